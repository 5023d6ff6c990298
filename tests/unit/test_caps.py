"""Bandwidth caps, on a clock of their own."""

from __future__ import annotations

import pytest

from baton.transfer.caps import BURST_S, Caps, TokenBucket

MB = 1_000_000


def test_over_time_the_cap_is_exact_whatever_the_size_of_regions() -> None:
    for nbytes in (MB // 10, 4 * MB, 64 * MB):
        bucket, now, moved = TokenBucket(1.0), 10.0, 0
        while now < 12.0:
            now += bucket.wait_s(now)
            assert bucket.wait_s(now) == 0.0
            bucket.spend(nbytes, now)
            moved += nbytes
            now += 1e-9
        assert moved == pytest.approx(2e9 + BURST_S * 1e9, abs=2 * nbytes + 1000)


def test_a_rest_saves_up_no_more_than_a_burst() -> None:
    bucket = TokenBucket(1.0)
    bucket.spend(0, 1000.0)
    started = 0
    while bucket.wait_s(1000.0) == 0.0:
        bucket.spend(MB, 1000.0)
        started += 1
    assert started * MB == pytest.approx(BURST_S * 1e9, abs=MB + 1)


def test_a_lane_is_bound_by_its_own_cap_and_by_that_of_the_worker() -> None:
    caps = Caps(1.0, {"zmq": 0.1, "local": 0.0})
    caps.spend("zmq", 20 * MB, 0.0)
    assert caps.wait_s("zmq", 0.0) == pytest.approx((20 - 0.1 * 1000 * BURST_S) / 100)
    assert caps.wait_s("local", 0.0) == pytest.approx((20 - 1000 * BURST_S) / 1000)
    caps.spend("local", 0, 0.2)
    assert caps.wait_s("local", 0.2) == caps.wait_s("zmq", 0.2) == 0.0


def test_no_cap_no_wait() -> None:
    caps = Caps(0.0, {})
    caps.spend("zmq", 1 << 40, 0.0)
    assert caps.wait_s("zmq", 0.0) == 0.0
