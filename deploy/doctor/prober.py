"""One end of what a doctor measures: the sockets and lanes of a worker, over a small pool in which nothing lies.

Owns: its mesh, lanes and pool, and the one measurement under way. Never: a thread or a wait of its own (`probe.py`
turns it), or a page that is anybody's.

The lanes are those of `transfer/`, and which of them hand-offs would take is decided by the same code (`PeerLanes`).
Bytes are timed from asking until they lie in the receiver's pages. A peer's part in it, `serve`, is to hold ready what
is asked for, within bounds; whom it was not told to meet asks in vain.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from baton.common.config import ClusterConfig
from baton.common.engine.batch import KvMemory
from baton.common.ids import Stamp, WorkerId
from baton.common.kv.buffers import NumpyKvBuffer
from baton.common.kv.layout import Component
from baton.common.messages import Member, Probe, ProbeReady
from baton.deploy.doctor.shapes import LaneReport, PairReport
from baton.transfer.keys import KeyPair
from baton.transfer.lanes import build_lanes
from baton.transfer.link import Chosen, LaneStatus, LaneView, NoLane, Wait
from baton.transfer.mesh import Mesh
from baton.transfer.peer_lanes import PeerLanes
from baton.transfer.transports.base import Bytes, Ended, OperationEnd, Received, Rows

PAGE_BYTES = 64 << 10
POOL_PAGES = 256
REGION_BYTES = 4 << 20
"""What travels at a time; regions of one round are asked for together, as those of a hand-off are."""
ROUNDS = 3
LATENCY_ROUNDS = 10
CONTROL_ROUNDS = 5
ROUND_BYTES = POOL_PAGES * PAGE_BYTES
LANE_BYTES = ROUNDS * ROUND_BYTES + REGION_BYTES + LATENCY_ROUNDS * PAGE_BYTES
"""At most, of one lane in one direction."""
SLOW_S = 0.5
"""A lane on which a region or a round took longer is known well enough."""
ASK_AGAIN_S = 0.25
SETTLE_S = 2.5
"""So long links may take to come up before those that are up are measured."""
MOST_SERVED = 64
SERVED_S = 10.0
CONTROL = "control"
"""The lane of a question that is about no lane."""

Measuring = Generator[None, None, PairReport]


@dataclass(slots=True)
class _Served:
    lane: str
    until_s: float


@dataclass(slots=True)
class _Open:
    """A region that was asked for; its slot, on a staged lane."""

    units: np.ndarray
    staged: bool


class Prober:
    """See the module. `config` is the cluster's; `bind_host` is an address. Raises ConfigError."""

    def __init__(self, stamp: Stamp, config: ClusterConfig) -> None:
        self.stamp = stamp
        self._keys = KeyPair.generate()
        transfer = replace(config.transfer, region_bytes=REGION_BYTES, lane_choice="measured")
        config = replace(config, transfer=transfer)
        self._mesh = Mesh(stamp, config.bind_host, self._keys)
        buffer = NumpyKvBuffer(1 + POOL_PAGES, PAGE_BYTES, 16, shared=True)
        memory = KvMemory.full(buffer, 16)
        self._pool = buffer.as_bytes()
        self._pool[:] = 1  # memory that was never written is not measured
        built = build_lanes(stamp, config, self._mesh, memory)
        self._lanes = PeerLanes(transfer, built.staged, built.direct, built.pull)
        self._scrap: Bytes = np.zeros(REGION_BYTES, dtype=np.uint8)
        """What staged lanes send."""
        self._slots: Bytes = np.zeros(ROUND_BYTES, dtype=np.uint8)
        """And receive into. After a failure a late write spoils bytes that mean nothing."""
        self._peers: dict[WorkerId, Member] = {}
        self._heard: set[WorkerId] = set()
        self._ready: dict[int, float] = {}  # tag -> when its source said so
        self._open: dict[int, _Open] = {}  # by op
        self._ended: dict[int, str] = {}  # op -> why it failed; "": it did not
        self._served: dict[int, _Served] = {}  # by op
        self._next_op = 1
        self._next_tag = 1 << 39
        self._measuring: tuple[Measuring, Future[PairReport]] | None = None

    @property
    def member(self) -> Member:
        return Member(
            stamp=self.stamp,
            role="probe",
            address=self._mesh.address,
            key=self._keys.public,
            lanes=self._lanes.addresses(),
        )

    @property
    def has_ucx(self) -> bool:
        return "ucx" in self._lanes.transports

    @property
    def heard(self) -> frozenset[WorkerId]:
        return frozenset(self._heard)

    def meet(self, sources: Sequence[Member], everybody: Sequence[Member]) -> None:
        """Opens the lanes from `sources`, and the way for control frames to all."""
        self._peers = {member.stamp.worker: member for member in everybody if member.stamp != self.stamp}
        self._mesh.allow.set_members(self._peers.values())
        for worker, member in self._peers.items():
            self._mesh.connect(worker, member.address, member.key)
        self._lanes.set_peers(sources, time.monotonic())

    def measure(self, source: WorkerId, within_s: float) -> Future[PairReport]:
        """One at a time. Ends within `within_s` and SETTLE_S, whatever the peer does."""
        assert self._measuring is None, "one measurement at a time"
        done: Future[PairReport] = Future()
        self._measuring = (self._measure(self._peers[source].stamp, time.monotonic() + within_s), done)
        return done

    def wake(self) -> None:
        """From any thread."""
        self._mesh.wake()

    def step(self, wait_s: float) -> None:
        """One turn: what came, what ended, and the measurement a piece further."""
        wait_s = 0.001 if self._lanes.busy else wait_s
        for frame in self._mesh.poll(wait_s):
            peer = self._peers.get(frame.src.worker)
            if peer is None or peer.stamp != frame.src:
                continue
            self._heard.add(peer.stamp.worker)
            if isinstance(frame.body, Probe):
                self._serve(frame.body, peer.stamp)
            elif isinstance(frame.body, ProbeReady):
                self._ready[frame.body.tag] = time.perf_counter()
        now = time.monotonic()
        for event in self._lanes.poll(now):
            self._on_end(event)
        for op in [op for op, served in self._served.items() if now >= served.until_s]:
            self._lanes.cancel(self._served.pop(op).lane, op)
        self._go_on()

    def close(self) -> None:
        self._lanes.close()
        self._mesh.close()

    # ------------------------------------------------------------------------------------------ source

    def _serve(self, probe: Probe, peer: Stamp) -> None:
        if probe.lane != CONTROL:
            if probe.nbytes > REGION_BYTES or len(self._served) >= MOST_SERVED:
                return
            op = self._take_op()
            if probe.lane in self._lanes.direct:
                self._lanes.direct[probe.lane].send(op, peer, probe.tag, self._rows(0, probe.nbytes))
            elif probe.lane in self._lanes.staged:
                self._lanes.staged[probe.lane].send(op, peer, probe.tag, self._scrap[: probe.nbytes])
            else:
                return
            self._served[op] = _Served(probe.lane, time.monotonic() + SERVED_S)
        self._mesh.send(peer.worker, peer.epoch, ProbeReady(tag=probe.tag))

    def _on_end(self, event: OperationEnd) -> None:
        self._served.pop(event.op, None)
        opened = self._open.pop(event.op, None)
        if opened is None:
            return
        if isinstance(event, Received) and opened.staged:
            self._pool[opened.units] = event.data.reshape(len(opened.units), PAGE_BYTES)
        self._ended[event.op] = event.reason if isinstance(event, Ended) else ""

    # ---------------------------------------------------------------------------------------- receiver

    def _go_on(self) -> None:
        if self._measuring is None:
            return
        measuring, done = self._measuring
        try:
            next(measuring)
        except StopIteration as end:
            self._measuring = None
            done.set_result(end.value)

    def _measure(self, peer: Stamp, until_s: float) -> Measuring:
        control_us = yield from self._control(peer, until_s)
        yield from self._settle(peer, until_s)
        reports = []
        for view in self._views(peer):
            if view.status is LaneStatus.UP:
                reports.append((yield from self._lane(peer, view.lane, until_s)))
            else:  # one that has failed is tried again and again
                status = LaneStatus.DOWN if view.reason else view.status
                reports.append(LaneReport(view.lane, status.value, view.reason or "no answer"))
        choice = yield from self._choose(peer)
        chosen = choice.lane if isinstance(choice, Chosen) else ""
        return PairReport(peer.worker, self.stamp.worker, control_us, tuple(reports), chosen, choice.reason)

    def _control(self, peer: Stamp, until_s: float) -> Generator[None, None, float]:
        """The shortest round trip, in microseconds; 0: none. A frame may be lost, or come before its receiver knows
        us: asked again until half of the time is over."""
        took_s: list[float] = []
        until_s = time.monotonic() + min(SETTLE_S, (until_s - time.monotonic()) / 2)
        while len(took_s) < CONTROL_ROUNDS and time.monotonic() < until_s:
            tag, asked_s = self._ask(peer, CONTROL, 1), time.perf_counter()
            again_s = min(until_s, time.monotonic() + ASK_AGAIN_S)
            while tag not in self._ready and time.monotonic() < again_s:
                yield
            if tag in self._ready:
                took_s.append(self._ready.pop(tag) - asked_s)
        return min(took_s, default=0.0) * 1e6

    def _settle(self, peer: Stamp, until_s: float) -> Generator[None, None, None]:
        until_s = min(until_s, time.monotonic() + SETTLE_S)
        while any(view.status is LaneStatus.CONNECTING for view in self._views(peer)) and time.monotonic() < until_s:
            yield

    def _choose(self, peer: Stamp) -> Generator[None, None, Chosen | Wait | NoLane]:
        """As a hand-off would: it waits for a lane that is about to come up, too."""
        until_s = time.monotonic() + SETTLE_S
        while isinstance(choice := self._lanes.choose(peer, time.monotonic()), Wait) and time.monotonic() < until_s:
            yield
        return choice

    def _views(self, peer: Stamp) -> list[LaneView]:
        return self._lanes.views(time.monotonic()).get(peer.worker, [])

    def _lane(self, peer: Stamp, lane: str, until_s: float) -> Generator[None, None, LaneReport]:
        moved, latency_s, gbps = 0, 0.0, 0.0
        for nbytes in (*[PAGE_BYTES] * LATENCY_ROUNDS, REGION_BYTES, *[ROUND_BYTES] * ROUNDS):
            took_s = yield from self._round(peer, lane, nbytes, until_s)
            if isinstance(took_s, str):
                return LaneReport(lane, "up", took_s, latency_s * 1e6, gbps, moved)
            moved += nbytes
            if nbytes == PAGE_BYTES:
                latency_s = min(latency_s or took_s, took_s)
                continue
            gbps = max(gbps, nbytes / took_s / 1e9)
            self._lanes.set_speed(peer.worker, lane, nbytes, nbytes / gbps / 1e9)
            if took_s > SLOW_S:
                break
        return LaneReport(lane, "up", "", latency_s * 1e6, gbps, moved)

    def _round(self, peer: Stamp, lane: str, nbytes: int, until_s: float) -> Generator[None, None, float | str]:
        """Seconds from asking until all of it is in our pages, or why not."""
        sizes = [REGION_BYTES] * (nbytes // REGION_BYTES) or [nbytes]
        if lane in self._lanes.pull:
            rows = self._rows(0, nbytes)
            started_s = time.perf_counter()
            failed = self._lanes.pull[lane].pull(peer, rows, rows)
            return failed.reason if failed else time.perf_counter() - started_s
        tags = [self._ask(peer, lane, size) for size in sizes]
        while not all(tag in self._ready for tag in tags):
            if time.monotonic() >= until_s:
                return "the source does not answer"
            yield
        started_s = time.perf_counter()
        ops = [
            self._receive(peer, lane, tag, index, size)
            for index, (tag, size) in enumerate(zip(tags, sizes, strict=True))
        ]
        while not all(op in self._ended for op in ops):
            if time.monotonic() >= until_s:
                for op in ops:
                    self._lanes.cancel(lane, op)
                return "not all of it came in time"
            yield
        took_s = time.perf_counter() - started_s
        return next((reason for op in ops if (reason := self._ended.pop(op))), took_s)

    def _ask(self, peer: Stamp, lane: str, nbytes: int) -> int:
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        self._mesh.send(peer.worker, peer.epoch, Probe(lane=lane, tag=tag, nbytes=nbytes))
        return tag

    def _receive(self, peer: Stamp, lane: str, tag: int, index: int, nbytes: int) -> int:
        op, rows = self._take_op(), self._rows(index, nbytes)
        staged = lane in self._lanes.staged
        self._open[op] = _Open(rows.units, staged)
        if staged:
            begin = index * REGION_BYTES
            self._lanes.staged[lane].receive(op, peer, tag, self._slots[begin : begin + nbytes])
        else:
            self._lanes.direct[lane].receive(op, peer, tag, rows)
        return op

    def _rows(self, region: int, nbytes: int) -> Rows:
        """Pages of the pool, each region its own; not one after the other, as those of requests are not."""
        first, count = region * (REGION_BYTES // PAGE_BYTES), max(1, nbytes // PAGE_BYTES)
        scattered = (np.arange(first, first + count) * 97) % POOL_PAGES + 1
        return Rows(Component.FULL, scattered.astype(np.int32), 0, PAGE_BYTES)

    def _take_op(self) -> int:
        op, self._next_op = self._next_op, self._next_op + 1
        return op


def try_port(host: str, port: int, within_s: float) -> str:
    """ "open", "refused", "no answer", or what else the system says."""
    try:
        socket.create_connection((host, port), within_s).close()
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    return "open"
