"""The states of a sink, and what each of them knows. Values only: `sink.py` is what moves between them."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from baton.common.ids import HandoffKey, RequestId, Stamp
from baton.common.messages import (
    Accept,
    Cancelled,
    Chunk,
    Done,
    Failed,
    Failure,
    Nack,
    Offer,
    Refuse,
    SamplingParams,
    Ticket,
)
from baton.common.spans import NOT_TRACED
from baton.transfer.api import AbortSink
from baton.transfer.plan import Place, Segment, Span, count_units, most_regions, place_of
from baton.transfer.session.effects import (
    EngineEvent,
    Landed,
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
    Step,
)

# ---------------------------------------------------------------------------------------------------- regions


class Arriving(Struct, frozen=True):
    """A LandRegion is open for it."""

    chunk: Chunk


class Damaged(Struct, frozen=True):
    """The first try was damaged; Nack has been sent and asks for the bytes under `tag`."""

    chunk: Chunk
    tag: int


class Arrived(Struct, frozen=True):
    """Verified and in the pages."""

    chunk: Chunk


Region = Arriving | Damaged | Arrived


class Arrivals(Struct, frozen=True):
    """What has come in so far, by seq, and what it cost. The first regions, as far as they have landed without a gap,
    are only counted: a step costs O(credit) however long the hand-off is."""

    counted: int = 0  # regions [0, this) have landed
    units: int = 0  # and so have units [0, this) of the whole hand-off, with all of their layers
    last: Chunk | None = None  # of the last one that was counted
    open: tuple[Region | None, ...] = ()  # from seq `counted` on; None: not announced yet
    landed: int = 0  # regions, also behind a gap
    nbytes: int = 0
    scatter_s: float = 0.0
    slots: int = 0  # what `Landed` added to the first credit

    @property
    def announced(self) -> int:
        """Regions that are known of; there may be gaps."""
        return self.counted + len(self.open)

    def has_landed(self, seq: int) -> bool:
        return 0 <= seq < self.counted or isinstance(self.get(seq), Arrived)

    def get(self, seq: int) -> Region | None:
        """None: not announced yet, or counted long ago."""
        return self.open[seq - self.counted] if self.counted <= seq < self.announced else None

    def chunk_of(self, seq: int) -> Chunk | None:
        """For its neighbours: None if it is not announced yet, or counted before the last one that was."""
        if seq == self.counted - 1:
            return self.last
        region = self.get(seq)
        return None if region is None else region.chunk

    def with_region(self, seq: int, region: Region) -> Arrivals:
        at = seq - self.counted
        padded = self.open + (None,) * (at + 1 - len(self.open))
        return replace(self, open=(*padded[:at], region, *padded[at + 1 :]))

    def with_landed(self, event: Landed, chunk: Chunk) -> Arrivals:
        """Regions are neighbours (S4): with its last part, behind all others, a unit is whole."""
        after = self.with_region(event.seq, Arrived(chunk)).open
        done, units, last = 0, self.units, self.last
        while done < len(after) and isinstance(region := after[done], Arrived):
            last = region.chunk
            units += last.units if last.part == last.parts - 1 else 0
            done += 1
        return Arrivals(
            counted=self.counted + done,
            units=units,
            last=last,
            open=after[done:],
            landed=self.landed + 1,
            nbytes=self.nbytes + event.nbytes,
            scatter_s=self.scatter_s + event.scatter_s,
            slots=self.slots + event.slots,
        )


# ----------------------------------------------------------------------------------------------------- states


class SinkOrder(Struct, frozen=True):
    """What the engine asked for; the same in all states."""

    key: HandoffKey
    peer: Stamp
    request_id: RequestId
    tokens: bytes
    start: int
    segments: tuple[Segment, ...]
    spans: tuple[Span, ...]  # the destination of each segment, whole
    sample: bool
    sampling: SamplingParams
    deadline_s: float
    tag_base: int
    priority: int = 0
    trace: str = NOT_TRACED
    ticket: Ticket = Ticket()

    @property
    def total(self) -> int:
        return len(self.tokens) // 4

    @property
    def scored(self) -> int:
        """Prompt tokens whose log probabilities come with the first token."""
        return self.total - 1 if self.sample and self.sampling.scores_prompt else 0

    @property
    def unit_count(self) -> int:
        return count_units(self.segments)

    @property
    def most_regions(self) -> int:
        return most_regions(self.segments)

    @property
    def tag_count(self) -> int:
        """Every region is sent at most twice."""
        return 2 * self.most_regions

    def first_tag(self, seq: int) -> int:
        return self.tag_base + seq

    def second_tag(self, seq: int) -> int:
        return self.tag_base + self.most_regions + seq

    def place_of(self, chunk: Chunk) -> Place:
        """Of a region that was taken in: it has one."""
        place = place_of(self.segments, chunk)
        assert place is not None, chunk
        return place


class Preparing(Struct, frozen=True):
    """Waits for staging and a lane. The peer knows nothing."""

    order: SinkOrder


class Offered(Struct, frozen=True):
    """Offer sent, and re-sent until anything of the source answers it."""

    order: SinkOrder
    offer: Offer
    resend_at_s: float


class Receiving(Struct, frozen=True):
    """The source has the offer; regions land. `done` once the source has said that all are announced."""

    order: SinkOrder
    offer: Offer
    arrivals: Arrivals
    first_chunk_at_s: float | None
    done: Done | None
    resend_at_s: float  # of Nacks; counts only while a region is Damaged

    @property
    def credit(self) -> int:
        """Regions with a lower seq may be sent."""
        return self.offer.credit + self.arrivals.slots

    @property
    def nacks(self) -> tuple[Nack, ...]:
        return tuple(
            Nack(key=self.order.key, seq=seq, tag=region.tag)
            for seq, region in enumerate(self.arrivals.open, self.arrivals.counted)
            if isinstance(region, Damaged)
        )


class Draining(Struct, frozen=True):
    """Over, and the fence is asked for. `offered`: the peer may know of the attempt, so it must be told. `lane`: ""
    when none was chosen yet."""

    order: SinkOrder
    failure: Failure
    peer_lost: bool
    offered: bool
    lane: str
    arrivals: Arrivals


class Committed(Struct, frozen=True):
    """Terminal: the engine has the pages. Kept to answer a source that did not hear of it."""

    order: SinkOrder


class Aborted(Struct, frozen=True):
    """Terminal for the engine; Cancel is re-sent until Cancelled."""

    order: SinkOrder
    failure: Failure
    resend_at_s: float


class Closed(Struct, frozen=True):
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
