"""Named points in time. Owns which are due; never looks at a clock.

Each name has at most one deadline; setting it again moves it. Costs O(log n) and never scans.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class Deadlines(Generic[Name]):
    """A heap whose moved and dropped entries are skipped when they surface, and swept when they are the majority."""

    def __init__(self) -> None:
        self._due: dict[Name, tuple[float, int, Name]] = {}  # the entry of the heap that counts
        self._heap: list[tuple[float, int, Name]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._due)

    def get(self, name: Name) -> float | None:
        """When `name` is due; None: not at all."""
        due = self._due.get(name)
        return None if due is None else due[0]

    def set(self, name: Name, at_s: float) -> None:
        """`name` is due at `at_s`, and at no other time."""
        self._sequence += 1
        self._due[name] = entry = (at_s, self._sequence, name)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 4 * len(self._due):
            self._heap = list(self._due.values())
            heapq.heapify(self._heap)

    def drop(self, name: Name) -> None:
        """`name` is not due any more; fine when it never was."""
        self._due.pop(name, None)

    def next_s(self) -> float | None:
        """When the earliest is due."""
        heap = self._heap
        while heap:
            first = heap[0]
            if self._due.get(first[2]) is first:
                return first[0]
            heapq.heappop(heap)
        return None

    def pop_due(self, now: float) -> list[Name]:
        """Removes and returns what is due, earliest first; those set at the same time in the order of setting."""
        due: list[Name] = []
        while (at_s := self.next_s()) is not None and at_s <= now:
            _, _, name = heapq.heappop(self._heap)
            del self._due[name]
            due.append(name)
        return due


def earliest(*due_s: float | None) -> float | None:
    """Of those that are due at all."""
    first: float | None = None
    for at_s in due_s:
        if at_s is not None and (first is None or at_s < first):
            first = at_s
    return first
