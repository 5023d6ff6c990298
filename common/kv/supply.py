"""`Supply`: the free pages and slots of every component of one pool, and the prefix tree as the reserve behind them.

Owns the allocators, and with the prefix cache everything that no record owns. Never: knows a record, a row or a length.
Gives all that was asked for or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.common.kv.allocator import PageAllocator
from baton.common.kv.events import PageLog
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.configurations import make_prefix_cache
from baton.common.kv.prefix.interface import I32, NO_IDS, GroupCounts, GroupPages, PrefixCache
from baton.common.kv.prefix.names import PrefixCacheName
from baton.common.kv.transitions import TransitionLog
from baton.common.kv.verdicts import RefusalReason, Refused


class Supply:
    """`num_pages` counts the null page of each component."""

    def __init__(
        self,
        layout: KvLayout,
        num_pages: Mapping[Component, int],
        prefix_cache: PrefixCacheName,
        transitions: TransitionLog | None,
        events: PageLog | None = None,
    ) -> None:
        assert set(num_pages) == set(layout.components), (num_pages, layout)
        self.allocators = {component: PageAllocator(num_pages[component]) for component in layout.components}
        self.prefix: PrefixCache = make_prefix_cache(prefix_cache, layout)
        self.transitions = transitions
        self.events = events

    def total(self, component: Component) -> int:
        return self.allocators[component].total_pages

    def free(self, component: Component) -> int:
        return self.allocators[component].free_pages

    def available(self, component: Component) -> int:
        """Free now, or after evicting everything evictable."""
        return self.allocators[component].free_pages + self.prefix.evictable.of(component)

    def counts(self) -> tuple[GroupCounts, GroupCounts]:
        """(total, free); 0 of a component that the model lacks."""
        found = {component.value: allocator for component, allocator in self.allocators.items()}
        total = {name: allocator.total_pages for name, allocator in found.items()}
        free = {name: allocator.free_pages for name, allocator in found.items()}
        return GroupCounts(**total), GroupCounts(**free)

    def obtain(self, component: Component, count: int) -> I32 | Refused:
        """Evicts exactly the shortfall, and only when that is enough."""
        if count == 0:
            return NO_IDS
        allocator = self.allocators[component]
        short = count - allocator.free_pages
        if short > 0:
            evictable = self.prefix.evictable.of(component)
            if short > evictable:
                return Refused(RefusalReason.NO_PAGES, short - evictable)
            self.evict(component, short)
        ids = allocator.allocate(count)
        assert ids is not None, f"{count} of {component} are missing right after they were made free"
        return ids

    def note(self, change: str, component: Component, ids: I32, row: int | None) -> None:
        if self.transitions is not None:
            self.transitions.record(change, ids, row, component)

    def give_back(self, component: Component, ids: I32, change: str, row: int | None) -> None:
        if len(ids):
            self.allocators[component].free(ids)
            self.note(change, component, ids, row)

    def evict(self, component: Component, count: int) -> int:
        """Frees at most `count` cached pages or slots, least recently used first, and what of other components cannot
        stay without them. Returns how many of `component`."""
        gone = self.prefix.evict(component, count)
        self._take_back(gone)
        return len(gone.of(component))

    def clear(self) -> GroupCounts:
        """Frees everything cached that nobody reads. Returns how much."""
        gone = self.prefix.clear()
        self._take_back(gone)
        return gone.counts

    def _take_back(self, gone: GroupPages) -> None:
        if self.events is not None:
            self.events.removed(gone.full)
        for component in self.allocators:
            self.give_back(component, gone.of(component), "cached -> free", None)
