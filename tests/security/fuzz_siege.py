"""A siege: every attacker of this folder at every socket of `fuzz_victims`, with honest questions in between, and the
books at the end. One line makes it again: `FUZZ_SEED=n`.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
from chaos_proxy import process_context
from fuzz_doors import (
    EventReaders,
    MadTcpSource,
    MadZmqSource,
    Strangers,
    TcpLaneCaller,
    WrongKeys,
    ZmqLaneCaller,
)
from fuzz_http import HttpStrangers
from fuzz_members import Mad, MadDecode, MadGateway, MadPrefill
from fuzz_ucx import UcxCaller
from fuzz_victims import Account, Arena, Find, MayStart, Tell, Up, free_ports, run_victims

from baton.common.engine.fake_runner import fake_generate
from baton.common.ids import HandoffId, HandoffKey, Stamp, WorkerId
from baton.common.messages import Chunk, LaneAddress, Member, SamplingParams
from baton.common.shared_memory import SharedBlock
from baton.deploy.tokenizer import ByteTokenizer
from baton.transfer.keys import ControllerDoor, KeyPair

WAIT_S = 60.0
ROUND = 500
"""Frames between two looks at whether everybody is well."""
TOLD_LATER = frozenset({429, 503})
"""Mad members fill queues: then honest clients are told to come again, and do."""


class Asker(threading.Thread):
    """An honest client. Asks all the time, and knows the answers."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._random = random.Random(seed)
        self._ending = threading.Event()
        self.right = 0
        self.told_later = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=WAIT_S) as http:
            while not self._ending.wait(0.01):
                self.ask(http)

    def ask(self, http: httpx.Client) -> None:
        dice = self._random
        prompt = [dice.randrange(256) for _ in range(dice.choice((3, 20, 90, 200)))]
        tokens = dice.choice((1, 4, 16))
        body = {"model": "fake", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        try:
            response = http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            self.wrong.append(f"no answer: {error!r}")
            return
        if response.status_code in TOLD_LATER:
            self.told_later += 1
            return
        expected = ByteTokenizer().decode(fake_generate(prompt, SamplingParams(max_tokens=tokens), tokens))
        if response.status_code != 200 or response.json()["choices"][0]["text"] != expected:
            self.wrong.append(
                f"{response.status_code} {response.text[:300]} for {prompt[:8]}..., {tokens}: {expected!r}"
            )
        else:
            self.right += 1

    def stop(self) -> None:
        self._ending.set()
        self.join(WAIT_S)


class Siege:
    """`close` in any case."""

    def __init__(self, seed: int, folder: Path, lanes: tuple[str, ...] = ("local", "tcp", "zmq")) -> None:
        self.seed = seed
        self.dice = random.Random(seed)
        self.log = folder / "victims.log"
        ports = free_ports()
        self._ports = ports
        context = process_context()
        self._pipe, theirs = context.Pipe()
        arena = Arena(lanes, *ports)
        self._process = context.Process(target=run_victims, args=(theirs, arena, str(self.log)), daemon=True)
        self._process.start()
        theirs.close()
        self._seats: dict[str, tuple[int, KeyPair]] = {}
        self._told: list[object] = []
        self._closers: list[Callable[[], None]] = []
        self.mad: dict[str, Mad] = {}
        self.sent: Counter[str] = Counter()
        self.lanes: dict[str, ZmqLaneCaller | TcpLaneCaller | UcxCaller] = {}
        self.asker: Asker | None = None
        self._zmq_source: MadZmqSource | None = None
        self._up = self._await(Up)
        assert isinstance(self._up, Up)
        self._set_up()

    # --------------------------------------------------------------------------------------------- set-up

    def _set_up(self) -> None:
        self._admit("gateway-1", MadGateway, {})
        seen = self.mad["gateway-1"].seen
        self._wait(lambda: len(seen) == 3, "all honest members are known")
        members = dict(seen)
        prefill = members[WorkerId("prefill-0")]
        self._admit("decode-1", MadDecode, prefill.fingerprint)

        def lanes(stamp: Stamp, keys: KeyPair) -> tuple[LaneAddress, ...]:
            return self._mad_lanes(stamp, keys, prefill)

        self._admit("prefill-1", MadPrefill, prefill.fingerprint, lanes)
        dice, decode = self.dice, self.mad["decode-1"]
        secret = decode.keys.shared_with(prefill.key, "tcp")
        doors = [(_port(self._up.controller.address), self._up.controller.key)]
        doors += [(_port(one.address), one.key) for one in members.values()]
        doors += [(port, one.key) for one in members.values() if (port := _port_of(one, "zmq"))]
        zmq_ports = [port for port, _ in doors]
        tcp_ports = [port for one in members.values() if (port := _port_of(one, "tcp"))]
        event_ports = [(self._ports[0] + place, self._ports[1] + place) for place in (0, 1)]
        http_port = _port(self._up.url)
        self.strangers = Strangers(dice, (*zmq_ports, *tcp_ports, *sum(event_ports, ()), http_port))
        self.wrong_keys = WrongKeys(dice, tuple(doors))
        self.events = EventReaders(dice, tuple(event_ports))
        self.http = HttpStrangers(dice, http_port)
        if port := _port_of(prefill, "zmq"):
            keys, stamp = decode.keys, decode.stamp
            self.lanes["zmq lane"] = ZmqLaneCaller(dice, port, prefill.key, keys, stamp, prefill.stamp.epoch)
        if port := _port_of(prefill, "tcp"):
            self.lanes["tcp lane"] = TcpLaneCaller(dice, port, secret, decode.stamp, prefill.stamp)
        for lane in prefill.lanes:
            if lane.lane == "ucx":
                secret = decode.keys.shared_with(prefill.key, "ucx")
                self.lanes["ucx lane"] = UcxCaller(dice, lane, secret, decode.stamp, prefill.stamp)
        for one in (self.strangers, self.wrong_keys, self.events, *self.lanes.values()):
            self._closers.append(one.close)
        self.asker = Asker(self._up.url, self.seed)
        self.asker.start()

    def _admit(
        self,
        worker: str,
        kind: type[Mad],
        fingerprint: dict[str, str],
        lanes: Callable[[Stamp, KeyPair], tuple[LaneAddress, ...]] = lambda stamp, keys: (),
    ) -> None:
        self._wait(lambda: worker in self._seats, f"{worker} may start")
        incarnation, guest = self._seats.pop(worker)
        door = ControllerDoor(self._up.controller.address, self._up.controller.key, guest)
        role = worker.partition("-")[0]
        made = kind(worker, role, incarnation, door, self.dice, fingerprint, lanes)
        self.mad[worker] = made
        self._wait(lambda: made.listed, f"{worker} is a member")

    def _mad_lanes(self, stamp: Stamp, keys: KeyPair, honest: Member) -> tuple[LaneAddress, ...]:
        """What a decode worker will link to: real memory, and listeners that answer anything."""
        addresses: dict[str, dict[str, str | int]] = {}
        for lane in honest.lanes:
            if lane.lane == "local":
                local = dict(lane.address)
                self._block = SharedBlock(int(local["full_units"]) * int(local["full_unit_bytes"]))
                local |= {"pid": os.getpid(), "full_fd": self._block.fd, "full_nonce": self._block.nonce.hex()}
                addresses["local"] = local
        honest_members = dict(self.mad["gateway-1"].seen)

        def secret_with(peer: Stamp) -> bytes | None:
            member = honest_members.get(peer.worker)
            return None if member is None else keys.shared_with(member.key, "tcp")

        self._zmq_source = MadZmqSource(random.Random(self.seed), keys, stamp)
        self._tcp_source = MadTcpSource(random.Random(self.seed), secret_with, stamp)
        self._closers += [self._zmq_source.close, self._tcp_source.close]
        addresses["tcp"] = {"host": "127.0.0.1", "port": self._tcp_source.port}
        addresses["zmq"] = {"tcp": self._zmq_source.address}
        return tuple(LaneAddress(lane=name, address=address) for name, address in addresses.items())

    # ------------------------------------------------------------------------------------------- fighting

    def rounds(self, frames: int) -> None:
        """So many frames, and more or less as many as that of each kind of attacker."""
        begun = self.total
        while self.total - begun < frames:
            self._round()

    @property
    def url(self) -> str:
        """Of the honest gateway."""
        return self._up.url

    @property
    def total(self) -> int:
        return self.sent.total()

    def _round(self) -> None:
        jobs: list[tuple[Callable[[], object], int]] = [
            (self._speak, 300),
            *((lane.ask, lane.in_a_row // len(self.lanes)) for lane in self.lanes.values()),
            (self.events.ask, 30),
            (self.http.ask, 14),
            (self.strangers.knock, 8),
            (self.wrong_keys.knock, 1),
        ]
        for lane in self.lanes.values():
            lane.tags = [body.tag for body in self.mad["decode-1"].words.heard if isinstance(body, Chunk)] or [0]
        for job, times in jobs:
            for _ in range(times):
                job()
            self.tend()
        counted = {
            **self.lanes,
            "kv events": self.events,
            "http": self.http,
            "strangers": self.strangers,
            "wrong keys": self.wrong_keys,
            "zmq source": self._zmq_source,
            "tcp source": self._tcp_source,
        }
        for name, attacker in counted.items():
            self.sent[name] += attacker.sent
            attacker.sent = 0

    def _speak(self) -> None:
        mad = self.dice.choice(list(self.mad.values()))
        if mad.listed:
            self.sent[f"to {mad.speak()}"] += 1

    def tend(self) -> None:
        """Mad members hear and live, and the victims are asked whether they do."""
        for mad in self.mad.values():
            mad.tick()
        if self._zmq_source is not None:
            self._zmq_source.serve()
        self._listen()

    def account(self) -> Account:
        self._pipe.send(Tell())
        found = self._await(Account)
        assert isinstance(found, Account)
        named = (name.partition("/") for name in found.handoffs)
        keys = [HandoffKey(HandoffId(int(handoff, 16)), int(attempt)) for handoff, _, attempt in named]
        for mad in self.mad.values():
            mad.foreign_keys = [key for key in keys if key not in mad.alien_keys and key not in mad.words.keys]
        return found

    def rest(self) -> Account:
        """Mad members are gone, and what they had begun has ended."""
        self.asker.stop()
        for mad in self.mad.values():
            mad.close()
        self.mad.clear()
        until_s = time.monotonic() + WAIT_S
        while any((account := self.account()).open.values()) and time.monotonic() < until_s:
            time.sleep(0.1)
        return account

    # --------------------------------------------------------------------------------------------- waiting

    def _listen(self) -> None:
        while self._pipe.poll():
            try:
                item = self._pipe.recv()
            except (EOFError, OSError):
                break
            match item:
                case MayStart(worker, incarnation, guest):
                    self._seats[worker] = incarnation, guest
                    assert worker not in self.mad, f"{worker} was killed, and should live"
                case Find(what):
                    raise AssertionError(what)
                case _:
                    self._told.append(item)
        if self._process.exitcode is not None:
            code, log = self._process.exitcode, self.log.read_text()
            raise AssertionError(f"the victims' process ended: {code}\n{log[-4000:]}")
        if self.asker is not None:
            assert not self.asker.wrong, self.asker.wrong[:3]

    def _await(self, kind: type) -> object:
        found: list[object] = []

        def there() -> bool:
            found.extend(item for item in self._told if isinstance(item, kind))
            return bool(found)

        self._wait(there, kind.__name__)
        self._told = [item for item in self._told if not isinstance(item, kind)]
        return found[-1]

    def _wait(self, good: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + WAIT_S
        while not good():
            if time.monotonic() > until_s:
                os.kill(self._process.pid or 0, signal.SIGUSR1)  # says where each of its threads is
                time.sleep(1.0)
                raise AssertionError(f"{what}: not within {WAIT_S} s\n{self.log.read_text()[-6000:]}")
            self.tend()
            time.sleep(0.005)

    def close(self) -> None:
        self._process.kill()
        self._process.join(WAIT_S)
        for mad in self.mad.values():
            mad.close()
        for close in self._closers:
            close()


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _port_of(member: Member, lane: str) -> int:
    """0: it has no such lane."""
    for one in member.lanes:
        if one.lane == lane:
            return _port(str(one.address["tcp"])) if lane == "zmq" else int(one.address["port"])
    return 0
