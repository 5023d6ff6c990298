"""`KvPool`: allocator, rows and prefix cache of one worker, behind the functions that move ownership.

The one object an engine core holds for KV. Owns every page of its buffer, by id; never touches the bytes behind them,
knows no schedule and no clock. Single-threaded: it belongs to the engine thread.

The lengths of a record are written here and nowhere else, in the same call as the allocation they describe. Every
function that allocates is all or nothing: on refusal or exception, lock, row and pages are as they were before (cached
pages that were evicted for it stay evicted).

    token    0            protected          committed           allocated        row width
             |-- tree's pages --|-- own pages, valid --|-- own, undefined --|-- nothing --|
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from baton.common.kv.allocator import PageAllocator
from baton.common.kv.census import Census, Holding, take_census
from baton.common.kv.errors import OwnershipError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.configurations import make_prefix_cache
from baton.common.kv.prefix.interface import I32, GroupPages, PrefixCache, PrefixStats, Span
from baton.common.kv.prefix.names import PrefixCacheName
from baton.common.kv.record import KvHolder, ReqKvInfo, take_kv
from baton.common.kv.release import free_leftovers
from baton.common.kv.rows import RowTable
from baton.common.kv.transitions import TransitionLog
from baton.common.units import page_floor, pages_for_tokens, whole_pages

TokenIds = I32 | Sequence[int]


class RefusalReason(StrEnum):
    """Why nothing was allocated. Adversity, not a bug."""

    NO_PAGES = "no_pages"  # even after evicting everything evictable
    NO_ROW = "no_row"
    TOO_LONG = "too_long"  # longer than a row, or than the whole pool: waiting does not help
    NO_ROOM_TO_GROW = "no_room_to_grow"  # admission: fits now, but active requests need the room


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing changed. `short_pages` more pages would have been enough (0 when pages were not the reason)."""

    reason: RefusalReason
    short_pages: int = 0


@dataclass(frozen=True, slots=True)
class PreAllocated:
    """The holder owns a record. KV of [0, prefix_len) is valid; that of [prefix_len, fill_len) is to be written into
    `pages` (a copy). `prefix_len` is page-aligned."""

    prefix_len: int
    pages: I32


@dataclass(frozen=True, slots=True)
class Extended:
    """The lengths moved; `new_pages` were allocated for it."""

    new_pages: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What a pre-allocation would take now: `new_pages` from the free or evictable ones, and `pinned_pages` that are
    evictable now and would be locked."""

    prefix_len: int
    new_pages: int
    pinned_pages: int


@dataclass(frozen=True, slots=True)
class KvStats:
    """Gauges, and the prefix cache's counters. Conservation: free + evictable + locked + owned == total."""

    total_pages: int
    free_pages: int
    free_rows: int
    total_rows: int
    prefix: PrefixStats

    @property
    def owned_pages(self) -> int:
        """By records: requests and hand-offs."""
        return self.total_pages - self.free_pages - self.prefix.evictable.full - self.prefix.locked.full


_EXTENDED_IN_PLACE = Extended(0)
_EXTENDED_BY_ONE = Extended(1)


class KvPool:
    """`num_pages` counts the null page, as `KvBuffer.num_pages` does; `max_context_len` is the row width in tokens."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_context_len: int,
        prefix_cache: PrefixCacheName = "radix",
        transitions: TransitionLog | None = None,
    ) -> None:
        self.page_size = page_size
        self.max_context_len = max_context_len
        self.allocator = PageAllocator(num_pages)
        self.rows = RowTable(max_rows, pages_for_tokens(max_context_len, page_size))
        self.prefix: PrefixCache = make_prefix_cache(prefix_cache, KvLayout(page_size))
        self.transitions = transitions

    # ------------------------------------------------------------------------------------------ reading

    @property
    def total_pages(self) -> int:
        return self.allocator.total_pages

    @property
    def free_pages(self) -> int:
        return self.allocator.free_pages

    @property
    def evictable_pages(self) -> int:
        return self.prefix.evictable.full

    @property
    def available_pages(self) -> int:
        """Free now, or after evicting everything evictable."""
        return self.allocator.free_pages + self.prefix.evictable.full

    def match_len(self, tokens: TokenIds) -> int:
        """Length of the cached prefix; page-aligned. Pure, and true only until the next allocation."""
        return self.prefix.match_prefix(_as_array(tokens)).length

    def demand(self, tokens: TokenIds, fill_len: int, max_prefix: int) -> Demand:
        """What `pre_alloc` without a record would take. Pure."""
        match = self.prefix.match_prefix(self._capped(tokens, min(max_prefix, fill_len)))
        new_pages = pages_for_tokens(fill_len, self.page_size) - whole_pages(match.length, self.page_size)
        return Demand(match.length, new_pages, self.prefix.evictable_in(match).full)

    def pages_of(self, record: ReqKvInfo, start_token: int, end_token: int) -> I32:
        """A copy of the page ids of [start_token, end_token); start is page-aligned. May cross threads."""
        if start_token % self.page_size or not 0 <= start_token <= end_token <= record.kv_allocated_len:
            raise OwnershipError(f"tokens [{start_token}, {end_token}) of {record!r}")
        first, end = whole_pages(start_token, self.page_size), pages_for_tokens(end_token, self.page_size)
        return self.rows.view(record.req_pool_idx, first, end).copy()

    def pages_for_row(self, record: ReqKvInfo, length: int) -> I32:
        """A read-only view of the page ids of [0, length), for packing a batch: valid until the record changes."""
        if length > record.kv_allocated_len:
            raise OwnershipError(f"{length} tokens of {record!r}")
        return self.rows.view(record.req_pool_idx, 0, pages_for_tokens(length, self.page_size))

    def stats(self) -> KvStats:
        return KvStats(
            total_pages=self.total_pages,
            free_pages=self.free_pages,
            free_rows=self.rows.free_rows,
            total_rows=self.rows.max_rows,
            prefix=self.prefix.stats(),
        )

    def census(self, holdings: Iterable[Holding]) -> Census:
        """Pages per owner class. `holdings` must name every live record once."""
        return take_census(
            holdings,
            page_size=self.page_size,
            total=self.total_pages,
            free=self.free_pages,
            evictable=self.prefix.evictable.full,
            locked=self.prefix.locked.full,
        )

    # --------------------------------------------------------------- allocation: the only writers of lengths

    def prepare_for_extend(
        self, holder: KvHolder, tokens: TokenIds, new_len: int, max_prefix: int | None = None
    ) -> int | Refused:
        """Makes room for computing KV up to `new_len`; both lengths move there. Returns where computing starts.

        On first use: locks the cached prefix of `tokens`, at most `max_prefix` of it (default new_len - 1, so that at
        least one token is computed), takes a row and creates the record; the start is the prefix length. Later: the
        start is what was committed before.
        """
        if new_len > self._longest:
            return Refused(RefusalReason.TOO_LONG)
        record = holder.kv
        if record is None:
            cap = new_len - 1 if max_prefix is None else min(max_prefix, new_len)
            made = self._create(holder, self._capped(tokens, cap), new_len, committed=new_len)
            return made if isinstance(made, Refused) else made.prefix_len
        start = record.kv_committed_len
        if new_len < start:
            raise OwnershipError(f"cannot extend {record!r} back to {new_len}")
        grown = self._grow(record, max(new_len, record.kv_allocated_len), committed=new_len)
        return grown if isinstance(grown, Refused) else start

    def prepare_for_decode(self, holder: KvHolder, n: int = 1) -> Extended | Refused:
        """Makes room for `n` more tokens: committed += n, allocated += n. Called once per running request and step."""
        record = _owned(holder)
        old = record.kv_allocated_len
        new = old + n
        pages = pages_for_tokens(new, self.page_size) - pages_for_tokens(old, self.page_size)
        if pages == 0 and new <= self.max_context_len:
            record.kv_allocated_len = new
            record.kv_committed_len += n
            return _EXTENDED_IN_PLACE
        if new > self._longest:
            return Refused(RefusalReason.TOO_LONG)
        grown = self._grow(record, new, committed=record.kv_committed_len + n)
        if isinstance(grown, Refused):
            return grown
        return _EXTENDED_BY_ONE if pages == 1 else Extended(pages)

    def pre_alloc(self, holder: KvHolder, tokens: TokenIds, fill_len: int, max_prefix: int) -> PreAllocated | Refused:
        """Promises pages for [0, fill_len) before a byte is transferred: locks the cached prefix of `tokens`, at most
        `max_prefix` of it, takes a row, creates the record and allocates the rest. Committed is the prefix.

        A holder that has a record already grows or shrinks to `fill_len`; of what it has committed, at most
        `max_prefix` counts as the prefix (never less than what is the tree's).
        """
        if fill_len > self._longest:
            return Refused(RefusalReason.TOO_LONG)
        record = holder.kv
        if record is None:
            return self._create(holder, self._capped(tokens, min(max_prefix, fill_len)), fill_len, committed=None)
        committed = min(record.kv_committed_len, max_prefix, fill_len)
        if committed < record.cache_protected_len:
            raise OwnershipError(f"{record!r} cannot go back to {committed} tokens")
        start = page_floor(committed, self.page_size)
        promised = self.pages_of(record, start, min(record.kv_allocated_len, fill_len))
        if fill_len < record.kv_allocated_len:
            self._shrink(record, fill_len, committed)
        grown = self._grow(record, fill_len, committed)
        if isinstance(grown, Refused):
            return grown
        return PreAllocated(start, np.concatenate((promised, grown)))

    def commit_incoming(self, record: ReqKvInfo, landed_until: int) -> None:
        """The bytes of [0, landed_until) are in the record's pages and verified: committed advances to there."""
        if not record.kv_committed_len <= landed_until <= record.kv_allocated_len:
            raise OwnershipError(f"bytes landed until {landed_until} for {record!r}")
        record.kv_committed_len = landed_until

    # ------------------------------------------------------------------------------- caching and releasing

    def cache_unfinished_req(self, holder: KvHolder, tokens: TokenIds) -> None:
        """At a chunk boundary: offers what is committed to the tree; protected and lock move forward. The row may then
        name other pages (those the tree had already): whoever lends pages to a reader calls this *before* it does."""
        record = _owned(holder)
        self.cache_finished_req(holder, tokens, kv_len_to_handle=record.kv_committed_len)

    def cache_finished_req(
        self, holder: KvHolder, tokens: TokenIds, is_insert: bool = True, *, kv_len_to_handle: int
    ) -> None:
        """Offers the KV of tokens[:kv_len_to_handle] to the tree, moves protected and lock over what it keeps, and
        frees the duplicates. The record stays whole: the rest is its own until `release_kv_cache`."""
        record = _owned(holder)
        if not is_insert:
            return
        start = record.cache_protected_len
        if not start <= kv_len_to_handle <= min(record.kv_committed_len, len(tokens)):
            raise OwnershipError(f"cannot insert {kv_len_to_handle} of {len(tokens)} tokens for {record!r}")
        row, first = record.req_pool_idx, whole_pages(start, self.page_size)
        entries = self.rows.view(row, 0, pages_for_tokens(kv_len_to_handle, self.page_size)).copy()
        given = GroupPages(full=entries[first:])
        kept = self.prefix.insert(record.prefix_lock, _as_array(tokens)[:kv_len_to_handle], given)
        record.prefix_lock = kept.lease
        if kept.lease is None or kept.lease.length == start:
            return
        record.cache_protected_len = kept.lease.length
        self.rows.write(row, first, kept.pages.full)
        known = Span(start, start + len(kept.duplicate.full) * self.page_size)
        freed = free_leftovers(self.allocator, entries, [known], self.page_size)
        if self.transitions is not None:
            self.transitions.record("duplicate -> free", freed, row)
            self.transitions.record("row -> cached", kept.taken.full, row)

    def release_kv_cache(
        self, holder: KvHolder, tokens: TokenIds, is_insert: bool = True, *, effective_len: int | None = None
    ) -> None:
        """Ends the record: its KV goes to the tree (when `is_insert`), all else is freed, the lock and the row are
        returned, and the holder owns nothing. Consumes the record.

        `effective_len` says how much of what is committed may be kept (default all): a step that was planned but not
        computed, or tokens behind a stop, are not.
        """
        record = _owned(holder)
        self._assert_consistent(record)
        effective = record.kv_committed_len if effective_len is None else effective_len
        effective = max(effective, record.cache_protected_len)
        self.cache_finished_req(holder, tokens, is_insert, kv_len_to_handle=effective)
        record = take_kv(holder)
        row, allocated = record.req_pool_idx, record.kv_allocated_len
        entries = self.rows.view(row, 0, pages_for_tokens(allocated, self.page_size))
        leftovers = [Span(record.cache_protected_len, effective), Span(effective, allocated)]
        freed = free_leftovers(self.allocator, entries, leftovers, self.page_size)
        if record.prefix_lock is not None:
            self.prefix.unlock(record.prefix_lock)
        self.rows.release(row)
        record.retire("released")
        if self.transitions is not None:
            self.transitions.record("row -> free", freed, row)

    def evict(self, n: int) -> int:
        """Frees at most `n` cached pages, least recently used first. Returns how many."""
        pages = self.prefix.evict(Component.FULL, n).full
        self.allocator.free(pages)
        if self.transitions is not None:
            self.transitions.record("cached -> free", pages, None)
        return len(pages)

    def clear_cache(self) -> int:
        """Frees every cached page that nobody reads. Returns how many."""
        return self.evict(self.prefix.evictable.full)

    # ------------------------------------------------------------------------------------------ inside

    @property
    def _longest(self) -> int:
        return min(self.max_context_len, self.total_pages * self.page_size)

    def _capped(self, tokens: TokenIds, most: int) -> I32:
        return _as_array(tokens)[: max(0, page_floor(most, self.page_size))]

    def _create(
        self, holder: KvHolder, prefix_tokens: I32, allocated: int, committed: int | None
    ) -> PreAllocated | Refused:
        """Lock, row, pages, record: in this order, and backwards when one of them fails. `committed` None: prefix."""
        with ExitStack() as undo:
            lease = self.prefix.lock(self.prefix.match_prefix(prefix_tokens))
            if lease is not None:
                undo.callback(self.prefix.unlock, lease)
            prefix_len = 0 if lease is None else lease.length
            row = self.rows.acquire()
            if row is None:
                return Refused(RefusalReason.NO_ROW)
            undo.callback(self.rows.release, row)
            prefix_pages = whole_pages(prefix_len, self.page_size)
            pages = self._obtain(pages_for_tokens(allocated, self.page_size) - prefix_pages)
            if isinstance(pages, Refused):
                return pages
            undo.callback(self.allocator.free, pages)
            if lease is not None:
                self.rows.write(row, 0, self.prefix.pages(lease).full)
            self.rows.write(row, prefix_pages, pages)
            if self.transitions is not None:
                self.transitions.record("free -> row", pages, row)
            holder.kv = ReqKvInfo(
                req_pool_idx=row,
                cache_protected_len=prefix_len,
                kv_committed_len=prefix_len if committed is None else committed,
                kv_allocated_len=allocated,
                prefix_lock=lease,
            )
            undo.pop_all()
            return PreAllocated(prefix_len, pages)

    def _grow(self, record: ReqKvInfo, allocated: int, committed: int) -> I32 | Refused:
        """The new pages, in the row; both lengths are set with them."""
        have = pages_for_tokens(record.kv_allocated_len, self.page_size)
        pages = self._obtain(pages_for_tokens(allocated, self.page_size) - have)
        if isinstance(pages, Refused):
            return pages
        try:
            self.rows.write(record.req_pool_idx, have, pages)
            if self.transitions is not None:
                self.transitions.record("free -> row", pages, record.req_pool_idx)
        except BaseException:
            self.allocator.free(pages)
            raise
        record.kv_allocated_len = allocated
        record.kv_committed_len = committed
        return pages

    def _shrink(self, record: ReqKvInfo, allocated: int, committed: int) -> None:
        """Frees the pages that lie wholly beyond `allocated`."""
        row, keep = record.req_pool_idx, pages_for_tokens(allocated, self.page_size)
        extra = self.rows.view(row, keep, pages_for_tokens(record.kv_allocated_len, self.page_size)).copy()
        record.kv_allocated_len = allocated
        record.kv_committed_len = committed
        self.rows.write(row, keep, np.zeros_like(extra))
        self.allocator.free(extra)
        if self.transitions is not None:
            self.transitions.record("row -> free", extra, row)

    def _obtain(self, count: int) -> I32 | Refused:
        """Evicts exactly the shortfall, and only when that is enough."""
        short = count - self.allocator.free_pages
        if short > 0:
            if short > self.prefix.evictable.full:
                return Refused(RefusalReason.NO_PAGES, short - self.prefix.evictable.full)
            self.evict(short)
        pages = self.allocator.allocate(count)
        assert pages is not None, f"{count} pages are missing right after they were made free"
        return pages

    def _assert_consistent(self, record: ReqKvInfo) -> None:
        protected = record.cache_protected_len
        locked = 0 if record.prefix_lock is None else record.prefix_lock.length
        ordered = 0 <= protected <= record.kv_committed_len <= record.kv_allocated_len <= self.max_context_len
        if not ordered or protected % self.page_size or protected != locked:
            raise OwnershipError(f"{record!r} with a lease over {locked} tokens, page size {self.page_size}")


def _as_array(tokens: TokenIds) -> I32:
    return np.ascontiguousarray(tokens, dtype=np.int32)


def _owned(holder: KvHolder) -> ReqKvInfo:
    record = holder.kv
    if record is None:
        raise OwnershipError(f"{holder!r} owns no KV")
    return record
