"""What a prefix cache is: the border between tokens-and-pages (behind it) and requests (in front of it).

A backend owns the pages and state slots that were given to it and knows which tokens they hold. It never sees a request
or a record, never frees a page itself (`evict` and `clear` hand pages back, the pool frees them), and never decides how
much of a request is valid: the caller says so.

Lengths and spans are in tokens; lengths are multiples of the page size unless stated otherwise. "Ids" are page ids for
FULL and SWA and slot ids for STATE, each from the pool of its component; 0 is the null page or slot: nothing.

A length is *usable* when computing can go on from it: the pages of [0, length) are there for FULL, those of
[layout.live_from(length), length) for SWA, and a checkpoint of exactly that length for STATE. Lengths of matches and
leases are usable, always.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from baton.common.kv.errors import OwnershipError
from baton.common.kv.layout import Component

I32 = npt.NDArray[np.int32]

NO_IDS: I32 = np.empty(0, dtype=np.int32)
NO_IDS.flags.writeable = False


class Span(NamedTuple):
    """Tokens [start, end)."""

    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


_PLACE = {component: place for place, component in enumerate(Component)}
"""Where a tuple by component has each of them."""


class GroupCounts(NamedTuple):
    """A number of pages, or of state slots, per component."""

    full: int = 0
    swa: int = 0
    state: int = 0

    def of(self, component: Component) -> int:
        return self[_PLACE[component]]


class GroupPages(NamedTuple):
    """Ids per component; a component that a layout lacks has none.

    As the pages *of a span*: `full` and `swa` have one entry per page of it, in order; those of `swa` that are dead are
    0; `state` holds the slot of the state at the span's end, or nothing. As a *set* (freed, taken, duplicate pages):
    any number of each, no zeros.
    """

    full: I32 = NO_IDS
    swa: I32 = NO_IDS
    state: I32 = NO_IDS

    def of(self, component: Component) -> I32:
        return self[_PLACE[component]]

    @property
    def state_slot(self) -> int:
        """Of a span: the slot of the state at its end; 0 when there is none."""
        return int(self.state[0]) if len(self.state) else 0

    @property
    def counts(self) -> GroupCounts:
        """Of a set."""
        return GroupCounts(len(self.full), len(self.swa), len(self.state))


class PrefixLease:
    """The right to read what computing on from `length` needs (`PrefixCache.pages`): none of it is evicted while the
    lease lives. Ends exactly once, by `PrefixCache.unlock`. Not copyable, not picklable: two holders of one lease would
    end it twice."""

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


class PrefixMatch(Struct, frozen=True):
    """The longest usable known prefix when it was asked for; holds nothing, so it may be out of date by the time it is
    locked."""

    length: int


class Inserted(Struct, frozen=True):
    """What became of the ids that were given to the cache. `taken`, `duplicate` and `tail` are sets that share nothing
    and add up, per component, to what was given (without its zeros).

    taken: the cache owns them now. duplicate: the cache holds the same content of tokens below `lease.length` under
    ids of its own; the given ones are still the caller's, who frees them. tail: content from `lease.length` on, not
    kept, because no whole page or no usable length lies there, or because the backend does not want it; still the
    caller's. `pages` are what to read instead from now on: the cache's pages of [start, lease.length), where start is
    the length of the lease that was consumed. SWA entries below the new lease's live window are 0: they are not
    protected any more, also where the old lease protected them.
    """

    lease: PrefixLease | None
    taken: GroupPages
    duplicate: GroupPages
    tail: GroupPages
    pages: GroupPages


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Gauges per component, of nodes and leases, and of entries in the eviction queues (stale ones included); counters
    since start."""

    nodes: int
    leases: int
    evictable: GroupCounts
    locked: GroupCounts
    eviction_queue: GroupCounts
    evicted_total: GroupCounts


class PrefixCache(Protocol):
    """Implementations: `tree.UnifiedRadixCache` (sharing), `chunk.ChunkCache` (none)."""

    @property
    def evictable(self) -> GroupCounts:
        """What `evict` could give up now, of each component. O(1)."""
        ...

    @property
    def locked(self) -> GroupCounts:
        """What the cache owns beyond that. O(1)."""
        ...

    def match_prefix(self, tokens: I32) -> PrefixMatch:
        """The longest usable prefix that is known. Pure: does not count as a use."""
        ...

    def evictable_in(self, match: PrefixMatch) -> GroupCounts:
        """How much of the match is evictable now, and would no longer be once it is locked. Pure."""
        ...

    def lock(self, match: PrefixMatch) -> PrefixLease | None:
        """A lease over exactly the match; None when it is empty, or when part of it (or of what lay behind it) was
        evicted since."""
        ...

    def unlock(self, lease: PrefixLease, *, used: bool = True) -> None:
        """Consumes the lease. Counts as a use of what it protected, unless it was only copied from."""
        ...

    def pages(self, lease: PrefixLease) -> GroupPages:
        """What the lease protects: all FULL pages of [0, lease.length), the SWA pages of the live window at its end
        (0 before it), and the checkpoint there."""
        ...

    def insert(self, lease: PrefixLease | None, tokens: I32, given: GroupPages) -> Inserted:
        """Offers `given`, the pages of [start, len(tokens)), where start is the lease's length (0 without one): per
        paged component at least the whole ones, SWA entries 0 where they are gone already, and perhaps the slot of a
        state that has seen exactly `tokens`. Consumes the lease; the result carries the one that replaces it, over the
        longest usable length that the cache knows afterwards. The SWA pages that its window leaves behind may be
        evicted from then on: whoever reads them has finished."""
        ...

    def coldest(self, count: int) -> Sequence[tuple[I32, PrefixMatch]]:
        """What `evict(FULL, count)` would take next from: of each, all tokens up to its end, and the match over them.
        For layouts of full attention alone. Pure."""
        ...

    def evict(self, component: Component, count: int) -> GroupPages:
        """Gives up `count` pages or slots of the component, or all that are evictable when they are fewer, least
        recently used first; and of the other components whatever cannot stay without them."""
        ...

    def clear(self) -> GroupPages:
        """Gives up everything that is evictable."""
        ...

    def cached_pages(self) -> tuple[GroupPages, GroupPages]:
        """All that the cache owns, as sets: (evictable, locked)."""
        ...

    def check(self, leases: Iterable[PrefixLease]) -> None:
        """Walks everything. Raises InvariantViolation unless it is whole and locked by exactly these leases."""
        ...

    def stats(self) -> PrefixStats: ...
