"""What a prefix cache is: the border between tokens-and-pages (behind it) and requests (in front of it).

A backend owns the pages that were given to it and knows which tokens they hold. It never sees a request or a record,
never frees a page itself (`evict` and `clear` hand pages back, the pool frees them), and never decides how much of a
request is valid: the caller says so.

Lengths and spans are in tokens; lengths are multiples of the page size unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from baton.common.kv.errors import OwnershipError

I32 = npt.NDArray[np.int32]


class Span(NamedTuple):
    """Tokens [start, end)."""

    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


class PrefixLease:
    """The right to read the pages of [0, length): none of them is evicted while it lives. Ends exactly once, by
    `PrefixCache.unlock`. Not copyable, not picklable: two holders of one lease would end it twice."""

    __slots__ = ("length", "live")

    def __init__(self, length: int) -> None:
        self.length = length
        self.live = True

    def end(self) -> None:
        """For backends: marks the lease as over; the second time raises."""
        if not self.live:
            raise OwnershipError(f"a lease over {self.length} tokens was unlocked twice")
        self.live = False

    def __copy__(self) -> NoReturn:
        raise TypeError("a lease is not copied: it is moved")

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a lease is not copied: it is moved")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a lease does not leave its process")


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Where the longest known prefix ended when it was asked for; holds nothing, so it may be out of date by the time
    it is locked."""

    length: int


@dataclass(frozen=True, slots=True)
class Inserted:
    """What became of the pages of [start, end) that were given to the cache. `locked`, `duplicate` and `tail` follow
    one another and add up to that span.

    locked: the cache owns these pages now, and `lease` keeps them. duplicate: the cache holds the same tokens in pages
    of its own; the given ones are still the caller's, who frees them. tail: not kept (no whole page, or the backend
    does not want it); still the caller's. `pages` are the cache's pages of [start, lease.length), to read from now on.
    """

    lease: PrefixLease | None
    duplicate: Span
    locked: Span
    tail: Span
    pages: I32


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Gauges in pages, nodes and entries of the eviction queue (stale ones included); counters since start."""

    nodes: int
    leases: int
    evictable_pages: int
    locked_pages: int
    eviction_queue: int
    evicted_pages_total: int


class PrefixCache(Protocol):
    """Implementations: `radix.RadixCache` (sharing), `chunk.ChunkCache` (none)."""

    @property
    def evictable_pages(self) -> int: ...

    @property
    def locked_pages(self) -> int: ...

    def match_prefix(self, tokens: I32) -> PrefixMatch:
        """The longest known prefix. Pure: does not count as a use."""
        ...

    def evictable_pages_in(self, match: PrefixMatch) -> int:
        """How many pages of the match are evictable now, and would no longer be once it is locked."""
        ...

    def lock(self, match: PrefixMatch) -> PrefixLease | None:
        """A lease over exactly the match; None when it is empty, or when part of it (or of what lay behind it) was
        evicted since."""
        ...

    def unlock(self, lease: PrefixLease) -> None:
        """Consumes the lease."""
        ...

    def pages(self, lease: PrefixLease) -> I32:
        """The pages of [0, lease.length), in order."""
        ...

    def insert(self, lease: PrefixLease | None, tokens: I32, pages: I32) -> Inserted:
        """Offers `pages`, which hold tokens[start:] where start is the lease's length (0 without one). Consumes the
        lease; the result carries the one that replaces it."""
        ...

    def evict(self, pages: int) -> I32:
        """Gives up at most this many evictable pages, least recently used first, exactly as many when it can."""
        ...

    def clear(self) -> I32:
        """Gives up everything that is evictable."""
        ...

    def cached_pages(self) -> tuple[I32, I32]:
        """All pages the cache owns: (evictable, locked)."""
        ...

    def check(self, leases: Iterable[PrefixLease]) -> None:
        """Walks everything. Raises InvariantViolation unless it is whole and locked by exactly these leases."""
        ...

    def stats(self) -> PrefixStats: ...
