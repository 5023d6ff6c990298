"""`KvPool`: the pages, state slots, rows and prefix cache of one worker, behind the functions that move ownership.

The one object an engine core holds for KV. Owns every page and slot of its buffers, by id; never touches the bytes
behind them, knows no schedule and no clock. Single-threaded: it belongs to the engine thread. What is special to one
component is in `window.SlidingWindow` and `states.StateSlots`; what nobody owns is `supply.Supply`'s.

The lengths of a record are written here and nowhere else, in the same call as the allocation they describe. Every
function that allocates is all or nothing: on refusal or exception, lock, row, pages and promises are as they were
before (cached pages that were evicted for it stay evicted, and so do pages that a window had left behind).

    token    0            protected          committed           allocated        row width
             |-- tree's pages --|-- own pages, valid --|-- own, undefined --|-- nothing --|

So it is with full attention. Sliding pages are promised for all of this and drawn when a step or a hand-off fills them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from baton.common.kv.allocator import PageAllocator
from baton.common.kv.caching import insert_and_go_on, release
from baton.common.kv.census import Census, Holding, take_census
from baton.common.kv.errors import OwnershipError
from baton.common.kv.events import PageLog
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.parts import PoolParts
from baton.common.kv.prefix.interface import (
    I32,
    NO_IDS,
    GroupCounts,
    PrefixCache,
    PrefixLease,
    PrefixMatch,
    Span,
)
from baton.common.kv.prefix.names import PrefixCacheName
from baton.common.kv.record import KvHolder, ReqKvInfo
from baton.common.kv.resizing import create, grow, shrink
from baton.common.kv.transitions import TransitionLog
from baton.common.kv.verdicts import Demand, Extended, KvStats, PreAllocated, RefusalReason, Refused
from baton.common.units import page_floor, pages_for_tokens, whole_pages

__all__ = ["Demand", "Extended", "KvPool", "KvStats", "PreAllocated", "RefusalReason", "Refused", "TokenIds"]

TokenIds = I32 | Sequence[int]

CHECKPOINT_TOKENS = 64
"""How often about the state of a running request is kept: a copy costs as much as a step reads and writes of it."""

_EXTENDED_IN_PLACE = Extended(0)
_EXTENDED_BY_ONE = Extended(1)


class KvPool:
    """`num_pages` counts the null page (or slot) of each component, as `KvBuffer.num_pages` does; `max_context_len` is
    the row width in tokens; `step_tokens` is the most that one step computes of one record. `longest` is the most
    tokens of one record: what a row and an otherwise empty pool can hold. `copying` are the leases of those who copy
    cached pages, beside the records' own. With `events` it says what becomes cached and what does not stay (of the
    pages of full attention: without those, nothing)."""

    def __init__(
        self,
        layout: KvLayout,
        num_pages: Mapping[Component, int],
        max_rows: int,
        max_context_len: int,
        prefix_cache: PrefixCacheName = "radix",
        transitions: TransitionLog | None = None,
        step_tokens: int = 512,
        *,
        events: bool = False,
    ) -> None:
        self.layout = layout
        self.page_size = layout.page_size
        self.max_context_len = max_context_len
        self.main = layout.components[0]
        self.events: PageLog | None = None
        if events and layout.full:
            self.events = PageLog(layout.page_size, num_pages[Component.FULL])
        self.parts = PoolParts(
            layout, num_pages, max_rows, max_context_len, prefix_cache, transitions, step_tokens, self.events
        )
        self.supply, self.rows = self.parts.supply, self.parts.rows
        self.window, self.states = self.parts.window, self.parts.states
        self.longest = self.parts.longest(max_context_len)
        self.copying: list[PrefixLease] = []

    # ------------------------------------------------------------------------------------------ reading

    @property
    def prefix(self) -> PrefixCache:
        return self.supply.prefix

    @property
    def transitions(self) -> TransitionLog | None:
        return self.supply.transitions

    @property
    def allocator(self) -> PageAllocator:
        """The main component's, which `total_pages` and the like count."""
        return self.supply.allocators[self.main]

    @property
    def total_pages(self) -> int:
        return self.supply.total(self.main)

    @property
    def free_pages(self) -> int:
        return self.supply.free(self.main)

    @property
    def evictable_pages(self) -> int:
        return self.supply.prefix.evictable.of(self.main)

    @property
    def available_pages(self) -> int:
        return self.parts.available(self.main)

    def match_len(self, tokens: TokenIds) -> int:
        """Length of the cached prefix; page-aligned. Pure, and true only until the next allocation."""
        return self.prefix.match_prefix(_as_array(tokens)).length

    def demand(self, tokens: TokenIds, fill_len: int, max_prefix: int) -> Demand:
        """What `pre_alloc` without a record would take. Pure."""
        match = self.prefix.match_prefix(self._capped(tokens, min(max_prefix, fill_len)))
        pinned = self.prefix.evictable_in(match)
        return Demand(
            prefix_len=match.length,
            new=GroupCounts(
                full=self.parts.full_pages(match.length, fill_len),
                swa=self.parts.needed(Component.SWA, fill_len),
                state=int(self.layout.state),
            ),
            pinned=pinned._replace(swa=0),
        )

    def pages_of(self, record: ReqKvInfo, start_token: int, end_token: int) -> I32:
        """A copy of the main component's page ids of [start_token, end_token); start is page-aligned. May cross
        threads."""
        if start_token % self.page_size or not 0 <= start_token <= end_token <= record.kv_allocated_len:
            raise OwnershipError(f"tokens [{start_token}, {end_token}) of {record!r}")
        first, end = whole_pages(start_token, self.page_size), pages_for_tokens(end_token, self.page_size)
        return self.rows.view(record.req_pool_idx, first, end).copy()

    def pages_for_row(self, record: ReqKvInfo, length: int) -> I32:
        """A read-only view of the main component's page ids of [0, length), for packing a batch: valid until the record
        changes. Empty for a model without pages."""
        if length > record.kv_allocated_len:
            raise OwnershipError(f"{length} tokens of {record!r}")
        if self.main is Component.STATE:
            return NO_IDS
        return self.rows.view(record.req_pool_idx, 0, pages_for_tokens(length, self.page_size))

    def swa_pages_for_row(self, record: ReqKvInfo, length: int) -> I32 | None:
        """The same of the sliding window where it is not the main component; else None."""
        if self.window is None or not self.layout.full:
            return None
        return self.window.row(record, 0, length)

    def pages_to_send(self, record: ReqKvInfo, component: Component, start: int, end: int) -> I32:
        """A copy of what a peer that has [0, start) reads of [start, end), all of it committed. May cross threads."""
        if end > record.kv_committed_len:
            raise OwnershipError(f"tokens until {end} of {record!r} are to be sent")
        match component:
            case Component.FULL:
                return self.pages_of(record, start, end)
            case Component.SWA:
                assert self.window is not None
                return self.window.row(record, max(start, self.layout.live_from(end)), end).copy()
            case Component.STATE:
                assert self.states is not None
                return np.array([self.states.readable(record)], dtype=np.int32)

    def stats(self) -> KvStats:
        total, free = self.supply.counts()
        return KvStats(
            total=total,
            free=free,
            promised=self.window.promised if self.window is not None else 0,
            free_rows=self.rows.free_rows,
            total_rows=self.rows.max_rows,
            prefix=self.prefix.stats(),
        )

    def census(self, holdings: Iterable[Holding]) -> Census:
        """Pages per owner class of the main component; with those of the others. `holdings` must name every live record
        once."""
        held = list(holdings)
        first, *others = [self._census_of(component, held) for component in self.layout.components]
        return dataclasses.replace(first, others=tuple(others))

    def _census_of(self, component: Component, held: Iterable[Holding]) -> Census:
        return take_census(
            component,
            [(one.owner_class, len(self.parts.own_ids(one.record, component))) for one in held],
            total=self.supply.total(component),
            free=self.supply.free(component),
            evictable=self.prefix.evictable.of(component),
            locked=self.prefix.locked.of(component),
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
        if new_len > self.longest:
            return Refused(RefusalReason.TOO_LONG)
        record = holder.kv
        if record is None:
            cap = new_len - 1 if max_prefix is None else min(max_prefix, new_len)
            made = create(self.parts, holder, self._capped(tokens, cap), new_len, committed=new_len)
            return made if isinstance(made, Refused) else made.prefix_len
        start = record.kv_committed_len
        if new_len < start:
            raise OwnershipError(f"cannot extend {record!r} back to {new_len}")
        grown = grow(self.parts, record, max(new_len, record.kv_allocated_len), new_len, draw=Span(start, new_len))
        return grown if isinstance(grown, Refused) else start

    def prepare_for_decode(self, holder: KvHolder, n: int = 1) -> Extended | Refused:
        """Makes room for `n` more tokens: committed += n, allocated += n. Called once per running request and step,
        when its step before is over."""
        record = _owned(holder)
        old = record.kv_allocated_len
        new = old + n
        pages = pages_for_tokens(new, self.page_size) - pages_for_tokens(old, self.page_size)
        if pages == 0 and new <= self.max_context_len:
            record.kv_allocated_len = new
            record.kv_committed_len += n
            return _EXTENDED_IN_PLACE
        if new > self.longest:
            return Refused(RefusalReason.TOO_LONG)
        grown = grow(self.parts, record, new, record.kv_committed_len + n, draw=Span(old, new))
        if isinstance(grown, Refused):
            return grown
        return _EXTENDED_BY_ONE if len(grown) == 1 else Extended(len(grown))

    def prepare_chunk(self, record: ReqKvInfo, end: int) -> None:
        """A step is going to compute [committed, end) of what is promised: the pages for it are there afterwards. The
        record's step before is over: what its window has left behind is freed."""
        if not record.kv_committed_len <= end <= record.kv_allocated_len:
            raise OwnershipError(f"a chunk until {end} of {record!r}")
        if self.window is not None:
            self.window.draw(record, record.kv_committed_len, record.kv_committed_len, end)

    def pre_alloc(self, holder: KvHolder, tokens: TokenIds, fill_len: int, max_prefix: int) -> PreAllocated | Refused:
        """Promises pages for [0, fill_len) before a byte is transferred: locks the cached prefix of `tokens`, at most
        `max_prefix` of it, takes a row, creates the record and allocates the rest. Committed is the prefix.

        A holder that has a record already grows or shrinks to `fill_len`; of what it has committed, at most
        `max_prefix` counts as the prefix (never less than what is the tree's): a length that it `can_go_back` to.
        """
        if fill_len > self.longest:
            return Refused(RefusalReason.TOO_LONG)
        record = holder.kv
        if record is None:
            return create(self.parts, holder, self._capped(tokens, min(max_prefix, fill_len)), fill_len, committed=None)
        committed = min(record.kv_committed_len, max_prefix, fill_len)
        if not self.can_go_back(record, committed):
            raise OwnershipError(f"{record!r} cannot go back to {committed} tokens")
        start = page_floor(committed, self.page_size)
        promised = self.parts.full_view(record, start, min(record.kv_allocated_len, fill_len)).copy()
        if fill_len < record.kv_allocated_len:
            shrink(self.parts, record, fill_len, committed)
            return PreAllocated(start, promised)
        grown = grow(self.parts, record, fill_len, committed, draw=None)
        return grown if isinstance(grown, Refused) else PreAllocated(start, np.concatenate((promised, grown)))

    def can_go_back(self, record: ReqKvInfo, length: int) -> bool:
        """Whether computing can go on from `length` tokens of what the record has: not below what is the tree's, not
        where its window has passed, and a recurrent state is only that of where it stands, or a checkpoint's."""
        protected, committed = record.cache_protected_len, record.kv_committed_len
        if not protected <= length <= committed:
            return False
        if length in (protected, committed):
            return True
        return self.states is None and (self.window is None or self.window.is_live(record, length))

    def open_incoming(self, record: ReqKvInfo, start: int) -> dict[Component, I32]:
        """What a hand-off of tokens [start, allocated) will write, by component (copies). Until it has ended, by
        `commit_incoming` or `abandon_incoming`, all of it is the hand-off's.

        Where layers slide or recur, what landed is only good as a whole, and replaces what they kept before: until
        then nothing above the tree's prefix counts as committed. That is so before anything is freed: an exception on
        the way is as a hand-off that failed.
        """
        total = record.kv_allocated_len
        if start % self.page_size or not record.cache_protected_len <= start <= record.kv_committed_len:
            raise OwnershipError(f"a hand-off from {start} for {record!r}")
        pages: dict[Component, I32] = {}
        if self.layout.full:
            pages[Component.FULL] = self.pages_of(record, start, total)
        if self.states is not None:
            self.states.start_over(record)
        if not self.lands_in_part:
            record.kv_committed_len = record.cache_protected_len
        if self.window is not None and len(sliding := self.window.open_incoming(record, start, total)):
            pages[Component.SWA] = sliding
        if self.states is not None:
            pages[Component.STATE] = self.parts.own_ids(record, Component.STATE)
        return pages

    def checkpoint_at(self, length: int) -> int:
        """Where a chunk on the way to `length` tokens should end, so that others can go on from a checkpoint there and
        still compute a token; `length` when no checkpoint is kept."""
        if self.states is None or not self.parts.sharing:
            return length
        return page_floor(length - 1, self.page_size)

    def wants_checkpoint(self, length: int) -> bool:
        """Whether a recurrent state of `length` tokens, met while answering, is worth a slot: now and then, and while
        at most half of the slots are in use."""
        if self.states is None or not self.parts.sharing:
            return False
        every = self.page_size * max(1, CHECKPOINT_TOKENS // self.page_size)
        return length % every == 0 and 2 * self.parts.available(Component.STATE) >= self.supply.total(Component.STATE)

    def settled_until(self, record: ReqKvInfo) -> int:
        """The pages of full attention until here stay in the row, whatever is cached from now on: they may be lent."""
        committed = page_floor(record.kv_committed_len, self.page_size)
        return record.cache_protected_len if self.parts.sharing else committed

    @property
    def lands_in_part(self) -> bool:
        """Whether the beginning of what a hand-off moves is worth something without the rest."""
        return self.window is None and self.states is None

    def commit_incoming(self, record: ReqKvInfo, landed_until: int) -> None:
        """KV of [0, landed_until) is in the record's pages, computed or verified: committed advances to there."""
        if not record.kv_committed_len <= landed_until <= record.kv_allocated_len:
            raise OwnershipError(f"bytes landed until {landed_until} for {record!r}")
        if self.states is not None and landed_until > record.kv_committed_len:
            self.states.written(record)
        record.kv_committed_len = landed_until

    def abandon_incoming(self, record: ReqKvInfo) -> None:
        """The hand-off has ended, and nothing counts that was not committed."""
        if self.window is not None:
            self.window.free_from(record, record.kv_committed_len)

    def take_state_copies(self, records: Iterable[ReqKvInfo]) -> I32 | None:
        """`Batch.state_copies` of a step over these records: it is planned now, and will be computed."""
        if self.states is None:
            return None
        copies = [copy for record in records if (copy := self.states.take_copy(record)) is not None]
        return np.array(copies, dtype=np.int32) if copies else None

    def free_swa_out_of_window_slots(self, record: ReqKvInfo, pre_len: int) -> int:
        """Frees the record's sliding pages that no query from position `pre_len` on sees, and that no launched step
        reads. What plans a step or opens a hand-off does so by itself. Returns how many."""
        return 0 if self.window is None else self.window.free_out_of_window(record, pre_len)

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
        frees the duplicates. The record stays whole: the rest is its own until `release_kv_cache`. Its state goes along
        when it is that of this very length, a whole number of pages, and there is a slot to go on in."""
        record = _owned(holder)
        if is_insert:
            insert_and_go_on(self.parts, record, _as_array(tokens), kv_len_to_handle)

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
        release(self.parts, holder, record, _as_array(tokens) if is_insert else None, effective)

    def begin_copy(self, match: PrefixMatch) -> PrefixLease | None:
        """What is cached of the match stays in place and as it is, for somebody who copies it, until `end_copy`. None
        when nothing is, any more."""
        lease = self.prefix.lock(match)
        if lease is not None:
            self.copying.append(lease)
        return lease

    def end_copy(self, lease: PrefixLease) -> None:
        """Consumes the lease. To be copied is not to be used: what was next to be evicted still is."""
        self.copying.remove(lease)
        self.prefix.unlock(lease, used=False)

    def evict(self, n: int) -> int:
        """Frees at most `n` cached pages of the main component, least recently used first. Returns how many."""
        return self.supply.evict(self.main, n)

    def clear_cache(self) -> int:
        """Frees everything cached that nobody reads. Returns how many pages of the main component."""
        return self.supply.clear().of(self.main)

    # ------------------------------------------------------------------------------------------ inside

    def _capped(self, tokens: TokenIds, most: int) -> I32:
        return _as_array(tokens)[: max(0, page_floor(most, self.page_size))]

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
