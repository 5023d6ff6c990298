"""What a sink does on its moves: takes regions in, distrusts what cannot be, commits, or drains. Pure functions of a
state and an event; `sink.py` says which of them belongs to which state."""

from __future__ import annotations

from msgspec.structs import replace

from baton.common.errors import ErrorCode
from baton.common.ids import Stamp
from baton.common.kv.layout import Component
from baton.common.messages import (
    Ack,
    Cancel,
    Chunk,
    Commit,
    Done,
    Failure,
    HandoffBody,
    Nack,
    Offer,
)
from baton.transfer.api import FirstTokenReady, PrefillResult, SinkCommitted, SinkFailed
from baton.transfer.plan import PAGE_ID_BYTES, is_first, is_next, is_within, most_in_region, place_of
from baton.transfer.session.effects import (
    PULL_LANES,
    CloseSink,
    EngineEvent,
    FenceSink,
    Landed,
    LandRegion,
    RegionDamaged,
    SendFrame,
    SinkPrepared,
)
from baton.transfer.session.sink_states import (
    Arrivals,
    Arriving,
    Committed,
    Damaged,
    Draining,
    Offered,
    Preparing,
    Receiving,
    SinkOrder,
    SinkState,
    SinkStep,
)
from baton.transfer.session.step import (
    SessionRules,
    Step,
    Verdict,
    for_the_wire,
    impossible,
)

# ------------------------------------------------------------------------------------------------- verbs


def begin_receiving(state: Offered) -> Receiving:
    return Receiving(state.order, state.offer, Arrivals(), None, None, state.resend_at_s)


def take_chunk(state: Receiving, chunk: Chunk, now: float) -> SinkStep:
    if state.arrivals.has_landed(chunk.seq):
        ack = Ack(key=state.order.key, seq=chunk.seq, credit=state.credit)
        return Step(state, Verdict.IGNORED_DUPLICATE, (to_peer(state.order, ack),))
    match state.arrivals.get(chunk.seq):
        case Arriving():
            return Step(state, Verdict.IGNORED_DUPLICATE)
        case Damaged(first, tag):
            if chunk.tag != tag:
                return stale(state)  # announced before the Nack
            if place_of(state.order.segments, chunk) != state.order.place_of(first):
                return drain(state, _broken(state.order, f"region {chunk.seq} is another one the second time"))
        case None:
            wrong = _contradiction(state, chunk)
            if wrong:
                return drain(state, _broken(state.order, wrong))
    after = replace(
        state,
        arrivals=state.arrivals.with_region(chunk.seq, Arriving(chunk)),
        first_chunk_at_s=now if state.first_chunk_at_s is None else state.first_chunk_at_s,
    )
    land = LandRegion(state.order.key, state.order.peer, state.offer.lane, chunk.tag, chunk)
    return Step(after, Verdict.MOVE, (land,))


def _contradiction(state: Receiving, chunk: Chunk) -> str:
    """Why a newly announced region cannot be part of this hand-off; "" when it can (S3, S4)."""
    order, offer, seq = state.order, state.offer, chunk.seq
    before, behind = state.arrivals.chunk_of(seq - 1), state.arrivals.chunk_of(seq + 1)
    place = place_of(order.segments, chunk)
    if seq >= state.credit:
        return f"region {seq} came without credit ({state.credit})"
    if state.done is not None and seq >= state.done.regions:
        return f"region {seq} came after the last one"
    if chunk.tag != order.first_tag(seq):
        return f"region {seq} came under a foreign tag"
    if place is None:
        return f"no {chunk.component} was asked for"
    segment, whole = order.segments[place.segment], offer.region_units[place.segment]
    if not is_within(order.segments, place):
        part = f"part {chunk.part} of {chunk.parts} (from {chunk.tail} on) of units [{place.first}, {place.end})"
        return f"{part} of {segment.units} of {chunk.component} was not asked for"
    if chunk.units > most_in_region(segment, whole, chunk.parts):
        return f"region {seq} has {chunk.units} units, over {most_in_region(segment, whole, chunk.parts)}"
    if seq == 0 and not is_first(place):
        return f"region 0 starts at unit {place.first}, part {place.part}"
    if before is not None and not is_next(order.segments, order.place_of(before), place):
        return f"a gap before region {seq}"
    if behind is not None and not is_next(order.segments, place, order.place_of(behind)):
        return f"a gap behind region {seq}"
    if len(chunk.source_pages) != (chunk.units * PAGE_ID_BYTES if offer.lane in PULL_LANES else 0):
        return f"region {seq} names {len(chunk.source_pages) // PAGE_ID_BYTES} source pages"
    return ""


def take_done(state: Receiving, done: Done, now: float) -> SinkStep:
    if state.done is not None:
        return Step(state, Verdict.IGNORED_DUPLICATE)
    order = state.order
    if done.total_tokens != order.total:
        return drain(state, _broken(order, f"{done.total_tokens} tokens were prefilled, not {order.total}"))
    if (done.first_token >= 0) != order.sample:
        return drain(state, _broken(order, "a first token was sampled without being asked for, or the other way round"))
    scored = 0 if done.prompt_logprobs is None else len(done.prompt_logprobs)
    if scored != order.scored:
        return drain(state, _broken(order, f"{scored} prompt tokens were scored, not {order.scored}"))
    if not max(1, state.arrivals.announced) <= done.regions <= order.most_regions:
        return drain(state, _broken(order, f"{done.regions} regions cannot be all"))
    step = _commit_if_complete(replace(state, done=done), now)
    if order.sample and isinstance(step.state, Receiving):  # nobody who reads it needs the rest
        ready = FirstTokenReady(order.key, done.first_token, done.logprob, done.prompt_logprobs)
        return replace(step, effects=(EngineEvent(ready),))
    return step


def take_landed(state: Receiving, event: Landed, now: float) -> SinkStep:
    region = state.arrivals.get(event.seq)
    if not isinstance(region, Arriving):
        raise impossible(state, event)
    after = replace(state, arrivals=state.arrivals.with_landed(event, region.chunk))
    step = _commit_if_complete(after, now)
    if step.effects:  # committed (or failed): that says more than an acknowledgement
        return step
    ack = Ack(key=state.order.key, seq=event.seq, credit=after.credit)
    return Step(after, Verdict.MOVE, (to_peer(state.order, ack),))


def _commit_if_complete(state: Receiving, now: float) -> SinkStep:
    order, arrivals, done = state.order, state.arrivals, state.done
    if done is None or arrivals.landed < done.regions:
        return Step(state, Verdict.MOVE)
    if arrivals.units != order.unit_count:
        return drain(state, _broken(order, f"{done.regions} regions end before unit {order.unit_count}"))
    assert state.first_chunk_at_s is not None
    result = PrefillResult(done.first_token, done.logprob, done.prefill_s, done.cached_tokens, done.prompt_logprobs)
    committed = SinkCommitted(
        order.key,
        order.peer.worker,
        result,
        arrivals.nbytes,
        state.offer.lane,
        transfer_s=now - state.first_chunk_at_s,
        scatter_s=arrivals.scatter_s,
        landed_s=now,
    )
    commit = to_peer(order, Commit(key=order.key))
    # The engine waits for this, the source only wants its pages back.
    return Step(Committed(order), Verdict.MOVE, (CloseSink(order.key), EngineEvent(committed), commit))


def take_damaged(state: Receiving, event: RegionDamaged, now: float, rules: SessionRules) -> SinkStep:
    region, second_tag = state.arrivals.get(event.seq), state.order.second_tag(event.seq)
    if not isinstance(region, Arriving):
        raise impossible(state, event)
    if region.chunk.tag == second_tag:
        reason = f"region {event.seq} from {state.order.peer.worker} was damaged twice"
        return drain(state, Failure(code=ErrorCode.TRANSFER_CORRUPT, reason=reason))
    resend_at_s = state.resend_at_s if state.nacks else now + rules.resend_after_s
    arrivals = state.arrivals.with_region(event.seq, Damaged(region.chunk, second_tag))
    nack = Nack(key=state.order.key, seq=event.seq, tag=second_tag)
    after = replace(state, arrivals=arrivals, resend_at_s=resend_at_s)
    return Step(after, Verdict.MOVE, (to_peer(state.order, nack),))


def drain(
    state: Preparing | Offered | Receiving, failure: Failure, *, peer_lost: bool = False, offered: bool = True
) -> SinkStep:
    """Ends the hand-off: fence first, everything else after it. `offered=False`: there is nobody to tell."""
    arrivals = state.arrivals if isinstance(state, Receiving) else Arrivals()
    known_there = offered and not isinstance(state, Preparing)
    lane = "" if isinstance(state, Preparing) else state.offer.lane
    after = Draining(state.order, failure, peer_lost, known_there, lane, arrivals)
    return Step(after, Verdict.MOVE, (FenceSink(state.order.key),))


# ------------------------------------------------------------------------------------------------ messages


def stale(state: SinkState) -> SinkStep:
    return Step(state, Verdict.IGNORED_STALE)


def to_peer(order: SinkOrder, body: HandoffBody) -> SendFrame:
    return SendFrame(order.peer.worker, order.peer.epoch, body)


def cancel_frame(order: SinkOrder, failure: Failure) -> SendFrame:
    return to_peer(order, Cancel(key=order.key, failure=for_the_wire(failure)))


def make_offer(order: SinkOrder, prepared: SinkPrepared, now: float) -> Offer:
    return Offer(
        key=order.key,
        request_id=order.request_id,
        tokens=order.tokens,
        start=order.start,
        sample=order.sample,
        sampling=order.sampling,
        ttl_s=max(0.0, order.deadline_s - now),
        lane=prepared.lane,
        credit=prepared.credit,
        region_units=prepared.region_units,
        tag_base=order.tag_base,
        priority=order.priority,
        lane_gbps=prepared.lane_gbps,
        trace=order.trace,
        ticket=order.ticket,
    )


def sink_failed(
    order: SinkOrder, failure: Failure, peer_lost: bool, lane: str, arrivals: Arrivals, rules: SessionRules
) -> EngineEvent:
    until = order.start
    if all(segment.component is Component.FULL for segment in order.segments):
        until = min(order.total, order.start + arrivals.units * rules.page_size)
    # Else a window or a state is missing, and without them the rest is of no use.
    return EngineEvent(SinkFailed(order.key, order.peer.worker, failure, until, arrivals.nbytes, lane, peer_lost))


def out_of_time(reason: str) -> Failure:
    return Failure(code=ErrorCode.DEADLINE_EXCEEDED, reason=reason)


def peer_gone(peer: Stamp) -> Failure:
    return Failure(code=ErrorCode.NO_WORKER, reason=f"{peer.worker} (incarnation {peer.incarnation}) is gone")


def _broken(order: SinkOrder, reason: str) -> Failure:
    return Failure(code=ErrorCode.INTERNAL, reason=f"{order.peer.worker} broke the hand-off: {reason}")
