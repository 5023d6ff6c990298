"""Where time comes from. Cores are handed `now` as a number; shells read it here and nowhere else."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never run backwards, from an arbitrary origin. Not comparable between processes."""

    def now(self) -> float: ...


class MonotonicClock:
    """The real clock."""

    def now(self) -> float:
        return time.monotonic()


def wall_offset_s(clock: Clock) -> float:
    """Added to a time of `clock` it is one of the wall clock. As good as that one is: processes of one host agree to
    well under a millisecond, hosts as well as their clocks are kept together."""
    before_s, wall_s, after_s = clock.now(), time.time(), clock.now()
    return wall_s - (before_s + after_s) / 2


class VirtualClock:
    """A clock that moves only when it is told to; for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, now_s: float) -> None:
        assert now_s >= self._now_s, f"time runs forwards: {now_s} < {self._now_s}"
        self._now_s = now_s
