"""Virtual time: a heap of things to do, and the trace of what was done. Owns the clock; knows nothing of Baton.

Same seed, same trace: all randomness comes from one `random.Random`, ties are broken by the order of scheduling, and
nothing here iterates over a set.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from array import array
from collections.abc import Callable
from random import Random
from typing import NamedTuple, Protocol

MOST_AT_ONE_TIME = 10_000
HASHED_AT_ONCE = 4096
"""Lines of the trace. They are collected as they are: hashing each alone costs more than some events do."""


class Actor(Protocol):
    """Somebody whose events come to nothing when it is dead, and wait while it is stopped."""

    name: str
    alive: bool
    paused: bool
    backlog: list[Event]


Event = tuple[float, int, Actor | None, str, Callable[..., None], tuple[object, ...]]
"""When, a number that breaks ties, whose, a label for the trace, and what to call. An event of nobody has no label."""


class Clock(NamedTuple):
    """One process's: virtual time runs at `rate` for it, and began at `offset_s`."""

    offset_s: float = 0.0
    rate: float = 1.0

    def local_s(self, world_s: float) -> float:
        return world_s * self.rate + self.offset_s

    def world_s(self, local_s: float) -> float:
        """The first moment at which it shows `local_s`, or more."""
        world_s = (local_s - self.offset_s) / self.rate
        while self.local_s(world_s) < local_s:  # rounded
            world_s = math.nextafter(world_s, math.inf)
        return world_s


class Schedule:
    """`at`/`after` enter a thing to do, `run_until` does all that are due."""

    def __init__(self, seed: int, keep_trace: bool = False) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self._heap: list[Event] = []
        self._sequence = 0
        self._at_this_time = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._times = array("d")
        self._lines: list[str] = []
        self.trace: list[str] | None = [] if keep_trace else None
        self.events = 0

    def at(self, time_s: float, action: Callable[..., None], *args: object) -> None:
        self.enter(time_s, None, "", action, args)

    def after(self, delay_s: float, action: Callable[..., None], *args: object) -> None:
        self.enter(self.now + delay_s, None, "", action, args)

    def enter(
        self,
        time_s: float,
        actor: Actor | None,
        label: str,
        action: Callable[..., None],
        args: tuple[object, ...] = (),
    ) -> None:
        """For `actor`, at that time or now, whichever is later."""
        self._sequence = number = self._sequence + 1
        now = self.now
        heapq.heappush(self._heap, (time_s if time_s > now else now, number, actor, label, action, args))

    def run_until(self, end_s: float) -> None:
        """Everything that is due by then, also what is entered on the way. Afterwards it is `end_s`."""
        heap, pop, note = self._heap, heapq.heappop, self.note
        while heap and heap[0][0] <= end_s:
            event = pop(heap)
            time_s, _, actor, label, action, args = event
            if time_s == self.now:
                self._at_this_time += 1
                assert self._at_this_time < MOST_AT_ONE_TIME, "time stands still: something is due again and again"
            else:
                self._at_this_time = 0
                self.now = time_s
            self.events += 1
            if actor is None:
                action(*args)
            elif actor.alive:
                if actor.paused:
                    actor.backlog.append(event)
                else:
                    note(actor.name, label)
                    action(*args)
        self.now = max(self.now, end_s)

    def note(self, name: str, label: str) -> None:
        """One line of the trace: who, and what."""
        self._times.append(self.now)
        lines = self._lines
        lines += (name, label)
        if self.trace is not None:
            self.trace.append(f"{self.now:.6f} {name} {label}")
        if len(lines) > 2 * HASHED_AT_ONCE:
            self._hash()

    def _hash(self) -> None:
        self._digest.update(self._times.tobytes())
        self._digest.update("\n".join(self._lines).encode())
        self._times, self._lines = array("d"), []

    @property
    def trace_hash(self) -> str:
        """Of the times, to the bit, and the lines so far."""
        self._hash()
        return self._digest.hexdigest()
