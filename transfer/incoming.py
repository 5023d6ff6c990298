"""The receiving half of the data plane: gives hand-offs their slots, and lands regions in their pages.

Owns: the ring of receive slots, who waits for one, the hand-offs that may land something, and receives under way.
Never: a decision about a hand-off, or a page that is not registered (`staging.StagingHandler` sees to that).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import assert_never

from baton.common.config import TransferConfig
from baton.common.errors import ErrorCode
from baton.common.ids import HandoffKey, Stamp
from baton.common.kv.layout import Component
from baton.common.log import EventLog
from baton.common.messages import MAX_REGION_UNITS, Failure, unpack_tokens
from baton.transfer.link import Chosen, NoLane, Wait
from baton.transfer.peer_lanes import PeerLanes
from baton.transfer.session.effects import (
    DataEvent,
    Landed,
    LandRegion,
    PrepareSink,
    RegionDamaged,
    SinkFenced,
    SinkLaneFailed,
    SinkNotPrepared,
    SinkPrepared,
)
from baton.transfer.staging import Damaged, NotMine, Scatter, Scattered, SlotLease, StagingHandler, StagingRing
from baton.transfer.transports.base import Ended, OperationEnd, Placed, Received, Rows

WAITING_RECHECK_S = 0.05
"""How late a hand-off may notice that it has waited long enough for a better lane."""

_log = EventLog("baton.transfer")


@dataclass(slots=True)
class _Sink:
    """A prepared hand-off."""

    peer: Stamp
    lane: str
    ops: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Receive:
    """A region on its way into a slot, or straight into its pages."""

    effect: LandRegion
    lease: SlotLease | None
    started_s: float


class Incoming:
    """`answer` takes the events for the endpoint; `next_op` numbers operations, over both halves."""

    def __init__(
        self,
        config: TransferConfig,
        handler: StagingHandler,
        lanes: PeerLanes,
        answer: Callable[[DataEvent], None],
        next_op: Callable[[], int],
    ) -> None:
        self._config = config
        self._handler = handler
        self._lanes = lanes
        self._answer = answer
        self._next_op = next_op
        self._ring = StagingRing(config.staging_ring_bytes, config.region_bytes)
        self._waiting: dict[HandoffKey, PrepareSink] = {}  # in order of arrival
        self._sinks: dict[HandoffKey, _Sink] = {}
        self._to_pull: deque[LandRegion] = deque()
        self._ops: dict[int, _Receive] = {}

    # ----------------------------------------------------------------------------------------- effects

    def prepare(self, effect: PrepareSink, now: float) -> None:
        self._waiting[effect.key] = effect
        self.prepare_waiting(now)

    def land(self, effect: LandRegion, now: float) -> None:
        if effect.lane in self._lanes.pull:
            self._to_pull.append(effect)
        elif effect.lane in self._lanes.direct:
            self._receive_in_place(effect, now)
        else:
            self._receive_in_slot(effect, now)

    def fence(self, key: HandoffKey, now: float) -> None:
        self._waiting.pop(key, None)
        sink = self._sinks.get(key)
        if sink is not None:
            self._to_pull = deque(effect for effect in self._to_pull if effect.key != key)
            self._forget(key)
            for op in sink.ops:
                self._lanes.cancel(sink.lane, op)
        self._answer(SinkFenced(key))
        self.prepare_waiting(now)

    def close(self, key: HandoffKey, now: float) -> None:
        self._forget(key)
        self.prepare_waiting(now)

    # ------------------------------------------------------------------------------------------- slots

    def prepare_waiting(self, now: float) -> None:
        """Hands out slots in order of arrival: once one hand-off waits for a slot, no later one is served before it."""
        ring_is_short = False
        for effect in list(self._waiting.values()):
            match self._lanes.choose(effect.peer, now):
                case NoLane(reason):
                    del self._waiting[effect.key]
                    failure = Failure(code=ErrorCode.NO_WORKER, reason=f"no lane to {effect.peer.worker}: {reason}")
                    lost = not self._lanes.knows(effect.peer)
                    self._answer(SinkNotPrepared(effect.key, failure, peer_lost=lost))
                case Chosen(lane) as chosen if lane not in self._lanes.staged or not ring_is_short:
                    ring_is_short = not self._prepare(effect, chosen) or ring_is_short
                case Chosen() | Wait():
                    pass

    def _prepare(self, effect: PrepareSink, chosen: Chosen) -> bool:
        """False: no slot is free."""
        credit = min(self._config.credit_regions, sum(span.units for span in effect.spans))
        if chosen.lane in self._lanes.staged:
            credit = self._ring.reserve(effect.key, credit)
            if credit == 0:
                return False
        del self._waiting[effect.key]
        self._handler.register_decode_req(effect.key, effect.spans)
        self._sinks[effect.key] = _Sink(effect.peer, chosen.lane)
        region_units = tuple(self._region_units(span.component) for span in effect.spans)
        speed = self._lanes.gbps(effect.peer.worker, chosen.lane)
        self._answer(SinkPrepared(effect.key, chosen.lane, credit, region_units, speed))
        self._lanes.use(effect.peer, chosen)
        return True

    def _region_units(self, component: Component) -> int:
        """Most in a region. One at least: without slots a region of one unit may be larger than a slot."""
        return max(1, min(self._config.region_bytes // self._handler.unit_bytes(component), MAX_REGION_UNITS))

    # ----------------------------------------------------------------------------------------- regions

    def copies(self, now: float) -> Iterator[None]:
        """Yields after each region that was pulled."""
        while self._to_pull:
            self._pull_region(self._to_pull.popleft(), now)
            yield

    def _receive_in_place(self, effect: LandRegion, now: float) -> None:
        target = self._handler.destination_of(effect.key, effect.chunk)
        if isinstance(target, Rows):
            op = self._start_op(effect, None)
            self._lanes.direct[effect.lane].receive(op, effect.peer, effect.tag, target)
        else:
            self._answer_landed(effect, target, now)

    def _receive_in_slot(self, effect: LandRegion, now: float) -> None:
        lease = self._ring.lease(effect.key, effect.chunk.seq)
        assert lease is not None, f"{effect.key}: more regions under way than slots were reserved"
        if effect.chunk.nbytes > len(lease.view):
            self._ring.give_back(lease)
            self._fail(effect, f"region of {effect.chunk.nbytes} bytes is larger than a slot", False, now)
            return
        op = self._start_op(effect, lease)
        self._lanes.staged[effect.lane].receive(op, effect.peer, effect.tag, lease.view[: effect.chunk.nbytes])

    def _start_op(self, effect: LandRegion, lease: SlotLease | None) -> int:
        op = self._next_op()
        self._sinks[effect.key].ops.add(op)
        self._ops[op] = _Receive(effect, lease, time.perf_counter())
        return op

    def on_operation(self, event: OperationEnd, now: float) -> bool:
        """An operation has ended, so its memory is ours again. Whoever started it may be gone. False: not ours."""
        receive = self._ops.pop(event.op, None)
        if receive is None:
            return False
        effect = receive.effect
        sink = self._sinks.get(effect.key)
        if sink is not None and event.op in sink.ops:
            sink.ops.remove(event.op)
            if isinstance(event, Received):
                self._answer_landed(effect, self._handler._scatter_region(effect.key, effect.chunk, event.data), now)
            elif isinstance(event, Placed):
                self._answer_landed(effect, self._handler.verify_placed(effect.key, effect.chunk), now)
            elif isinstance(event, Ended):
                self._fail(effect, event.reason, event.peer_lost, now)
        if receive.lease is not None:
            self._ring.give_back(receive.lease)
        if not isinstance(event, Ended):
            self._note_moved(effect, receive.started_s)
        return True

    def _pull_region(self, effect: LandRegion, now: float) -> None:
        chunk = effect.chunk
        target = self._handler.destination_of(effect.key, chunk)
        started = time.perf_counter()
        if not isinstance(target, Rows):
            self._answer_landed(effect, target, now)
            return
        source = replace(target, units=unpack_tokens(chunk.source_pages))
        failed = self._lanes.pull[effect.lane].pull(effect.peer, source, target)
        if failed is not None:
            self._fail(effect, failed.reason, failed.peer_lost, now)
        else:
            self._answer_landed(effect, self._handler.verify_placed(effect.key, chunk, started), now)
            self._note_moved(effect, started)

    def _answer_landed(self, effect: LandRegion, outcome: Scatter, now: float) -> None:
        match outcome:
            case Scattered(nbytes, scatter_s):
                self._answer(Landed(effect.key, effect.chunk.seq, nbytes, scatter_s))
            case Damaged(reason):
                _log.warning("region_damaged", peer=effect.peer.worker, lane=effect.lane, reason=reason)
                self._answer(RegionDamaged(effect.key, effect.chunk.seq))
            case NotMine(reason):
                self._fail(effect, reason, False, now)
            case _:
                assert_never(outcome)

    def _fail(self, effect: LandRegion, reason: str, peer_lost: bool, now: float) -> None:
        self._lanes.on_failure(effect.peer, effect.lane, reason, now)
        failure = Failure(code=ErrorCode.INTERNAL, reason=f"lane {effect.lane}: {reason}")
        self._answer(SinkLaneFailed(effect.key, failure, peer_lost))

    def _forget(self, key: HandoffKey) -> None:
        self._sinks.pop(key, None)
        self._handler.forget(key)
        self._ring.close(key)

    def _note_moved(self, effect: LandRegion, started_s: float) -> None:
        ended_s = time.perf_counter()
        self._lanes.note_moved(effect.peer.worker, effect.lane, effect.chunk.nbytes, started_s, ended_s)

    # --------------------------------------------------------------------------------------- questions

    def wait_s(self) -> float | None:
        """How soon it wants to go on; None: not before something happens."""
        if self._to_pull:
            return 0.0
        return WAITING_RECHECK_S if self._waiting else None

    @property
    def slots(self) -> tuple[int, int, int]:
        """Free, reserved, leased."""
        return self._ring.free, self._ring.reserved, self._ring.leased

    @property
    def waiting(self) -> int:
        """Hand-offs without a lane or a slot yet."""
        return len(self._waiting)

    @property
    def open(self) -> int:
        """Hand-offs that may land something."""
        return len(self._sinks)

    @property
    def operations(self) -> int:
        return len(self._ops)
