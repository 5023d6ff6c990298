"""The receiving side of one hand-off: Preparing -> Offered -> Receiving -> Committed | Draining -> Aborted -> Closed.

Owns: which regions have landed, how much credit the source has, and when the destination pages go back to the
engine. Never: touches memory, reads a clock, sends anything (effects are returned), or ends without a fence.

Invariants:
- S1  The engine hears exactly one of SinkCommitted and SinkFailed; after it no LandRegion of the key is open.
- S2  Cancel is sent only after SinkFenced: for the source it is the proof that nobody here reads its pages.
- S3  At most `credit` LandRegion are open at any time, and never two for one region.
- S4  Every region lies page-aligned inside [start, total), next to its neighbours: landed ones never overlap.
- S5  Whatever a peer sends, the machine ends the hand-off at worst; it never raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import msgspec

from baton.common.errors import ErrorCode
from baton.common.ids import HandoffKey, RequestId, Stamp
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
    SamplingParams,
)
from baton.common.units import pages_for_tokens
from baton.transfer.api import AbortSink, PrefillResult, SinkCommitted, SinkFailed
from baton.transfer.plan import PAGE_ID_BYTES
from baton.transfer.session.effects import (
    PULL_LANES,
    CloseSink,
    EngineEvent,
    FenceSink,
    Landed,
    LandRegion,
    PrepareSink,
    RegionDamaged,
    SendFrame,
    SinkEffect,
    SinkFenced,
    SinkLaneFailed,
    SinkNotPrepared,
    SinkPrepared,
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
class Arriving:
    """A LandRegion is open for it."""

    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Damaged:
    """The first try was damaged; Nack has been sent and asks for the bytes under `tag`."""

    chunk: Chunk
    tag: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Verified and in the pages."""

    chunk: Chunk


Region = Arriving | Damaged | Arrived
Regions = tuple[Region | None, ...]  # by seq; None: not announced yet


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What has come in so far, and what it cost."""

    regions: Regions = ()
    nbytes: int = 0
    scatter_s: float = 0.0

    def get(self, seq: int) -> Region | None:
        return self.regions[seq] if 0 <= seq < len(self.regions) else None

    def with_region(self, seq: int, region: Region) -> Arrivals:
        padded = self.regions + (None,) * (seq + 1 - len(self.regions))
        return replace(self, regions=(*padded[:seq], region, *padded[seq + 1 :]))

    def with_landed(self, event: Landed, chunk: Chunk) -> Arrivals:
        after = self.with_region(event.seq, Arrived(chunk))
        return replace(after, nbytes=self.nbytes + event.nbytes, scatter_s=self.scatter_s + event.scatter_s)

    @property
    def landed(self) -> int:
        return sum(isinstance(region, Arrived) for region in self.regions)

    def landed_until(self, start: int) -> int:
        """[start, this) is in the pages without a gap. Page-aligned unless it is the total (S4)."""
        for region in self.regions:
            if not isinstance(region, Arrived):
                break
            start = region.chunk.first_token + region.chunk.tokens
        return start


# ----------------------------------------------------------------------------------------------------- states


@dataclass(frozen=True, slots=True)
class SinkOrder:
    """What the engine asked for; the same in all states."""

    key: HandoffKey
    peer: Stamp
    request_id: RequestId
    tokens: bytes
    start: int
    pages: bytes
    sample: bool
    sampling: SamplingParams
    deadline_s: float
    tag_base: int

    @property
    def total(self) -> int:
        return len(self.tokens) // 4

    @property
    def page_count(self) -> int:
        return len(self.pages) // PAGE_ID_BYTES

    @property
    def tag_count(self) -> int:
        """A region has at least one page, and is sent at most twice."""
        return 2 * self.page_count

    def first_tag(self, seq: int) -> int:
        return self.tag_base + seq

    def second_tag(self, seq: int) -> int:
        return self.tag_base + self.page_count + seq


@dataclass(frozen=True, slots=True)
class Preparing:
    """Waits for staging and a lane. The peer knows nothing."""

    order: SinkOrder


@dataclass(frozen=True, slots=True)
class Offered:
    """Offer sent, and re-sent until anything of the source answers it."""

    order: SinkOrder
    offer: Offer
    resend_at_s: float


@dataclass(frozen=True, slots=True)
class Receiving:
    """The source has the offer; regions land. `done` once the source has said that all are announced."""

    order: SinkOrder
    offer: Offer
    arrivals: Arrivals
    first_chunk_at_s: float | None
    done: Done | None
    resend_at_s: float  # of Nacks; counts only while a region is Damaged

    @property
    def credit(self) -> int:
        """Regions with a lower seq may be sent: one slot is free again for each that landed."""
        return self.offer.credit + self.arrivals.landed

    @property
    def nacks(self) -> tuple[SendFrame, ...]:
        return tuple(
            _to_peer(self.order, Nack(key=self.order.key, seq=seq, tag=region.tag))
            for seq, region in enumerate(self.arrivals.regions)
            if isinstance(region, Damaged)
        )


@dataclass(frozen=True, slots=True)
class Draining:
    """Over, and the fence is asked for. `offered`: the peer may know of the attempt, so it must be told."""

    order: SinkOrder
    failure: Failure
    peer_lost: bool
    offered: bool
    arrivals: Arrivals


@dataclass(frozen=True, slots=True)
class Committed:
    """Terminal: the engine has the pages. Kept to answer a source that did not hear of it."""

    order: SinkOrder


@dataclass(frozen=True, slots=True)
class Aborted:
    """Terminal for the engine; Cancel is re-sent until Cancelled."""

    order: SinkOrder
    failure: Failure
    resend_at_s: float


@dataclass(frozen=True, slots=True)
class Closed:
    """Terminal: nobody is owed anything. Kept to answer late frames."""

    order: SinkOrder
    failure: Failure


SinkState = Preparing | Offered | Receiving | Draining | Committed | Aborted | Closed
SinkOver = Committed | Aborted | Closed  # the engine has been told

SinkFrame = Accept | Refuse | Chunk | Done | Failed | Cancelled
SinkInput = (
    SinkFrame
    | AbortSink
    | SinkPrepared
    | SinkNotPrepared
    | Landed
    | RegionDamaged
    | SinkLaneFailed
    | SinkFenced
    | ResendDue
    | DeadlinePassed
    | PeerSilent
    | PeerDead
)
SinkOutput = SendFrame | EngineEvent | SinkEffect
SinkStep = Step[SinkState, SinkOutput]


def open_sink(order: SinkOrder, rules: SessionRules) -> SinkStep:
    """The first step of a hand-off."""
    wanted = order.total - order.start
    assert wanted > 0, "nothing to hand over"
    assert order.start % rules.page_size == 0, order.start
    assert order.page_count == pages_for_tokens(wanted, rules.page_size), "pages of exactly the range"
    prepare = PrepareSink(order.key, order.peer, order.start, order.total, order.pages, order.tag_base, order.tag_count)
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
            assert min(event.credit, event.region_pages) >= 1, event
            offer = _offer(state.order, event, now)
            after = Offered(state.order, offer, now + rules.resend_after_s)
            return Step(after, Verdict.MOVE, (_to_peer(state.order, offer),))
        case SinkNotPrepared():
            over = Closed(state.order, event.failure)
            return Step(over, Verdict.MOVE, (_sink_failed(state.order, event.failure, event.peer_lost, Arrivals()),))
        case AbortSink():
            return _drain(state, event.failure)
        case DeadlinePassed():
            return _drain(state, _deadline_failure("no staging was free for the hand-off in time"))
        case PeerSilent() | PeerDead():
            return _drain(state, _lost_failure(state.order.peer), peer_lost=True)
        case Accept() | Refuse() | Chunk() | Done() | Failed() | Cancelled():
            return _stale(state)  # nothing has been offered
        case Landed() | RegionDamaged() | SinkLaneFailed() | SinkFenced() | ResendDue():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _offered(state: Offered, event: SinkInput, now: float, rules: SessionRules) -> SinkStep:
    match event:
        case Accept():
            return Step(_accepted(state), Verdict.MOVE)
        case Chunk():
            return _chunk(_accepted(state), event, now, rules)  # overtook the Accept, or that was lost
        case Done():
            return _done(_accepted(state), event, now)
        case Refuse() | Failed():
            return _drain(state, event.failure)
        case SinkLaneFailed():
            return _drain(state, event.failure, peer_lost=event.peer_lost)
        case AbortSink():
            return _drain(state, event.failure)
        case DeadlinePassed():
            return _drain(state, _deadline_failure(f"{state.order.peer.worker} did not answer the offer in time"))
        case PeerSilent():
            return _drain(state, _lost_failure(state.order.peer), peer_lost=True)
        case PeerDead():
            return _drain(state, _lost_failure(state.order.peer), peer_lost=True, offered=False)
        case ResendDue():
            offer = msgspec.structs.replace(state.offer, ttl_s=max(0.0, state.order.deadline_s - now))
            after = replace(state, resend_at_s=now + rules.resend_after_s)
            return Step(after, Verdict.MOVE, (_to_peer(state.order, offer),))
        case Cancelled():
            return _stale(state)  # answers a Cancel that was never sent
        case SinkPrepared() | SinkNotPrepared() | Landed() | RegionDamaged() | SinkFenced():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _receiving(state: Receiving, event: SinkInput, now: float, rules: SessionRules) -> SinkStep:
    match event:
        case Accept():
            return Step(state, Verdict.IGNORED_DUPLICATE)
        case Chunk():
            return _chunk(state, event, now, rules)
        case Done():
            return _done(state, event, now)
        case Landed():
            return _landed(state, event, now)
        case RegionDamaged():
            return _damaged(state, event, now, rules)
        case Refuse() | Failed():
            return _drain(state, event.failure)
        case SinkLaneFailed():
            return _drain(state, event.failure, peer_lost=event.peer_lost)
        case AbortSink():
            return _drain(state, event.failure)
        case DeadlinePassed():
            return _drain(state, _deadline_failure("the hand-off did not finish in time"))
        case PeerSilent():
            return _drain(state, _lost_failure(state.order.peer), peer_lost=True)
        case PeerDead():
            return _drain(state, _lost_failure(state.order.peer), peer_lost=True, offered=False)
        case ResendDue():
            return Step(replace(state, resend_at_s=now + rules.resend_after_s), Verdict.MOVE, state.nacks)
        case Cancelled():
            return _stale(state)
        case SinkPrepared() | SinkNotPrepared() | SinkFenced():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _draining(state: Draining, event: SinkInput, now: float, rules: SessionRules) -> SinkStep:
    match event:
        case SinkFenced():
            told = _sink_failed(state.order, state.failure, state.peer_lost, state.arrivals)
            if not state.offered:
                return Step(Closed(state.order, state.failure), Verdict.MOVE, (told,))
            after = Aborted(state.order, state.failure, now + rules.resend_after_s)
            return Step(after, Verdict.MOVE, (_cancel(state.order, state.failure), told))
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
            return _stale(state)  # the Cancel that follows the fence answers all of them
        case SinkPrepared() | SinkNotPrepared() | RegionDamaged() | SinkLaneFailed():
            return _stale(state)  # crossed the fence on its way
        case ResendDue() | DeadlinePassed():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _committed(state: Committed, event: SinkInput) -> SinkStep:
    match event:
        case Chunk() | Done() | Failed():
            # The source did not hear of the commit. Commit is also the proof that a failed source waits for.
            commit = _to_peer(state.order, Commit(key=state.order.key))
            return Step(state, Verdict.IGNORED_DUPLICATE, (commit,))
        case Accept() | Refuse() | Cancelled():
            return _stale(state)
        case AbortSink():
            return _stale(state)  # crossed SinkCommitted on its way: the engine has the pages
        case PeerSilent() | PeerDead() | SinkLaneFailed():
            return _stale(state)
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
            return Step(after, Verdict.MOVE, (_cancel(state.order, state.failure),))
        case Accept() | Chunk() | Done() | Failed():
            return Step(state, Verdict.IGNORED_STALE, (_cancel(state.order, state.failure),))
        case AbortSink() | PeerSilent():
            return _stale(state)
        case SinkPrepared() | SinkNotPrepared() | Landed() | RegionDamaged() | SinkLaneFailed():
            return _stale(state)
        case SinkFenced() | DeadlinePassed():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _closed(state: Closed, event: SinkInput) -> SinkStep:
    match event:
        case Accept() | Chunk() | Done() | Failed():
            return Step(state, Verdict.IGNORED_STALE, (_cancel(state.order, state.failure),))
        case Refuse() | Cancelled() | AbortSink() | PeerSilent() | PeerDead():
            return _stale(state)
        case SinkPrepared() | SinkNotPrepared() | Landed() | RegionDamaged() | SinkLaneFailed():
            return _stale(state)
        case SinkFenced() | ResendDue() | DeadlinePassed():
            raise impossible(state, event)
        case _:
            assert_never(event)


# ------------------------------------------------------------------------------------------------- verbs


def _accepted(state: Offered) -> Receiving:
    return Receiving(state.order, state.offer, Arrivals(), None, None, state.resend_at_s)


def _chunk(state: Receiving, chunk: Chunk, now: float, rules: SessionRules) -> SinkStep:
    match state.arrivals.get(chunk.seq):
        case Arrived():
            ack = Ack(key=state.order.key, seq=chunk.seq, credit=state.credit)
            return Step(state, Verdict.IGNORED_DUPLICATE, (_to_peer(state.order, ack),))
        case Arriving():
            return Step(state, Verdict.IGNORED_DUPLICATE)
        case Damaged(first, tag):
            if chunk.tag != tag:
                return _stale(state)  # announced before the Nack
            if (chunk.first_token, chunk.tokens) != (first.first_token, first.tokens):
                return _drain(state, _broken(state.order, f"region {chunk.seq} is another one the second time"))
        case None:
            wrong = _contradiction(state, chunk, rules)
            if wrong:
                return _drain(state, _broken(state.order, wrong))
    after = replace(
        state,
        arrivals=state.arrivals.with_region(chunk.seq, Arriving(chunk)),
        first_chunk_at_s=now if state.first_chunk_at_s is None else state.first_chunk_at_s,
    )
    land = LandRegion(state.order.key, state.order.peer, state.offer.lane, chunk.tag, chunk)
    return Step(after, Verdict.MOVE, (land,))


def _contradiction(state: Receiving, chunk: Chunk, rules: SessionRules) -> str:
    """Why a newly announced region cannot be part of this hand-off; "" when it can (S3, S4)."""
    order, end = state.order, chunk.first_token + chunk.tokens
    pages = pages_for_tokens(chunk.tokens, rules.page_size)
    before, behind = state.arrivals.get(chunk.seq - 1), state.arrivals.get(chunk.seq + 1)
    checks: Sequence[tuple[bool, str]] = (
        (chunk.seq >= state.credit, f"region {chunk.seq} came without credit ({state.credit})"),
        (state.done is not None and chunk.seq >= state.done.regions, f"region {chunk.seq} came after the last one"),
        (chunk.tag != order.first_tag(chunk.seq), f"region {chunk.seq} came under a foreign tag"),
        (chunk.first_token < order.start or end > order.total, f"[{chunk.first_token}, {end}) was not asked for"),
        (chunk.first_token % rules.page_size != 0, f"region {chunk.seq} starts inside a page"),
        (end % rules.page_size != 0 and end != order.total, f"region {chunk.seq} ends inside a page"),
        (pages > state.offer.region_pages, f"region {chunk.seq} has {pages} pages, over {state.offer.region_pages}"),
        (chunk.seq == 0 and chunk.first_token != order.start, f"region 0 starts at {chunk.first_token}"),
        (before is not None and _end(before) != chunk.first_token, f"a gap before region {chunk.seq}"),
        (behind is not None and behind.chunk.first_token != end, f"a gap behind region {chunk.seq}"),
        (
            len(chunk.source_pages) != (pages * PAGE_ID_BYTES if state.offer.lane in PULL_LANES else 0),
            f"region {chunk.seq} names {len(chunk.source_pages) // PAGE_ID_BYTES} source pages",
        ),
    )
    return next((reason for wrong, reason in checks if wrong), "")


def _end(region: Region) -> int:
    return region.chunk.first_token + region.chunk.tokens


def _done(state: Receiving, done: Done, now: float) -> SinkStep:
    if state.done is not None:
        return Step(state, Verdict.IGNORED_DUPLICATE)
    order = state.order
    if done.total_tokens != order.total:
        return _drain(state, _broken(order, f"{done.total_tokens} tokens were prefilled, not {order.total}"))
    if (done.first_token >= 0) != order.sample:
        return _drain(
            state, _broken(order, "a first token was sampled without being asked for, or the other way round")
        )
    if not max(1, len(state.arrivals.regions)) <= done.regions <= order.page_count:
        return _drain(state, _broken(order, f"{done.regions} regions cannot be all"))
    return _commit_if_complete(replace(state, done=done), now)


def _landed(state: Receiving, event: Landed, now: float) -> SinkStep:
    region = state.arrivals.get(event.seq)
    if not isinstance(region, Arriving):
        raise impossible(state, event)
    after = replace(state, arrivals=state.arrivals.with_landed(event, region.chunk))
    step = _commit_if_complete(after, now)
    if step.effects:  # committed (or failed): that says more than an acknowledgement
        return step
    ack = Ack(key=state.order.key, seq=event.seq, credit=after.credit)
    return Step(after, Verdict.MOVE, (_to_peer(state.order, ack),))


def _commit_if_complete(state: Receiving, now: float) -> SinkStep:
    order, arrivals, done = state.order, state.arrivals, state.done
    if done is None or arrivals.landed < done.regions:
        return Step(state, Verdict.MOVE)
    if arrivals.landed_until(order.start) != order.total:
        return _drain(state, _broken(order, f"{done.regions} regions end before token {order.total}"))
    assert state.first_chunk_at_s is not None
    result = PrefillResult(done.first_token, done.logprob, done.prefill_s, done.cached_tokens)
    committed = SinkCommitted(
        order.key,
        order.peer.worker,
        result,
        arrivals.nbytes,
        state.offer.lane,
        transfer_s=now - state.first_chunk_at_s,
        scatter_s=arrivals.scatter_s,
    )
    commit = _to_peer(order, Commit(key=order.key))
    return Step(Committed(order), Verdict.MOVE, (CloseSink(order.key), commit, EngineEvent(committed)))


def _damaged(state: Receiving, event: RegionDamaged, now: float, rules: SessionRules) -> SinkStep:
    region, second_tag = state.arrivals.get(event.seq), state.order.second_tag(event.seq)
    if not isinstance(region, Arriving):
        raise impossible(state, event)
    if region.chunk.tag == second_tag:
        reason = f"region {event.seq} from {state.order.peer.worker} was damaged twice"
        return _drain(state, Failure(code=ErrorCode.TRANSFER_CORRUPT, reason=reason))
    resend_at_s = state.resend_at_s if state.nacks else now + rules.resend_after_s
    arrivals = state.arrivals.with_region(event.seq, Damaged(region.chunk, second_tag))
    nack = Nack(key=state.order.key, seq=event.seq, tag=second_tag)
    after = replace(state, arrivals=arrivals, resend_at_s=resend_at_s)
    return Step(after, Verdict.MOVE, (_to_peer(state.order, nack),))


def _drain(
    state: Preparing | Offered | Receiving, failure: Failure, *, peer_lost: bool = False, offered: bool = True
) -> SinkStep:
    """Ends the hand-off: fence first, everything else after it. `offered=False`: there is nobody to tell."""
    arrivals = state.arrivals if isinstance(state, Receiving) else Arrivals()
    known_there = offered and not isinstance(state, Preparing)
    after = Draining(state.order, failure, peer_lost, known_there, arrivals)
    return Step(after, Verdict.MOVE, (FenceSink(state.order.key),))


# ------------------------------------------------------------------------------------------------ messages


def _stale(state: SinkState) -> SinkStep:
    return Step(state, Verdict.IGNORED_STALE)


def _to_peer(order: SinkOrder, body: HandoffBody) -> SendFrame:
    return SendFrame(order.peer.worker, order.peer.epoch, body)


def _cancel(order: SinkOrder, failure: Failure) -> SendFrame:
    return _to_peer(order, Cancel(key=order.key, failure=failure))


def _offer(order: SinkOrder, prepared: SinkPrepared, now: float) -> Offer:
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
        region_pages=prepared.region_pages,
        tag_base=order.tag_base,
    )


def _sink_failed(order: SinkOrder, failure: Failure, peer_lost: bool, arrivals: Arrivals) -> EngineEvent:
    until = arrivals.landed_until(order.start)
    return EngineEvent(SinkFailed(order.key, order.peer.worker, failure, until, arrivals.nbytes, peer_lost))


def _deadline_failure(reason: str) -> Failure:
    return Failure(code=ErrorCode.DEADLINE_EXCEEDED, reason=reason)


def _lost_failure(peer: Stamp) -> Failure:
    return Failure(code=ErrorCode.NO_WORKER, reason=f"{peer.worker} (incarnation {peer.incarnation}) is gone")


def _broken(order: SinkOrder, reason: str) -> Failure:
    return Failure(code=ErrorCode.INTERNAL, reason=f"{order.peer.worker} broke the hand-off: {reason}")
