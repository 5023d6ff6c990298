"""`SlidingWindow`: the sliding-window pages of all records of one pool, promised up front and drawn as they are needed.

Owns the table of those pages and the sum of what is promised. Never: decides when a step is over (its caller says what
length is reached), or touches a page of full-attention layers.

A record needs few sliding pages at a time, whatever its length: those of the window behind it and of the step ahead,
and those that its lease on the prefix tree locks. `most_pages` bounds that sum, and each record has a promise of so
many, or of the pages of all its tokens when these are fewer, from its first allocation to its end. Promises never add
up to more than the pool has. No record ever owns and locks more than its promise, and what several lock counts once in
the pool but for each of them here; so free and evictable pages always suffice for what is promised and not yet drawn.
Drawing cannot fail: nobody who is half computed waits for pages that another one holds.

Entries of a row: below `cache_protected_len` the pages of its lease's window (0 before it); above, its own, 0 where
the window has left a page behind or nothing was computed yet.
"""

from __future__ import annotations

import numpy as np

from baton.common.kv.errors import OwnershipError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.interface import I32
from baton.common.kv.record import ReqKvInfo
from baton.common.kv.rows import RowTable
from baton.common.kv.supply import Supply
from baton.common.kv.verdicts import RefusalReason, Refused
from baton.common.units import page_ceil, page_floor, pages_for_tokens, whole_pages


def most_pages(layout: KvLayout, step_tokens: int, sharing: bool) -> int:
    """How many sliding pages one record may own and lock at one time, whatever its length. `step_tokens`: most tokens
    that one step computes of it. `sharing`: there is a prefix tree."""
    page_size, step_tokens = layout.page_size, max(step_tokens, layout.page_size)
    rounding = (1 + sharing) * (page_size - 1)  # of where the window begins
    ahead = pages_for_tokens(layout.window - 1 + rounding + step_tokens, page_size)
    locked = whole_pages(layout.window - 1 + page_size - 1, page_size) if sharing else 0
    return ahead + locked


class SlidingWindow:
    """`step_tokens` as for `most_pages`. `sharing`: there is a prefix tree; then the window of the last whole page
    stays, so that what is inserted can be matched."""

    def __init__(self, layout: KvLayout, supply: Supply, rows: RowTable, step_tokens: int, *, sharing: bool) -> None:
        self.rows = rows
        self.promised = 0
        self._layout = layout
        self._page_size = layout.page_size
        self._supply = supply
        self._sharing = sharing
        self.most_pages = most_pages(layout, step_tokens, sharing)

    @property
    def total_pages(self) -> int:
        return self._supply.total(Component.SWA)

    @property
    def available_pages(self) -> int:
        """Not promised to anybody."""
        return self.total_pages - self.promised

    def pages_for(self, length: int) -> int:
        """What is promised to a record of `length` tokens."""
        return min(self.most_pages, pages_for_tokens(length, self._page_size))

    def row(self, record: ReqKvInfo, first_token: int, end_token: int) -> I32:
        """A view of the entries of the pages that hold [first_token, end_token); valid until the record changes."""
        first, end = whole_pages(first_token, self._page_size), pages_for_tokens(end_token, self._page_size)
        return self.rows.view(record.req_pool_idx, first, end)

    # ------------------------------------------------------------------------------------------ promises

    def promise(self, more: int) -> Refused | None:
        """Adds to the sum of promises (or takes from it); refuses when the pool has not that many."""
        short = more - self.available_pages
        if more > 0 and short > 0:
            return Refused(RefusalReason.NO_PAGES, short)
        self.promised += more
        assert self.promised >= 0, "more was given back than was promised"
        return None

    def promise_for(self, record: ReqKvInfo, length: int) -> Refused | None:
        """The record's promise, now that it is to have `length` tokens."""
        pages = self.pages_for(length)
        refused = self.promise(pages - record.swa_promised)
        if refused is None:
            record.swa_promised = pages
        return refused

    # ------------------------------------------------------------------------------------------ drawing

    def draw(self, record: ReqKvInfo, known: int, first_token: int, end_token: int) -> None:
        """The record's tokens [first_token, end_token) get the pages that they lack, out of its promise, after what the
        window behind `known` tokens leaves has been freed. All or nothing."""
        self.free_out_of_window(record, known)
        entries = self.row(record, first_token, end_token)
        if np.logical_and.reduce(entries):
            return  # as for most tokens of a running request
        missing = np.flatnonzero(entries == 0)
        row, first = record.req_pool_idx, whole_pages(first_token, self._page_size)
        if self.held_pages(record) + len(missing) > record.swa_promised:
            raise OwnershipError(f"[{first_token}, {end_token}) is more than what is promised to {record!r}")
        pages = self._supply.obtain(Component.SWA, len(missing))
        assert not isinstance(pages, Refused), f"promises were not kept: {pages}"
        try:
            filled = entries.copy()
            filled[missing] = pages
            self._supply.note("free -> row", Component.SWA, pages, row)
            self.rows.write(row, first, filled)
        except BaseException:
            self._supply.give_back(Component.SWA, pages, "row -> free", None)
            raise

    def open_incoming(self, record: ReqKvInfo, start: int, total: int) -> I32:
        """The pages (a copy) of what is live behind `total` tokens and not there yet: that of [start, total). What lies
        before the window is freed, to the edge: it will not be sent."""
        live = self._layout.live_from(total)
        self.free_below(record, live)
        first = max(start, live)
        if first < total:
            self.draw(record, total, first, total)
        return self.row(record, first, total).copy()

    def held_pages(self, record: ReqKvInfo) -> int:
        """What counts against its promise: its own pages, and those that its lease locks."""
        protected = record.cache_protected_len
        locked = self.row(record, self._layout.live_from(protected), protected)
        return int(np.count_nonzero(locked)) + int(np.count_nonzero(self.own(record)))

    def own(self, record: ReqKvInfo) -> I32:
        """A view of the entries behind the tree's; 0 where there is no page."""
        return self.row(record, record.cache_protected_len, record.kv_allocated_len)

    # ------------------------------------------------------------------------------------------ freeing

    def dead_lo(self, record: ReqKvInfo) -> int:
        """The window frees nothing below it: it is the tree's, or kept on purpose."""
        protected, floor = record.cache_protected_len, record.swa_evict_floor
        return protected if floor <= protected else page_ceil(floor, self._page_size)

    def free_out_of_window(self, record: ReqKvInfo, known: int) -> int:
        """Frees the record's own pages that no query from position `known` on sees. Nothing that is launched may read
        them any more. Returns how many."""
        kept_until = page_floor(known, self._page_size) if self._sharing else known
        return self.free_below(record, self._layout.live_from(kept_until))

    def free_below(self, record: ReqKvInfo, end_token: int) -> int:
        """Moves the record's eviction cursor to `end_token` (page-aligned), or not at all when it is there already."""
        cursor = max(record.swa_evicted_seqlen, self.dead_lo(record))
        freed = self._free(record, cursor, min(end_token, page_ceil(record.kv_allocated_len, self._page_size)))
        record.swa_evicted_seqlen = max(cursor, end_token)
        return freed

    def free_from(self, record: ReqKvInfo, first_token: int) -> int:
        """Frees the record's own pages that lie wholly behind `first_token`: it goes back to there."""
        first = page_ceil(first_token, self._page_size)
        freed = self._free(record, first, record.kv_allocated_len)
        record.swa_evicted_seqlen = min(record.swa_evicted_seqlen, first)
        return freed

    def is_live(self, record: ReqKvInfo, length: int) -> bool:
        """Whether sliding layers could go on from `length`, at or above what is the tree's."""
        return record.swa_evicted_seqlen <= max(record.cache_protected_len, self._layout.live_from(length))

    def release(self, record: ReqKvInfo) -> None:
        """Frees all of the record's own pages, and its promise. The lease is the caller's to return."""
        self._free(record, record.cache_protected_len, record.kv_allocated_len)
        self.promised -= record.swa_promised
        record.swa_promised = 0

    def moved_to_tree(self, record: ReqKvInfo, old_protected: int, kept: I32) -> None:
        """The lease went on from `old_protected` to the record's `cache_protected_len`; `kept` are its pages of that
        span. What lies before its window is not protected any more."""
        row, window = record.req_pool_idx, self._layout.live_from(record.cache_protected_len)
        self.rows.write(row, whole_pages(old_protected, self._page_size), kept)
        first = self._layout.live_from(old_protected)
        left_behind = whole_pages(min(window, old_protected) - first, self._page_size)
        if left_behind > 0:
            self.rows.write(row, whole_pages(first, self._page_size), np.zeros(left_behind, dtype=np.int32))

    def _free(self, record: ReqKvInfo, first_token: int, end_token: int) -> int:
        if end_token <= first_token:
            return 0
        row, entries = record.req_pool_idx, self.row(record, first_token, end_token).copy()
        pages = entries[entries != 0]
        if len(pages):
            self.rows.write(row, whole_pages(first_token, self._page_size), np.zeros_like(entries))
            self._supply.give_back(Component.SWA, pages, "row -> free", row)
        return len(pages)
