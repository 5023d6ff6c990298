"""How much may move: token buckets for the whole worker and for each lane, in one direction. Pure.

A region starts while nothing is owed, whatever its size, and is paid off at the rate of the cap before the next one
starts. So any size of region works, and over time the cap is exact.
"""

from __future__ import annotations

from collections.abc import Mapping

BURST_S = 0.005
"""What may be saved up while nothing moves."""


class TokenBucket:
    """`gbps`: gigabytes (1e9) per second, above 0."""

    def __init__(self, gbps: float) -> None:
        assert gbps > 0, gbps
        self._rate = gbps * 1e9
        self._level = self._rate * BURST_S
        self._at_s = 0.0

    def wait_s(self, now: float) -> float:
        """Until something may start; 0.0: now."""
        self._fill(now)
        return -self._level / self._rate if self._level <= -1.0 else 0.0  # a part of a byte is rounding

    def spend(self, nbytes: int, now: float) -> None:
        self._fill(now)
        self._level -= nbytes

    def _fill(self, now: float) -> None:
        self._level = min(self._rate * BURST_S, self._level + (now - self._at_s) * self._rate)
        self._at_s = now


class Caps:
    """`max_gbps` of everything, `lane_max_gbps` by lane; 0: no limit."""

    def __init__(self, max_gbps: float, lane_max_gbps: Mapping[str, float]) -> None:
        self._all = TokenBucket(max_gbps) if max_gbps else None
        self._lanes = {lane: TokenBucket(gbps) for lane, gbps in lane_max_gbps.items() if gbps}

    def wait_s(self, lane: str, now: float) -> float:
        """Until a region may start on `lane`; 0.0: now."""
        return max((bucket.wait_s(now) for bucket in self._buckets(lane)), default=0.0)

    def spend(self, lane: str, nbytes: int, now: float) -> None:
        for bucket in self._buckets(lane):
            bucket.spend(nbytes, now)

    def _buckets(self, lane: str) -> list[TokenBucket]:
        return [bucket for bucket in (self._all, self._lanes.get(lane)) if bucket is not None]
