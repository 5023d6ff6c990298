"""`PoolParts`: what a pool is made of, and what a record has of each component. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from baton.common.kv.events import PageLog
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.configurations import shares_prefixes
from baton.common.kv.prefix.interface import I32, NO_IDS
from baton.common.kv.prefix.names import PrefixCacheName
from baton.common.kv.prefix.node import live_ids
from baton.common.kv.record import ReqKvInfo
from baton.common.kv.rows import RowTable
from baton.common.kv.states import StateSlots
from baton.common.kv.supply import Supply
from baton.common.kv.transitions import TransitionLog
from baton.common.kv.window import SlidingWindow
from baton.common.units import pages_for_tokens, whole_pages

LEAST_STATE_SLOTS = 2


class PoolParts:
    """`rows` has the pages of full attention; of the window where no layer attends to everything. `window` and `states`
    are None where the model has no such layers."""

    __slots__ = ("layout", "page_size", "rows", "sharing", "states", "supply", "window")

    def __init__(
        self,
        layout: KvLayout,
        num_pages: Mapping[Component, int],
        max_rows: int,
        max_context_len: int,
        prefix_cache: PrefixCacheName,
        transitions: TransitionLog | None,
        step_tokens: int,
        events: PageLog | None,
    ) -> None:
        self.layout = layout
        self.page_size = layout.page_size
        self.supply = Supply(layout, num_pages, prefix_cache, transitions, events)
        width = pages_for_tokens(max_context_len, layout.page_size) if layout.paged else 1
        self.rows = RowTable(max_rows, width)
        self.sharing = shares_prefixes(prefix_cache)
        self.window: SlidingWindow | None = None
        if layout.window:
            table = self.rows.beside() if layout.full else self.rows
            self.window = SlidingWindow(layout, self.supply, table, step_tokens, sharing=self.sharing)
        if layout.state and self.supply.total(Component.STATE) < LEAST_STATE_SLOTS:
            raise ValueError("a sequence needs a slot of its own beside that of the checkpoint it begins with")
        self.states = StateSlots(self.supply) if layout.state else None

    def longest(self, max_context_len: int) -> int:
        """Most tokens of one record: what a row and an otherwise empty pool can hold."""
        longest = max_context_len
        if self.layout.full:
            longest = min(longest, self.supply.total(Component.FULL) * self.page_size)
        if self.window is not None and self.window.most_pages > self.window.total_pages:
            longest = min(longest, self.window.total_pages * self.page_size)
        return longest

    def available(self, component: Component) -> int:
        """What a new record could get: free now or after evicting everything evictable; of sliding pages, not promised
        to anybody."""
        if component is Component.SWA and self.window is not None:
            return self.window.available_pages
        return self.supply.available(component)

    def needed(self, component: Component, length: int) -> int:
        """Pages or slots that a record of `length` tokens takes of the component, when nothing of it is cached."""
        match component:
            case Component.FULL:
                return self.full_pages(0, length)
            case Component.SWA:
                return self.window.pages_for(length) if self.window is not None else 0
            case Component.STATE:
                return int(self.layout.state)

    def full_pages(self, old: int, new: int) -> int:
        """How many more pages of full attention `new` tokens take than `old`."""
        if not self.layout.full:
            return 0
        return pages_for_tokens(new, self.page_size) - pages_for_tokens(old, self.page_size)

    def full_view(self, record: ReqKvInfo, start: int, end: int) -> I32:
        """Row entries of full attention: of the pages that hold [start, end)."""
        if not self.layout.full:
            return NO_IDS
        first, last = whole_pages(start, self.page_size), pages_for_tokens(end, self.page_size)
        return self.rows.view(record.req_pool_idx, first, last)

    def readable_ids(self, record: ReqKvInfo, component: Component) -> I32:
        """All that the record may read of the component: its own, and what its lease protects."""
        if record.prefix_lock is None:
            return self.own_ids(record, component)
        leased = self.supply.prefix.pages(record.prefix_lock).of(component)
        return live_ids(np.concatenate((leased, self.own_ids(record, component))))

    def own_ids(self, record: ReqKvInfo, component: Component) -> I32:
        """What the record owns of the component, beyond what is the tree's."""
        match component:
            case Component.FULL:
                return self.full_view(record, record.cache_protected_len, record.kv_allocated_len)
            case Component.SWA:
                assert self.window is not None
                return live_ids(self.window.own(record))
            case Component.STATE:
                return np.array([record.state_slot], dtype=np.int32)
