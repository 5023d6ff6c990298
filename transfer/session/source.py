"""The sending side of one hand-off: Accepted -> Sending -> AwaitingAck -> Releasing -> Released, or on the way out
Cancelling -> Closed and Failing -> Quarantined | Aborted -> Closed. Refused is a door that was never opened.

Owns: how shipped spans are cut into regions, which of them the sink has, and when the source pages may go back to the
engine. Never: touches memory, reads a clock, sends anything (effects are returned), or ends without a fence.

Invariants:
- T1  The engine hears exactly one of SourceReleased and SourceAborted; after it no SendRegion of the key is open.
- T2  On a pull lane, once a region has been announced, pages come back only with the peer's proof: Commit, Cancel, or
      its proven death. Never with a timer, never because it is silent.
- T3  A region with seq >= credit is not sent.
- T4  Done is sent once every segment is shipped to its end (the first token in it is worth something before all bytes
      are), and until it is answered once they are announced; FinishSource before they were shipped so far is a bug.
- T5  Whatever a peer sends, the machine ends the hand-off at worst; it never raises.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from baton.common.ids import Stamp
from baton.common.messages import (
    Accept,
    Ack,
    Cancel,
    Cancelled,
    Commit,
    Nack,
    Offer,
)
from baton.transfer.api import (
    AbortSource,
    FinishSource,
    OfferReceived,
    ShipRegion,
    SourceAborted,
    SourceReleased,
)
from baton.transfer.session.effects import (
    EngineEvent,
    FenceSource,
    RegionReady,
    SendFrame,
    SourceFenced,
    SourceLaneFailed,
)
from baton.transfer.session.source_moves import (
    announce,
    announced_any,
    await_ack_if_announced,
    failed_frame,
    finish,
    give_up,
    pump,
    ship,
    stale,
    take_nack,
    to_peer,
    unacked,
    with_acked,
)
from baton.transfer.session.source_states import (
    Aborted,
    Accepted,
    Announced,
    AwaitingAck,
    Cancelling,
    Closed,
    Failing,
    Quarantined,
    Refused,
    Regions,
    Released,
    Releasing,
    Sending,
    SourceAlive,
    SourceFrame,
    SourceInput,
    SourceOutput,
    SourceOver,
    SourceState,
    SourceStep,
    SourceTerms,
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
    "Accepted",
    "AwaitingAck",
    "Cancelling",
    "Closed",
    "Failing",
    "Quarantined",
    "Refused",
    "Released",
    "Releasing",
    "Sending",
    "SourceAlive",
    "SourceFrame",
    "SourceInput",
    "SourceOutput",
    "SourceOver",
    "SourceState",
    "SourceStep",
    "SourceTerms",
    "accept_offer",
    "source_clockwork",
    "source_peer",
    "source_step",
    "source_timer",
]
"""The face of a session; the parts live in the modules beside it."""


def accept_offer(terms: SourceTerms, credit: int, received: OfferReceived) -> SourceStep:
    """The first step of a hand-off: the endpoint has found nothing against the offer."""
    accept = to_peer(terms, Accept(key=terms.key))
    return Step(Accepted(terms, credit), Verdict.MOVE, (EngineEvent(received), accept))


def source_peer(state: SourceState) -> Stamp:
    return state.peer if isinstance(state, Closed | Refused) else state.terms.peer


def source_timer(state: SourceState) -> float | None:
    """When `source_clockwork` has something to say, on the local clock. The fenced states wait for a local fence, which
    always completes; Quarantined re-sends and waits for proof; the terminal ones end with their place in the table."""
    match state:
        case Accepted():
            return state.terms.deadline_s
        case Sending():
            for region in state.regions.open:
                if isinstance(region, Announced):  # and not acknowledged
                    return min(state.terms.deadline_s, state.resend_at_s)
            return state.terms.deadline_s
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
            sending = Sending(state.terms, state.credit, Regions(), None, now + rules.resend_after_s)
            return ship(sending, event, rules)
        case Offer():
            return Step(state, Verdict.IGNORED_DUPLICATE, (to_peer(state.terms, Accept(key=state.terms.key)),))
        case Ack() | Nack():
            return stale(state)  # about a region that does not exist
        case Commit() | Cancel() | AbortSource() | SourceLaneFailed() | DeadlinePassed() | PeerSilent() | PeerDead():
            return give_up(state, event, now, rules, read_by_peer=False)
        case FinishSource() | RegionReady() | SourceFenced() | ResendDue():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _sending(state: Sending, event: SourceInput, now: float, rules: SessionRules) -> SourceStep:
    match event:
        case ShipRegion():
            return ship(state, event, rules)
        case FinishSource():
            return finish(state, event, now, rules)
        case RegionReady():
            after, chunk = announce(state, event, now, rules)
            step = await_ack_if_announced(after, now, rules)
            return Step(step.state, Verdict.MOVE, (chunk, *step.effects))
        case Ack():
            regions = with_acked(state.regions, event)
            if regions is None and event.credit <= state.credit:
                return Step(state, Verdict.IGNORED_DUPLICATE)
            return pump(replace(state, credit=max(state.credit, event.credit), regions=regions or state.regions))
        case Nack():
            return take_nack(state, event, now, rules)
        case Offer():
            return Step(state, Verdict.IGNORED_DUPLICATE, (to_peer(state.terms, Accept(key=state.terms.key)),))
        case ResendDue():
            return Step(replace(state, resend_at_s=now + rules.resend_after_s), Verdict.MOVE, unacked(state))
        case Commit() | Cancel() | AbortSource() | SourceLaneFailed() | DeadlinePassed() | PeerSilent() | PeerDead():
            # A Commit before Done can only be about a hand-off that this one is a late echo of.
            return give_up(state, event, now, rules, read_by_peer=announced_any(state))
        case SourceFenced():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _awaiting_ack(state: AwaitingAck, event: SourceInput, now: float, rules: SessionRules) -> SourceStep:
    match event:
        case Commit():
            return Step(Releasing(state.terms), Verdict.MOVE, (FenceSource(state.terms.key),))
        case RegionReady():  # of a region that was damaged
            after, chunk = announce(state, event, now, rules)
            return Step(after, Verdict.MOVE, (chunk,))
        case Ack():
            regions = with_acked(state.regions, event)
            if regions is None:
                return Step(state, Verdict.IGNORED_DUPLICATE)
            return Step(replace(state, regions=regions), Verdict.MOVE)
        case Nack():
            return take_nack(state, event, now, rules)
        case Offer():
            return Step(state, Verdict.IGNORED_DUPLICATE)
        case ResendDue():
            after = replace(state, resend_at_s=now + rules.resend_after_s)
            return Step(after, Verdict.MOVE, (*unacked(state), to_peer(state.terms, state.done)))
        case Cancel() | AbortSource() | SourceLaneFailed() | DeadlinePassed() | PeerSilent() | PeerDead():
            return give_up(state, event, now, rules, read_by_peer=True)
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
            return stale(state)
        case AbortSource() | RegionReady() | SourceLaneFailed() | PeerSilent() | PeerDead():
            return stale(state)  # SourceReleased is on its way
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
                Closed(terms.key, terms.peer), Verdict.MOVE, (to_peer(terms, Cancelled(key=terms.key)), aborted)
            )
        case Cancel():
            return Step(state, Verdict.IGNORED_DUPLICATE)  # Cancelled follows the fence
        case Offer() | Ack() | Nack() | Commit():
            return stale(state)
        case ShipRegion() | FinishSource() | AbortSource():
            return stale(state)  # SourceAborted is on its way
        case RegionReady() | SourceLaneFailed() | PeerSilent() | PeerDead():
            return stale(state)
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
            return Step(after, Verdict.MOVE, (failed_frame(terms, state.failure),))
        case Offer():
            return Step(state, Verdict.IGNORED_DUPLICATE, (failed_frame(terms, state.failure),))
        case Ack() | Nack():
            return stale(state)
        case ShipRegion() | FinishSource() | AbortSource():
            return stale(state)
        case RegionReady() | SourceLaneFailed() | PeerSilent():
            return stale(state)
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
                effects = (to_peer(terms, Cancelled(key=terms.key)),)
            if isinstance(state, Quarantined):
                effects = (*effects, EngineEvent(SourceAborted(terms.key, state.failure)))
            return Step(closed, Verdict.MOVE, effects)
        case ResendDue():
            after = replace(state, resend_at_s=now + rules.resend_after_s)
            return Step(after, Verdict.MOVE, (failed_frame(terms, state.failure),))
        case Offer():
            return Step(state, Verdict.IGNORED_DUPLICATE, (failed_frame(terms, state.failure),))
        case Ack() | Nack():
            return stale(state)
        case ShipRegion() | FinishSource() | AbortSource():
            return stale(state)
        case RegionReady() | SourceLaneFailed() | PeerSilent():
            return stale(state)
        case SourceFenced() | DeadlinePassed():
            raise impossible(state, event)
        case _:
            assert_never(event)


def _released(state: Released, event: SourceInput) -> SourceStep:
    match event:
        case Cancel():  # a sink that has forgotten its commit answers so; it is true as well
            return Step(state, Verdict.IGNORED_STALE, (to_peer(state.terms, Cancelled(key=state.terms.key)),))
        case Commit():
            return Step(state, Verdict.IGNORED_DUPLICATE)
        case Offer() | Ack() | Nack():
            return stale(state)
        case AbortSource():
            return stale(state)  # crossed SourceReleased on its way
        case RegionReady() | SourceLaneFailed() | PeerSilent() | PeerDead():
            return stale(state)
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
            return stale(state)
        case ShipRegion() | FinishSource() | AbortSource():
            return stale(state)  # crossed SourceAborted on its way
        case RegionReady() | SourceLaneFailed() | PeerSilent() | PeerDead():
            return stale(state)
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
            return stale(state)
        case ShipRegion() | FinishSource() | AbortSource():  # the engine never heard of it
            raise impossible(state, event)
        case RegionReady() | SourceLaneFailed() | SourceFenced() | ResendDue() | DeadlinePassed():
            raise impossible(state, event)
        case _:
            assert_never(event)
