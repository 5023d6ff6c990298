"""The sending side of one hand-off: Accepted -> Sending -> AwaitingAck -> Releasing -> Released, or on the way out
Cancelling -> Closed and Failing -> Quarantined | Aborted -> Closed. Refused is a door that was never opened.

Owns: how shipped spans are cut into regions, which of them the sink has, and when the source pages may go back to the
engine. Never: touches memory, reads a clock, sends anything (effects are returned), or ends without a fence.

Invariants:
- T1  The engine hears exactly one of SourceReleased and SourceAborted; after it no SendRegion of the key is open.
- T2  On a pull lane, once a region has been announced, pages come back only with the peer's proof: Commit, Cancel, or
      its proven death. Never with a timer, never because it is silent.
- T3  A region with seq >= credit is not sent.
- T4  Done is sent once all of [start, total) is announced; FinishSource before that is a bug.
- T5  Whatever a peer sends, the machine ends the hand-off at worst; it never raises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar, assert_never

from baton.common.errors import ErrorCode
from baton.common.ids import HandoffKey, Stamp
from baton.common.messages import (
    Accept,
    Ack,
    Cancel,
    Cancelled,
    Chunk,
    Commit,
    Done,
    Failed,
    Failure,
    HandoffBody,
    Nack,
    Offer,
    Refuse,
)
from baton.transfer.api import (
    AbortSource,
    FinishSource,
    OfferReceived,
    PrefillResult,
    ShipRegion,
    SourceAborted,
    SourceReleased,
    SourceStopping,
)
from baton.transfer.plan import Span, cut_into_regions
from baton.transfer.session.effects import (
    PULL_LANES,
    EngineEvent,
    FenceSource,
    RegionReady,
    SendFrame,
    SendRegion,
    SourceEffect,
    SourceFenced,
    SourceLaneFailed,
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

# ---------------------------------------------------------------------------------------------------- regions


@dataclass(frozen=True, slots=True)
class Queued:
    """Waits for credit."""

    span: Span


@dataclass(frozen=True, slots=True)
class Gathering:
    """A SendRegion is open for it."""

    span: Span
    tag: int


@dataclass(frozen=True, slots=True)
class Announced:
    """Its bytes are on their way; the Chunk is re-sent until Ack."""

    span: Span
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Acked:
    """In the sink's pages."""

    span: Span


Region = Queued | Gathering | Announced | Acked
Regions = tuple[Region, ...]  # by seq


# ----------------------------------------------------------------------------------------------------- states


@dataclass(frozen=True, slots=True)
class SourceTerms:
    """What the offer fixed; the same in all states."""

    key: HandoffKey
    peer: Stamp
    lane: str
    start: int
    total: int
    sample: bool
    region_pages: int
    tag_base: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine has the offer and has shipped nothing yet."""

    terms: SourceTerms
    credit: int


@dataclass(frozen=True, slots=True)
class Sending:
    """Regions go out as credit allows. `result` once the engine has finished, while some are not announced yet."""

    terms: SourceTerms
    credit: int
    regions: Regions
    result: PrefillResult | None
    resend_at_s: float  # counts only while a region is Announced


@dataclass(frozen=True, slots=True)
class AwaitingAck:
    """All is announced; Done is re-sent until Commit or Cancel, and so is what was not acknowledged."""

    terms: SourceTerms
    regions: Regions
    done: Done
    resend_at_s: float


@dataclass(frozen=True, slots=True)
class Releasing:
    """Committed over there; the fence is asked for."""

    terms: SourceTerms


@dataclass(frozen=True, slots=True)
class Cancelling:
    """Over, and the peer is proven to have stopped; the fence is asked for."""

    terms: SourceTerms
    failure: Failure


@dataclass(frozen=True, slots=True)
class Failing:
    """Given up here, the peer is told; the fence is asked for. `read_by_peer`: it may be pulling from the pages."""

    terms: SourceTerms
    failure: Failure
    read_by_peer: bool
    resend_at_s: float


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Fenced here, but the peer may still read: Failed is re-sent until it proves that it does not (T2)."""

    terms: SourceTerms
    failure: Failure
    resend_at_s: float


@dataclass(frozen=True, slots=True)
class Released:
    """Terminal: the sink has the KV, the engine its pages."""

    terms: SourceTerms


@dataclass(frozen=True, slots=True)
class Aborted:
    """Terminal for the engine; Failed is re-sent until Cancel."""

    terms: SourceTerms
    failure: Failure
    resend_at_s: float


@dataclass(frozen=True, slots=True)
class Closed:
    """Terminal: nothing of the attempt is left. Also what a Cancel before its Offer leaves behind."""

    key: HandoffKey
    peer: Stamp


@dataclass(frozen=True, slots=True)
class Refused:
    """Terminal: never taken on. Kept so that a duplicate of the offer gets the same answer."""

    peer: Stamp
    refusal: Refuse


SourceAlive = Accepted | Sending | AwaitingAck
SourceState = SourceAlive | Releasing | Cancelling | Failing | Quarantined | Released | Aborted | Closed | Refused
SourceOver = Released | Aborted | Closed | Refused  # the engine has been told, or never knew

SourceFrame = Offer | Ack | Nack | Commit | Cancel
SourceInput = (
    SourceFrame
    | ShipRegion
    | FinishSource
    | AbortSource
    | RegionReady
    | SourceLaneFailed
    | SourceFenced
    | ResendDue
    | DeadlinePassed
    | PeerSilent
    | PeerDead
)
SourceOutput = SendFrame | EngineEvent | SourceEffect
SourceStep = Step[SourceState, SourceOutput]


def accept_offer(terms: SourceTerms, credit: int, received: OfferReceived) -> SourceStep:
    """The first step of a hand-off: the endpoint has found nothing against the offer."""
    accept = _to_peer(terms, Accept(key=terms.key))
    return Step(Accepted(terms, credit), Verdict.MOVE, (accept, EngineEvent(received)))


def source_peer(state: SourceState) -> Stamp:
    return state.peer if isinstance(state, Closed | Refused) else state.terms.peer


def source_timer(state: SourceState) -> float | None:
    """When `source_clockwork` has something to say, on the local clock. The fenced states wait for a local fence, which
    always completes; Quarantined re-sends and waits for proof; the terminal ones end with their place in the table."""
    match state:
        case Accepted():
            return state.terms.deadline_s
        case Sending():
            unacked = any(isinstance(region, Announced) for region in state.regions)
            return min(state.terms.deadline_s, state.resend_at_s) if unacked else state.terms.deadline_s
        case AwaitingAck():
            return min(state.terms.deadline_s, state.resend_at_s)
        case Failing() | Quarantined() | Aborted():
            return state.resend_at_s
        case Releasing() | Cancelling() | Released() | Closed() | Refused():
            return None
        case _:
            assert_never(state)


def source_clockwork(state: SourceState, now: float) -> ResendDue | DeadlinePassed:
    """Which of the two is due; call it when `source_timer(state) <= now`."""
    if isinstance(state, SourceAlive) and state.terms.deadline_s <= now:
        return DeadlinePassed()
    return ResendDue()


def source_step(state: SourceState, event: SourceInput, now: float, rules: SessionRules) -> SourceStep:
    """The machine. Raises ImpossibleTransition for bugs of this process only."""
    match state:
        case Accepted():
            return _accepted(state, event, now, rules)
        case Sending():
            return _sending(state, event, now, rules)
        case AwaitingAck():
            return _awaiting_ack(state, event, now, rules)
        case Releasing():
            return _releasing(state, event)
        case Cancelling():
            return _cancelling(state, event)
        case Failing():
            return _failing(state, event, now, rules)
        case Quarantined() | Aborted():
            return _telling(state, event, now, rules)
        case Released():
            return _released(state, event)
        case Closed():
            return _closed(state, event)
        case Refused():
            return _refused(state, event)
        case _:
            assert_never(state)


# -------------------------------------------------------------------------------------- one function per state


def _accepted(state: Accepted, event: SourceInput, now: float, rules: SessionRules) -> SourceStep:
    match event:
        case ShipRegion():
            sending = Sending(state.terms, state.credit, (), None, now + rules.resend_after_s)
            return _ship(sending, event, rules)
        case Offer():
            return Step(state, Verdict.IGNORED_DUPLICATE, (_to_peer(state.terms, Accept(key=state.terms.key)),))
        case Ack() | Nack():
            return _stale(state)  # about a region that does not exist
        case Commit() | Cancel() | AbortSource() | SourceLaneFailed() | DeadlinePassed() | PeerSilent() | PeerDead():
            return _give_up(state, event, now, rules, read_by_peer=False)
        case FinishSource() | RegionReady() | SourceFenced() | ResendDue():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _sending(state: Sending, event: SourceInput, now: float, rules: SessionRules) -> SourceStep:
    match event:
        case ShipRegion():
            return _ship(state, event, rules)
        case FinishSource():
            return _finish(state, event, now, rules)
        case RegionReady():
            after, chunk = _announce(state, event, now, rules)
            step = _await_ack_if_announced(after, now, rules)
            return Step(step.state, Verdict.MOVE, (chunk, *step.effects))
        case Ack():
            regions = _acked(state.regions, event)
            if regions is None and event.credit <= state.credit:
                return Step(state, Verdict.IGNORED_DUPLICATE)
            return _pump(replace(state, credit=max(state.credit, event.credit)), regions or state.regions)
        case Nack():
            return _nacked(state, event, now, rules)
        case Offer():
            return Step(state, Verdict.IGNORED_DUPLICATE, (_to_peer(state.terms, Accept(key=state.terms.key)),))
        case ResendDue():
            return Step(replace(state, resend_at_s=now + rules.resend_after_s), Verdict.MOVE, _unacked(state))
        case Commit() | Cancel() | AbortSource() | SourceLaneFailed() | DeadlinePassed() | PeerSilent() | PeerDead():
            # A Commit before Done can only be about a hand-off that this one is a late echo of.
            return _give_up(state, event, now, rules, read_by_peer=_announced_any(state))
        case SourceFenced():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _awaiting_ack(state: AwaitingAck, event: SourceInput, now: float, rules: SessionRules) -> SourceStep:
    match event:
        case Commit():
            return Step(Releasing(state.terms), Verdict.MOVE, (FenceSource(state.terms.key),))
        case RegionReady():  # of a region that was damaged
            after, chunk = _announce(state, event, now, rules)
            return Step(after, Verdict.MOVE, (chunk,))
        case Ack():
            regions = _acked(state.regions, event)
            if regions is None:
                return Step(state, Verdict.IGNORED_DUPLICATE)
            return Step(replace(state, regions=regions), Verdict.MOVE)
        case Nack():
            return _nacked(state, event, now, rules)
        case Offer():
            return Step(state, Verdict.IGNORED_DUPLICATE)
        case ResendDue():
            after = replace(state, resend_at_s=now + rules.resend_after_s)
            return Step(after, Verdict.MOVE, (*_unacked(state), _to_peer(state.terms, state.done)))
        case Cancel() | AbortSource() | SourceLaneFailed() | DeadlinePassed() | PeerSilent() | PeerDead():
            return _give_up(state, event, now, rules, read_by_peer=True)
        case ShipRegion() | FinishSource() | SourceFenced():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _releasing(state: Releasing, event: SourceInput) -> SourceStep:
    match event:
        case SourceFenced():
            return Step(Released(state.terms), Verdict.MOVE, (EngineEvent(SourceReleased(state.terms.key)),))
        case Commit():
            return Step(state, Verdict.IGNORED_DUPLICATE)
        case Offer() | Ack() | Nack() | Cancel():
            return _stale(state)
        case AbortSource() | RegionReady() | SourceLaneFailed() | PeerSilent() | PeerDead():
            return _stale(state)  # SourceReleased is on its way
        case ShipRegion() | FinishSource() | ResendDue() | DeadlinePassed():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _cancelling(state: Cancelling, event: SourceInput) -> SourceStep:
    match event:
        case SourceFenced():
            terms = state.terms
            aborted = EngineEvent(SourceAborted(terms.key, state.failure))
            return Step(
                Closed(terms.key, terms.peer), Verdict.MOVE, (_to_peer(terms, Cancelled(key=terms.key)), aborted)
            )
        case Cancel():
            return Step(state, Verdict.IGNORED_DUPLICATE)  # Cancelled follows the fence
        case Offer() | Ack() | Nack() | Commit():
            return _stale(state)
        case ShipRegion() | FinishSource() | AbortSource():
            return _stale(state)  # SourceAborted is on its way
        case RegionReady() | SourceLaneFailed() | PeerSilent() | PeerDead():
            return _stale(state)
        case ResendDue() | DeadlinePassed():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _failing(state: Failing, event: SourceInput, now: float, rules: SessionRules) -> SourceStep:
    terms = state.terms
    match event:
        case SourceFenced():
            if state.read_by_peer:
                return Step(Quarantined(terms, state.failure, state.resend_at_s), Verdict.MOVE)
            aborted = EngineEvent(SourceAborted(terms.key, state.failure))
            return Step(Aborted(terms, state.failure, state.resend_at_s), Verdict.MOVE, (aborted,))
        case Cancel() | Commit() | PeerDead():
            return Step(Cancelling(terms, state.failure), Verdict.MOVE)
        case ResendDue():
            after = replace(state, resend_at_s=now + rules.resend_after_s)
            return Step(after, Verdict.MOVE, (_failed(terms, state.failure),))
        case Offer():
            return Step(state, Verdict.IGNORED_DUPLICATE, (_failed(terms, state.failure),))
        case Ack() | Nack():
            return _stale(state)
        case ShipRegion() | FinishSource() | AbortSource():
            return _stale(state)
        case RegionReady() | SourceLaneFailed() | PeerSilent():
            return _stale(state)
        case DeadlinePassed():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _telling(state: Quarantined | Aborted, event: SourceInput, now: float, rules: SessionRules) -> SourceStep:
    """Quarantined and Aborted differ in one thing: whether the engine has its pages back already."""
    terms = state.terms
    match event:
        case Cancel() | Commit() | PeerDead():
            closed = Closed(terms.key, terms.peer)
            effects: tuple[SourceOutput, ...] = ()
            if isinstance(event, Cancel):
                effects = (_to_peer(terms, Cancelled(key=terms.key)),)
            if isinstance(state, Quarantined):
                effects = (*effects, EngineEvent(SourceAborted(terms.key, state.failure)))
            return Step(closed, Verdict.MOVE, effects)
        case ResendDue():
            after = replace(state, resend_at_s=now + rules.resend_after_s)
            return Step(after, Verdict.MOVE, (_failed(terms, state.failure),))
        case Offer():
            return Step(state, Verdict.IGNORED_DUPLICATE, (_failed(terms, state.failure),))
        case Ack() | Nack():
            return _stale(state)
        case ShipRegion() | FinishSource() | AbortSource():
            return _stale(state)
        case RegionReady() | SourceLaneFailed() | PeerSilent():
            return _stale(state)
        case SourceFenced() | DeadlinePassed():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _released(state: Released, event: SourceInput) -> SourceStep:
    match event:
        case Cancel():  # a sink that has forgotten its commit answers so; it is true as well
            return Step(state, Verdict.IGNORED_STALE, (_to_peer(state.terms, Cancelled(key=state.terms.key)),))
        case Commit():
            return Step(state, Verdict.IGNORED_DUPLICATE)
        case Offer() | Ack() | Nack():
            return _stale(state)
        case AbortSource():
            return _stale(state)  # crossed SourceReleased on its way
        case RegionReady() | SourceLaneFailed() | PeerSilent() | PeerDead():
            return _stale(state)
        case ShipRegion() | FinishSource() | SourceFenced() | ResendDue() | DeadlinePassed():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _closed(state: Closed, event: SourceInput) -> SourceStep:
    match event:
        case Cancel() | Offer():
            cancelled = SendFrame(state.peer.worker, state.peer.epoch, Cancelled(key=state.key))
            return Step(state, Verdict.IGNORED_DUPLICATE, (cancelled,))
        case Ack() | Nack() | Commit():
            return _stale(state)
        case ShipRegion() | FinishSource() | AbortSource():
            return _stale(state)  # crossed SourceAborted on its way
        case RegionReady() | SourceLaneFailed() | PeerSilent() | PeerDead():
            return _stale(state)
        case SourceFenced() | ResendDue() | DeadlinePassed():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _refused(state: Refused, event: SourceInput) -> SourceStep:
    key, peer = state.refusal.key, state.peer
    match event:
        case Offer():
            return Step(state, Verdict.IGNORED_DUPLICATE, (SendFrame(peer.worker, peer.epoch, state.refusal),))
        case Cancel():
            return Step(Closed(key, peer), Verdict.MOVE, (SendFrame(peer.worker, peer.epoch, Cancelled(key=key)),))
        case Ack() | Nack() | Commit() | PeerSilent() | PeerDead():
            return _stale(state)
        case ShipRegion() | FinishSource() | AbortSource():  # the engine never heard of it
            raise impossible(state, event)
        case RegionReady() | SourceLaneFailed() | SourceFenced() | ResendDue() | DeadlinePassed():
            raise impossible(state, event)
        case _:
            assert_never(event)


# ------------------------------------------------------------------------------------------ verbs of sending


def _ship(state: Sending, event: ShipRegion, rules: SessionRules) -> SourceStep:
    terms = state.terms
    shipped_until = state.regions[-1].span.end if state.regions else terms.start
    span = Span(event.first_token, event.tokens, event.pages.astype("<i4", copy=False).tobytes())
    assert state.result is None, "shipped after FinishSource"
    assert event.tokens > 0, event
    assert span.first_token == shipped_until, f"a gap: {span.first_token} after {shipped_until}"
    assert span.end == terms.total or (span.end % rules.page_size == 0 and span.end < terms.total), span
    cut = cut_into_regions(span, rules.page_size, terms.region_pages)
    return _pump(state, state.regions + tuple(Queued(region) for region in cut))


def _pump(state: Sending, regions: Regions) -> SourceStep:
    """Sends what credit allows (T3)."""
    regions, sends = _with_credit(state.terms, regions, state.credit)
    return Step(replace(state, regions=regions), Verdict.MOVE, sends)


def _with_credit(terms: SourceTerms, regions: Regions, credit: int) -> tuple[Regions, tuple[SendRegion, ...]]:
    after, sends = list(regions), []
    for seq, region in enumerate(regions[:credit]):
        if isinstance(region, Queued):
            after[seq] = Gathering(region.span, terms.tag_base + seq)
            sends.append(_send_region(terms, seq, terms.tag_base + seq, region.span))
    return tuple(after), tuple(sends)


def _finish(state: Sending, event: FinishSource, now: float, rules: SessionRules) -> SourceStep:
    assert state.result is None, "FinishSource twice"
    assert state.regions[-1].span.end == state.terms.total, "finished before everything was shipped"
    assert (event.result.first_token >= 0) == state.terms.sample, "a first token exactly when one was asked for"
    step = _await_ack_if_announced(replace(state, result=event.result), now, rules)
    return Step(step.state, Verdict.MOVE, step.effects)


def _await_ack_if_announced(state: Sending, now: float, rules: SessionRules) -> SourceStep:
    result, terms = state.result, state.terms
    if result is None or any(isinstance(region, Queued | Gathering) for region in state.regions):
        return Step(state, Verdict.MOVE)
    done = Done(
        key=terms.key,
        regions=len(state.regions),
        total_tokens=terms.total,
        first_token=result.first_token,
        logprob=result.logprob,
        prefill_s=result.prefill_s,
        cached_tokens=result.cached_tokens,
    )
    after = AwaitingAck(terms, state.regions, done, now + rules.resend_after_s)
    return Step(after, Verdict.MOVE, (_to_peer(terms, done),))


SendingT = TypeVar("SendingT", Sending, AwaitingAck)


def _announce(state: SendingT, event: RegionReady, now: float, rules: SessionRules) -> tuple[SendingT, SendFrame]:
    region = state.regions[event.seq] if event.seq < len(state.regions) else None
    if not isinstance(region, Gathering) or region.tag != event.tag:
        raise impossible(state, event)
    span, terms = region.span, state.terms
    chunk = Chunk(
        key=terms.key,
        seq=event.seq,
        tag=event.tag,
        first_token=span.first_token,
        tokens=span.tokens,
        nbytes=event.nbytes,
        digest=event.digest,
        source_pages=span.pages if terms.lane in PULL_LANES else b"",
    )
    # An earlier region that waits for its Ack keeps its turn: steady progress of others must not put it off.
    resend_at_s = state.resend_at_s if _unacked(state) else now + rules.resend_after_s
    regions = _with_region(state.regions, event.seq, Announced(span, chunk))
    return replace(state, regions=regions, resend_at_s=resend_at_s), _to_peer(terms, chunk)


def _acked(regions: Regions, ack: Ack) -> Regions | None:
    """None when the Ack says nothing new: a duplicate, or about a region that has not been announced."""
    region = regions[ack.seq] if ack.seq < len(regions) else None
    return _with_region(regions, ack.seq, Acked(region.span)) if isinstance(region, Announced) else None


def _nacked(state: SendingT, nack: Nack, now: float, rules: SessionRules) -> SourceStep:
    region = state.regions[nack.seq] if nack.seq < len(state.regions) else None
    match region:
        case None | Queued() | Acked():
            return _stale(state)
        case Gathering(_, tag):
            return Step(state, Verdict.IGNORED_DUPLICATE if tag == nack.tag else Verdict.IGNORED_STALE)
        case Announced(span, chunk):
            if chunk.tag == nack.tag:
                return Step(state, Verdict.IGNORED_DUPLICATE)
            if chunk.tag != state.terms.tag_base + nack.seq:
                reason = f"{state.terms.peer.worker} wants region {nack.seq} a third time"
                return _fail(state, Failure(code=ErrorCode.TRANSFER_CORRUPT, reason=reason), now, rules, True)
            after = replace(state, regions=_with_region(state.regions, nack.seq, Gathering(span, nack.tag)))
            return Step(after, Verdict.MOVE, (_send_region(state.terms, nack.seq, nack.tag, span),))


def _unacked(state: Sending | AwaitingAck) -> tuple[SendFrame, ...]:
    return tuple(_to_peer(state.terms, r.chunk) for r in state.regions if isinstance(r, Announced))


def _announced_any(state: Sending) -> bool:
    """Whether the peer has ever been shown a region. One that is gathered again counts."""
    return any(
        isinstance(region, Announced | Acked)
        or (isinstance(region, Gathering) and region.tag != state.terms.tag_base + seq)
        for seq, region in enumerate(state.regions)
    )


# --------------------------------------------------------------------------------------------- verbs of ending


def _give_up(
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
    effects: tuple[SourceOutput, ...] = (FenceSource(terms.key), _failed(terms, failure))
    if pulled and not asked:
        effects = (*effects, EngineEvent(SourceStopping(terms.key, failure)))
    return Step(after, Verdict.MOVE, effects)


# ------------------------------------------------------------------------------------------------ small things


def _stale(state: SourceState) -> SourceStep:
    return Step(state, Verdict.IGNORED_STALE)


def _with_region(regions: Regions, seq: int, region: Region) -> Regions:
    return (*regions[:seq], region, *regions[seq + 1 :])


def _send_region(terms: SourceTerms, seq: int, tag: int, span: Span) -> SendRegion:
    return SendRegion(terms.key, terms.peer, terms.lane, seq, tag, span.first_token, span.tokens, span.pages)


def _to_peer(terms: SourceTerms, body: HandoffBody) -> SendFrame:
    return SendFrame(terms.peer.worker, terms.peer.epoch, body)


def _failed(terms: SourceTerms, failure: Failure) -> SendFrame:
    return _to_peer(terms, Failed(key=terms.key, failure=failure))


def _lost_failure(peer: Stamp) -> Failure:
    return Failure(code=ErrorCode.NO_WORKER, reason=f"{peer.worker} (incarnation {peer.incarnation}) is gone")
