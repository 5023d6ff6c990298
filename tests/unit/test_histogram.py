"""Latencies in fixed buckets: what is counted where, and what quantiles say of it."""

from __future__ import annotations

import pytest

from baton.common.histogram import LATENCY_BOUNDS_S, LatencyHistogram, quantile_s


def counted(*latencies_s: float) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for one in latencies_s:
        histogram.add(one)
    return histogram


def test_bounds_are_inclusive_and_nothing_is_too_slow_to_be_counted() -> None:
    histogram = counted(0.0, LATENCY_BOUNDS_S[0], LATENCY_BOUNDS_S[1], 1e6)
    assert histogram.counts == [2, 1, *[0] * (len(LATENCY_BOUNDS_S) - 2), 1]
    assert histogram.total_s == pytest.approx(1e6 + LATENCY_BOUNDS_S[0] + LATENCY_BOUNDS_S[1])


def test_quantiles_lie_in_the_bucket_of_what_they_are_of() -> None:
    counts = counted(*[0.003] * 98, 0.2, 0.2).counts
    assert 0.0025 < (quantile_s(counts, 0.5, 0.2) or 0.0) <= 0.005
    assert 0.1 < (quantile_s(counts, 0.99, 0.2) or 0.0) <= 0.2
    assert quantile_s(LatencyHistogram().counts, 0.5, 0.0) is None


@pytest.mark.parametrize("longest_s", [33.0, 1e6])
def test_no_quantile_is_longer_than_the_longest(longest_s: float) -> None:
    histogram = counted(0.003, longest_s)
    assert quantile_s(histogram.counts, 1.0, histogram.longest_s) == longest_s
    assert 30.0 < (quantile_s(histogram.counts, 0.99, histogram.longest_s) or 0.0) <= longest_s
