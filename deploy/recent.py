"""What the last minute of a gateway was like: rates, latencies, and the requests that took longest. Pure.

Owns: a ring of short spans, each counted for itself, so that what is over is forgotten as a whole and memory is
bounded. Never: a clock, or what requests said.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from typing import final

from msgspec import Struct
from msgspec.structs import replace

from baton.common.histogram import LatencyHistogram, quantile_s
from baton.common.messages import Timeline

SPAN_S = 5.0
SPANS = 12
SLOWEST = 8


class Quantiles(Struct, frozen=True, kw_only=True):
    """In seconds; None: there was nothing."""

    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None


class SlowRequest(Struct, frozen=True, kw_only=True):
    """One that was answered. `ended_s_ago`: when."""

    request_id: str
    ended_s_ago: float = 0.0
    total_s: float
    ttft_s: float | None
    prompt_tokens: int
    completion_tokens: int
    timeline: Timeline


class Recent(Struct, frozen=True, kw_only=True):
    """The last `span_s` seconds, as one gateway saw them. `outcomes`: by stop, length, or an error code."""

    span_s: float = 0.0
    outcomes: dict[str, int] = {}
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: Quantiles = Quantiles()
    itl: Quantiles = Quantiles()
    total: Quantiles = Quantiles()
    slowest: tuple[SlowRequest, ...] = ()  # the slowest first


@final
class _Span:
    def __init__(self, number: int) -> None:
        self.number = number
        self.outcomes: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.ttft, self.itl, self.total = LatencyHistogram(), LatencyHistogram(), LatencyHistogram()
        self.slowest: list[tuple[float, str, float, SlowRequest]] = []  # a heap of (total, id, ended at, request)


@final
class RecentBook:
    """Counts what happens; `look` adds up. `now` never goes back."""

    def __init__(self, now: float) -> None:
        self._begun_s = now
        self._spans: deque[_Span] = deque(maxlen=SPANS)

    def tokens(self, now: float, count: int, since_last_s: float, *, first: bool) -> None:
        span = self._span(now)
        span.output_tokens += count
        (span.ttft if first else span.itl).add(since_last_s)

    def ended(self, now: float, outcome: str) -> None:
        self._span(now).outcomes[outcome] += 1

    def finished(self, now: float, request: SlowRequest) -> None:
        """One that was answered; also `ended`."""
        span = self._span(now)
        span.prompt_tokens += request.prompt_tokens
        span.total.add(request.total_s)
        entry = (request.total_s, request.request_id, now, request)
        push = heapq.heappush if len(span.slowest) < SLOWEST else heapq.heappushpop
        push(span.slowest, entry)

    def look(self, now: float) -> Recent:
        oldest = math.floor(now / SPAN_S) - SPANS + 1
        spans = [span for span in self._spans if span.number >= oldest]
        slowest = heapq.nlargest(SLOWEST, (entry for span in spans for entry in span.slowest))
        outcomes: Counter[str] = Counter()
        for span in spans:
            outcomes += span.outcomes
        return Recent(
            span_s=now - max(self._begun_s, oldest * SPAN_S),
            outcomes=dict(outcomes),
            prompt_tokens=sum(span.prompt_tokens for span in spans),
            output_tokens=sum(span.output_tokens for span in spans),
            ttft=_quantiles([span.ttft for span in spans]),
            itl=_quantiles([span.itl for span in spans]),
            total=_quantiles([span.total for span in spans]),
            slowest=tuple(replace(request, ended_s_ago=now - ended_s) for _, _, ended_s, request in slowest),
        )

    def _span(self, now: float) -> _Span:
        number = math.floor(now / SPAN_S)
        if not self._spans or self._spans[-1].number != number:
            self._spans.append(_Span(number))
        return self._spans[-1]


def _quantiles(histograms: list[LatencyHistogram]) -> Quantiles:
    counts = [sum(column) for column in zip(*(one.counts for one in histograms), strict=True)]
    longest_s = max((one.longest_s for one in histograms), default=0.0)
    p50_s, p90_s, p99_s = (quantile_s(counts, share, longest_s) for share in (0.5, 0.9, 0.99))
    return Quantiles(p50_s=p50_s, p90_s=p90_s, p99_s=p99_s)
