"""A cluster of bare workers (`chaos_peer.py`) behind a proxy, and what happened to it. Nothing here waits for ever."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaos_mesh import NO_FAULTS, FrameFaults
from chaos_peer import PAGE_SIZE, Account, Calm, CheckUp, End, PeerSpec, Quit, Ready, Trap, run_peer
from chaos_proxy import ProxyProcess, process_context
from io_rig import StandInController
from msgspec import structs

from baton.common.config import ClusterConfig, KvConfig, LivenessConfig, TransferConfig
from baton.common.errors import ErrorCode
from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.messages import LaneAddress, Member

WAIT_S = 30.0
_NUMBERS = re.compile(r"\d+")


def chaos_config(*lanes: str, dead_after_s: float = 1.0) -> ClusterConfig:
    return ClusterConfig(
        kv=KvConfig(page_size=PAGE_SIZE),
        transfer=TransferConfig(
            lanes=lanes,
            staging_ring_bytes=32 * 16384,
            region_bytes=16384,
            direct_region_bytes=16384,
            credit_regions=3,
            resend_after_s=0.1,
            digest="full",
            tombstone_ttl_s=20.0,
        ),
        liveness=LivenessConfig(
            heartbeat_interval_s=0.1, republish_interval_s=dead_after_s / 2, dead_after_s=dead_after_s
        ),
    )


class Hub(StandInController):
    """Publishes addresses that lead through the proxy."""

    def __init__(self, encrypted: bool, proxy: ProxyProcess | None) -> None:
        self._proxy = proxy
        self.known: dict[WorkerId, Member] = {}
        super().__init__(encrypted)

    def _on_hello(self, member: Member) -> None:
        self.known[member.stamp.worker] = member
        super()._on_hello(member if self._proxy is None else self._behind(self._proxy, member))

    def _behind(self, proxy: ProxyProcess, member: Member) -> Member:
        seat = member.stamp.worker

        def door(name: str, port: int) -> int:
            return proxy.door(f"{seat}/{name}", port)

        def lane_behind(lane: LaneAddress) -> LaneAddress:
            match lane.lane:
                case "tcp":
                    return structs.replace(
                        lane, address=lane.address | {"port": door("tcp", int(lane.address["port"]))}
                    )
                case "zmq":
                    return structs.replace(lane, address={"tcp": f"tcp://127.0.0.1:{door('zmq', _port(lane))}"})
                case _:
                    return lane

        control = door("control", int(member.address.rpartition(":")[2]))
        lanes = tuple(lane_behind(lane) for lane in member.lanes)
        return structs.replace(member, address=f"tcp://127.0.0.1:{control}", lanes=lanes)


def _port(lane: LaneAddress) -> int:
    return int(str(lane.address["tcp"]).rpartition(":")[2])


class PeerProcess:
    """One worker's process."""

    def __init__(self, spec: PeerSpec) -> None:
        self.spec = spec
        context = process_context()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=run_peer, args=(theirs, spec), daemon=True)
        self.process.start()
        theirs.close()
        self.up = False
        assert self.process.pid is not None
        self.pid: int = self.process.pid
        self._heard: list[object] = []

    def send(self, command: object) -> None:
        self._pipe.send(command)

    def hear(self) -> list[object]:
        """What it has reported since. Never waits; nothing from one that has died in the middle of a word."""
        try:
            while self._pipe.poll():
                item = self._pipe.recv()
                if isinstance(item, Ready):
                    self.up = True
                else:
                    self._heard.append(item)
        except (EOFError, OSError):
            pass
        heard, self._heard = self._heard, []
        return heard

    def put_back(self, items: list[object]) -> None:
        self._heard = items + self._heard

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Returns when it is proven dead."""
        self.process.kill()
        self.process.join(WAIT_S)
        assert not self.process.is_alive()
        self._pipe.close()

    @property
    def is_stopped(self) -> bool:
        """By itself, or by us."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    @property
    def is_dead(self) -> bool:
        return not self.process.is_alive()


@dataclass(slots=True)
class Tally:
    """What became of everything."""

    committed: Counter[str] = field(default_factory=Counter)  # by lane
    failed: Counter[str] = field(default_factory=Counter)  # sinks, by code
    given_back: Counter[str] = field(default_factory=Counter)  # sources, by code
    nbytes: int = 0
    wrong_bytes: int = 0
    between_honest: int = 0
    mad: set[str] = field(default_factory=set)
    late: list[End] = field(default_factory=list)
    untyped: list[End] = field(default_factory=list)
    odd: Counter[str] = field(default_factory=Counter)  # failures of lanes and peers, by reason

    def add(self, worker: str, end: End) -> None:
        """`worker` says so. What mad members and their partners have to complain of counts for nothing."""
        honest = not {worker, end.peer} & self.mad
        self.wrong_bytes += end.wrong_bytes if honest else 0
        if end.late_s and honest:
            self.late.append(end)
        if end.side == "source":
            self.given_back[end.code or "released"] += 1
            return
        if not end.code:
            self.committed[end.lane] += 1
            self.between_honest += honest
            self.nbytes += end.nbytes
            return
        self.failed[end.code] += 1
        if end.code in (ErrorCode.INTERNAL, ErrorCode.NO_WORKER):
            self.odd[_NUMBERS.sub("#", end.reason)[:100]] += 1
        if not end.reason:
            self.untyped.append(end)


class ChaosCluster:
    """Seats, and who sits in them."""

    def __init__(self, seed: int, *, encrypted: bool = True, proxied: bool = True) -> None:
        self.seed = seed
        self.proxy = ProxyProcess(seed) if proxied else None
        self.hub = Hub(encrypted, self.proxy)
        self.peers: dict[str, PeerProcess] = {}
        self.tally = Tally()
        self._started = 0

    def start(
        self,
        worker: str,
        config: ClusterConfig,
        faults: FrameFaults = NO_FAULTS,
        trap: Trap | None = None,
        piece_delay_s: float = 0.0,
        give_up: float = 0.0,
        hold_first: bool = False,
    ) -> PeerProcess:
        """A new process for the seat; the one before is proven dead."""
        self._started += 1
        if faults.mad:
            self.tally.mad.add(worker)
        role = "prefill" if worker.startswith("prefill") else "decode"
        stamp = Stamp(WorkerId(worker), self._started, Epoch(self.seed * 1000 + self._started))
        spec = PeerSpec(
            stamp, role, config, self.hub.door, self.seed * 1000 + self._started, faults, trap,
            piece_delay_s, give_up, hold_first,
        )  # fmt: skip
        peer = self.peers[worker] = PeerProcess(spec)
        return peer

    def replace_dead(self, worker: str) -> PeerProcess:
        """A successor in the same seat, on the same addresses, without the trap of its predecessor."""
        if WorkerId(worker) in self.hub.members():
            self.hub.remove(worker)
        old = self.peers[worker].spec
        return self.start(worker, old.config, old.faults, None, old.piece_delay_s, old.give_up)

    def listen(self) -> None:
        """Takes in what the processes report. One that ended by itself has a bug, also one that drove others mad."""
        for worker, peer in self.peers.items():
            rest = []
            for item in peer.hear():
                if isinstance(item, list):
                    for end in item:
                        self.tally.add(worker, end)
                else:
                    rest.append(item)
            peer.put_back(rest)
            code = peer.process.exitcode
            assert code in (None, -signal.SIGKILL), f"{worker} ended by itself: {code}"

    def wait(self, good: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
        deadline_s = time.monotonic() + wait_s
        while not good():
            assert time.monotonic() < deadline_s, f"{what}: not within {wait_s} s; {self.tally}"
            self.listen()
            time.sleep(0.01)

    def wait_up(self) -> None:
        """Every process is a member, and every sink knows every source."""

        def up() -> bool:
            members = self.hub.members()
            return all(peer.up and members.get(worker) == peer.spec.stamp for worker, peer in self.peers.items())

        self.wait(up, "all are members")

    def ends(self) -> int:
        return self.tally.committed.total() + self.tally.failed.total()

    def accounts(self, wait_s: float = WAIT_S) -> dict[str, Account]:
        """Of all processes, as soon as they hold nothing any more; else as they are when the time is over."""
        deadline_s = time.monotonic() + wait_s
        while True:
            accounts = {worker: self.account(worker) for worker in self.peers}
            if all(account.clean for account in accounts.values()) or time.monotonic() > deadline_s:
                return accounts
            time.sleep(0.05)

    def calm(self) -> None:
        for peer in self.peers.values():
            peer.send(Calm())

    def close(self) -> None:
        for peer in self.peers.values():
            if not peer.is_dead and not peer.is_stopped:
                peer.send(Quit())
        for peer in self.peers.values():
            if not peer.is_stopped:
                peer.process.join(5.0)
            peer.kill()
        self.hub.close()
        if self.proxy is not None:
            self.proxy.close()

    def account(self, worker: str) -> Account:
        peer = self.peers[worker]
        peer.send(CheckUp())
        found: list[Account] = []

        def answered() -> bool:
            heard = peer.hear()
            found.extend(item for item in heard if isinstance(item, Account))
            peer.put_back([item for item in heard if not isinstance(item, Account)])
            return bool(found)

        self.wait(answered, f"account of {worker}")
        return found[0]
