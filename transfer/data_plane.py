"""Carries out what the session machines ask of the data plane (`session/effects.py`), over whatever lanes there are.

Owns: staging memory on both sides, the operations under way, the order in which hand-offs get slots, and counters per
(peer, lane). Never: a decision about a hand-off, a control frame, or a wait: everything happens in `execute` and `poll`
of the one owner thread, in portions, so that timers and heartbeats are never late.

Fences are immediate: this thread is the only one that copies into or out of pages. What a transport may still touch is
a staging slot, and that stays leased (quarantined) until its operation has ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import assert_never

from baton.common.config import TransferConfig
from baton.common.engine.batch import KvMemory
from baton.common.errors import ConfigError, ErrorCode
from baton.common.ids import HandoffKey, Stamp, WorkerId
from baton.common.kv.layout import Component
from baton.common.log import EventLog
from baton.common.messages import MAX_REGION_UNITS, Failure, LaneAddress, Member, unpack_tokens
from baton.transfer.digest import RegionDigest
from baton.transfer.link import Chosen, CloseLink, LaneView, Links, NoLane, OpenLink, Wait
from baton.transfer.plan import Span
from baton.transfer.session.effects import (
    PULL_LANES,
    CloseSink,
    DataEffect,
    DataEvent,
    FenceSink,
    FenceSource,
    Landed,
    LandRegion,
    PrepareSink,
    RegionDamaged,
    RegionReady,
    SendRegion,
    SinkFenced,
    SinkLaneFailed,
    SinkNotPrepared,
    SinkPrepared,
    SourceFenced,
    SourceLaneFailed,
)
from baton.transfer.speed import LaneSpeeds
from baton.transfer.staging import (
    Damaged,
    NotMine,
    Scatter,
    Scattered,
    SlotLease,
    StagingHandler,
    StagingRing,
    unit_rows,
)
from baton.transfer.transports.base import (
    Bytes,
    Ended,
    LinkDown,
    LinkUp,
    PullTransport,
    Received,
    Sent,
    StagedTransport,
    Transport,
)

TURN_S = 0.004
"""About as long the copies of one `poll` may take; at least one is made."""
LANE_BUSY_S = 0.001
"""How soon a lane is asked again for an end that it cannot announce."""
WAITING_RECHECK_S = 0.05
"""How late a hand-off may notice that it has waited long enough for a better lane."""

_log = EventLog("baton.transfer")


@dataclass(slots=True)
class LaneCounters:
    """One peer over one lane, since the start."""

    regions_in: int = 0
    bytes_in: int = 0
    regions_out: int = 0
    bytes_out: int = 0
    damaged: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class DataPlaneSnapshot:
    """For `baton status` and metrics. Slots: free, reserved, leased (of which nobody waits for: quarantined)."""

    lanes: dict[WorkerId, list[LaneView]]
    counters: dict[tuple[WorkerId, str], LaneCounters]
    receive_slots: tuple[int, int, int]
    send_slots: tuple[int, int, int]
    waiting_sinks: int
    open_sinks: int
    open_operations: int


@dataclass(slots=True)
class _Sink:
    """A prepared hand-off that receives."""

    peer: Stamp
    lane: str
    ops: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Op:
    """A region on its way, and the slot that it occupies."""

    cause: LandRegion | SendRegion
    lease: SlotLease
    ring: StagingRing
    started_s: float


class DataPlane:
    """See the module. `staged` and `pull` are the lanes that this process has; `config.lanes` orders them. Raises
    ConfigError when there are staged lanes and a page is larger than their slots."""

    def __init__(
        self,
        config: TransferConfig,
        memory: KvMemory,
        staged: Sequence[StagedTransport],
        pull: Sequence[PullTransport] = (),
    ) -> None:
        self._config = config
        self._handler = StagingHandler(unit_rows(memory), RegionDigest(config.digest))
        self._staged = {transport.lane: transport for transport in staged}
        self._pull = {transport.lane: transport for transport in pull}
        assert self._pull.keys() <= PULL_LANES, "the session machines must know which lanes pull"
        assert not self._staged.keys() & PULL_LANES
        self._transports: dict[str, Transport] = {**self._staged, **self._pull}
        for component in memory.layout.components if staged else ():
            _check_unit_fits(component, self._handler.unit_bytes(component), config.region_bytes)
        self._links = Links([lane for lane in config.lanes if lane in self._transports])
        self._receive_ring = StagingRing(config.staging_ring_bytes, config.region_bytes)
        self._send_ring = StagingRing(config.staging_ring_bytes, config.region_bytes)
        self._waiting: dict[HandoffKey, PrepareSink] = {}  # in order of arrival
        self._sinks: dict[HandoffKey, _Sink] = {}
        self._to_pull: deque[LandRegion] = deque()
        self._to_send: deque[SendRegion] = deque()
        self._ops: dict[int, _Op] = {}
        self._op_numbers = count(1)
        self._counters: dict[tuple[WorkerId, str], LaneCounters] = {}
        self._speeds = LaneSpeeds()
        self._lane_in_use: dict[Stamp, str] = {}
        self._events: list[DataEvent] = []

    # ------------------------------------------------------------------------------------------- peers

    def addresses(self) -> tuple[LaneAddress, ...]:
        """What peers need to reach this process, in order of preference."""
        return tuple(self._transports[lane].address() for lane in self._config.lanes if lane in self._transports)

    def set_peers(self, peers: Sequence[Member], now: float) -> None:
        """The processes that this one receives from."""
        self._carry_out(self._links.set_peers([(peer.stamp, peer.lanes) for peer in peers], now))
        for stamp in [stamp for stamp in self._lane_in_use if not self._links.knows(stamp)]:
            del self._lane_in_use[stamp]

    # ----------------------------------------------------------------------------------------- effects

    def execute(self, effect: DataEffect, now: float) -> list[DataEvent]:
        """Starts one effect. Returns what can be answered already, of this and of others."""
        match effect:
            case PrepareSink():
                self._waiting[effect.key] = effect
                self._prepare_waiting(now)
            case LandRegion():
                self._land(effect, now)
            case SendRegion():
                self._to_send.append(effect)
            case FenceSink():
                self._fence_sink(effect.key)
                self._prepare_waiting(now)
            case FenceSource():
                self._fence_source(effect.key)
            case CloseSink():
                self._forget_sink(effect.key)
                self._prepare_waiting(now)
            case _:
                assert_never(effect)
        return self._take_events()

    def poll(self, now: float) -> list[DataEvent]:
        """Goes on with everything under way, for about TURN_S."""
        end = time.perf_counter() + TURN_S
        for lane, transport in self._transports.items():
            for event in transport.poll():
                match event:
                    case Received() | Sent() | Ended():
                        self._on_operation(event, now)
                    case LinkUp():
                        self._links.on_up(event.peer, lane, now)
                    case LinkDown():
                        self._links.on_down(event.peer, lane, event.reason, now)
                        _log.info("link_down", peer=event.peer.worker, lane=lane, reason=event.reason)
                    case _:
                        assert_never(event)
        self._carry_out(self._links.on_timer(now))
        self._prepare_waiting(now)
        for _ in self._copies(now):
            if time.perf_counter() >= end:
                break
        return self._take_events()

    def wait_s(self, now: float) -> float | None:
        """How long `poll` may be left uncalled when no wake source of a lane speaks up; None: as long as you like."""
        can_send = bool(self._to_send) and (self._send_ring.free > 0 or self._to_send[0].lane not in self._staged)
        if self._to_pull or can_send:
            return 0.0
        if any(transport.busy for transport in self._transports.values()):
            return LANE_BUSY_S
        times = [self._links.next_deadline(), now + WAITING_RECHECK_S if self._waiting else None]
        return min((max(0.0, time_s - now) for time_s in times if time_s is not None), default=None)

    def snapshot(self, now: float) -> DataPlaneSnapshot:
        def slots(ring: StagingRing) -> tuple[int, int, int]:
            return ring.free, ring.reserved, ring.leased

        return DataPlaneSnapshot(
            lanes=self._links.snapshot(now),
            counters={pair: replace(counters) for pair, counters in self._counters.items()},
            receive_slots=slots(self._receive_ring),
            send_slots=slots(self._send_ring),
            waiting_sinks=len(self._waiting),
            open_sinks=len(self._sinks),
            open_operations=len(self._ops),
        )

    def lane_gbps(self, peer: WorkerId, lane: str) -> float:
        """What regions of hand-offs with `peer` reached on `lane` lately, in either direction; 0.0: not known. On a
        pull lane only the receiver sees bytes move."""
        return self._speeds.gbps(peer, lane)

    def close(self) -> None:
        """Ends all lanes; staging memory is safe to drop afterwards."""
        for transport in self._transports.values():
            transport.close()

    # -------------------------------------------------------------------------------------------- sink

    def _prepare_waiting(self, now: float) -> None:
        """Hands out slots in order of arrival: once one hand-off waits for a slot, no later one is served before it."""
        ring_is_short = False
        for effect in list(self._waiting.values()):
            match self._links.choose(effect.peer, now):
                case NoLane(reason):
                    del self._waiting[effect.key]
                    failure = Failure(code=ErrorCode.NO_WORKER, reason=f"no lane to {effect.peer.worker}: {reason}")
                    lost = not self._links.knows(effect.peer)
                    self._events.append(SinkNotPrepared(effect.key, failure, peer_lost=lost))
                case Chosen(lane, reason) if lane in self._pull or not ring_is_short:
                    ring_is_short = not self._prepare(effect, lane, reason) or ring_is_short
                case Chosen() | Wait():
                    pass

    def _prepare(self, effect: PrepareSink, lane: str, reason: str) -> bool:
        """False: no slot is free."""
        credit = min(self._config.credit_regions, sum(span.units for span in effect.spans))
        if lane in self._staged:
            credit = self._receive_ring.reserve(effect.key, credit)
            if credit == 0:
                return False
        del self._waiting[effect.key]
        self._handler.register_decode_req(effect.key, effect.spans)
        self._sinks[effect.key] = _Sink(effect.peer, lane)
        region_units = tuple(self._region_units(span.component) for span in effect.spans)
        self._events.append(SinkPrepared(effect.key, lane, credit, region_units))
        if self._lane_in_use.get(effect.peer) != lane:
            self._lane_in_use[effect.peer] = lane
            _log.info("lane", peer=effect.peer.worker, lane=lane, reason=reason)
        return True

    def _region_units(self, component: Component) -> int:
        """Most in a region. One at least: on a pull lane a region of one unit may be larger than a slot."""
        return max(1, min(self._config.region_bytes // self._handler.unit_bytes(component), MAX_REGION_UNITS))

    def _land(self, effect: LandRegion, now: float) -> None:
        if effect.lane in self._pull:
            self._to_pull.append(effect)
            return
        sink = self._sinks[effect.key]
        lease = self._receive_ring.lease(effect.key, effect.chunk.seq)
        assert lease is not None, f"{effect.key}: more regions under way than slots were reserved"
        if effect.chunk.nbytes > len(lease.view):
            self._receive_ring.give_back(lease)
            self._fail_sink(effect, f"region of {effect.chunk.nbytes} bytes is larger than a slot", False, now)
            return
        op = next(self._op_numbers)
        sink.ops.add(op)
        self._ops[op] = _Op(effect, lease, self._receive_ring, time.perf_counter())
        self._staged[effect.lane].receive(op, effect.peer, effect.tag, lease.view[: effect.chunk.nbytes])

    def _pull_region(self, effect: LandRegion, now: float) -> None:
        chunk = effect.chunk
        target = self._handler.destination_of(effect.key, chunk)
        started = time.perf_counter()
        if isinstance(target, NotMine):
            self._answer_landed(effect, target, now)
            return
        source = replace(target, units=unpack_tokens(chunk.source_pages))
        pull = self._pull[effect.lane].pull
        failed = pull(effect.peer, source, target)
        if failed is not None:
            self._fail_sink(effect, failed.reason, failed.peer_lost, now)
        else:
            self._answer_landed(effect, self._handler.verify_pulled(effect.key, chunk, target, started), now)
            self._speeds.note(effect.peer.worker, effect.lane, chunk.nbytes, started, time.perf_counter())

    def _on_received(self, effect: LandRegion, data: Bytes, now: float) -> None:
        self._answer_landed(effect, self._handler._scatter_region(effect.key, effect.chunk, data), now)

    def _answer_landed(self, effect: LandRegion, outcome: Scatter, now: float) -> None:
        counters = self._counters_of(effect)
        match outcome:
            case Scattered(nbytes, scatter_s):
                counters.regions_in += 1
                counters.bytes_in += nbytes
                self._events.append(Landed(effect.key, effect.chunk.seq, nbytes, scatter_s))
            case Damaged(reason):
                counters.damaged += 1
                _log.warning("region_damaged", peer=effect.peer.worker, lane=effect.lane, reason=reason)
                self._events.append(RegionDamaged(effect.key, effect.chunk.seq))
            case NotMine(reason):
                self._fail_sink(effect, reason, False, now)
            case _:
                assert_never(outcome)

    def _fail_sink(self, effect: LandRegion, reason: str, peer_lost: bool, now: float) -> None:
        self._lane_failed(effect, reason, now)
        failure = Failure(code=ErrorCode.INTERNAL, reason=f"lane {effect.lane}: {reason}")
        self._events.append(SinkLaneFailed(effect.key, failure, peer_lost))

    def _fence_sink(self, key: HandoffKey) -> None:
        self._waiting.pop(key, None)
        sink = self._sinks.get(key)
        if sink is not None:
            self._to_pull = deque(effect for effect in self._to_pull if effect.key != key)
            self._forget_sink(key)
            for op in sink.ops:
                self._staged[sink.lane].cancel(op)
        self._events.append(SinkFenced(key))

    def _forget_sink(self, key: HandoffKey) -> None:
        self._sinks.pop(key, None)
        self._handler.forget(key)
        self._receive_ring.close(key)

    # ------------------------------------------------------------------------------------------ source

    def _send_region(self, effect: SendRegion) -> bool:
        """False: no slot is free."""
        source = self._handler.rows_of(effect.span)
        counters = self._counters_of(effect)
        if effect.lane in self._pull:
            nbytes, digest = source.nbytes, self._handler.digest(source, effect.seq)
        else:
            lease = self._send_ring.lease_free(effect.key, effect.seq)
            if lease is None:
                return False
            payload = self._handler.gather(source, lease.view)
            nbytes, digest = len(payload), self._handler.digest_staged(source, payload, effect.seq)
            op = next(self._op_numbers)
            self._ops[op] = _Op(effect, lease, self._send_ring, time.perf_counter())
            self._staged[effect.lane].send(op, effect.peer, effect.tag, payload)
        counters.regions_out += 1
        counters.bytes_out += nbytes
        self._events.append(RegionReady(effect.key, effect.seq, effect.tag, nbytes, digest))
        return True

    def _region_bytes(self, span: Span) -> int:
        return span.units * self._handler.unit_bytes(span.component)

    def _bytes_of(self, effect: LandRegion | SendRegion) -> int:
        return effect.chunk.nbytes if isinstance(effect, LandRegion) else self._region_bytes(effect.span)

    def _fail_source(self, effect: SendRegion, reason: str) -> None:
        failure = Failure(code=ErrorCode.INTERNAL, reason=f"lane {effect.lane}: {reason}")
        self._events.append(SourceLaneFailed(effect.key, failure))

    def _fence_source(self, key: HandoffKey) -> None:
        self._to_send = deque(effect for effect in self._to_send if effect.key != key)
        for op, under_way in list(self._ops.items()):
            if under_way.cause.key == key and under_way.ring is self._send_ring:
                self._staged[under_way.cause.lane].cancel(op)
        self._events.append(SourceFenced(key))

    # -------------------------------------------------------------------------------------------- both

    def _copies(self, now: float) -> Iterator[None]:
        """Yields after each region that was pulled, or gathered and sent."""
        while self._to_pull:
            self._pull_region(self._to_pull.popleft(), now)
            yield
        while self._to_send:
            effect = self._to_send[0]
            if effect.lane not in self._transports:
                self._fail_source(effect, "this process does not have it")
            elif effect.lane in self._staged and self._region_bytes(effect.span) > self._config.region_bytes:
                self._fail_source(effect, "the region is larger than a slot")
            elif not self._send_region(effect):
                return
            self._to_send.popleft()
            yield

    def _on_operation(self, event: Received | Sent | Ended, now: float) -> None:
        """An operation has ended, so its slot is ours again. Whoever started it may be gone."""
        under_way = self._ops.pop(event.op)
        cause = under_way.cause
        match cause:
            case LandRegion():
                sink = self._sinks.get(cause.key)
                if sink is not None and event.op in sink.ops:
                    sink.ops.remove(event.op)
                    if isinstance(event, Received):
                        self._on_received(cause, event.data, now)
                    elif isinstance(event, Ended):
                        self._fail_sink(cause, event.reason, event.peer_lost, now)
            case SendRegion():
                if isinstance(event, Ended):
                    self._counters_of(cause).failures += 1
                    self._fail_source(cause, event.reason)
            case _:
                assert_never(cause)
        under_way.ring.give_back(under_way.lease)
        if not isinstance(event, Ended):
            nbytes = self._bytes_of(cause)
            self._speeds.note(cause.peer.worker, cause.lane, nbytes, under_way.started_s, time.perf_counter())

    def _lane_failed(self, effect: LandRegion, reason: str, now: float) -> None:
        self._counters_of(effect).failures += 1
        _log.warning("lane_failed", peer=effect.peer.worker, lane=effect.lane, reason=reason)
        self._links.on_failure(effect.peer, effect.lane, now)

    def _carry_out(self, effects: Sequence[OpenLink | CloseLink]) -> None:
        for effect in effects:
            match effect:
                case OpenLink(peer, lane, address):
                    self._transports[lane].open(peer, address)
                case CloseLink(peer, lane):
                    self._transports[lane].close_link(peer)
                case _:
                    assert_never(effect)

    def _counters_of(self, effect: LandRegion | SendRegion) -> LaneCounters:
        return self._counters.setdefault((effect.peer.worker, effect.lane), LaneCounters())

    def _take_events(self) -> list[DataEvent]:
        events, self._events = self._events, []
        return events


def _check_unit_fits(component: Component, unit_bytes: int, region_bytes: int) -> None:
    if unit_bytes > region_bytes:
        reason = f"a page of {component} KV has {unit_bytes} bytes and travels whole, in a staging slot of this size"
        nearest = f"at least {unit_bytes}, and transfer.staging_ring_bytes for transfer.credit_regions of them"
        raise ConfigError("transfer.region_bytes", region_bytes, reason, nearest)
