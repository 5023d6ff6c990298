"""One decode worker and up to a thousand prefill workers in one process, on virtual time: what a hand-off costs in CPU
time when there are many peers. Real endpoints and data planes, over the in-process lane; no sockets and no threads.

Owns: the loop that carries frames between them. What stays flat here does not grow with the number of peers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from baton.common.config import TransferConfig
from baton.common.engine.batch import KvMemory
from baton.common.engine.core_api import MembershipView
from baton.common.ids import Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.buffers import NumpyKvBuffer
from baton.common.kv.layout import Component
from baton.common.messages import Frame, Member, SamplingParams
from baton.transfer.api import FinishSource, OfferReceived, OpenSink, PrefillResult, ShipRegion, SinkCommitted
from baton.transfer.data_plane import DataPlane
from baton.transfer.endpoint import Endpoint
from baton.transfer.session.effects import EndpointEffect, EngineEvent, SendFrame
from baton.transfer.transports.base import TransportEvent
from baton.transfer.transports.inproc import InprocHub, InprocTransport

PAGE_BYTES = 4096
PAGES = 4
"""Of one hand-off: the cost of its messages is what is measured."""
TURN_S = 0.0005
"""Virtual time between the turns of all processes that have something to do."""
DECODE = WorkerId("decode")
CONFIG = TransferConfig(lanes=("inproc",), staging_ring_bytes=16 << 20, region_bytes=16 << 10)


class _NoWatcher:
    """Nobody waits here: the loop is told who has something to do."""

    def register(self, source: object) -> None: ...

    def unregister(self, source: object) -> None: ...


class _Lane(InprocTransport):
    """Says that its process has something to do."""

    def __init__(self, stamp: Stamp, hub: InprocHub, wake: Callable[[], None]) -> None:
        super().__init__(stamp, hub, _NoWatcher())
        self._wake = wake

    def report(self, event: TransportEvent) -> None:
        super().report(event)
        self._wake()


class _Process:
    def __init__(self, world: _World, worker: WorkerId, epoch: int) -> None:
        self.stamp = Stamp(worker, 1, Epoch(epoch))
        self._world = world
        buffer = NumpyKvBuffer(1 + PAGES, PAGE_BYTES, page_size=1)
        memory = KvMemory.full(buffer, page_size=1)
        self.lane = _Lane(self.stamp, world.hub, lambda: world.wake(self))
        self.data = DataPlane(CONFIG, memory, (self.lane,))
        self.endpoint = Endpoint(self.stamp, CONFIG, memory.layout, ["inproc"])
        self.member = Member(stamp=self.stamp, role="", address="", lanes=self.data.addresses())
        self.inbox: deque[Frame] = deque()

    def turn(self, now: float) -> None:
        """What an I/O thread does when it wakes up."""
        while self.inbox:
            self.carry_out(self.endpoint.on_frame(self.inbox.popleft(), now), now)
        for event in self.data.poll(now):
            self.carry_out(self.endpoint.on_data(event, now), now)
        self.carry_out(self.endpoint.on_timer(now), now)
        if self.data.wait_s(now) == 0.0:
            self._world.wake(self)
        self.endpoint.next_deadline()

    def carry_out(self, effects: Iterable[EndpointEffect], now: float) -> None:
        waiting = deque(effects)
        while waiting:
            effect = waiting.popleft()
            match effect:
                case SendFrame():
                    self._world.deliver(effect.worker, Frame(self.stamp, Epoch(effect.dst_epoch), effect.body))
                case EngineEvent(OfferReceived() as offer):
                    pages = np.arange(1, 1 + PAGES, dtype=np.int32)
                    waiting.extend(self.endpoint.command(ShipRegion(offer.key, 0, PAGES, pages), now))
                    result = PrefillResult(-1, None, 0.0, 0)
                    waiting.extend(self.endpoint.command(FinishSource(offer.key, result), now))
                case EngineEvent(SinkCommitted()):
                    self._world.committed += 1
                case EngineEvent():
                    pass
                case _:
                    for event in self.data.execute(effect, now):
                        waiting.extend(self.endpoint.on_data(event, now))


class _World:
    """`pairs` prefill workers and the decode worker that receives from all of them."""

    def __init__(self, pairs: int) -> None:
        self.hub = InprocHub()
        self.now = 0.0
        self.committed = 0
        self._ready: dict[_Process, None] = {}
        self.decode = _Process(self, DECODE, 1)
        self.prefills = [_Process(self, WorkerId(f"prefill-{number}"), 2 + number) for number in range(pairs)]
        self._processes = {process.stamp.worker: process for process in (self.decode, *self.prefills)}
        view = MembershipView(1, tuple(process.member for process in self._processes.values()))
        for process in self._processes.values():
            process.carry_out(process.endpoint.on_membership(view, self.now), self.now)
        self.decode.data.set_peers([process.member for process in self.prefills], self.now)
        self._handoffs = 0

    def wake(self, process: _Process) -> None:
        self._ready[process] = None

    def deliver(self, worker: WorkerId, frame: Frame) -> None:
        process = self._processes[worker]
        process.inbox.append(frame)
        self.wake(process)

    def open(self) -> None:
        """One hand-off more, from the next peer."""
        self._handoffs += 1
        order = OpenSink(
            key=HandoffKey(HandoffId(self._handoffs), 1),
            peer=self.prefills[self._handoffs % len(self.prefills)].stamp.worker,
            request_id=RequestId(str(self._handoffs)),
            tokens=np.zeros(PAGES, dtype=np.int32),
            start=0,
            pages={Component.FULL: np.arange(1, 1 + PAGES, dtype=np.int32)},
            sample=False,
            sampling=SamplingParams(),
            deadline_s=self.now + 60.0,
        )
        self.decode.carry_out(self.decode.endpoint.command(order, self.now), self.now)
        self.wake(self.decode)

    def turn(self) -> None:
        self.now += TURN_S
        ready, self._ready = self._ready, {}
        for process in ready:
            process.turn(self.now)

    def close(self) -> None:
        for process in self._processes.values():
            process.lane.close()


def cpu_s_per_handoff(pairs: int, handoffs: int, together: int) -> float:
    """Of both sides, with `together` hand-offs open at a time, after as many again that warm up."""
    world = _World(pairs)
    try:
        _run(world, together * 2, together)
        started_s = time.process_time()
        _run(world, handoffs, together)
        return (time.process_time() - started_s) / handoffs
    finally:
        world.close()


def _run(world: _World, handoffs: int, together: int) -> None:
    opened, until = 0, world.committed + handoffs
    before = world.committed
    while world.committed < until:
        while opened < handoffs and opened - (world.committed - before) < together:
            world.open()
            opened += 1
        turns_before = world.now
        world.turn()
        assert world.now - turns_before < 1.0
        assert world.now < 3600.0, f"{world.committed - before} of {handoffs} hand-offs were over"
