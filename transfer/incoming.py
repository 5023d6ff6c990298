"""The receiving half of the data plane: gives hand-offs their lane and their slots, and lands regions in their pages.

Owns: the ring of receive slots, the hand-offs that wait for a lane or a slot and those that may land something, regions
that wait to be asked for (`region_queue.py`), receives, scatters and late pulls under way. Never: a decision about a
hand-off, or a page that is not registered (`staging.StagingHandler` sees to that).

Invariant. A scatter or a late pull cannot be called back: until it is done its hand-off is not fenced, and its slot not
free, whatever becomes of hand-off, peer and lane meanwhile.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import assert_never

from baton.common.errors import ErrorCode
from baton.common.ids import HandoffKey, Stamp
from baton.common.kv.layout import Component
from baton.common.log import EventLog
from baton.common.messages import MAX_REGION_UNITS, Failure, unpack_tokens
from baton.transfer.link import Chosen, NoLane, Wait
from baton.transfer.plane_parts import PlaneParts
from baton.transfer.region_queue import RegionQueue
from baton.transfer.session.effects import (
    Landed,
    LandRegion,
    PrepareSink,
    RegionDamaged,
    SinkFenced,
    SinkLaneFailed,
    SinkNotPrepared,
    SinkPrepared,
)
from baton.transfer.slot_shares import SlotShares
from baton.transfer.staging import (
    Damaged,
    NotMine,
    Reading,
    Scatter,
    Scattered,
    Scattering,
    SlotLease,
)
from baton.transfer.stalls import Stalls
from baton.transfer.transports.base import Ended, OperationEnd, Placed, PullFailed, Pulling, Received, Rows

WINDOW_REGIONS = 2
"""So many full regions of one peer are asked for at a time on a lane: enough to keep it busy, and not so many that a
small hand-off waits long behind what is on its way."""
WAITING_RECHECK_S = 0.05
"""How late a hand-off may notice that it has waited long enough for a better lane."""

_log = EventLog("baton.transfer")


@dataclass(slots=True)
class _Sink:
    """A prepared hand-off."""

    peer: Stamp
    lane: str
    priority: int
    ops: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A region that is to land in `target`."""

    effect: LandRegion
    target: Rows


@dataclass(frozen=True, slots=True)
class _Receive:
    """A region on its way into a slot, or straight into its pages."""

    wanted: _Wanted
    lease: SlotLease | None
    started_s: float


@dataclass(frozen=True, slots=True)
class _Scatter:
    """A region on its way from its slot into its pages."""

    receive: _Receive
    scattering: Scattering


@dataclass(slots=True)
class _Pull:
    """A region on its way from the source's pages into ours; then (`reading`) what its digest is made of, from there
    into its slot."""

    receive: _Receive
    pulling: Pulling
    reading: Reading | None = None

    def done(self) -> bool:
        return self.pulling.done() if self.reading is None else self.reading.copying.done()


class Incoming:
    def __init__(self, parts: PlaneParts) -> None:
        config, caps = parts.config, parts.new_caps()
        self._config = config
        self._handler = parts.handler
        self._lanes = parts.lanes
        self._answer = parts.answer
        self._next_op = parts.next_op
        self.ring = parts.new_ring()
        self._shares = SlotShares()
        self._waiting: dict[HandoffKey, PrepareSink] = {}  # for a lane or a slot
        self._recheck_at_s, self._seen_version = 0.0, 0
        self._sinks: dict[HandoffKey, _Sink] = {}
        self._to_pull: RegionQueue[_Wanted] = RegionQueue(caps, 1)
        self._to_receive: RegionQueue[_Wanted] = RegionQueue(caps, WINDOW_REGIONS * config.region_bytes)  # into slots
        self._to_place: RegionQueue[_Wanted] = RegionQueue(caps, WINDOW_REGIONS * config.direct_region_bytes)
        self._ops: dict[int, _Receive] = {}
        self._stalls = Stalls(parts.stalled_s)
        self._scatters: list[_Scatter] = []
        self._pulls: list[_Pull] = []

    # ----------------------------------------------------------------------------------------- effects

    def prepare(self, effect: PrepareSink, now: float) -> None:
        self._waiting[effect.key] = effect
        self._place(effect, now)
        self._grant_slots(now)

    def land(self, effect: LandRegion, now: float) -> None:
        """Queues it; receives and late pulls that may start do so at once, other pulls in their turn (`step`)."""
        chunk = effect.chunk
        target = self._handler.destination_of(effect.key, chunk)
        if not isinstance(target, Rows):
            self._answer_landed(effect, target, now)
        elif effect.lane in self._lanes.slotted and chunk.nbytes > self.ring.slot_bytes:
            self._fail(effect, f"region of {chunk.nbytes} bytes is larger than a slot", False, now)
        else:
            holds = 0 if effect.lane in self._lanes.pull else target.nbytes
            wanted = _Wanted(effect, target)
            priority = self._sinks[effect.key].priority
            self._queue_of(effect.lane).put(
                effect.lane, effect.peer, effect.key, priority, wanted, target.nbytes, holds
            )
            self._start_receives(now)

    def fence(self, key: HandoffKey, now: float) -> None:
        sink = self._sinks.get(key)
        self._forget(key)
        if sink is not None:
            if sink.ops and self._stalls.is_suspicious((sink.lane, sink.peer)):
                self._lanes.on_failure(sink.peer, sink.lane, "nothing came until a hand-off was given up", now)
            for op in sink.ops:
                self._lanes.cancel(sink.lane, op)
        self._answer_fenced(key)
        self._grant_slots(now)

    def close(self, key: HandoffKey, now: float) -> None:
        assert not self._is_copying(key), f"{key} is complete, and a region of it is not"
        self._forget(key)
        self._grant_slots(now)

    # ------------------------------------------------------------------------------------------- slots

    def prepare_waiting(self, now: float) -> None:
        """Goes on with those that wait: lanes come up and go, waiting for a better one ends, slots are given back."""
        if self._waiting and (self._lanes.version != self._seen_version or now >= self._recheck_at_s):
            self._seen_version, self._recheck_at_s = self._lanes.version, now + WAITING_RECHECK_S
            for effect in list(self._waiting.values()):
                self._place(effect, now)
        self._grant_slots(now)

    def _place(self, effect: PrepareSink, now: float) -> None:
        """Finds its lane. A lane with slots means to wait in line for some."""
        chosen = self._lanes.choose(effect.peer, now)
        if isinstance(chosen, Chosen) and not self._handler.takes(self._lanes.layout_of(effect.peer)):
            chosen = NoLane("its pages are laid out in a way that cannot be turned into ours")
        match chosen:
            case NoLane(reason):
                failure = Failure(code=ErrorCode.NO_WORKER, reason=f"no lane to {effect.peer.worker}: {reason}")
                lost = not self._lanes.knows(effect.peer)
                self._forget(effect.key)
                self._answer(SinkNotPrepared(effect.key, failure, peer_lost=lost))
            case Chosen(lane) if lane not in self._lanes.slotted:
                self._open(effect, chosen, self._config.credit_regions)
            case Chosen(lane) if effect.key not in self._shares:
                want = sum(-(-span.units // self._region_units(span.component, lane)) for span in effect.spans)
                self._shares.ask(effect.key, effect.priority, min(self._config.credit_regions, want))
            case Chosen() | Wait():
                pass

    def _grant_slots(self, now: float) -> None:
        while (granted := self._shares.grant(self.ring.free)) is not None:
            key, count = granted
            effect = self._waiting[key]
            chosen = self._lanes.choose(effect.peer, now)
            if isinstance(chosen, Chosen) and chosen.lane in self._lanes.slotted:
                self.ring.reserve(key, count)
                self._open(effect, chosen, count)
            else:  # its lane went while it waited
                self._shares.close(key)
                self._place(effect, now)

    def _open(self, effect: PrepareSink, chosen: Chosen, credit: int) -> None:
        if chosen.lane not in self._lanes.slotted:
            self._shares.close(effect.key)
        del self._waiting[effect.key]
        self._handler.register_decode_req(effect.key, effect.spans, self._lanes.layout_of(effect.peer))
        self._sinks[effect.key] = _Sink(effect.peer, chosen.lane, effect.priority)
        region_units = tuple(self._region_units(span.component, chosen.lane) for span in effect.spans)
        speed = self._lanes.gbps(effect.peer.worker, chosen.lane)
        self._answer(SinkPrepared(effect.key, chosen.lane, credit, region_units, speed))
        self._lanes.use(effect.peer, chosen)

    def _region_units(self, component: Component, lane: str) -> int:
        """Most in a region. One at least: without slots a region of one unit may be larger than what is said."""
        most = self._config.region_bytes if lane in self._lanes.slotted else self._config.direct_region_bytes
        return max(1, min(most // self._handler.unit_bytes(component), MAX_REGION_UNITS))

    def _queue_of(self, lane: str) -> RegionQueue[_Wanted]:
        if lane in self._lanes.pull:
            return self._to_pull
        return self._to_place if lane in self._lanes.direct else self._to_receive

    # ----------------------------------------------------------------------------------------- regions

    def step(self, now: float) -> bool:
        """Asks for what may be asked for, goes on with copies, and pulls one region. False: none waits."""
        if self._scatters:
            self._end_scatters(now)
        if self._pulls:
            self._go_on_pulling(now)
        self._start_receives(now)
        for lane, peer in self._stalls.look(now):
            self._fail_on(lane, peer, now)
        wanted = self._to_pull.take(now)
        if wanted is not None:
            self._pull_region(wanted.effect, wanted.target, now)
        return wanted is not None

    def _start_receives(self, now: float) -> None:
        for queue in (self._to_receive, self._to_place):
            while (wanted := queue.take(now)) is not None:
                if wanted.effect.lane in self._lanes.late:
                    self._begin_pull(wanted, now)
                else:
                    self._receive(wanted)

    def _fail_on(self, lane: str, peer: Stamp, now: float) -> None:
        """All that waits there for what does not come."""
        for sink in [sink for sink in self._sinks.values() if sink.ops and (sink.lane, sink.peer) == (lane, peer)]:
            effect = self._ops[min(sink.ops)].wanted.effect
            self._fail(effect, "nothing has come for too long", False, now)

    def _receive(self, wanted: _Wanted) -> None:
        effect, op = wanted.effect, self._next_op()
        self._stalls.began((effect.lane, effect.peer), wanted.target.nbytes)
        self._sinks[effect.key].ops.add(op)
        if effect.lane in self._lanes.direct:
            self._ops[op] = _Receive(wanted, None, time.perf_counter())
            self._lanes.direct[effect.lane].receive(op, effect.peer, effect.tag, wanted.target)
        else:
            lease = self._lease(effect)
            self._ops[op] = _Receive(wanted, lease, time.perf_counter())
            self._lanes.staged[effect.lane].receive(op, effect.peer, effect.tag, lease.view[: effect.chunk.nbytes])

    def _lease(self, effect: LandRegion) -> SlotLease:
        lease = self.ring.lease(effect.key, effect.chunk.seq)
        assert lease is not None, f"{effect.key}: more regions under way than slots were promised"
        return lease

    def on_operation(self, event: OperationEnd, now: float) -> bool:
        """An operation has ended, so its memory is ours again. Whoever started it may be gone. False: not ours."""
        receive = self._ops.pop(event.op, None)
        if receive is None:
            return False
        effect = receive.wanted.effect
        self._stalls.ended((effect.lane, effect.peer), receive.wanted.target.nbytes)
        self._queue_of(effect.lane).ended(effect.lane, effect.peer, receive.wanted.target.nbytes)
        sink = self._sinks.get(effect.key)
        outcome: Scatter | Scattering | None = None
        if sink is not None and event.op in sink.ops:
            sink.ops.remove(event.op)
            if isinstance(event, Received):
                outcome = self._handler._scatter_region(effect.key, effect.chunk, event.data)
            elif isinstance(event, Placed):
                outcome = self._handler.verify_placed(effect.key, effect.chunk)
            elif isinstance(event, Ended):
                self._fail(effect, event.reason, event.peer_lost, now)
        if isinstance(outcome, Scattering):
            self._scatters.append(_Scatter(receive, outcome))
        else:
            self._end_receive(receive, outcome, now)
        if not isinstance(event, Ended):
            self._note_moved(effect, receive.started_s)
        return True

    def _end_receive(self, receive: _Receive, outcome: Scatter | None, now: float) -> None:
        """Nothing touches its memory any more."""
        if receive.lease is not None:
            self.ring.give_back(receive.lease)
        if outcome is not None:
            self._answer_landed(receive.wanted.effect, outcome, now)

    def _end_scatters(self, now: float) -> None:
        """Those of a hand-off that was fenced meanwhile end its fence."""
        for scatter in [scatter for scatter in self._scatters if scatter.scattering.copying.done()]:
            self._scatters.remove(scatter)
            key = scatter.receive.wanted.effect.key
            if key in self._sinks:
                self._end_receive(scatter.receive, self._handler.scattered(scatter.scattering), now)
            else:
                self._end_receive(scatter.receive, None, now)
                self._answer_fenced(key)

    def _begin_pull(self, wanted: _Wanted, now: float) -> None:
        effect, receive = wanted.effect, _Receive(wanted, self._lease(wanted.effect), time.perf_counter())
        source = replace(wanted.target, units=unpack_tokens(effect.chunk.source_pages))
        pulling = self._lanes.late[effect.lane].begin_pull(effect.peer, source, wanted.target)
        if isinstance(pulling, PullFailed):
            self._end_late(receive, None, now)
            self._fail(effect, pulling.reason, pulling.peer_lost, now)
        else:
            self._pulls.append(_Pull(receive, pulling))

    def _go_on_pulling(self, now: float) -> None:
        """Reads back what is to be compared of each region that has come, and lands it when that is here. Of a hand-off
        that was fenced meanwhile the end of either copy ends the fence."""
        for pull in [pull for pull in self._pulls if pull.done()]:
            receive, effect = pull.receive, pull.receive.wanted.effect
            if effect.key not in self._sinks:
                self._pulls.remove(pull)
                self._end_late(receive, None, now)
                self._answer_fenced(effect.key)
            elif pull.reading is not None:
                self._pulls.remove(pull)
                self._note_moved(effect, receive.started_s)
                outcome = self._handler.verify_placed(effect.key, effect.chunk, receive.started_s, pull.reading)
                self._end_late(receive, outcome, now)
            elif (failed := pull.pulling.failed) is not None:
                self._pulls.remove(pull)
                self._end_late(receive, None, now)
                self._fail(effect, failed.reason, failed.peer_lost, now)
            else:
                assert receive.lease is not None
                rows, slot = receive.wanted.target, receive.lease.view
                pull.reading = self._handler.read_for_digest(rows, effect.chunk.seq, slot)

    def _end_late(self, receive: _Receive, outcome: Scatter | None, now: float) -> None:
        """`_end_receive`, of a late pull."""
        effect = receive.wanted.effect
        self._to_receive.ended(effect.lane, effect.peer, receive.wanted.target.nbytes)
        self._end_receive(receive, outcome, now)

    def _answer_fenced(self, key: HandoffKey) -> None:
        """Not before the last copy has let go of the pages."""
        if not self._is_copying(key):
            self._answer(SinkFenced(key))

    def _is_copying(self, key: HandoffKey) -> bool:
        receives = [copy.receive for copies in (self._scatters, self._pulls) for copy in copies]
        return any(receive.wanted.effect.key == key for receive in receives)

    def _trade_slots(self, effect: LandRegion) -> int:
        """How many regions more may come after this one has landed."""
        if effect.lane not in self._lanes.slotted:
            return 1
        slots = self._shares.landed(effect.key, self.ring.free)
        if slots == 0:
            self.ring.release(effect.key)
        elif slots > 1:
            self.ring.reserve(effect.key, slots - 1)
        return slots

    def _pull_region(self, effect: LandRegion, target: Rows, now: float) -> None:
        chunk = effect.chunk
        started = time.perf_counter()
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
                self._answer(Landed(effect.key, effect.chunk.seq, nbytes, scatter_s, self._trade_slots(effect)))
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
        """Of a key that waits, is open, or is gone already."""
        self._waiting.pop(key, None)
        self._shares.close(key)
        sink = self._sinks.pop(key, None)
        if sink is not None:
            self._queue_of(sink.lane).forget(sink.lane, sink.peer, key)
        self._handler.forget(key)
        self.ring.close(key)

    def _note_moved(self, effect: LandRegion, started_s: float) -> None:
        ended_s = time.perf_counter()
        self._lanes.note_moved(effect.peer.worker, effect.lane, effect.chunk.nbytes, started_s, ended_s)

    # --------------------------------------------------------------------------------------- questions

    def wait_s(self, now: float) -> float | None:
        """How soon it wants to go on; None: not before something happens."""
        waits = [queue.wait_s(now) for queue in (self._to_pull, self._to_receive, self._to_place)]
        waits += [WAITING_RECHECK_S if self._waiting else None, self._stalls.wait_s()]
        return min((wait for wait in waits if wait is not None), default=None)

    def is_idle(self, peer: Stamp) -> bool:
        """Nothing of `peer` may land."""
        return not any(sink.peer == peer for sink in self._sinks.values())

    @property
    def waiting(self) -> int:
        """Hand-offs without a lane or a slot yet."""
        return len(self._waiting)

    @property
    def open(self) -> int:
        """Hand-offs that may land something."""
        return len(self._sinks)

    @property
    def copying(self) -> bool:
        """A copy is under way, whose end nothing announces."""
        return bool(self._scatters or self._pulls)

    @property
    def operations(self) -> int:
        """Regions on their way into a slot, or into pages."""
        return len(self._ops) + len(self._scatters) + len(self._pulls)
