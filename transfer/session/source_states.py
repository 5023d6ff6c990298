"""The states of a source, and what each of them knows. Values only: `source.py` is what moves between them."""

from __future__ import annotations

from dataclasses import dataclass

from baton.common.ids import HandoffKey, Stamp
from baton.common.messages import (
    Ack,
    Cancel,
    Chunk,
    Commit,
    Done,
    Failure,
    Nack,
    Offer,
    Refuse,
)
from baton.transfer.api import (
    AbortSource,
    FinishSource,
    PrefillResult,
    ShipRegion,
)
from baton.transfer.plan import Segment, Span
from baton.transfer.session.effects import (
    EngineEvent,
    RegionReady,
    SendFrame,
    SourceEffect,
    SourceFenced,
    SourceLaneFailed,
)
from baton.transfer.session.step import (
    DeadlinePassed,
    PeerDead,
    PeerSilent,
    ResendDue,
    Step,
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
    total: int
    segments: tuple[Segment, ...]
    sample: bool
    region_units: tuple[int, ...]  # by segment
    tag_base: int
    deadline_s: float
    priority: int = 0


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
