"""What KvPool promises in single situations: all or nothing, exact shortfalls, and the named scenarios of KV memory."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from baton.common.clock import VirtualClock
from baton.common.kv.census import Holding, OwnerClass
from baton.common.kv.checker import InvariantChecker
from baton.common.kv.errors import OwnershipError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.pool import Extended, KvPool, PreAllocated, RefusalReason, Refused
from baton.common.kv.record import ReqKvInfo, take_kv
from baton.common.kv.transitions import TransitionLog


@dataclass
class Holder:
    kv: ReqKvInfo | None = None


def make_pool(num_pages: int = 21, page_size: int = 4, rows: int = 4, width: int = 64, cache: str = "radix") -> KvPool:
    log = TransitionLog(VirtualClock())
    return KvPool(KvLayout(page_size), {Component.FULL: num_pages}, rows, width, cache, log)  # type: ignore[arg-type]


def check(pool: KvPool, *holders: Holder, owner_class: OwnerClass = OwnerClass.REQUEST) -> None:
    held = [Holding(owner_class, f"h{i}", h.kv) for i, h in enumerate(holders) if h.kv is not None]
    assert InvariantChecker().check(pool, held).unaccounted == 0


def cached(pool: KvPool, tokens: list[int]) -> None:
    """Leaves the KV of `tokens` in the tree, unlocked."""
    holder = Holder()
    assert pool.prepare_for_extend(holder, tokens, len(tokens)) == 0
    pool.release_kv_cache(holder, tokens)


def seq(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


# ---------------------------------------------------------------------------------------- all or nothing


def snapshot(pool: KvPool, holder: Holder) -> tuple[object, ...]:
    """What an undone operation must leave as it was. Pages may have been evicted: that is not undone."""
    prefix = pool.prefix.stats()
    return pool.available_pages, pool.rows.free_rows, prefix.leases, prefix.locked.full, repr(holder.kv)


Operation = Callable[[KvPool, Holder], object]

OPERATIONS: dict[str, tuple[bool, Operation]] = {
    "extend, first": (False, lambda pool, h: pool.prepare_for_extend(h, seq(40), 40)),
    "extend, later": (True, lambda pool, h: pool.prepare_for_extend(h, seq(40), 40)),
    "decode": (True, lambda pool, h: pool.prepare_for_decode(h, 9)),
    "pre_alloc, first": (False, lambda pool, h: pool.pre_alloc(h, seq(40), 40, 39)),
    "pre_alloc, later": (True, lambda pool, h: pool.pre_alloc(h, seq(40), 40, 39)),
}


def prepared(has_record: bool) -> tuple[KvPool, Holder, Holder]:
    """No page free: 4 owned by `other`, the first 3 of the holder's tokens cached, the rest evictable."""
    pool, holder, other = make_pool(num_pages=17), Holder(), Holder()
    assert pool.prepare_for_extend(other, seq(16, 500), 16) == 0
    cached(pool, seq(12))
    cached(pool, seq(36, 100))
    if has_record:
        assert pool.prepare_for_extend(holder, seq(13), 13) == 12
    return pool, holder, other


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_refusal_for_want_of_pages_changes_nothing(name: str) -> None:
    has_record, operation = OPERATIONS[name]
    pool, holder, other = prepared(has_record)
    hog = Holder()
    assert pool.prepare_for_extend(hog, seq(32, 100), 32, max_prefix=32) == 32  # locks what could have been evicted
    before = snapshot(pool, holder), pool.evictable_pages
    result = operation(pool, holder)
    assert isinstance(result, Refused)
    assert result.reason is RefusalReason.NO_PAGES
    assert (snapshot(pool, holder), pool.evictable_pages) == before
    check(pool, holder, other, hog)
    pool.release_kv_cache(hog, seq(32, 100), is_insert=False)
    assert not isinstance(operation(pool, holder), Refused)


def test_no_row_returns_the_lock() -> None:
    pool = make_pool(rows=1)
    cached(pool, seq(8))
    first, second = Holder(), Holder()
    assert pool.prepare_for_extend(first, seq(4, 50), 4) == 0
    assert pool.pre_alloc(second, seq(12), 12, 11) == Refused(RefusalReason.NO_ROW)
    assert pool.evictable_pages == 2
    check(pool, first, second)


def test_what_can_never_fit_is_told_apart_from_what_must_wait() -> None:
    pool = make_pool(num_pages=6, width=64)
    holder = Holder()
    for result in (
        pool.pre_alloc(holder, seq(21), 21, 20),
        pool.prepare_for_extend(holder, seq(65), 65),
        pool.prepare_for_extend(holder, seq(21), 21),
    ):
        assert result == Refused(RefusalReason.TOO_LONG)
    assert pool.prepare_for_extend(holder, seq(20), 20) == 0
    assert pool.prepare_for_decode(holder) == Refused(RefusalReason.TOO_LONG)
    narrow = make_pool(width=10)
    holder = Holder()
    assert narrow.prepare_for_extend(holder, seq(10), 10) == 0
    assert narrow.prepare_for_decode(holder) == Refused(RefusalReason.TOO_LONG)
    assert holder.kv is not None
    assert holder.kv.kv_allocated_len == 10


def test_exactly_the_shortfall_is_evicted() -> None:
    pool = make_pool(num_pages=11)
    cached(pool, seq(32))  # 8 of 10 pages
    holder = Holder()
    assert pool.prepare_for_extend(holder, seq(20, 100), 20) == 0  # 5 pages, 2 are free
    assert (pool.free_pages, pool.evictable_pages) == (0, 5)
    assert pool.match_len(seq(32)) == 20


# ---------------------------------------------------------------------------------------- prefixes and hand-offs


def test_a_match_leaves_a_token_to_compute_unless_told_otherwise() -> None:
    pool = make_pool()
    cached(pool, seq(16))
    assert pool.prepare_for_extend(Holder(), seq(16), 16) == 12
    assert pool.prepare_for_extend(Holder(), seq(16), 16, max_prefix=16) == 16
    assert pool.prepare_for_extend(Holder(), seq(16), 16, max_prefix=7) == 4


def test_pre_alloc_promises_pages_that_are_not_valid_before_they_land() -> None:
    pool, holder = make_pool(), Holder()
    cached(pool, seq(8))
    allocation = pool.pre_alloc(holder, seq(18), 18, 17)
    assert isinstance(allocation, PreAllocated)
    assert allocation.prefix_len == 8
    assert len(allocation.pages) == 3
    record = holder.kv
    assert record is not None
    assert (record.cache_protected_len, record.kv_committed_len, record.kv_allocated_len) == (8, 8, 18)
    with pytest.raises(OwnershipError):  # nothing uncommitted is ever inserted
        pool.cache_finished_req(holder, seq(18), kv_len_to_handle=12)
    pool.commit_incoming(record, 13)
    again = pool.pre_alloc(holder, seq(18), 18, 17)  # the next attempt starts at the last whole page that landed
    assert isinstance(again, PreAllocated)
    assert again.prefix_len == 12
    assert again.pages.tolist() == allocation.pages[1:].tolist()
    with pytest.raises(OwnershipError):
        pool.commit_incoming(record, 12)
    pool.commit_incoming(record, 18)
    assert pool.prepare_for_decode(holder) == Extended(0)
    check(pool, holder, owner_class=OwnerClass.INCOMING)
    pool.release_kv_cache(holder, seq(19))
    assert pool.match_len(seq(19)) == 16


def test_a_failed_hand_off_can_be_prefilled_in_the_pages_it_was_promised() -> None:
    pool, holder = make_pool(), Holder()
    assert isinstance(pool.pre_alloc(holder, seq(18), 18, 17), PreAllocated)
    free = pool.free_pages
    assert holder.kv is not None
    pool.commit_incoming(holder.kv, 8)
    assert pool.prepare_for_extend(holder, seq(18), 14) == 8
    assert pool.prepare_for_extend(holder, seq(18), 18) == 14
    assert pool.free_pages == free
    assert (holder.kv.kv_committed_len, holder.kv.kv_allocated_len) == (18, 18)


def test_decode_radix_abort() -> None:
    """Abort meets decode-side prefix reuse: nothing is freed twice, the lock comes back exactly once."""
    pool = make_pool()
    cached(pool, seq(8))
    first, second = Holder(), Holder()
    for holder in (first, second):
        assert isinstance(pool.pre_alloc(holder, seq(20), 20, 19), PreAllocated)
    pool.release_kv_cache(first, seq(20), is_insert=False)
    check(pool, first, second)
    assert pool.prefix.locked.full == 2
    pool.release_kv_cache(second, seq(20), is_insert=False)
    check(pool)
    assert pool.census([]).idle
    with pytest.raises(OwnershipError):
        pool.release_kv_cache(second, seq(20))


def test_two_requests_that_compute_the_same_prefix_end_up_sharing_it() -> None:
    pool, first, second = make_pool(), Holder(), Holder()
    for holder in (first, second):
        assert pool.prepare_for_extend(holder, seq(10), 10) == 0
    assert pool.free_pages == 14
    for holder in (first, second):
        pool.cache_unfinished_req(holder, seq(10))
    check(pool, first, second)
    assert pool.free_pages == 16
    assert first.kv is not None
    assert second.kv is not None
    assert pool.pages_of(first.kv, 0, 8).tolist() == pool.pages_of(second.kv, 0, 8).tolist()
    assert pool.pages_of(first.kv, 8, 10).tolist() != pool.pages_of(second.kv, 8, 10).tolist()


@pytest.mark.parametrize("cache", ["radix", "chunk"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_page_freed_twice_at_a_seam_on_release(cache: str, page_size: int) -> None:
    """The kept part, the unaligned tail and the over-allocation meet inside pages; each page goes back once."""
    for effective in range(0, 24):
        pool, holder = make_pool(page_size=page_size, num_pages=60, cache=cache), Holder()
        assert isinstance(pool.pre_alloc(holder, seq(40), 40, 39), PreAllocated)
        assert holder.kv is not None
        pool.commit_incoming(holder.kv, 23)
        pool.release_kv_cache(holder, seq(40), effective_len=effective)
        check(pool)
        kept = effective // page_size if cache == "radix" else 0
        assert pool.free_pages == 59 - kept


def test_a_chunk_cache_shares_nothing() -> None:
    pool = make_pool(cache="chunk")
    cached(pool, seq(16))
    assert pool.match_len(seq(16)) == 0
    assert pool.free_pages == pool.total_pages
    holder = Holder()
    assert pool.prepare_for_extend(holder, seq(16), 16) == 0
    pool.cache_unfinished_req(holder, seq(16))
    assert holder.kv is not None
    assert holder.kv.cache_protected_len == 0
    assert pool.clear_cache() == 0
    check(pool, holder)


# ---------------------------------------------------------------------------------------- access and misuse


def test_pages_handed_across_threads_are_copies_and_rows_are_read_only() -> None:
    pool, holder = make_pool(), Holder()
    assert pool.prepare_for_extend(holder, seq(12), 12) == 0
    assert holder.kv is not None
    copied, view = pool.pages_of(holder.kv, 4, 9), pool.pages_for_row(holder.kv, 9)
    assert copied.dtype == view.dtype == np.int32
    assert copied.tolist() == view[1:].tolist()
    assert len(pool.pages_for_row(holder.kv, 8)) == 2
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    copied[:] = 0
    assert pool.pages_for_row(holder.kv, 9)[1] != 0
    for start, end in ((1, 8), (8, 4), (0, 13), (-4, 4)):
        with pytest.raises(OwnershipError):
            pool.pages_of(holder.kv, start, end)
    with pytest.raises(OwnershipError):
        pool.pages_for_row(holder.kv, 13)


def test_a_holder_without_a_record_can_do_nothing() -> None:
    pool, holder = make_pool(), Holder()
    for misuse in (
        lambda: pool.prepare_for_decode(holder),
        lambda: pool.cache_unfinished_req(holder, []),
        lambda: pool.release_kv_cache(holder, []),
        lambda: take_kv(holder),
    ):
        with pytest.raises(OwnershipError):
            misuse()


def test_lengths_that_contradict_the_tokens_are_refused_loudly() -> None:
    pool, holder = make_pool(), Holder()
    assert pool.prepare_for_extend(holder, seq(12), 12) == 0
    with pytest.raises(OwnershipError):
        pool.prepare_for_extend(holder, seq(12), 11)
    with pytest.raises(OwnershipError):
        pool.cache_unfinished_req(holder, seq(11))
    with pytest.raises(OwnershipError):
        pool.cache_finished_req(holder, seq(20), kv_len_to_handle=13)
    check(pool, holder)


def test_clear_leaves_what_is_being_read() -> None:
    pool, holder = make_pool(), Holder()
    cached(pool, seq(16))
    assert pool.prepare_for_extend(holder, seq(12), 12) == 8
    assert pool.clear_cache() == 2
    assert pool.match_len(seq(16)) == 8
    check(pool, holder)
