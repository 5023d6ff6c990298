"""Virtual time: a heap of things to do, and the trace of what was done. Owns the clock; knows nothing of Baton.

Same seed, same trace: all randomness comes from one `random.Random`, ties are broken by the order of scheduling, and
nothing here iterates over a set.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from random import Random

from baton.common.clock import VirtualClock

MOST_AT_ONE_TIME = 10_000


class Schedule:
    """`at`/`after` enter a thing to do, `run_next` does the earliest."""

    def __init__(self, seed: int, keep_trace: bool = False) -> None:
        self.rng = Random(seed)
        self.clock = VirtualClock()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._at_this_time = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self.trace: list[str] | None = [] if keep_trace else None
        self.events = 0

    @property
    def now(self) -> float:
        return self.clock.now()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._sequence, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def run_next(self) -> bool:
        """False when nothing is left to do."""
        if not self._heap:
            return False
        time_s, _, action = heapq.heappop(self._heap)
        self._at_this_time = self._at_this_time + 1 if time_s == self.now else 0
        assert self._at_this_time < MOST_AT_ONE_TIME, "time stands still: something is due again and again"
        self.clock.advance_to(time_s)
        self.events += 1
        action()
        return True

    def next_s(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def note(self, line: str) -> None:
        """One line of the trace."""
        stamped = f"{self.now:.6f} {line}"
        self._digest.update(stamped.encode())
        if self.trace is not None:
            self.trace.append(stamped)

    @property
    def trace_hash(self) -> str:
        return self._digest.hexdigest()
