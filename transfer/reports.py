"""What a worker tells of itself and its hand-offs: the words of `baton status`, `/metrics` and `baton handoffs`. Values
only. What hand-offs did is counted by `session/ledger.py`, since the process started; times are seconds.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from baton.common.histogram import LATENCY_BOUNDS_S
from baton.common.kv.layout import Component
from baton.common.kv.page_layout import PageLayout
from baton.common.messages import Load
from baton.common.spans import NOT_TRACED

Direction = Literal["in", "out"]
"""Of KV, seen from the worker that tells: a decode worker receives, a prefill worker sends."""

Outcome = Literal["open", "committed", "failed"]

_NO_COUNTS = (0,) * (len(LATENCY_BOUNDS_S) + 1)


class Latencies(Struct, frozen=True, kw_only=True):
    """`counts[i]` of them took at most `LATENCY_BOUNDS_S[i]` and more than the bound before; the last one, more."""

    counts: tuple[int, ...] = _NO_COUNTS
    total_s: float = 0.0
    longest_s: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)


class Flow(Struct, frozen=True, kw_only=True):
    """What has moved between a worker and one peer over one lane. `lane` is "" for hand-offs that ended before they
    got one."""

    peer: str
    lane: str
    direction: Direction
    recent_gbps: float = 0.0  # while it had work, over the last of it; 0.0: not known
    busy_s: float = 0.0  # some region was under way
    nbytes: int = 0
    regions: int = 0
    region: Latencies = Latencies()  # in: announced until in its pages; out: announced until acknowledged
    handoff: Latencies = Latencies()  # in: asked for until committed; out: offered until its pages were free again
    tail: Latencies = Latencies()  # out: all computed until committed: what the request waited for the transfer alone
    failed: int = 0  # hand-offs that ended without commit
    queued: int = 0
    queue_s: float = 0.0  # in: hand-offs that waited for a lane and staging; out: regions that waited for their turn
    resent_frames: int = 0
    damaged_regions: int = 0  # asked for a second time
    lane_failures: int = 0  # hand-offs that broke with the lane
    lane_changes: int = 0  # hand-offs that came by this lane after one that came by another
    stalls: int = 0
    stall_s: float = 0.0  # out: computed regions waited for credit, and nothing else was left to do

    @property
    def mean_gbps(self) -> float:
        return self.nbytes / self.busy_s / 1e9 if self.busy_s > 0 else 0.0


class RegionTimes(Struct, frozen=True, array_like=True):
    """One region of a hand-off, in seconds since that began."""

    seq: int
    begun_s: float
    ended_s: float
    nbytes: int


class HandoffTimes(Struct, frozen=True, kw_only=True):
    """The life of one hand-off. `marks`: what happened, and when, in seconds since it began; `regions`: the first of
    them, with what `Flow.region` measures."""

    handoff: str  # id/attempt
    direction: Direction
    request_id: str
    peer: str
    lane: str
    tokens: int
    begun_at_s: float  # on the clock of the process that tells
    outcome: Outcome
    reason: str = ""  # why it failed
    marks: dict[str, float]
    regions: tuple[RegionTimes, ...] = ()
    region_count: int = 0
    nbytes: int = 0
    resent_frames: int = 0
    damaged_regions: int = 0
    stalls: int = 0
    stall_s: float = 0.0
    queued_s: float | None = None  # out: of its prompt, until its engine had pages for it; None: it did not come so far
    scatter_s: float = 0.0  # in: writing regions into pages
    code: str = ""  # why it failed, for programs
    trace: str = NOT_TRACED


class WorkerMetrics(Struct, frozen=True, kw_only=True):
    """What is scraped of a worker, cheap to tell. `slots`: staging slots by ring ("receive", "send") and state ("free",
    "reserved", "leased"); `tiers`: as the tier thread counts them; `trace_spans`: sent to a collector, and lost;
    `refused`: what came over a socket and was not heard (`refusals_of`)."""

    flows: tuple[Flow, ...] = ()
    slots: dict[str, dict[str, int]] = {}
    tiers: dict[str, int] = {}
    trace_spans: dict[str, int] = {}
    refused: dict[str, int] = {}


class LaneReport(Struct, frozen=True, kw_only=True):
    """One data lane from a peer that this worker receives from."""

    peer: str
    lane: str
    status: str
    reason: str
    gbps: float  # lately reached, or found by a probe; 0.0: not known


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """One worker's account of itself. `census` holds pages per owner class; they add up to `census["total"]`. It is
    that of `component`, the model's first; `components` has those of the others, by name."""

    worker: str
    role: str
    incarnation: int
    pid: int
    cores: tuple[int, ...]
    load: Load
    component: str = Component.FULL
    census: dict[str, int]
    components: dict[str, dict[str, int]] = {}
    lanes: tuple[LaneReport, ...]
    flows: tuple[Flow, ...]
    hand_offs: int
    counters: dict[str, int]
    chunk_predictor: str = "off"  # or the formula that chooses chunks; or "failed: " and why
    forward_path: str  # how a step is computed: fused or generic (ADR 0028), or fake
    page_layout: str = PageLayout.CANONICAL  # in which order K and V lie inside a page (ADR 0031)
