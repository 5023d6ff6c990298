"""Whose region is next: fair between hand-offs, small ones soon, urgent ones sooner, nobody never. Pure.

Owns: the order of what waits. Never: a clock, a lane, or what an item is.

Between classes of priority: each step doubles the share of the bytes, and a class without work leaves its share to the
rest (start-time fair queueing). Within a class a hand-off that is new stands in a line of its own until its first turn
is used up; that line and the one of all others get equal shares, so that a small hand-off is soon done, and no stream
of new ones holds up the others. In a line: turns of TURN_BYTES, in bytes (surplus round robin: what was overdrawn is
paid with later turns, so regions may be larger than a turn). Cost: O(1) for an item of at most TURN_BYTES, amortized; a
larger one counts as so many.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.common.ids import HandoffKey

TURN_BYTES = 1 << 20
LEVELS = 3
"""Priorities beyond this many steps from 0 count as this many: shares differ by up to 2 ** (2 * LEVELS)."""

T = TypeVar("T")


@dataclass(slots=True)
class _Flow(Generic[T]):
    """One hand-off. `balance`: what it may still take in this turn."""

    level: int
    balance: int
    items: deque[tuple[T, int]] = field(default_factory=deque)


@dataclass(slots=True)
class _Line(Generic[T]):
    """Hand-offs that have something waiting. `passed`: what the line has had."""

    flows: OrderedDict[HandoffKey, _Flow[T]] = field(default_factory=OrderedDict)
    passed: float = 0.0


@dataclass(slots=True)
class _Class(Generic[T]):
    """The hand-offs of one priority. `passed`: what the class has had, by its weight."""

    weight: float
    fresh: _Line[T] = field(default_factory=_Line)
    known: _Line[T] = field(default_factory=_Line)
    passed: float = 0.0
    line_passed: float = 0.0  # of the line that was served last

    @property
    def has_work(self) -> bool:
        return bool(self.fresh.flows or self.known.flows)

    def enter(self, line: _Line[T], key: HandoffKey, flow: _Flow[T]) -> None:
        """At its end."""
        if not line.flows:
            line.passed = max(line.passed, self.line_passed)  # a rest saves nothing up
        line.flows[key] = flow

    def next_line(self) -> _Line[T]:
        fresh_is_next = not self.known.flows or self.fresh.passed <= self.known.passed
        return self.fresh if self.fresh.flows and fresh_is_next else self.known


class Turns(Generic[T]):
    """Items of one hand-off keep their order. As large as what waits, and one entry per hand-off until `forget`."""

    def __init__(self) -> None:
        self._flows: dict[HandoffKey, _Flow[T]] = {}
        self._classes: dict[int, _Class[T]] = {}
        self._passed = 0.0  # of the class that was served last
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def __contains__(self, key: HandoffKey) -> bool:
        """Whether the hand-off has not been forgotten."""
        return key in self._flows

    @property
    def remembers(self) -> bool:
        """Whether any hand-off has not been forgotten."""
        return bool(self._flows)

    def put(self, key: HandoffKey, priority: int, item: T, cost: int) -> None:
        """`cost` in bytes. The priority of a hand-off is that of its first item."""
        level = max(-LEVELS, min(LEVELS, priority))
        flow = self._flows.get(key)
        one = self._classes.setdefault(level if flow is None else flow.level, _Class(2.0**-level))
        if not one.has_work:
            one.passed = max(one.passed, self._passed)
        if flow is None:
            flow = self._flows[key] = _Flow(level, TURN_BYTES)
            one.enter(one.fresh, key, flow)
        elif not flow.items:
            flow.balance = min(flow.balance, 0) + TURN_BYTES
            one.enter(one.known, key, flow)
        flow.items.append((item, cost))
        self._waiting += 1

    def take(self) -> T | None:
        """The next one; None: nothing waits."""
        waiting = [one for one in self._classes.values() if one.has_work]
        if not waiting:
            return None
        one = min(waiting, key=lambda one: (one.passed, -one.weight))
        line = one.next_line()
        key, flow = next(iter(line.flows.items()))
        while flow.balance <= 0:
            flow.balance += TURN_BYTES
            line.flows.move_to_end(key)
            key, flow = next(iter(line.flows.items()))
        item, cost = flow.items.popleft()
        flow.balance -= cost
        self._waiting -= 1
        self._passed, one.line_passed = one.passed, line.passed
        one.passed += cost / one.weight
        line.passed += cost
        if not flow.items or flow.balance <= 0:
            del line.flows[key]
        if flow.items and flow.balance <= 0:
            flow.balance += TURN_BYTES
            one.enter(one.known, key, flow)
        return item

    def forget(self, key: HandoffKey) -> None:
        """Drops what waits of the hand-off, and what it was. Unknown is fine."""
        flow = self._flows.pop(key, None)
        if flow is not None:
            self._waiting -= len(flow.items)
            one = self._classes[flow.level]
            one.fresh.flows.pop(key, None)
            one.known.flows.pop(key, None)
