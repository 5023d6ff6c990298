"""What became of a process's hand-offs, and how long it took: counted from the steps of their sessions. Pure.

Owns: the totals per (peer, lane, direction), and the times of the last hand-offs. Never: a clock (each step comes with
its time), a part in any decision, or a wait: forgetting all of it would change nothing.

Bounds: one record per session whose engine has not been told the end, the last KEPT_HANDOFFS of those that ended, the
times of REGIONS_KEPT regions in each, and one total per pair, lane and direction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.common.histogram import LatencyHistogram
from baton.common.ids import HandoffKey, WorkerId
from baton.common.messages import Ack, Chunk, Commit, Done, Failure
from baton.common.spans import NOT_TRACED
from baton.common.trace import Args, Recorder
from baton.transfer.api import (
    FinishSource,
    OfferReceived,
    ShipRegion,
    SinkCommand,
    SinkCommitted,
    SinkEvent,
    SinkFailed,
    SourceAborted,
    SourceCommand,
    SourceEvent,
    SourceReleased,
)
from baton.transfer.reports import Direction, Flow, HandoffTimes, Latencies, Outcome, RegionTimes
from baton.transfer.session import sink, source
from baton.transfer.session.effects import (
    EngineEvent,
    FenceSink,
    FenceSource,
    Landed,
    LandRegion,
    RegionDamaged,
    RegionReady,
    SendRegion,
    SinkLaneFailed,
    SinkPrepared,
    SourceLaneFailed,
)
from baton.transfer.session.source_states import Sending
from baton.transfer.session.step import ResendDue, Verdict

KEPT_HANDOFFS = 128
REGIONS_KEPT = 32


@dataclass(slots=True)
class _Total:
    """Behind a `Flow`."""

    peer: WorkerId
    lane: str
    direction: Direction
    nbytes: int = 0
    regions: int = 0
    under_way: int = 0
    busy_since_s: float = 0.0
    busy_s: float = 0.0
    region: LatencyHistogram = field(default_factory=LatencyHistogram)
    handoff: LatencyHistogram = field(default_factory=LatencyHistogram)
    tail: LatencyHistogram = field(default_factory=LatencyHistogram)
    failed: int = 0
    queued: int = 0
    queue_s: float = 0.0
    resent_frames: int = 0
    damaged_regions: int = 0
    lane_failures: int = 0
    lane_changes: int = 0
    stalls: int = 0
    stall_s: float = 0.0

    def begin(self, now: float) -> None:
        """One region more is under way."""
        if self.under_way == 0:
            self.busy_since_s = now
        self.under_way += 1

    def end(self, now: float) -> None:
        self.under_way -= 1
        if self.under_way == 0:
            self.busy_s += now - self.busy_since_s


@dataclass(slots=True)
class _Record:
    """One hand-off, while its session lives. `queued` and `begun`: regions by seq, since when."""

    key: HandoffKey
    request_id: str
    tokens: int
    begun_at_s: float
    total: _Total
    marks: dict[str, float] = field(default_factory=dict)
    queued: dict[int, float] = field(default_factory=dict)
    begun: dict[int, tuple[float, int]] = field(default_factory=dict)  # and its bytes
    regions: list[tuple[int, float, float, int]] = field(default_factory=list)  # seq, begun, ended, bytes
    region_count: int = 0
    nbytes: int = 0
    resent_frames: int = 0
    damaged_regions: int = 0
    stalls: int = 0
    stall_s: float = 0.0
    stalled_since_s: float | None = None
    failure: Failure | None = None
    trace: str = NOT_TRACED
    queued_s: float | None = None  # at the source, until its engine had pages
    scatter_s: float = 0.0

    def mark(self, what: str, now: float) -> None:
        """The first time that something happens."""
        if what not in self.marks:
            self.marks[what] = now - self.begun_at_s


class Ledger:
    """Told of every step of every session; `trace` gets each region and hand-off that ends while it is set, `on_ended`
    the life of each hand-off that ended."""

    def __init__(self) -> None:
        self.trace: Recorder | None = None
        self.on_ended: Callable[[HandoffTimes], None] | None = None
        self._totals: dict[tuple[WorkerId, str, Direction], _Total] = {}
        self._sinks: dict[HandoffKey, _Record] = {}
        self._sources: dict[HandoffKey, _Record] = {}
        self._last_lane: dict[tuple[WorkerId, Direction], str] = {}
        self._ended: deque[_Record] = deque(maxlen=KEPT_HANDOFFS)

    # --------------------------------------------------------------------------------------------- told

    def on_sink(self, key: HandoffKey, event: sink.SinkInput | None, step: sink.SinkStep, now: float) -> None:
        """`event` None: the session begins with this step."""
        record = self._sinks.get(key)
        if record is None:
            if event is not None:
                return  # it has ended; what comes late changes nothing here
            order = step.state.order
            total = self._total(order.peer.worker, "", "in")
            record = self._sinks[key] = _Record(key, order.request_id, order.total - order.start, now, total)
            record.trace = order.trace
        match event:  # the frequent ones first
            case Chunk():
                pass  # what follows from it is among the effects
            case Landed():
                self._region_ended(record, event.seq, now)
            case SinkPrepared():
                self._takes_lane(record, event.lane, now)
                record.total.queued += 1
                record.total.queue_s += now - record.begun_at_s
                record.mark("offered", now)
            case RegionDamaged():
                self._region_damaged(record, event.seq, now)
            case Done() if step.verdict is Verdict.MOVE:
                record.mark("all announced", now)
            case ResendDue():
                self._resent(record, len(step.effects))
            case SinkLaneFailed():
                record.total.lane_failures += 1
            case _:
                pass
        if "accepted" not in record.marks and isinstance(step.state, sink.Receiving):
            record.mark("accepted", now)
        for effect in step.effects:
            match effect:
                case LandRegion():
                    self._region_begun(record, effect.chunk.seq, effect.chunk.nbytes, now)
                case FenceSink():
                    self._cut_short(record, now)
                case EngineEvent(SinkCommitted(scatter_s=scatter_s)):
                    record.scatter_s = scatter_s
                    record.mark("committed", now)
                    self._ended_well(self._sinks, record, now)
                case EngineEvent(SinkFailed() as failed):
                    self._ended_badly(self._sinks, record, failed.failure, now)
                case _:
                    pass

    def on_source(self, key: HandoffKey, event: source.SourceInput | None, step: source.SourceStep, now: float) -> None:
        """The same, of the sending side."""
        record = self._sources.get(key)
        if record is None:
            if event is not None:
                return
            record = self._open_source(key, step, now)
        match event:
            case Ack():
                self._region_ended(record, event.seq, now)
            case RegionReady():
                self._region_ready(record, event, now)
            case ShipRegion():
                record.mark("first computed", now)
            case FinishSource():
                record.queued_s = event.queued_s
                record.mark("all computed", now)
            case Commit() if isinstance(step.state, source.Releasing):
                self._committed(record, now)
            case ResendDue():
                self._resent(record, len(step.effects))
            case SourceLaneFailed():
                record.total.lane_failures += 1
            case _:
                pass
        for effect in step.effects:
            match effect:
                case SendRegion():
                    if effect.seq in record.begun:
                        self._region_damaged(record, effect.seq, now)
                    record.queued[effect.seq] = now
                case FenceSource():
                    record.queued.clear()
                    self._cut_short(record, now)
                case EngineEvent(SourceReleased()):
                    self._ended_well(self._sources, record, now)
                case EngineEvent(SourceAborted() as aborted):
                    self._ended_badly(self._sources, record, aborted.failure, now)
                case _:
                    pass
        self._watch_credit(record, step.state, now)

    def _open_source(self, key: HandoffKey, step: source.SourceStep, now: float) -> _Record:
        assert isinstance(step.state, source.Accepted), step.state
        terms = step.state.terms
        [offer] = [one.event for one in step.effects if isinstance(one, EngineEvent)]
        assert isinstance(offer, OfferReceived), offer
        total = self._total(terms.peer.worker, "", "out")
        record = self._sources[key] = _Record(key, offer.request_id, terms.total - offer.start, now, total)
        record.trace = offer.trace
        self._takes_lane(record, terms.lane, now)
        return record

    def _takes_lane(self, record: _Record, lane: str, now: float) -> None:
        peer, direction = record.total.peer, record.total.direction
        record.total = self._total(peer, lane, direction)
        if self._last_lane.setdefault((peer, direction), lane) != lane:
            self._last_lane[peer, direction] = lane
            record.total.lane_changes += 1

    def _region_ready(self, record: _Record, event: RegionReady, now: float) -> None:
        queued_since_s = record.queued.pop(event.seq, None)
        if queued_since_s is None:
            return  # crossed the end of the attempt
        record.total.queued += 1
        record.total.queue_s += max(0.0, now - queued_since_s - event.gather_s)
        self._region_begun(record, event.seq, event.nbytes, now)

    def _region_begun(self, record: _Record, seq: int, nbytes: int, now: float) -> None:
        record.mark("first region", now)
        record.begun[seq] = (now, nbytes)
        record.total.begin(now)

    def _region_ended(self, record: _Record, seq: int, now: float) -> None:
        """It is in the receiver's pages."""
        begun = record.begun.pop(seq, None)
        if begun is None:
            return  # told before
        since_s, nbytes = begun
        total = record.total
        total.end(now)
        total.region.add(now - since_s)
        total.regions += 1
        total.nbytes += nbytes
        record.region_count += 1
        record.nbytes += nbytes
        if len(record.regions) < REGIONS_KEPT:
            record.regions.append((seq, since_s, now, nbytes))
        if self.trace is not None and total.direction == "in":
            args: dict[str, int | str] = {
                "handoff": handoff_name(record.key),
                "seq": seq,
                "bytes": nbytes,
                "from": total.peer,
            }
            self.trace.interval(f"wire {total.lane}", since_s, now, args)

    def _region_damaged(self, record: _Record, seq: int, now: float) -> None:
        if record.begun.pop(seq, None) is not None:
            record.total.end(now)
        record.total.damaged_regions += 1
        record.damaged_regions += 1

    def _resent(self, record: _Record, frames: int) -> None:
        record.total.resent_frames += frames
        record.resent_frames += frames

    def _committed(self, record: _Record, now: float) -> None:
        """Says more than the acknowledgements that have not come, and none will."""
        record.mark("committed", now)
        for seq in list(record.begun):
            self._region_ended(record, seq, now)
        record.total.tail.add(record.marks["committed"] - record.marks["all computed"])

    def _watch_credit(self, record: _Record, state: source.SourceState, now: float) -> None:
        """Stalled: the engine has computed more, no credit is left for it, and all that had credit is announced."""
        wants = isinstance(state, Sending) and state.regions.queued
        if wants and not record.queued:
            if record.stalled_since_s is None:
                record.stalled_since_s = now
                record.stalls += 1
                record.total.stalls += 1
        elif record.stalled_since_s is not None:
            record.stall_s += now - record.stalled_since_s
            record.total.stall_s += now - record.stalled_since_s
            record.stalled_since_s = None

    # -------------------------------------------------------------------------------------------- endings

    def _cut_short(self, record: _Record, now: float) -> None:
        for _ in record.begun:
            record.total.end(now)
        record.begun.clear()

    def _ended_well(self, records: dict[HandoffKey, _Record], record: _Record, now: float) -> None:
        record.total.handoff.add(now - record.begun_at_s)
        self._ended_somehow(records, record, now)

    def _ended_badly(self, records: dict[HandoffKey, _Record], record: _Record, failure: Failure, now: float) -> None:
        record.total.failed += 1
        record.mark("failed", now)
        record.failure = failure
        self._ended_somehow(records, record, now)

    def _ended_somehow(self, records: dict[HandoffKey, _Record], record: _Record, now: float) -> None:
        del records[record.key]
        record.mark("over", now)
        self._ended.append(record)
        if self.on_ended is not None:
            self.on_ended(_times(record))
        if self.trace is not None:
            total = record.total
            args: Args = {
                "handoff": handoff_name(record.key), "request": record.request_id, "peer": total.peer,
                "lane": total.lane, "tokens": record.tokens, "bytes": record.nbytes, "failure": _told(record.failure),
            }  # fmt: skip
            self.trace.interval(f"hand-offs {total.direction}", record.begun_at_s, now, args)

    def _total(self, peer: WorkerId, lane: str, direction: Direction) -> _Total:
        total = self._totals.get((peer, lane, direction))
        if total is None:
            total = self._totals[peer, lane, direction] = _Total(peer, lane, direction)
        return total

    # ----------------------------------------------------------------------------------------------- tells

    def flows(self, now: float) -> list[Flow]:
        """One for each pair, lane and direction that has had a hand-off."""
        return [_flow(total, now) for _, total in sorted(self._totals.items()) if total.lane or total.failed]

    def handoffs(self) -> list[HandoffTimes]:
        """The last ones that ended, oldest first, and then those that are open."""
        live = sorted([*self._sinks.values(), *self._sources.values()], key=lambda record: record.begun_at_s)
        return [_times(record) for record in (*self._ended, *live)]


def handoff_name(key: HandoffKey) -> str:
    """The same on both sides."""
    return f"{key.handoff:016x}/{key.attempt}"


def flow_of(item: object) -> str:
    """The hand-off that a command or event of `baton.transfer.api` is about, by name; "": it is none. Nor is the
    release of the source's pages: a hand-off's way ends where its KV was wanted."""
    if isinstance(item, SinkCommand | SourceCommand | SinkEvent | SourceEvent) and not isinstance(item, SourceReleased):
        return handoff_name(item.key)
    return ""


def _flow(total: _Total, now: float) -> Flow:
    return Flow(
        peer=total.peer,
        lane=total.lane,
        direction=total.direction,
        busy_s=total.busy_s + (now - total.busy_since_s if total.under_way else 0.0),
        nbytes=total.nbytes,
        regions=total.regions,
        region=_latencies(total.region),
        handoff=_latencies(total.handoff),
        tail=_latencies(total.tail),
        failed=total.failed,
        queued=total.queued,
        queue_s=total.queue_s,
        resent_frames=total.resent_frames,
        damaged_regions=total.damaged_regions,
        lane_failures=total.lane_failures,
        lane_changes=total.lane_changes,
        stalls=total.stalls,
        stall_s=total.stall_s,
    )


def _latencies(histogram: LatencyHistogram) -> Latencies:
    return Latencies(counts=tuple(histogram.counts), total_s=histogram.total_s, longest_s=histogram.longest_s)


def _told(failure: Failure | None) -> str:
    return "" if failure is None else f"{failure.code}: {failure.reason}"


def _times(record: _Record) -> HandoffTimes:
    outcome: Outcome = "failed" if record.failure is not None else "committed" if "over" in record.marks else "open"
    return HandoffTimes(
        handoff=handoff_name(record.key),
        direction=record.total.direction,
        request_id=record.request_id,
        peer=record.total.peer,
        lane=record.total.lane,
        tokens=record.tokens,
        begun_at_s=record.begun_at_s,
        outcome=outcome,
        reason=_told(record.failure),
        marks=dict(record.marks),
        regions=tuple(
            RegionTimes(seq, begun_s - record.begun_at_s, ended_s - record.begun_at_s, nbytes)
            for seq, begun_s, ended_s, nbytes in record.regions
        ),
        region_count=record.region_count,
        nbytes=record.nbytes,
        resent_frames=record.resent_frames,
        damaged_regions=record.damaged_regions,
        stalls=record.stalls,
        stall_s=record.stall_s,
        queued_s=record.queued_s,
        scatter_s=record.scatter_s,
        code="" if record.failure is None else str(record.failure.code),
        trace=record.trace,
    )
