"""Admission: room to grow is kept, one running request can always finish alone, and nobody starves.

Page size 4, so that the arithmetic can be done in the head.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.ids import RequestId
from baton.common.kv.census import Holding, OwnerClass
from baton.common.kv.checker import InvariantChecker
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.pool import KvPool, PreAllocated, RefusalReason, Refused
from baton.common.kv.record import ReqKvInfo
from baton.common.units import pages_for_tokens
from baton.decode.admission import (
    BACKFILL_WINDOW,
    MAX_BACKFILL,
    ActiveRequest,
    Admission,
    Admitted,
    Candidate,
)


@dataclass
class Holder:
    kv: ReqKvInfo | None = None


def candidate(name: str, fill_len: int, total_len: int | None = None, retracted: bool = False) -> Candidate:
    tokens = np.arange(fill_len, dtype=np.int32) + 1000 * sum(map(ord, name))
    return Candidate(
        holder=Holder(),
        request_id=RequestId(name),
        tokens=tokens,
        max_prefix=fill_len - 1,
        total_len=fill_len + 100 if total_len is None else total_len,
        retracted=retracted,
    )


def active(admitted: Candidate, running: bool = True) -> ActiveRequest:
    assert admitted.holder.kv is not None
    return ActiveRequest(admitted.holder.kv, admitted.total_len, running)


def make(pages: int, reserved_tokens: int, rows: int = 64) -> tuple[KvPool, Admission]:
    pool = KvPool(KvLayout(4), {Component.FULL: pages + 1}, rows, 4096)
    return pool, Admission(pool, reserved_tokens, max_active=pool.rows.max_rows)


def admitted(result: object) -> Admitted:
    assert isinstance(result, Admitted), result
    return result


def test_admission_allocates_in_the_same_call() -> None:
    pool, admission = make(20, 8)
    first = candidate("a", 10)
    allocation = admitted(admission.admit([first], [])).allocation
    assert isinstance(allocation, PreAllocated)
    assert first.holder.kv is not None
    assert first.holder.kv.kv_allocated_len == 10
    assert pool.free_pages == 17
    assert admission.admit([], []) is None


def test_room_to_grow_is_kept_for_everyone_active_and_for_the_one_admitted() -> None:
    """20 pages. "a" holds 3 (10 tokens), 8 more tokens would take it to 5. "b" wants 10 pages and grows by 2."""
    for pages, fits in ((17, True), (16, False)):
        pool, admission = make(pages, 8)
        a, b = candidate("a", 10), candidate("b", 40)
        admitted(admission.admit([a], []))
        free = pool.free_pages
        result = admission.admit([b], [active(a, running=False)])
        if fits:
            admitted(result)
        else:
            assert result == Refused(RefusalReason.NO_ROOM_TO_GROW, short_pages=1)
            assert b.holder.kv is None
            assert pool.free_pages == free


def test_nobody_reserves_more_than_it_can_still_use() -> None:
    """`a` may produce 2 more tokens and has room for them in its last page; `b` none at all."""
    pool, admission = make(13, 512)
    a, b = candidate("a", 10, total_len=12), candidate("b", 40, total_len=40)
    admitted(admission.admit([a], []))
    admitted(admission.admit([b], [active(a)]))
    assert pool.free_pages == 0


def test_one_running_request_can_always_finish_alone() -> None:
    """`a` holds 3 of 20 pages and may grow to 15, so it lacks 12. `b` will be in transfer, its pages cannot be taken
    back: 12 must stay available, less the 5 that retracting `c`, which runs, would give."""
    _, admission = make(20, 1)
    a = candidate("a", 12, total_len=60)
    admitted(admission.admit([a], []))
    assert isinstance(admission.admit([candidate("b", 24)], [active(a)]), Refused)
    assert isinstance(admission.admit([candidate("b", 20)], [active(a)]), Admitted)
    _, admission = make(20, 1)
    a, c = candidate("a", 12, total_len=60), candidate("c", 20, total_len=21)
    for request, others in ((a, []), (c, [a])):
        admitted(admission.admit([request], [active(other) for other in others]))
    assert isinstance(admission.admit([candidate("b", 24)], [active(a), active(c)]), Refused)
    assert isinstance(admission.admit([candidate("b", 20)], [active(a), active(c)]), Admitted)


def test_with_nothing_active_whatever_fits_is_admitted() -> None:
    pool, admission = make(10, 512)
    admitted(admission.admit([candidate("a", 40)], []))
    assert pool.free_pages == 0


def test_cached_pages_count_as_available_unless_the_request_itself_will_lock_them() -> None:
    pool, admission = make(10, 4)
    warm = candidate("w", 32)
    admitted(admission.admit([warm], []))
    assert warm.holder.kv is not None
    pool.commit_incoming(warm.holder.kv, 32)
    pool.release_kv_cache(warm.holder, warm.tokens)
    assert pool.available_pages == 10
    other = candidate("o", 4, total_len=8)
    admitted(admission.admit([other], []))
    # 1 page owned, 9 available, of which 8 are the prefix of the next one: it takes all 8 and one more.
    follow = Candidate(Holder(), RequestId("f"), np.append(warm.tokens, [1, 2]).astype(np.int32), 33, 34)
    assert admission.admit([follow], [active(other)]) == Refused(RefusalReason.NO_ROOM_TO_GROW, short_pages=1)
    assert pool.evictable_pages == 8
    short = Candidate(Holder(), RequestId("s"), warm.tokens[:30], 29, 30)
    assert admitted(admission.admit([short], [active(other)])).allocation.prefix_len == 28


def test_what_does_not_fit_at_all_says_so() -> None:
    _, admission = make(10, 4)
    a = candidate("a", 20)
    admitted(admission.admit([a], []))
    result = admission.admit([candidate("b", 36)], [active(a)])
    assert isinstance(result, Refused)
    assert result.reason is RefusalReason.NO_PAGES
    too_long = admission.admit([candidate("c", 44), candidate("d", 1)], [active(a)])
    assert too_long == Refused(RefusalReason.TOO_LONG)


def test_a_request_that_owns_a_record_only_grows() -> None:
    pool, admission = make(10, 4)
    first = candidate("a", 8)
    admitted(admission.admit([first], []))
    longer = Candidate(first.holder, first.request_id, np.arange(21, dtype=np.int32), 20, 40)
    allocation = admitted(admission.admit([longer], [])).allocation
    assert (allocation.prefix_len, len(allocation.pages)) == (0, 6)
    assert pool.free_pages == 4


def test_small_requests_overtake_a_large_one_but_not_for_ever() -> None:
    pool, admission = make(100, 0)
    running = candidate("run", 4 * 20, total_len=80)
    admitted(admission.admit([running], []))
    large = candidate("large", 4 * 90, total_len=360)
    overtaken = 0
    others = [active(running)]
    while True:
        small = candidate(f"small{overtaken}", 4, total_len=4)
        result = admission.admit([large, small], others)
        if isinstance(result, Refused):
            break
        assert admitted(result).index == 1
        others.append(active(small))
        overtaken += 1
    assert overtaken == MAX_BACKFILL
    pool.release_kv_cache(running.holder, running.tokens, is_insert=False)
    assert isinstance(admission.admit([large], others[1:]), Refused)
    assert pool.free_pages == 100 - MAX_BACKFILL


def test_a_new_head_may_be_overtaken_again() -> None:
    pool, admission = make(100, 0)
    running = candidate("run", 4 * 50, total_len=200)
    admitted(admission.admit([running], []))
    for head in ("large1", "large2"):
        for n in range(MAX_BACKFILL):
            queue = [candidate(head, 4 * 60, total_len=240), candidate(f"{head}-{n}", 4, total_len=4)]
            assert admitted(admission.admit(queue, [active(running)])).index == 1
    assert pool.free_pages == 50 - 2 * MAX_BACKFILL


def test_a_retracted_request_ahead_does_not_let_others_overtake_again() -> None:
    _, admission = make(100, 0)
    running = candidate("run", 4 * 50, total_len=200)
    admitted(admission.admit([running], []))
    large = candidate("large", 4 * 60, total_len=240)
    for n in range(MAX_BACKFILL):
        assert admitted(admission.admit([large, candidate(str(n), 4, total_len=4)], [active(running)])).index == 1
    back = candidate("back", 4, total_len=4, retracted=True)
    assert admitted(admission.admit([back, large], [active(running)])).index == 0
    assert isinstance(admission.admit([large, candidate("small", 4, total_len=4)], [active(running)]), Refused)


def test_a_retracted_request_is_never_overtaken() -> None:
    _, admission = make(10, 0)
    running = candidate("run", 20, total_len=20)
    admitted(admission.admit([running], []))
    queue = [candidate("back", 32, total_len=32, retracted=True), candidate("small", 4, total_len=4)]
    assert isinstance(admission.admit(queue, [active(running)]), Refused)


def test_without_a_row_nobody_is_tried() -> None:
    _, admission = make(10, 0, rows=1)
    running = candidate("run", 4, total_len=4)
    admitted(admission.admit([running], []))
    queue = [candidate("a", 4, total_len=4), candidate("b", 4, total_len=4)]
    assert admission.admit(queue, [active(running)]) == Refused(RefusalReason.NO_ROW)


def test_looking_behind_the_head_is_bounded() -> None:
    _, admission = make(10, 0)
    running = candidate("run", 20, total_len=20)
    admitted(admission.admit([running], []))
    large = [candidate(f"l{n}", 24 + n, total_len=24 + n) for n in range(1 + BACKFILL_WINDOW)]
    queue = [*large, candidate("small", 4, total_len=4)]
    assert isinstance(admission.admit(queue, [active(running)]), Refused)
    assert admitted(admission.admit(queue[1:], [active(running)])).index == BACKFILL_WINDOW


lengths = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=14)


@settings(max_examples=80, deadline=None)
@given(lengths, st.integers(16, 60), st.sampled_from([0, 4, 16, 64]), st.booleans())
def test_every_queue_drains_and_room_to_grow_is_there_after_each_admission(
    shapes: list[tuple[int, int]], pages: int, reserved: int, longest_first: bool
) -> None:
    pool, admission = make(pages, reserved)
    queue = [candidate(str(n), fill, fill + more) for n, (fill, more) in enumerate(shapes)]
    waiting, running = list(queue), []
    rounds = 0
    while waiting or running:
        rounds += 1
        assert rounds < 200, "does not drain"
        result = admission.admit(waiting, [active(r) for r in running])
        if isinstance(result, Admitted):
            running.append(waiting.pop(result.index))
            if len(running) > 1:
                growth = sum(
                    pages_for_tokens(min(len(r.tokens) + reserved, r.total_len), 4) - pages_for_tokens(len(r.tokens), 4)
                    for r in running
                )
                assert pool.available_pages >= growth
            InvariantChecker().check(
                pool, [Holding(OwnerClass.INCOMING, r.request_id, r.holder.kv) for r in running if r.holder.kv]
            )
            continue
        assert running, f"refused on an empty worker: {result}"
        done = max(running, key=lambda r: len(r.tokens)) if longest_first else running[0]
        running.remove(done)
        pool.release_kv_cache(done.holder, done.tokens, is_insert=False)
    assert pool.free_pages == pool.total_pages


@pytest.mark.parametrize("fill_len", [1, 4, 40])
def test_a_pool_that_is_exactly_full_still_admits(fill_len: int) -> None:
    pool, admission = make(pages_for_tokens(fill_len, 4), 512)
    admitted(admission.admit([candidate("a", fill_len)], []))
    assert pool.free_pages == 0
