"""Times hand-offs between two processes of this machine: whole ones, through the real transfer plane.

Owns: the second process, both I/O threads, and pools that mean nothing. Never: an engine: the source answers each offer
at once. A hand-off takes from the order for it until its pages are the receiver's.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from baton.common.config import ClusterConfig
from baton.common.engine.batch import KvMemory
from baton.common.engine.core_api import MembershipView
from baton.common.errors import BatonError
from baton.common.ids import CONTROLLER, Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.buffers import NumpyKvBuffer
from baton.common.kv.layout import Component
from baton.common.messages import Hello, Member, Membership, SamplingParams
from baton.transfer.api import (
    FinishSource,
    OfferReceived,
    OpenSink,
    PrefillResult,
    ShipRegion,
    SinkCommitted,
    SinkFailed,
)
from baton.transfer.io import IoThread
from baton.transfer.keys import ControllerDoor, KeyPair
from baton.transfer.mesh import Mesh
from baton.transfer.process import die_with_parent

SOURCE, SINK = WorkerId("prefill-0"), WorkerId("decode-0")
WAIT_S = 60.0


class LaneFailed(BatonError):
    """No hand-off came about between two processes here."""


@dataclass(frozen=True, slots=True)
class MeasuredHandoff:
    lane: str
    nbytes: int
    took_s: float


@dataclass(frozen=True, slots=True)
class _End:
    """What a process needs to know to be one of the two."""

    config: ClusterConfig
    hub: ControllerDoor
    num_pages: int
    page_bytes: int
    cores: tuple[int, ...]  # of the source

    def memory(self) -> KvMemory:
        buffer = NumpyKvBuffer(1 + self.num_pages, self.page_bytes, page_size=1, shared=True)
        buffer.as_bytes()[:] = 1  # every page of it is touched
        return KvMemory.full(buffer, page_size=1)


def measure_handoffs(
    config: ClusterConfig, page_bytes: int, counts: tuple[int, ...], rounds: int, source_cores: tuple[int, ...]
) -> list[MeasuredHandoff]:
    """`rounds` hand-offs of each of `counts` pages, in turns. Raises LaneFailed."""
    keys = KeyPair.generate()
    hub = Mesh(Stamp(CONTROLLER, 1, Epoch(1)), config.bind_host, keys)
    ends = []
    for worker in (SOURCE, SINK):
        guest = KeyPair.generate()
        hub.allow.invite(guest.public, worker, 1)
        door = ControllerDoor(hub.address, keys.public, guest)
        ends.append(_End(config, door, max(counts), page_bytes, source_cores))
    try:
        with _source_process(ends[0]), _Sink(ends[1]) as sink:
            _admit(hub, sink)
            sink.wait_until_it_works()
            return [sink.measure(count) for _ in range(rounds) for count in counts]
    finally:
        hub.close()


def _admit(hub: Mesh, sink: _Sink) -> None:
    """Answers Hello until both know of each other; they stay members for good then."""
    members: dict[WorkerId, Member] = {}
    deadline_s = time.monotonic() + WAIT_S
    while not sink.sees_both:
        for frame in hub.poll(0.05):
            if isinstance(frame.body, Hello):
                members[frame.src.worker] = frame.body.member
        for worker, member in members.items():
            hub.connect(worker, member.address, member.key)
            hub.send(worker, Epoch(0), Membership(version=len(members), members=tuple(members.values())))
        if time.monotonic() > deadline_s:
            raise LaneFailed(f"{len(members)} of 2 processes were heard of in {WAIT_S:.0f} s")


class _Sink:
    """The receiver, in this process."""

    def __init__(self, end: _End) -> None:
        self._end = end
        self._events: queue.Queue[object] = queue.Queue()
        self._handoffs = 0
        stamp = Stamp(SINK, 1, Epoch(os.getpid()))
        self._io = IoThread(
            stamp, "decode", end.config, end.memory(), KeyPair.generate(), self._deliver, controller=end.hub
        )
        self._order = np.random.default_rng(2).permutation(np.arange(1, 1 + end.num_pages, dtype=np.int32))
        self.sees_both = False

    def __enter__(self) -> _Sink:
        self._io.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._io.stop(WAIT_S)

    def _deliver(self, event: object) -> None:
        if isinstance(event, MembershipView):
            self.sees_both = len(event.members) == 2
        else:
            self._events.put(event)

    def wait_until_it_works(self) -> None:
        """Links and lanes come up, and are measured by those who own them."""
        deadline_s = time.monotonic() + WAIT_S
        while isinstance(event := self._move(1), SinkFailed):
            if time.monotonic() > deadline_s:
                raise LaneFailed(event.failure.reason)
        self._move(self._end.num_pages)

    def measure(self, count: int) -> MeasuredHandoff:
        started = time.perf_counter()
        event = self._move(count)
        took_s = time.perf_counter() - started
        if not isinstance(event, SinkCommitted):
            raise LaneFailed(event.failure.reason)
        return MeasuredHandoff(event.lane, count * self._end.page_bytes, took_s)

    def _move(self, count: int) -> SinkCommitted | SinkFailed:
        self._handoffs += 1
        self._io.post(
            OpenSink(
                key=HandoffKey(HandoffId(os.getpid() << 24 | self._handoffs), 1),
                peer=SOURCE,
                request_id=RequestId(str(self._handoffs)),
                tokens=np.zeros(count, dtype=np.int32),
                start=0,
                pages={Component.FULL: self._order[:count]},
                sample=False,
                sampling=SamplingParams(),
                deadline_s=time.monotonic() + WAIT_S,
            )
        )
        try:
            event = self._events.get(timeout=WAIT_S)
        except queue.Empty:
            raise LaneFailed(f"a hand-off of {count} pages did not end in {WAIT_S:.0f} s") from None
        assert isinstance(event, SinkCommitted | SinkFailed), event
        return event


@contextmanager
def _source_process(end: _End) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_source, args=(theirs, end), daemon=True)
    process.start()
    theirs.close()
    try:
        yield
    finally:
        ours.close()  # which ends it
        process.join(WAIT_S)
        if process.is_alive():
            process.kill()


def _serve_source(connection: Connection, end: _End) -> None:
    """The source's process, until its parent closes the connection."""
    die_with_parent()
    if end.cores:
        os.sched_setaffinity(0, end.cores)
    order = np.random.default_rng(1).permutation(np.arange(1, 1 + end.num_pages, dtype=np.int32))

    def deliver(event: object) -> None:
        if isinstance(event, OfferReceived):
            count = len(event.tokens)
            io.post(ShipRegion(event.key, 0, count, order[:count]))
            io.post(FinishSource(event.key, PrefillResult(-1, None, 0.0, 0)))

    stamp = Stamp(SOURCE, 1, Epoch(os.getpid()))
    io = IoThread(stamp, "prefill", end.config, end.memory(), KeyPair.generate(), deliver, controller=end.hub)
    io.start()
    connection.poll(None)
    io.stop(WAIT_S)
