"""The states of a source, and what each of them knows. Values only: `source.py` is what moves between them."""

from __future__ import annotations

from msgspec import Struct

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


class Gathering(Struct, frozen=True):
    """A SendRegion is open for it."""

    tag: int


class Announced(Struct, frozen=True):
    """Its bytes are on their way; the Chunk is re-sent until Ack."""

    chunk: Chunk


class Acked(Struct, frozen=True):
    """In the sink's pages."""


Region = Gathering | Announced | Acked
ACKED = Acked()


class Regions(Struct, frozen=True):
    """Everything shipped so far, as regions by seq: first those in the sink's pages, then those under way, then those
    that wait for credit. A step changes what is under way, so it costs O(credit) however long the hand-off is."""

    spans: tuple[Span, ...] = ()  # of all of them
    acked: int = 0  # so many from the first on are in the sink's pages
    open: tuple[Region, ...] = ()  # from seq `acked` on; the first is not Acked

    @property
    def sent(self) -> int:
        """Regions that credit was used for."""
        return self.acked + len(self.open)

    @property
    def queued(self) -> bool:
        """Whether one waits for credit."""
        return self.sent < len(self.spans)

    def get(self, seq: int) -> Region | None:
        """None: it waits for credit, or there is none."""
        if seq < self.acked:
            return ACKED
        return self.open[seq - self.acked] if seq < self.sent else None

    def with_region(self, seq: int, region: Region) -> Regions:
        at = seq - self.acked
        after = (*self.open[:at], region, *self.open[at + 1 :])
        done = 0
        while done < len(after) and isinstance(after[done], Acked):
            done += 1
        return Regions(self.spans, self.acked + done, after[done:])


# ----------------------------------------------------------------------------------------------------- states


class SourceTerms(Struct, frozen=True):
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


class Accepted(Struct, frozen=True):
    """The engine has the offer and has shipped nothing yet."""

    terms: SourceTerms
    credit: int


class Sending(Struct, frozen=True):
    """Regions go out as credit allows. `result` once the engine has finished, while some are not announced yet."""

    terms: SourceTerms
    credit: int
    regions: Regions
    result: PrefillResult | None
    resend_at_s: float  # counts only while a region is Announced


class AwaitingAck(Struct, frozen=True):
    """All is announced; Done is re-sent until Commit or Cancel, and so is what was not acknowledged."""

    terms: SourceTerms
    regions: Regions
    done: Done
    resend_at_s: float


class Releasing(Struct, frozen=True):
    """Committed over there; the fence is asked for."""

    terms: SourceTerms


class Cancelling(Struct, frozen=True):
    """Over, and the peer is proven to have stopped; the fence is asked for."""

    terms: SourceTerms
    failure: Failure


class Failing(Struct, frozen=True):
    """Given up here, the peer is told; the fence is asked for. `read_by_peer`: it may be pulling from the pages."""

    terms: SourceTerms
    failure: Failure
    read_by_peer: bool
    resend_at_s: float


class Quarantined(Struct, frozen=True):
    """Fenced here, but the peer may still read: Failed is re-sent until it proves that it does not (T2)."""

    terms: SourceTerms
    failure: Failure
    resend_at_s: float


class Released(Struct, frozen=True):
    """Terminal: the sink has the KV, the engine its pages."""

    terms: SourceTerms


class Aborted(Struct, frozen=True):
    """Terminal for the engine; Failed is re-sent until Cancel."""

    terms: SourceTerms
    failure: Failure
    resend_at_s: float


class Closed(Struct, frozen=True):
    """Terminal: nothing of the attempt is left. Also what a Cancel before its Offer leaves behind."""

    key: HandoffKey
    peer: Stamp


class Refused(Struct, frozen=True):
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
