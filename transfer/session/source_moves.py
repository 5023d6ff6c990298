"""What a source does on its moves: cuts, sends as credit allows, announces, gives up. Pure functions of a state and an
event; `source.py` says which of them belongs to which state."""

from __future__ import annotations

from typing import TypeVar, assert_never

from msgspec.structs import replace

from baton.common.errors import ErrorCode
from baton.common.ids import Stamp
from baton.common.messages import (
    Ack,
    Cancel,
    Chunk,
    Commit,
    Done,
    Failed,
    Failure,
    HandoffBody,
    Nack,
)
from baton.transfer.api import (
    AbortSource,
    FinishSource,
    PrefillResult,
    ShipRegion,
    SourceStopping,
)
from baton.transfer.plan import (
    Span,
    cut_into_regions,
    find_segment,
    is_first,
    is_last,
    is_next,
    is_within,
    most_in_region,
    place_of,
    span_of_tokens,
    unit_ids,
)
from baton.transfer.session.effects import (
    PULL_LANES,
    EngineEvent,
    FenceSource,
    RegionReady,
    SendFrame,
    SendRegion,
    SourceLaneFailed,
)
from baton.transfer.session.source_states import (
    ACKED,
    Acked,
    Announced,
    AwaitingAck,
    Cancelling,
    Failing,
    Gathering,
    Regions,
    Sending,
    SourceAlive,
    SourceOutput,
    SourceState,
    SourceStep,
    SourceTerms,
)
from baton.transfer.session.step import (
    DeadlinePassed,
    PeerDead,
    PeerSilent,
    SessionRules,
    Step,
    Verdict,
    for_the_wire,
    impossible,
)

# ------------------------------------------------------------------------------------------ verbs of sending


def ship(state: Sending, event: ShipRegion, rules: SessionRules) -> SourceStep:
    terms = state.terms
    assert state.result is None, "shipped after FinishSource"
    index = find_segment(terms.segments, event.component)
    assert index is not None, f"no {event.component} was asked for"
    segment = terms.segments[index]
    ids = unit_ids(event.component, event.pages, rules.state_pieces)
    span = span_of_tokens(segment, event.first_token, event.tokens, ids, rules.page_size)
    if event.parts > 1:
        assert span.first_unit + span.units == segment.units, f"by layers only to the end: {event} of {segment}"
        span = replace(span, part=event.part, parts=event.parts, tail=span.first_unit)
    cut = cut_into_regions(span, most_in_region(segment, terms.region_units[index], span.parts))
    assert _goes_on(state, cut[0]), f"a gap, or twice: {event} after {state.regions.spans[-1:]}"
    return pump(replace(state, regions=replace(state.regions, spans=state.regions.spans + cut)))


def _goes_on(state: Sending, span: Span) -> bool:
    """Whether `span` is what comes behind everything that was shipped."""
    segments = state.terms.segments
    place = place_of(segments, span)
    assert place is not None, span
    shipped = state.regions.spans
    if not shipped:
        return is_within(segments, place) and is_first(place)
    before = place_of(segments, shipped[-1])
    assert before is not None, shipped[-1]
    return is_within(segments, place) and is_next(segments, before, place)


def _all_shipped(state: Sending) -> bool:
    shipped = state.regions.spans
    last = place_of(state.terms.segments, shipped[-1]) if shipped else None
    return last is not None and is_last(state.terms.segments, last)


def pump(state: Sending) -> SourceStep:
    """Sends what credit allows (T3)."""
    regions, terms = state.regions, state.terms
    first, spans = regions.sent, regions.spans[regions.sent : state.credit]
    if not spans:
        return Step(state, Verdict.MOVE)
    tags = range(terms.tag_base + first, terms.tag_base + first + len(spans))
    opened = replace(regions, open=regions.open + tuple(Gathering(tag) for tag in tags))
    sends = tuple(_send_region(terms, tag - terms.tag_base, tag, span) for tag, span in zip(tags, spans, strict=True))
    return Step(replace(state, regions=opened), Verdict.MOVE, sends)


def finish(state: Sending, event: FinishSource, now: float, rules: SessionRules) -> SourceStep:
    assert state.result is None, "FinishSource twice"
    assert _all_shipped(state), "finished before everything was shipped"
    assert (event.result.first_token >= 0) == state.terms.sample, "a first token exactly when one was asked for"
    step = await_ack_if_announced(replace(state, result=event.result), now, rules)
    late = bool(step.effects) or not state.terms.sample
    early = () if late else (to_peer(state.terms, _done(state, event.result)),)  # its token need not wait for pages
    return Step(step.state, Verdict.MOVE, step.effects + early)


def _done(state: Sending, result: PrefillResult) -> Done:
    return Done(
        key=state.terms.key,
        regions=len(state.regions.spans),
        total_tokens=state.terms.total,
        first_token=result.first_token,
        logprob=result.logprob,
        prefill_s=result.prefill_s,
        cached_tokens=result.cached_tokens,
        prompt_logprobs=result.prompt_logprobs,
    )


def await_ack_if_announced(state: Sending, now: float, rules: SessionRules) -> SourceStep:
    result, terms = state.result, state.terms
    if result is None or state.regions.queued or any(isinstance(region, Gathering) for region in state.regions.open):
        return Step(state, Verdict.MOVE)
    done = _done(state, result)
    after = AwaitingAck(terms, state.regions, done, now + rules.resend_after_s)
    return Step(after, Verdict.MOVE, (to_peer(terms, done),))


SendingT = TypeVar("SendingT", Sending, AwaitingAck)


def announce(state: SendingT, event: RegionReady, now: float, rules: SessionRules) -> tuple[SendingT, SendFrame]:
    region = state.regions.get(event.seq)
    if not isinstance(region, Gathering) or region.tag != event.tag:
        raise impossible(state, event)
    span, terms = state.regions.spans[event.seq], state.terms
    chunk = Chunk(
        key=terms.key,
        seq=event.seq,
        tag=event.tag,
        component=span.component,
        first_unit=span.first_unit,
        units=span.units,
        part=span.part,
        parts=span.parts,
        tail=span.tail,
        nbytes=event.nbytes,
        digest=event.digest,
        source_pages=span.pages if terms.lane in PULL_LANES else b"",
    )
    # An earlier region that waits for its Ack keeps its turn: steady progress of others must not put it off.
    resend_at_s = state.resend_at_s if unacked(state) else now + rules.resend_after_s
    regions = state.regions.with_region(event.seq, Announced(chunk))
    return replace(state, regions=regions, resend_at_s=resend_at_s), to_peer(terms, chunk)


def with_acked(regions: Regions, ack: Ack) -> Regions | None:
    """None when the Ack says nothing new: a duplicate, or about a region that has not been announced."""
    return regions.with_region(ack.seq, ACKED) if isinstance(regions.get(ack.seq), Announced) else None


def take_nack(state: SendingT, nack: Nack, now: float, rules: SessionRules) -> SourceStep:
    match state.regions.get(nack.seq):
        case None | Acked():
            return stale(state)
        case Gathering(tag):
            return Step(state, Verdict.IGNORED_DUPLICATE if tag == nack.tag else Verdict.IGNORED_STALE)
        case Announced(chunk):
            if chunk.tag == nack.tag:
                return Step(state, Verdict.IGNORED_DUPLICATE)
            if chunk.tag != state.terms.tag_base + nack.seq:
                reason = f"{state.terms.peer.worker} wants region {nack.seq} a third time"
                return _fail(state, Failure(code=ErrorCode.TRANSFER_CORRUPT, reason=reason), now, rules, True)
            after = replace(state, regions=state.regions.with_region(nack.seq, Gathering(nack.tag)))
            again = _send_region(state.terms, nack.seq, nack.tag, state.regions.spans[nack.seq])
            return Step(after, Verdict.MOVE, (again,))


def unacked(state: Sending | AwaitingAck) -> tuple[SendFrame, ...]:
    return tuple(to_peer(state.terms, r.chunk) for r in state.regions.open if isinstance(r, Announced))


def announced_any(state: Sending) -> bool:
    """Whether the peer has ever been shown a region. One that is gathered again counts."""
    regions, first_tag = state.regions, state.terms.tag_base + state.regions.acked
    return regions.acked > 0 or any(
        not isinstance(region, Gathering) or region.tag != tag for tag, region in enumerate(regions.open, first_tag)
    )


# --------------------------------------------------------------------------------------------- verbs of ending


def give_up(
    state: SourceAlive,
    event: Commit | Cancel | AbortSource | SourceLaneFailed | DeadlinePassed | PeerSilent | PeerDead,
    now: float,
    rules: SessionRules,
    *,
    read_by_peer: bool,
) -> SourceStep:
    terms = state.terms
    match event:
        case Cancel():
            return _cancelled(terms, event.failure)
        case Commit():
            reason = f"{terms.peer.worker} already has this request's KV"
            return _cancelled(terms, Failure(code=ErrorCode.CANCELLED, reason=reason))
        case PeerDead():
            return _cancelled(terms, _lost_failure(terms.peer))
        case AbortSource() | SourceLaneFailed():
            return _fail(state, event.failure, now, rules, read_by_peer, asked=isinstance(event, AbortSource))
        case DeadlinePassed():
            failure = Failure(code=ErrorCode.DEADLINE_EXCEEDED, reason="the hand-off did not finish in time")
            return _fail(state, failure, now, rules, read_by_peer)
        case PeerSilent():
            return _fail(state, _lost_failure(terms.peer), now, rules, read_by_peer)
        case _:
            assert_never(event)


def _cancelled(terms: SourceTerms, failure: Failure) -> SourceStep:
    return Step(Cancelling(terms, failure), Verdict.MOVE, (FenceSource(terms.key),))


def _fail(
    state: SourceAlive, failure: Failure, now: float, rules: SessionRules, read_by_peer: bool, *, asked: bool = False
) -> SourceStep:
    """Gives up: tells the peer at once, and the engine too where its pages must wait for the peer's proof."""
    terms = state.terms
    pulled = read_by_peer and terms.lane in PULL_LANES
    after = Failing(terms, failure, pulled, now + rules.resend_after_s)
    effects: tuple[SourceOutput, ...] = (FenceSource(terms.key), failed_frame(terms, failure))
    if pulled and not asked:
        effects = (*effects, EngineEvent(SourceStopping(terms.key, failure)))
    return Step(after, Verdict.MOVE, effects)


# ------------------------------------------------------------------------------------------------ small things


def stale(state: SourceState) -> SourceStep:
    return Step(state, Verdict.IGNORED_STALE)


def _send_region(terms: SourceTerms, seq: int, tag: int, span: Span) -> SendRegion:
    return SendRegion(terms.key, terms.peer, terms.lane, seq, tag, span, terms.priority)


def to_peer(terms: SourceTerms, body: HandoffBody) -> SendFrame:
    return SendFrame(terms.peer.worker, terms.peer.epoch, body)


def failed_frame(terms: SourceTerms, failure: Failure) -> SendFrame:
    return to_peer(terms, Failed(key=terms.key, failure=for_the_wire(failure)))


def _lost_failure(peer: Stamp) -> Failure:
    return Failure(code=ErrorCode.NO_WORKER, reason=f"{peer.worker} (incarnation {peer.incarnation}) is gone")
