"""What a record gives to the prefix tree, and its end: with `pool` and `resizing` the only writers of its lengths.

Owns no state; the parts of the pool come as an argument.
"""

from __future__ import annotations

import numpy as np

from baton.common.kv.errors import OwnershipError
from baton.common.kv.events import PageLog
from baton.common.kv.layout import Component
from baton.common.kv.parts import PoolParts
from baton.common.kv.prefix.interface import I32, NO_IDS, GroupPages, Inserted, Span
from baton.common.kv.record import NO_COPY, KvHolder, ReqKvInfo, take_kv
from baton.common.kv.release import free_leftovers
from baton.common.units import whole_pages


def insert_and_go_on(parts: PoolParts, record: ReqKvInfo, tokens: I32, length: int) -> None:
    """Offers the KV of tokens[:length] to the tree; the record stays whole. Its state goes along when there is a spare
    slot: then the tree has the record's own, and the record's next step begins by copying that."""
    states = parts.states
    state = _state_to_offer(parts, record, length)
    spare = states.spare() if states is not None and len(state) else 0
    taken = GroupPages()
    try:
        taken = _insert(parts, record, tokens, length, state if spare else NO_IDS)
    finally:
        if states is not None:
            if len(taken.state):
                states.fork(record, spare)
            else:
                states.give_back(spare, None)


def release(parts: PoolParts, holder: KvHolder, record: ReqKvInfo, tokens: I32 | None, effective: int) -> None:
    """Ends the record: the KV of tokens[:effective] goes to the tree (none of `tokens` None), the rest is freed."""
    supply, window, states = parts.supply, parts.window, parts.states
    kept_state = False
    if tokens is not None:
        taken = _insert(parts, record, tokens, effective, _state_to_offer(parts, record, effective))
        kept_state = len(taken.state) > 0
    record = take_kv(holder)
    row, allocated = record.req_pool_idx, record.kv_allocated_len
    if parts.layout.full:
        entries = parts.full_view(record, 0, allocated)
        leftovers = [Span(record.cache_protected_len, effective), Span(effective, allocated)]
        freed = free_leftovers(supply.allocators[Component.FULL], entries, leftovers, parts.page_size)
        supply.note("row -> free", Component.FULL, freed, row)
    if window is not None:
        window.release(record)
    if record.prefix_lock is not None:
        supply.prefix.unlock(record.prefix_lock)
    if states is not None and not kept_state:
        states.give_back(record.state_slot, row)
    parts.rows.release(row)
    record.retire("released")


def _state_to_offer(parts: PoolParts, record: ReqKvInfo, length: int) -> I32:
    """The record's slot, when its state is that of exactly `length` tokens and these are whole pages."""
    news = length > record.cache_protected_len
    if parts.states is None or not news:
        return NO_IDS
    if record.state_source != NO_COPY:
        raise OwnershipError(f"the state of {record!r} was never computed")
    exact = length == record.kv_committed_len and length % parts.page_size == 0
    return np.array([record.state_slot], dtype=np.int32) if exact else NO_IDS


def _insert(parts: PoolParts, record: ReqKvInfo, tokens: I32, length: int, state: I32) -> GroupPages:
    """Offers the KV of tokens[:length] to the tree, moves protected and lock over what it keeps, and frees duplicates,
    except of the state, which stays the record's. Returns what the tree took."""
    supply, window, row = parts.supply, parts.window, record.req_pool_idx
    start = record.cache_protected_len
    if not start <= length <= min(record.kv_committed_len, len(tokens)):
        raise OwnershipError(f"cannot insert {length} of {len(tokens)} tokens for {record!r}")
    # The tree may keep what it is given for as long as it likes: copies, not views of the row.
    given = GroupPages(
        full=parts.full_view(record, start, length).copy(),
        swa=NO_IDS if window is None else window.row(record, start, length).copy(),
        state=state,
    )
    kept = supply.prefix.insert(record.prefix_lock, tokens[:length], given)
    record.prefix_lock = kept.lease
    if supply.events is not None and len(kept.taken.full):
        _tell(supply.events, parts, record, tokens, start, kept)
    if kept.lease is None or kept.lease.length == start:
        return kept.taken
    record.cache_protected_len = kept.lease.length
    if parts.layout.full:
        parts.rows.write(row, whole_pages(start, parts.page_size), kept.pages.full)
    if window is not None:
        window.moved_to_tree(record, start, kept.pages.swa)
    for component in parts.layout.paged:
        supply.note("row -> cached", component, kept.taken.of(component), row)
        supply.give_back(component, kept.duplicate.of(component), "duplicate -> free", row)
    return kept.taken


def _tell(events: PageLog, parts: PoolParts, record: ReqKvInfo, tokens: I32, start: int, kept: Inserted) -> None:
    """The tree took pages: behind those that it knew already of what was offered from `start` on, and those before."""
    page_size, taken = parts.page_size, kept.taken.full
    known = len(kept.duplicate.full)
    first = start + known * page_size
    if known:
        before = int(kept.pages.full[known - 1])
    else:
        before = int(parts.full_view(record, start - page_size, start)[0]) if start else 0
    events.stored(before, tokens[first : first + len(taken) * page_size], taken)
