"""The checker finds each kind of broken book, and says what last happened; who_holds looks one page up."""

from dataclasses import dataclass

import numpy as np
import pytest

from baton.common.clock import VirtualClock
from baton.common.errors import ErrorCode, RequestError
from baton.common.kv.census import Census, Holding, OwnerClass
from baton.common.kv.checker import InvariantChecker, InvariantViolation, who_holds
from baton.common.kv.compiled_checker import StepChecker
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.pool import KvPool, PreAllocated
from baton.common.kv.record import ReqKvInfo, take_kv
from baton.common.kv.transitions import TransitionLog


@dataclass
class Holder:
    kv: ReqKvInfo | None = None


class World:
    """20 pages of 4 tokens: request "a" owns 2 pages and reads 2 cached ones, hand-off "b" is promised 3, 1 is
    cached and nobody's."""

    def __init__(self) -> None:
        self.clock = VirtualClock(100.0)
        self.pool = KvPool(KvLayout(4), {Component.FULL: 21}, 4, 64, "radix", TransitionLog(self.clock))
        warm, self.a, self.b = Holder(), Holder(), Holder()
        self.pool.prepare_for_extend(warm, list(range(12)), 12)
        self.pool.release_kv_cache(warm, list(range(12)))
        self.clock.advance_to(200.0)
        assert self.pool.prepare_for_extend(self.a, [*range(8), 9, 9, 9, 9, 9], 13) == 8
        assert isinstance(self.pool.pre_alloc(self.b, [70] * 10, 10, 0), PreAllocated)

    def holdings(self) -> list[Holding]:
        assert self.a.kv is not None
        assert self.b.kv is not None
        return [Holding(OwnerClass.REQUEST, "a", self.a.kv), Holding(OwnerClass.INCOMING, "b", self.b.kv)]

    def record(self) -> ReqKvInfo:
        assert self.a.kv is not None
        return self.a.kv

    def violation(self, holdings: list[Holding] | None = None) -> str:
        held = self.holdings() if holdings is None else holdings
        with pytest.raises(InvariantViolation) as caught:
            InvariantChecker().check(self.pool, held)
        found = StepChecker(self.pool, lambda: held).broken_rule([one.record for one in held])
        assert found, "the compiled checks find nothing"
        return str(caught.value)


def test_a_census_partitions_the_pool() -> None:
    world = World()
    census = InvariantChecker().check(world.pool, world.holdings())
    assert census == Census(
        free=12,
        request=2,
        session=0,
        cached_evictable=1,
        cached_locked=2,
        incoming=3,
        outgoing=0,
        quarantined=0,
        total=20,
    )
    assert census.unaccounted == 0
    assert not census.idle
    assert "3 incoming" in str(census)
    assert world.pool.census([]).unaccounted == 5
    assert "5 UNACCOUNTED" in str(world.pool.census([]))


def test_a_leaked_page_is_named_with_its_history() -> None:
    world = World()
    pages = world.pool.allocator.allocate(1)
    assert pages is not None
    world.pool.transitions.record("free -> row", pages, 3)  # type: ignore[union-attr]
    message = world.violation()
    assert f"page {pages[0]} is owned by nobody" in message
    assert "free -> row (row 3), 1 pages (full)" in message


def test_a_page_in_two_owners_is_named_with_both() -> None:
    world = World()
    stolen = world.pool.pages_of(world.record(), 8, 12)
    world.pool.rows.write(world.b.kv.req_pool_idx, 1, stolen)  # type: ignore[union-attr]
    message = world.violation()
    assert f"page {stolen[0]} is owned by request a and by incoming b" in message
    assert "at 200.000 s: free -> row" in message


def test_a_page_that_is_owned_and_free_is_found() -> None:
    world = World()
    page = world.pool.pages_of(world.record(), 12, 13)
    world.pool.allocator.free(page)
    assert f"page {page[0]} is owned by free and by request a" in world.violation()


def test_a_null_page_in_a_row_is_found() -> None:
    world = World()
    world.pool.rows.write(world.record().req_pool_idx, 3, np.zeros(1, dtype=np.int32))
    assert "page 0 is owned by request a" in world.violation()


def test_a_page_outside_the_pool_is_found() -> None:
    world = World()
    world.pool.rows.write(world.record().req_pool_idx, 3, np.array([99], dtype=np.int32))
    assert "page 99 is in use; the pool has 20" in world.violation()


def test_lengths_out_of_order_are_found() -> None:
    for field, value in (
        ("kv_committed_len", 14),
        ("kv_committed_len", 7),
        ("kv_allocated_len", 65),
        ("cache_protected_len", 4),
    ):
        world = World()
        setattr(world.record(), field, value)
        assert "C2: request a" in world.violation()


def test_a_prefix_that_is_not_the_trees_is_found() -> None:
    world = World()
    world.pool.rows.write(world.record().req_pool_idx, 0, world.pool.pages_of(world.record(), 8, 12))
    assert "C3: request a reads full pages" in world.violation()


def test_a_record_nobody_reports_and_one_reported_twice_are_found() -> None:
    world = World()
    assert "are taken by nobody" in world.violation(world.holdings()[:1])
    assert "belongs to request a and to outgoing a2" in world.violation(
        [*world.holdings(), Holding(OwnerClass.OUTGOING, "a2", world.record())]
    )


def test_a_record_that_moved_away_is_found() -> None:
    world = World()
    holdings = world.holdings()
    moved = take_kv(world.a)
    assert "request a holds <ReqKvInfo moved to another owner>" in world.violation(holdings)
    world.a.kv = moved
    InvariantChecker().check(world.pool, world.holdings())


def test_an_unbalanced_lock_is_found() -> None:
    world = World()
    lease = world.pool.prefix.lock(world.pool.prefix.match_prefix(np.arange(12, dtype=np.int32)))
    assert lease is not None
    assert "2 leases were given out, 1 are held" in world.violation()


def test_who_holds_a_page_and_since_when() -> None:
    world = World()
    pool, record = world.pool, world.record()
    own = who_holds(pool, int(pool.pages_of(record, 8, 9)[0]), world.holdings())
    assert (own.owner, own.owner_id, own.readers) == (OwnerClass.REQUEST, "a", ())
    assert own.since_s == 200.0
    shared = who_holds(pool, int(pool.pages_of(record, 0, 4)[0]), world.holdings())
    assert (shared.owner, shared.readers, shared.since_s) == ("cached", ("a",), 100.0)
    assert [entry.change for entry in shared.history] == ["free -> row", "row -> cached"]
    free = int(pool.allocator.free_page_ids()[0])
    assert who_holds(pool, free, world.holdings()).owner == "free"
    assert who_holds(pool, int(pool.pages_of(record, 8, 9)[0]), []).owner == "nobody"
    text = shared.told(now_s=130.0).splitlines()
    assert text[0].endswith(": cached for 30.0 s, read by a")
    assert [line.strip() for line in text[1:]] == [
        "30.0 s ago: free -> row (row 0), 3 pages (full)",
        "30.0 s ago: row -> cached (row 0), 3 pages (full)",
    ]


@pytest.mark.parametrize("page", [-1, 0, 21, 10**12])
def test_a_page_that_the_pool_does_not_have_is_a_typed_refusal(page: int) -> None:
    with pytest.raises(RequestError, match=f"no full page {page}: they are numbered from 1 to 20") as refused:
        who_holds(World().pool, page, [])
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, "page")


@pytest.mark.parametrize("component", [Component.SWA, Component.STATE])
def test_and_so_is_a_component_that_the_model_lacks(component: Component) -> None:
    with pytest.raises(RequestError, match=f"no {component}: it has full") as refused:
        who_holds(World().pool, 1, [], component)
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, "component")


def test_the_transition_log_is_bounded_and_optional() -> None:
    log = TransitionLog(VirtualClock(), capacity=3)
    for row in range(5):
        log.record("free -> row", np.array([1, 2], dtype=np.int32), row)
    log.record("free -> row", np.array([], dtype=np.int32), 9)
    assert [entry.row for entry in log.of_page(2)] == [2, 3, 4]
    assert [entry.number for entry in log.of_row(4)] == [4]
    pool, holder = KvPool(KvLayout(4), {Component.FULL: 5}, 1, 16), Holder()
    pool.prepare_for_extend(holder, [1], 1)
    assert who_holds(pool, int(pool.pages_of(holder.kv, 0, 1)[0]), []).since_s is None  # type: ignore[arg-type]
