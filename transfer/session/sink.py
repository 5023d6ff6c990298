"""The receiving side of one hand-off: Preparing -> Offered -> Receiving -> Committed | Draining -> Aborted -> Closed.

Owns: which regions have landed, how much credit the source has, and when the destination pages go back to the
engine. Never: touches memory, reads a clock, sends anything (effects are returned), or ends without a fence.

Invariants:
- S1  The engine hears exactly one of SinkCommitted and SinkFailed; after it no LandRegion of the key is open. Before
      it, at most one FirstTokenReady.
- S2  Cancel is sent only after SinkFenced: for the source it is the proof that nobody here reads its pages.
- S3  Never more LandRegion are open than slots are promised, and never two for one region.
- S4  Every region lies in whole units inside one segment, next to its neighbours: landed ones never overlap.
- S5  Whatever a peer sends, the machine ends the hand-off at worst; it never raises.
"""

from __future__ import annotations

from typing import assert_never

import msgspec
from msgspec.structs import replace

from baton.common.ids import Stamp
from baton.common.messages import (
    Accept,
    Cancelled,
    Chunk,
    Commit,
    Done,
    Failed,
    Refuse,
)
from baton.transfer.api import AbortSink
from baton.transfer.session.effects import (
    Landed,
    PrepareSink,
    RegionDamaged,
    SinkFenced,
    SinkLaneFailed,
    SinkNotPrepared,
    SinkPrepared,
)
from baton.transfer.session.sink_moves import (
    begin_receiving,
    cancel_frame,
    drain,
    make_offer,
    out_of_time,
    peer_gone,
    sink_failed,
    stale,
    take_chunk,
    take_damaged,
    take_done,
    take_landed,
    to_peer,
)
from baton.transfer.session.sink_states import (
    Aborted,
    Arrivals,
    Arriving,
    Closed,
    Committed,
    Draining,
    Offered,
    Preparing,
    Receiving,
    SinkFrame,
    SinkInput,
    SinkOrder,
    SinkOutput,
    SinkOver,
    SinkState,
    SinkStep,
)
from baton.transfer.session.step import (
    DeadlinePassed,
    PeerDead,
    PeerSilent,
    ResendDue,
    SessionRules,
    Step,
    Verdict,
    impossible,
)

__all__ = [
    "Aborted",
    "Closed",
    "Committed",
    "Draining",
    "Offered",
    "Preparing",
    "Receiving",
    "SinkFrame",
    "SinkInput",
    "SinkOrder",
    "SinkOutput",
    "SinkOver",
    "SinkState",
    "SinkStep",
    "open_sink",
    "sink_clockwork",
    "sink_peer",
    "sink_step",
    "sink_timer",
]
"""The face of a session; the parts live in the modules beside it."""


def open_sink(order: SinkOrder, rules: SessionRules) -> SinkStep:
    """The first step of a hand-off."""
    assert order.segments, "nothing to hand over"
    assert order.start % rules.page_size == 0, order.start
    held = [(span.component, span.first_unit, span.units) for span in order.spans]
    assert held == [(segment.component, 0, segment.units) for segment in order.segments], "pages of exactly the range"
    prepare = PrepareSink(order.key, order.peer, order.spans, order.tag_base, order.tag_count, order.priority)
    return Step(Preparing(order), Verdict.MOVE, (prepare,))


def sink_peer(state: SinkState) -> Stamp:
    return state.order.peer


def sink_timer(state: SinkState) -> float | None:
    """When `sink_clockwork` has something to say, on the local clock. Draining waits for a local fence, which always
    completes; the terminal states end with their place in the endpoint's table."""
    match state:
        case Preparing():
            return state.order.deadline_s
        case Offered():
            return min(state.order.deadline_s, state.resend_at_s)
        case Receiving():
            return min(state.order.deadline_s, state.resend_at_s) if state.nacks else state.order.deadline_s
        case Aborted():
            return state.resend_at_s
        case Draining() | Committed() | Closed():
            return None
        case _:
            assert_never(state)


def sink_clockwork(state: SinkState, now: float) -> ResendDue | DeadlinePassed:
    """Which of the two is due; call it when `sink_timer(state) <= now`."""
    alive = isinstance(state, Preparing | Offered | Receiving)
    return DeadlinePassed() if alive and state.order.deadline_s <= now else ResendDue()


def sink_step(state: SinkState, event: SinkInput, now: float, rules: SessionRules) -> SinkStep:
    """The machine. Raises ImpossibleTransition for bugs of this process only."""
    match state:
        case Preparing():
            return _preparing(state, event, now, rules)
        case Offered():
            return _offered(state, event, now, rules)
        case Receiving():
            return _receiving(state, event, now, rules)
        case Draining():
            return _draining(state, event, now, rules)
        case Committed():
            return _committed(state, event)
        case Aborted():
            return _aborted(state, event, now, rules)
        case Closed():
            return _closed(state, event)
        case _:
            assert_never(state)


# -------------------------------------------------------------------------------------- one function per state


def _preparing(state: Preparing, event: SinkInput, now: float, rules: SessionRules) -> SinkStep:
    match event:
        case SinkPrepared():
            assert len(event.region_units) == len(state.order.segments), event
            assert min(event.credit, *event.region_units) >= 1, event
            offer = make_offer(state.order, event, now)
            after = Offered(state.order, offer, now + rules.resend_after_s)
            return Step(after, Verdict.MOVE, (to_peer(state.order, offer),))
        case SinkNotPrepared():
            over = Closed(state.order, event.failure)
            told = sink_failed(state.order, event.failure, event.peer_lost, "", Arrivals(), rules)
            return Step(over, Verdict.MOVE, (told,))
        case AbortSink():
            return drain(state, event.failure)
        case DeadlinePassed():
            return drain(state, out_of_time("no staging was free for the hand-off in time"))
        case PeerSilent() | PeerDead():
            return drain(state, peer_gone(state.order.peer), peer_lost=True)
        case Accept() | Refuse() | Chunk() | Done() | Failed() | Cancelled():
            return stale(state)  # nothing has been offered
        case Landed() | RegionDamaged() | SinkLaneFailed() | SinkFenced() | ResendDue():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _offered(state: Offered, event: SinkInput, now: float, rules: SessionRules) -> SinkStep:
    match event:
        case Accept():
            return Step(begin_receiving(state), Verdict.MOVE)
        case Chunk():
            return take_chunk(begin_receiving(state), event, now)  # overtook the Accept, or that was lost
        case Done():
            return take_done(begin_receiving(state), event, now)
        case Refuse() | Failed():
            return drain(state, event.failure)
        case SinkLaneFailed():
            return drain(state, event.failure, peer_lost=event.peer_lost)
        case AbortSink():
            return drain(state, event.failure)
        case DeadlinePassed():
            return drain(state, out_of_time(f"{state.order.peer.worker} did not answer the offer in time"))
        case PeerSilent():
            return drain(state, peer_gone(state.order.peer), peer_lost=True)
        case PeerDead():
            return drain(state, peer_gone(state.order.peer), peer_lost=True, offered=False)
        case ResendDue():
            offer = msgspec.structs.replace(state.offer, ttl_s=max(0.0, state.order.deadline_s - now))
            after = replace(state, resend_at_s=now + rules.resend_after_s)
            return Step(after, Verdict.MOVE, (to_peer(state.order, offer),))
        case Cancelled():
            return stale(state)  # answers a Cancel that was never sent
        case SinkPrepared() | SinkNotPrepared() | Landed() | RegionDamaged() | SinkFenced():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _receiving(state: Receiving, event: SinkInput, now: float, rules: SessionRules) -> SinkStep:
    match event:
        case Accept():
            return Step(state, Verdict.IGNORED_DUPLICATE)
        case Chunk():
            return take_chunk(state, event, now)
        case Done():
            return take_done(state, event, now)
        case Landed():
            return take_landed(state, event, now)
        case RegionDamaged():
            return take_damaged(state, event, now, rules)
        case Refuse() | Failed():
            return drain(state, event.failure)
        case SinkLaneFailed():
            return drain(state, event.failure, peer_lost=event.peer_lost)
        case AbortSink():
            return drain(state, event.failure)
        case DeadlinePassed():
            return drain(state, out_of_time("the hand-off did not finish in time"))
        case PeerSilent():
            return drain(state, peer_gone(state.order.peer), peer_lost=True)
        case PeerDead():
            return drain(state, peer_gone(state.order.peer), peer_lost=True, offered=False)
        case ResendDue():
            nacks = tuple(to_peer(state.order, nack) for nack in state.nacks)
            return Step(replace(state, resend_at_s=now + rules.resend_after_s), Verdict.MOVE, nacks)
        case Cancelled():
            return stale(state)
        case SinkPrepared() | SinkNotPrepared() | SinkFenced():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _draining(state: Draining, event: SinkInput, now: float, rules: SessionRules) -> SinkStep:
    match event:
        case SinkFenced():
            told = sink_failed(state.order, state.failure, state.peer_lost, state.lane, state.arrivals, rules)
            if not state.offered:
                return Step(Closed(state.order, state.failure), Verdict.MOVE, (told,))
            after = Aborted(state.order, state.failure, now + rules.resend_after_s)
            return Step(after, Verdict.MOVE, (cancel_frame(state.order, state.failure), told))
        case Landed():
            region = state.arrivals.get(event.seq)
            if not isinstance(region, Arriving):
                raise impossible(state, event)
            return Step(replace(state, arrivals=state.arrivals.with_landed(event, region.chunk)), Verdict.MOVE)
        case PeerSilent():
            verdict = Verdict.IGNORED_DUPLICATE if state.peer_lost else Verdict.MOVE
            return Step(replace(state, peer_lost=True), verdict)
        case PeerDead():
            return Step(replace(state, peer_lost=True, offered=False), Verdict.MOVE)
        case AbortSink():
            return Step(state, Verdict.IGNORED_DUPLICATE)
        case Accept() | Refuse() | Chunk() | Done() | Failed() | Cancelled():
            return stale(state)  # the Cancel that follows the fence answers all of them
        case SinkPrepared() | SinkNotPrepared() | RegionDamaged() | SinkLaneFailed():
            return stale(state)  # crossed the fence on its way
        case ResendDue() | DeadlinePassed():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _committed(state: Committed, event: SinkInput) -> SinkStep:
    match event:
        case Chunk() | Done() | Failed():
            # The source did not hear of the commit. Commit is also the proof that a failed source waits for.
            commit = to_peer(state.order, Commit(key=state.order.key))
            return Step(state, Verdict.IGNORED_DUPLICATE, (commit,))
        case Accept() | Refuse() | Cancelled():
            return stale(state)
        case AbortSink():
            return stale(state)  # crossed SinkCommitted on its way: the engine has the pages
        case PeerSilent() | PeerDead() | SinkLaneFailed():
            return stale(state)
        case SinkPrepared() | SinkNotPrepared() | Landed() | RegionDamaged() | SinkFenced():
            raise impossible(state, event)
        case ResendDue() | DeadlinePassed():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _aborted(state: Aborted, event: SinkInput, now: float, rules: SessionRules) -> SinkStep:
    match event:
        case Cancelled() | Refuse() | PeerDead():
            return Step(Closed(state.order, state.failure), Verdict.MOVE)  # nothing of it is left over there
        case ResendDue():
            after = replace(state, resend_at_s=now + rules.resend_after_s)
            return Step(after, Verdict.MOVE, (cancel_frame(state.order, state.failure),))
        case Accept() | Chunk() | Done() | Failed():
            return Step(state, Verdict.IGNORED_STALE, (cancel_frame(state.order, state.failure),))
        case AbortSink() | PeerSilent():
            return stale(state)
        case SinkPrepared() | SinkNotPrepared() | Landed() | RegionDamaged() | SinkLaneFailed():
            return stale(state)
        case SinkFenced() | DeadlinePassed():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _closed(state: Closed, event: SinkInput) -> SinkStep:
    match event:
        case Accept() | Chunk() | Done() | Failed():
            return Step(state, Verdict.IGNORED_STALE, (cancel_frame(state.order, state.failure),))
        case Refuse() | Cancelled() | AbortSink() | PeerSilent() | PeerDead():
            return stale(state)
        case SinkPrepared() | SinkNotPrepared() | Landed() | RegionDamaged() | SinkLaneFailed():
            return stale(state)
        case SinkFenced() | ResendDue() | DeadlinePassed():
            raise impossible(state, event)
        case _:
            assert_never(event)
