"""What a pool's prefix tree has come to hold and holds no more, as events for those who are elsewhere.

Owns: the names of the cached pages of full attention, and the events since somebody last took them. Never: a page, a
decision, or a reader. It is told by the pool what the tree took and gave up (`Supply`), so that it is the same for
every prefix cache, and costs nothing but the naming of each page that is new.

A page is named by all tokens up to its end: a chain of 64-bit hashes. Names are hints about where a prefix may be
found; nothing is ever read by them (what is read by name has a cryptographic one, see `tiers.keys`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Struct

from baton.common.kv.prefix.interface import I32

U64 = npt.NDArray[np.uint64]

NO_PARENT = 0
"""The name of what lies before a first page; no page has it."""
TOKEN_BYTES = 4


class PagesStored(Struct, frozen=True):
    """The tree has these pages now: one after the other, the first one behind the page `parent`. `tokens` of all."""

    parent: int
    names: list[int]
    tokens: I32


class PagesRemoved(Struct, frozen=True):
    """It has these no more."""

    names: list[int]


class AllRemoved(Struct, frozen=True):
    """It has nothing any more; these were there."""

    names: list[int]


PageEvent = PagesStored | PagesRemoved | AllRemoved


def page_names(tokens: I32, page_size: int, parent: int = NO_PARENT) -> Iterator[int]:
    """Of the whole pages of `tokens`, which follow the page `parent`. Made one by one, as they are asked for."""
    step = page_size * TOKEN_BYTES
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    for start in range(0, len(data) - step + 1, step):
        parent = xxhash.xxh3_64_intdigest(data[start : start + step], parent) or 1
        yield parent


@final
class PageLog:
    """Of one pool, with `num_pages` ids. The events wait until they are taken."""

    def __init__(self, page_size: int, num_pages: int) -> None:
        self._page_size = page_size
        self._names = np.zeros(num_pages, dtype=np.uint64)  # by page id; NO_PARENT: not cached
        self.cached = 0  # pages
        self._events: list[PageEvent] = []

    def stored(self, before: int, tokens: I32, pages: I32) -> None:
        """The tree took `pages`, which hold `tokens`; they follow the cached page `before` (0: nothing)."""
        parent = int(self._names[before]) if before else NO_PARENT
        assert parent or not before, f"page {before} is not cached"
        names = list(page_names(tokens, self._page_size, parent))
        assert len(names) == len(pages), (len(names), len(pages))
        self._names[pages] = names
        self.cached += len(pages)
        self._events.append(PagesStored(parent, names, tokens.copy()))

    def removed(self, pages: I32) -> None:
        """The tree gave them up; perhaps they were all that it had."""
        if len(pages):
            names = self._names[pages].tolist()
            self._names[pages] = NO_PARENT
            self.cached -= len(pages)
            self._events.append(PagesRemoved(names) if self.cached else AllRemoved(names))

    @property
    def waiting(self) -> bool:
        """There are events."""
        return bool(self._events)

    def take(self) -> list[PageEvent]:
        """What happened since the last time, in order."""
        events, self._events = self._events, []
        return events

    def held(self) -> U64:
        """The names of everything that is cached now, in no order: a snapshot, with all events in it."""
        held: U64 = self._names[self._names != NO_PARENT]
        return held
