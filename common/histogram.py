"""Latencies counted in fixed buckets. Pure.

Owns: the bounds, so that histograms of all processes can be added up. Never: a clock, or single values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LATENCY_BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Upper bounds, each inclusive; what is slower than the last is counted behind it."""


class LatencyHistogram:
    """How often each latency came. Adding one allocates nothing."""

    __slots__ = ("counts", "longest_s", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.total_s = 0.0
        self.longest_s = 0.0

    def add(self, latency_s: float) -> None:
        self.counts[bisect_left(LATENCY_BOUNDS_S, latency_s)] += 1
        self.total_s += latency_s
        self.longest_s = max(self.longest_s, latency_s)


def quantile_s(counts: Sequence[int], share: float, longest_s: float) -> float | None:
    """The latency that `share` of them did not exceed, taken as evenly spread within its bucket, the last of which ends
    with the longest. None: there are none."""
    assert 0.0 <= share <= 1.0, share
    wanted = share * sum(counts)
    if not any(counts):
        return None
    below = 0
    for index, count in enumerate(counts[: len(LATENCY_BOUNDS_S)]):
        if count and below + count >= wanted:
            low_s = LATENCY_BOUNDS_S[index - 1] if index else 0.0
            return low_s + (min(LATENCY_BOUNDS_S[index], longest_s) - low_s) * (wanted - below) / count
        below += count
    return longest_s
