"""A bounded memory of what last happened to pages, for the message of a violation and for "who holds page N since
when". Owns the ring; never decides anything. Off unless a pool is given one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton.common.clock import Clock
from baton.common.kv.layout import Component
from baton.common.kv.prefix.interface import I32


@dataclass(frozen=True, slots=True)
class Transition:
    """`pages` changed hands. `row` is the row of the record involved; None for eviction."""

    number: int
    at_s: float
    change: str  # "free -> row", "row -> free", "row -> cached", "duplicate -> free", "cached -> free"
    row: int | None
    pages: I32
    component: Component = Component.FULL

    def __str__(self) -> str:
        return f"#{self.number} at {self.at_s:.3f} s: {self.what}"

    @property
    def what(self) -> str:
        row = "" if self.row is None else f" (row {self.row})"
        return f"{self.change}{row}, {len(self.pages)} pages ({self.component})"


class TransitionLog:
    """The last `capacity` changes; older ones are forgotten."""

    def __init__(self, clock: Clock, capacity: int = 4096) -> None:
        self._clock = clock
        self._ring: deque[Transition] = deque(maxlen=capacity)
        self._count = 0

    def record(self, change: str, pages: I32, row: int | None, component: Component = Component.FULL) -> None:
        """`pages` must not be changed by the caller afterwards."""
        if len(pages):
            self._ring.append(Transition(self._count, self._clock.now(), change, row, pages, component))
            self._count += 1

    def of_page(self, page: int, component: Component = Component.FULL) -> tuple[Transition, ...]:
        """Oldest first."""
        return tuple(e for e in self._ring if e.component is component and (e.pages == page).any())

    def of_row(self, row: int) -> tuple[Transition, ...]:
        """Oldest first; a row serves one request after the other."""
        return tuple(entry for entry in self._ring if entry.row == row)
