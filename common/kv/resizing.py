"""How a record comes to be, grows, and goes back: with `pool` and `caching` the only writers of its lengths.

Each function is all or nothing. Owns no state; the parts of the pool come as an argument.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from baton.common.kv.layout import Component
from baton.common.kv.parts import PoolParts
from baton.common.kv.prefix.interface import I32, NO_IDS, PrefixLease, Span
from baton.common.kv.record import NO_COPY, KvHolder, ReqKvInfo
from baton.common.kv.verdicts import PreAllocated, RefusalReason, Refused
from baton.common.units import pages_for_tokens, whole_pages


def create(
    parts: PoolParts, holder: KvHolder, prefix_tokens: I32, allocated: int, committed: int | None
) -> PreAllocated | Refused:
    """Lock, row, promise, pages, slot, record: in this order, and backwards when one of them fails. `committed` None:
    the cached prefix of `prefix_tokens` (whole pages)."""
    supply, window, states = parts.supply, parts.window, parts.states
    with ExitStack() as undo:
        lease = supply.prefix.lock(supply.prefix.match_prefix(prefix_tokens))
        if lease is not None:
            undo.callback(supply.prefix.unlock, lease)
        prefix_len = 0 if lease is None else lease.length
        row = parts.rows.acquire()
        if row is None:
            return Refused(RefusalReason.NO_ROW)
        undo.callback(parts.rows.release, row)
        promised = parts.needed(Component.SWA, allocated)
        if window is not None:
            if (refused := window.promise(promised)) is not None:
                return refused
            undo.callback(window.promise, -promised)
        pages = supply.obtain(Component.FULL, parts.full_pages(prefix_len, allocated))
        if isinstance(pages, Refused):
            return pages
        undo.callback(supply.give_back, Component.FULL, pages, "row -> free", None)
        slot = supply.obtain(Component.STATE, int(parts.layout.state))
        if isinstance(slot, Refused):
            return slot
        undo.callback(supply.give_back, Component.STATE, slot, "row -> free", None)
        record = ReqKvInfo(
            req_pool_idx=row,
            cache_protected_len=prefix_len,
            kv_committed_len=prefix_len if committed is None else committed,
            kv_allocated_len=allocated,
            prefix_lock=lease,
            swa_evicted_seqlen=prefix_len,
            swa_promised=promised,
            state_slot=int(slot[0]) if len(slot) else 0,
            state_source=NO_COPY if states is None else states.checkpoint(lease),
        )
        if lease is not None:
            _write_prefix(parts, row, lease)
        if parts.layout.full:
            parts.rows.write(row, whole_pages(prefix_len, parts.page_size), pages)
        supply.note("free -> row", Component.FULL, pages, row)
        supply.note("free -> row", Component.STATE, slot, row)
        if window is not None and committed is not None:
            window.draw(record, prefix_len, prefix_len, committed)
        holder.kv = record
        undo.pop_all()
        return PreAllocated(prefix_len, pages)


def _write_prefix(parts: PoolParts, row: int, lease: PrefixLease) -> None:
    pages = parts.supply.prefix.pages(lease)
    if parts.layout.full:
        parts.rows.write(row, 0, pages.full)
    if parts.window is not None:
        parts.window.rows.write(row, 0, pages.swa)


def grow(parts: PoolParts, record: ReqKvInfo, allocated: int, committed: int, draw: Span | None) -> I32 | Refused:
    """The new pages of full attention, in the row; both lengths are set with them. `draw`: what a step is going to
    compute, whose sliding pages are needed now. Without: `committed` may lie below what the record has."""
    supply, window, old = parts.supply, parts.window, record.kv_allocated_len
    if window is not None and (refused := window.promise_for(record, allocated)) is not None:
        return refused
    pages: I32 | Refused = NO_IDS
    first = pages_for_tokens(old, parts.page_size)
    try:
        if parts.layout.full:
            pages = supply.obtain(Component.FULL, parts.full_pages(old, allocated))
            if isinstance(pages, Refused):
                if window is not None:
                    window.promise_for(record, old)
                return pages
            parts.rows.write(record.req_pool_idx, first, pages)
            supply.note("free -> row", Component.FULL, pages, record.req_pool_idx)
        if draw is None:
            _rewind(parts, record, committed)
        elif window is not None:
            window.draw(record, record.kv_committed_len, draw.start, draw.end)
    except BaseException:
        if not isinstance(pages, Refused) and len(pages):
            parts.rows.write(record.req_pool_idx, first, np.zeros_like(pages))
            supply.give_back(Component.FULL, pages, "row -> free", record.req_pool_idx)
        if window is not None:
            window.promise_for(record, old)
        raise
    record.kv_allocated_len = allocated
    record.kv_committed_len = committed
    return pages


def shrink(parts: PoolParts, record: ReqKvInfo, allocated: int, committed: int) -> None:
    """Frees the pages that lie wholly beyond `allocated`, and what slides or recurs beyond `committed`, which the
    record can go back to. Never refused: it takes nothing."""
    supply, window, row, old = parts.supply, parts.window, record.req_pool_idx, record.kv_allocated_len
    keep = pages_for_tokens(allocated, parts.page_size)
    extra = parts.full_view(record, keep * parts.page_size, old).copy()
    try:
        if len(extra):
            parts.rows.write(row, keep, np.zeros_like(extra))
        if window is not None:
            window.promise_for(record, allocated)
        _rewind(parts, record, committed)
    except BaseException:
        if len(extra):
            parts.rows.write(row, keep, extra)
        if window is not None:
            window.promise_for(record, old)
        raise
    record.kv_allocated_len = allocated
    record.kv_committed_len = committed
    supply.give_back(Component.FULL, extra, "row -> free", row)


def _rewind(parts: PoolParts, record: ReqKvInfo, committed: int) -> None:
    """Frees what slides beyond `committed`, and forgets a state beyond it. All or nothing: what frees comes last."""
    window, states = parts.window, parts.states
    source = record.state_source
    if states is not None and committed < record.kv_committed_len:
        source = states.checkpoint(record.prefix_lock)
    if window is not None:
        window.free_from(record, committed)
    record.state_source = source
