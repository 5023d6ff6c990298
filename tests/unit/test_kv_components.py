"""What a pool with sliding windows and recurrent states promises in single situations."""

from dataclasses import dataclass

import numpy as np
import pytest

from baton.common.clock import VirtualClock
from baton.common.errors import RequestError
from baton.common.kv.census import Holding, OwnerClass
from baton.common.kv.checker import InvariantChecker, InvariantViolation, who_holds
from baton.common.kv.compiled_checker import StepChecker
from baton.common.kv.errors import OwnershipError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.pool import Extended, KvPool, PreAllocated, RefusalReason, Refused
from baton.common.kv.record import ReqKvInfo
from baton.common.kv.transitions import TransitionLog

SWA = KvLayout(4, window=8)
STATE = KvLayout(4, state=True)
ALL = KvLayout(4, window=8, state=True)
PURE = KvLayout(4, full=False, window=8)


@dataclass
class Holder:
    kv: ReqKvInfo | None = None

    @property
    def record(self) -> ReqKvInfo:
        assert self.kv is not None
        return self.kv


def make_pool(
    layout: KvLayout, full: int = 40, swa: int = 20, state: int = 6, cache: str = "radix", step_tokens: int = 8
) -> KvPool:
    sizes = {Component.FULL: full + 1, Component.SWA: swa + 1, Component.STATE: state + 1}
    counts = {component: sizes[component] for component in layout.components}
    return KvPool(layout, counts, 6, 200, cache, TransitionLog(VirtualClock()), step_tokens)  # type: ignore[arg-type]


def seq(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


def check(pool: KvPool, *holders: Holder) -> None:
    held = [Holding(OwnerClass.REQUEST, f"h{i}", h.kv) for i, h in enumerate(holders) if h.kv]
    InvariantChecker().check(pool, held)
    assert StepChecker(pool, lambda: held).broken_rule([one.record for one in held]) == ""


def filled(pool: KvPool, tokens: list[int], until: int | None = None, step: int = 8) -> Holder:
    """Computed chunk by chunk, each offered to the tree, as a prefill worker does."""
    holder = Holder()
    assert isinstance(pool.pre_alloc(holder, tokens, len(tokens), len(tokens)), PreAllocated)
    record = holder.record
    while record.kv_committed_len < (until or len(tokens)):
        end = min(record.kv_committed_len + step, until or len(tokens))
        pool.prepare_chunk(record, end)
        pool.take_state_copies([record])
        check(pool, holder)
        pool.commit_incoming(record, end)
        pool.cache_unfinished_req(holder, tokens)
        check(pool, holder)
    return holder


def swa_row(pool: KvPool, holder: Holder) -> list[bool]:
    pages = pool.swa_pages_for_row(holder.record, holder.record.kv_allocated_len)
    assert pages is not None
    return (pages > 0).tolist()


# ---------------------------------------------------------------------------------------- sliding window


def test_a_long_sequence_holds_a_window_of_sliding_pages_however_long_it_gets() -> None:
    pool = make_pool(SWA, cache="chunk")
    holder = filled(pool, seq(60))
    assert isinstance(pool.window, object)
    most = 0
    for _ in range(80):
        assert isinstance(pool.prepare_for_decode(holder), Extended)
        check(pool, holder)
        most = max(most, len(pool.parts.own_ids(holder.record, Component.SWA)))
    assert most <= 4  # 8 tokens of the window, the one computed, and a page that they share with others
    assert len(pool.parts.own_ids(holder.record, Component.FULL)) == 35


@pytest.mark.parametrize("layout", [SWA, PURE])
def test_promises_saturate_at_the_window_and_never_exceed_the_pool(layout: KvLayout) -> None:
    """Nothing is drawn yet, and still only so many get in as can all come to their end."""
    pool = make_pool(layout, full=200, swa=20, cache="chunk")
    assert pool.window is not None
    most = pool.window.most_pages
    holders = []
    while True:
        holder = Holder()
        result = pool.pre_alloc(holder, seq(100), 100, 0)
        if isinstance(result, Refused):
            break
        holders.append(holder)
    assert len(holders) == 20 // most
    assert result == Refused(RefusalReason.NO_PAGES, most - 20 % most)
    assert pool.window.promised == most * len(holders)
    for _ in range(12):  # in turn, so that each waits while the others hold their most
        for holder in holders:
            record = holder.record
            end = min(100, record.kv_committed_len + 8)
            pool.prepare_chunk(record, end)
            pool.commit_incoming(record, end)
            check(pool, *holders)
    for holder in holders:
        pool.release_kv_cache(holder, seq(100), is_insert=False)
    assert pool.window.promised == 0
    assert pool.census([]).idle


def test_a_chunk_larger_than_a_step_is_a_bug() -> None:
    pool = make_pool(SWA)
    holder = Holder()
    assert isinstance(pool.pre_alloc(holder, seq(100), 100, 0), PreAllocated)
    with pytest.raises(OwnershipError, match="more than what is promised"):
        pool.prepare_chunk(holder.record, 60)


def test_the_window_frees_nothing_that_the_next_query_sees() -> None:
    pool = make_pool(KvLayout(4, window=6), cache="chunk")
    holder = filled(pool, seq(40))
    for known in range(40):
        pool.free_swa_out_of_window_slots(holder.record, known)
        first_seen = max(0, known - 6 + 1)
        assert holder.record.swa_evicted_seqlen <= max(first_seen, 36 - 5)
        assert all(swa_row(pool, holder)[max(first_seen, 35) // 4 :])


def test_what_is_kept_on_purpose_is_not_freed_by_the_window() -> None:
    pool = make_pool(SWA, cache="chunk", step_tokens=64)
    holder = Holder()
    assert pool.prepare_for_extend(holder, seq(40), 40) == 0
    holder.record.swa_evict_floor = 9
    pool.free_swa_out_of_window_slots(holder.record, 40)
    assert swa_row(pool, holder) == [True] * 3 + [False] * 5 + [True] * 2
    pool.release_kv_cache(holder, seq(40))
    check(pool)
    assert pool.census([]).idle


def test_a_released_sequence_can_be_matched_to_its_last_whole_page() -> None:
    for length in range(20, 36):
        pool = make_pool(SWA)
        holder = filled(pool, seq(12))
        for token in range(12, length):
            assert isinstance(pool.prepare_for_decode(holder), Extended), token
        pool.release_kv_cache(holder, seq(length))
        check(pool)
        assert pool.match_len(seq(length)) == length // 4 * 4


def test_a_shared_window_is_paid_for_by_each_that_reads_it() -> None:
    """Two go on from one prefix, in step: what the first leaves behind is still locked by the second."""
    pool = make_pool(SWA, full=100, swa=16)
    filled_one = filled(pool, seq(16))
    pool.release_kv_cache(filled_one, seq(16))
    holders = []
    tokens = [seq(16) + seq(60, 100 * n) for n in range(1, 5)]
    for one in tokens:
        holder = Holder()
        if isinstance(pool.pre_alloc(holder, one, 76, 75), PreAllocated):
            assert holder.record.kv_committed_len == 16
            holders.append((holder, one))
    assert len(holders) == 2
    for _ in range(8):
        for holder, one in holders:
            end = min(76, holder.record.kv_committed_len + 8)
            pool.prepare_chunk(holder.record, end)
            pool.commit_incoming(holder.record, end)
            pool.cache_unfinished_req(holder, one)
            check(pool, *(h for h, _ in holders))


# ---------------------------------------------------------------------------------------- recurrent state


def test_a_checkpoint_is_the_slot_itself_and_the_record_goes_on_in_a_copy() -> None:
    pool = make_pool(STATE)
    holder = Holder()
    assert isinstance(pool.pre_alloc(holder, seq(20), 20, 19), PreAllocated)
    record, own = holder.record, holder.record.state_slot
    copies = pool.take_state_copies([record])
    assert copies is not None
    assert copies.tolist() == [[0, own]]  # a fresh sequence
    assert pool.take_state_copies([record]) is None
    pool.commit_incoming(record, 8)
    pool.cache_unfinished_req(holder, seq(20))
    assert record.state_slot != own
    assert pool.pages_to_send(record, Component.STATE, 0, 8).tolist() == [own]
    copies = pool.take_state_copies([record])
    assert copies is not None
    assert copies.tolist() == [[own, record.state_slot]]
    pool.commit_incoming(record, 10)
    pool.cache_unfinished_req(holder, seq(20))  # not a whole page: nobody could go on from there
    assert record.cache_protected_len == 8
    check(pool, holder)
    pool.release_kv_cache(holder, seq(20))
    assert pool.match_len(seq(20)) == 8
    assert pool.stats().owned.state == 0


def test_without_a_slot_to_go_on_in_the_tree_gets_nothing() -> None:
    pool = make_pool(STATE, state=2)
    other, holder = Holder(), Holder()
    assert isinstance(pool.pre_alloc(other, seq(8, 50), 8, 0), PreAllocated)
    assert isinstance(pool.pre_alloc(holder, seq(8), 8, 0), PreAllocated)
    pool.take_state_copies([holder.record])
    pool.commit_incoming(holder.record, 8)
    pool.cache_unfinished_req(holder, seq(8))
    assert holder.record.cache_protected_len == 0
    check(pool, other, holder)
    pool.release_kv_cache(holder, seq(8))  # at its end it needs none
    assert pool.match_len(seq(8)) == 8
    check(pool, other)
    third = Holder()
    assert pool.pre_alloc(third, seq(9), 9, 9) == Refused(RefusalReason.NO_PAGES, 1)  # it would lock the checkpoint
    assert isinstance(pool.pre_alloc(third, seq(9, 70), 9, 0), PreAllocated)  # and it has to go for a stranger
    assert pool.match_len(seq(8)) == 0
    check(pool, other, third)


def test_one_state_slot_is_not_enough() -> None:
    with pytest.raises(ValueError, match="beside that of the checkpoint"):
        make_pool(STATE, state=1)


# ---------------------------------------------------------------------------------------- hand-offs, going back


@pytest.mark.parametrize("start", [0, 8])
def test_a_hand_off_names_what_is_still_live(start: int) -> None:
    pool = make_pool(ALL)
    if start:
        pool.release_kv_cache(filled(pool, seq(start)), seq(start))
    holder = Holder()
    assert isinstance(pool.pre_alloc(holder, seq(30), 30, 29), PreAllocated)
    pages = pool.open_incoming(holder.record, start)
    assert {component.value: len(ids) for component, ids in pages.items()} == {
        "full": 8 - start // 4,
        "swa": 8 - 20 // 4,  # [20, 30): the query at 30 sees from 23 on
        "state": 1,
    }
    check(pool, holder)
    pool.commit_incoming(holder.record, 30)
    assert pool.take_state_copies([holder.record]) is None
    check(pool, holder)
    assert isinstance(pool.prepare_for_decode(holder), Extended)
    check(pool, holder)


def test_a_hand_off_that_fails_leaves_what_the_tree_has() -> None:
    pool = make_pool(ALL)
    pool.release_kv_cache(filled(pool, seq(8)), seq(8))
    holder = Holder()
    assert isinstance(pool.pre_alloc(holder, seq(30), 30, 29), PreAllocated)
    record = holder.record
    for end in (16, 20):
        pool.prepare_chunk(record, end)
        pool.take_state_copies([record])
        pool.commit_incoming(record, end)
    pool.open_incoming(record, 20)
    assert record.kv_committed_len == 8
    check(pool, holder)
    pool.abandon_incoming(record)
    check(pool, holder)
    assert pool.parts.own_ids(record, Component.SWA).tolist() == []
    copies = pool.take_state_copies([record])
    assert copies is not None
    assert copies[0, 0] == pool.prefix.pages(record.prefix_lock).state_slot  # type: ignore[arg-type]
    for end in (16, 24, 30):
        pool.prepare_chunk(record, end)
        pool.commit_incoming(record, end)
        check(pool, holder)


def test_going_back_is_possible_where_the_window_and_the_state_still_are() -> None:
    pool = make_pool(SWA)
    holder = filled(pool, seq(12))
    for _ in range(30):
        pool.prepare_for_decode(holder)
    record = holder.record
    assert record.cache_protected_len == 12
    allowed = [length for length in range(50) if pool.can_go_back(record, length)]
    assert allowed == [12, *range(39, 43)]
    with pytest.raises(OwnershipError):
        pool.pre_alloc(holder, seq(50), 50, 30)
    assert isinstance(pool.pre_alloc(holder, seq(50), 50, 40), PreAllocated)
    check(pool, holder)
    assert isinstance(pool.pre_alloc(holder, seq(50), 50, 12), PreAllocated)
    check(pool, holder)
    pool.prepare_chunk(record, 20)
    check(pool, holder)
    pool = make_pool(STATE)
    holder = filled(pool, seq(12))
    for _ in range(3):
        pool.prepare_for_decode(holder)
        pool.take_state_copies([holder.record])
    assert [length for length in range(50) if pool.can_go_back(holder.record, length)] == [12, 15]


# ---------------------------------------------------------------------------------------- the checker


def test_the_checker_finds_what_is_wrong_with_a_window_or_a_state() -> None:
    def broken(layout: KvLayout) -> tuple[KvPool, Holder]:
        pool = make_pool(layout)
        return pool, filled(pool, seq(30))

    def message(pool: KvPool, holder: Holder) -> str:
        with pytest.raises(InvariantViolation) as caught:
            check(pool, holder)
        assert StepChecker(pool, list).broken_rule([holder.record]), "the compiled checks find nothing"
        return str(caught.value)

    pool, holder = broken(SWA)
    holder.record.swa_promised = 1
    assert "promised 1" in message(pool, holder)
    pool, holder = broken(SWA)
    pool.window.promised += 1  # type: ignore[union-attr]
    assert "C6: 8 sliding pages are promised, counted as 9" in message(pool, holder)
    pool, holder = broken(SWA)
    pool.window.rows.write(holder.record.req_pool_idx, 7, np.zeros(1, dtype=np.int32))  # type: ignore[union-attr]
    assert "C6: request h0" in message(pool, holder)
    pool, holder = broken(SWA)
    pool.window.rows.write(holder.record.req_pool_idx, 5, np.zeros(1, dtype=np.int32))  # type: ignore[union-attr]
    assert "C3: request h0 reads swa pages" in message(pool, holder)
    pool, holder = broken(SWA)
    page = pool.parts.own_ids(holder.record, Component.SWA)
    pool.supply.allocators[Component.SWA].free(page)
    assert f"swa page {page[0]} is owned by free and by request h0" in message(pool, holder)
    pool, holder = broken(STATE)
    holder.record.state_source = 5
    assert "C7: request h0 would copy state 5" in message(pool, holder)
    pool, holder = broken(STATE)
    holder.record.state_slot = 0
    assert "state slot 0 is owned by request h0" in message(pool, holder)


def test_a_census_counts_each_component_and_any_page_has_a_holder() -> None:
    pool = make_pool(ALL)
    holder = filled(pool, seq(30))
    holdings = [Holding(OwnerClass.OUTGOING, "h", holder.record)]
    census = pool.census(holdings)
    assert [one.component for one in (census, *census.others)] == list(Component)
    assert [one.outgoing for one in (census, *census.others)] == [2, 2, 1]
    assert [one.unaccounted for one in (census, *census.others)] == [0, 0, 0]
    assert "state slots" in str(census)
    assert not census.idle
    for component in Component:
        (own, *_) = pool.parts.own_ids(holder.record, component).tolist()
        found = who_holds(pool, own, holdings, component)
        assert (found.component, found.owner, found.owner_id) == (component, OwnerClass.OUTGOING, "h")
        unit = "slot" if component is Component.STATE else "page"
        assert found.told(0.0).startswith(f"{component} {unit} {own}: outgoing h for 0.0 s")
        total = pool.supply.total(component)
        owners = {who_holds(pool, page, holdings, component).owner for page in range(1, total + 1)}
        assert owners == {OwnerClass.OUTGOING, "cached", "free"}
        with pytest.raises(RequestError, match=f"no {component} {unit} {total + 1}: .* 1 to {total}"):
            who_holds(pool, total + 1, holdings, component)
    lease = holder.record.prefix_lock
    assert lease is not None
    checkpoint = pool.prefix.pages(lease).state_slot
    found = who_holds(pool, checkpoint, holdings, Component.STATE)
    assert (found.owner, found.readers) == ("cached", ("h",))
    assert [entry.change for entry in found.history][-1] == "row -> cached"
