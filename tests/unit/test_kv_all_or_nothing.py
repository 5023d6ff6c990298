"""Every operation of the pool that allocates, with an exception at each call of each of its parts: afterwards the pool
is as it was before, and the same operation succeeds.

Which calls there are is not written down here: every method of every part is wrapped, and the n-th call of any of them
raises, for n = 1, 2, … until the operation gets through. What gives back never fails: it is what undoes the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import pytest

from baton.common.clock import VirtualClock
from baton.common.kv.allocator import PageAllocator
from baton.common.kv.census import Holding, OwnerClass
from baton.common.kv.checker import InvariantChecker
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.parts import PoolParts
from baton.common.kv.pool import KvPool, PreAllocated, RefusalReason, Refused
from baton.common.kv.prefix.chunk import ChunkCache
from baton.common.kv.prefix.names import PrefixCacheName
from baton.common.kv.prefix.radix_cpp import RadixCacheCpp
from baton.common.kv.prefix.tree import UnifiedRadixCache
from baton.common.kv.record import ReqKvInfo
from baton.common.kv.rows import RowTable
from baton.common.kv.states import StateSlots
from baton.common.kv.supply import Supply
from baton.common.kv.transitions import TransitionLog
from baton.common.kv.window import SlidingWindow

CACHES = (UnifiedRadixCache, RadixCacheCpp, ChunkCache)
"""A cache is one part, whatever it is made of: what it calls of itself is not a step of the pool's."""
PARTS = (*CACHES, PageAllocator, RowTable, SlidingWindow, StateSlots, Supply, PoolParts, TransitionLog)
GIVES_BACK = {"free", "unlock", "release", "give_back", "_take_back"}
"""These, and what they call, never fail."""


class InjectedError(Exception):
    pass


@dataclass
class Wire:
    """`left` more calls until one fails; None: nothing fails and nothing is counted."""

    left: int | None = None
    calls: list[str] = field(default_factory=list)

    def step(self, name: str) -> None:
        assert self.left is not None
        self.left -= 1
        if self.left == 0:
            self.left = None
            raise InjectedError(name)
        self.calls.append(name)

    @contextmanager
    def safe(self) -> Iterator[None]:
        left, self.left = self.left, None
        try:
            yield
        finally:
            self.left = left


P = ParamSpec("P")
R = TypeVar("R")


def guarded(wire: Wire, part: type, name: str, function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if wire.left is None:
            return function(*args, **kwargs)
        if name not in GIVES_BACK:
            wire.step(f"{part.__name__}.{name}")
            if part not in CACHES:
                return function(*args, **kwargs)
        with wire.safe():
            return function(*args, **kwargs)

    return call


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    """In every method and property of every part, and where a record is made."""
    wire = Wire()
    for part in PARTS:
        for name, member in vars(part).items():
            if isinstance(member, property):
                assert member.fget is not None
                monkeypatch.setattr(part, name, property(guarded(wire, part, name, member.fget)))
            elif callable(member) and not name.startswith("__"):
                monkeypatch.setattr(part, name, guarded(wire, part, name, member))
    monkeypatch.setattr(ReqKvInfo, "__init__", guarded(wire, ReqKvInfo, "__init__", ReqKvInfo.__init__))
    return wire


# ---------------------------------------------------------------------------------------- pools to fail in


@dataclass
class Holder:
    kv: ReqKvInfo | None = None

    @property
    def record(self) -> ReqKvInfo:
        assert self.kv is not None
        return self.kv


@dataclass
class World:
    """`holder` is who the operation is for, `other` somebody else who runs."""

    pool: KvPool
    holder: Holder = field(default_factory=Holder)
    other: Holder = field(default_factory=Holder)

    def check(self) -> None:
        held = [(name, one.kv) for name, one in (("holder", self.holder), ("other", self.other)) if one.kv is not None]
        InvariantChecker().check(self.pool, [Holding(OwnerClass.REQUEST, name, record) for name, record in held])
        for _, record in held:
            assert record.swa_promised == self.pool.parts.needed(Component.SWA, record.kv_allocated_len)


def seq(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


def compute(pool: KvPool, holder: Holder, until: int) -> None:
    """What is promised already, in steps of a page."""
    record = holder.record
    while record.kv_committed_len < until:
        end = min(record.kv_committed_len + pool.page_size, until)
        pool.prepare_chunk(record, end)
        pool.take_state_copies([record])
        pool.commit_incoming(record, end)


def cache(pool: KvPool, tokens: list[int]) -> None:
    """Leaves all of it in the tree, unlocked: with a live window, and with a checkpoint at its end."""
    holder = Holder()
    assert isinstance(pool.pre_alloc(holder, tokens, len(tokens), len(tokens)), PreAllocated)
    compute(pool, holder, len(tokens))
    pool.release_kv_cache(holder, tokens)


def make_pool(layout: KvLayout, cache_name: PrefixCacheName, sizes: dict[Component, int]) -> KvPool:
    counts = {component: sizes[component] + 1 for component in layout.components}
    log = TransitionLog(VirtualClock())
    return KvPool(layout, counts, 4, 24 * layout.page_size, cache_name, log, 6 * layout.page_size)


def roomy(layout: KvLayout, cache_name: PrefixCacheName) -> World:
    """Nothing is cached."""
    return World(make_pool(layout, cache_name, dict.fromkeys(Component, 60)))


def full(layout: KvLayout, cache_name: PrefixCacheName) -> World:
    """The beginning of the holder's tokens is cached, and what else is free of any component is cached too: whatever
    is allocated must be evicted first."""
    world = World(make_pool(layout, cache_name, {Component.FULL: 15, Component.SWA: 13, Component.STATE: 4}))
    pool, ps = world.pool, layout.page_size
    assert isinstance(pool.pre_alloc(world.other, seq(4 * ps, 9000), 4 * ps, 0), PreAllocated)
    compute(pool, world.other, 4 * ps)
    for number in range(5):
        cache(pool, seq(2 * ps, 1000 + 100 * number))
    cache(pool, seq(3 * ps))
    return world


WORLDS: dict[str, Callable[[KvLayout], World]] = {
    "roomy": lambda layout: roomy(layout, "UnifiedRadixCache"),
    "full": lambda layout: full(layout, "UnifiedRadixCache"),
    "full, with a compiled tree": lambda layout: full(layout, "RadixCacheCpp"),
    "nothing is shared": lambda layout: roomy(layout, "ChunkCache"),
}

# ---------------------------------------------------------------------------------------- what is made to fail


@dataclass(frozen=True)
class Case:
    """`before` says what the holder has already; `operation` is what fails, and then succeeds."""

    operation: Callable[[KvPool, Holder, int], object]
    before: Callable[[KvPool, Holder, int], object] = lambda pool, holder, ps: None


def promised(allocated: float, committed: float) -> Callable[[KvPool, Holder, int], object]:
    """A record of so many pages, of which so many are computed; the rest of a page is one token."""

    def make(pool: KvPool, holder: Holder, ps: int) -> None:
        tokens = seq(length(allocated, ps))
        assert isinstance(pool.pre_alloc(holder, tokens, len(tokens), len(tokens)), PreAllocated)
        compute(pool, holder, length(committed, ps))

    return make


def length(count: float, ps: int) -> int:
    return int(count) * ps + (count != int(count))


def pre_alloc(fill: float, most: float | None) -> Callable[[KvPool, Holder, int], object]:
    """`most` None: back to what is the tree's."""

    def run(pool: KvPool, holder: Holder, ps: int) -> object:
        prefix = holder.record.cache_protected_len if most is None else length(most, ps)
        return pool.pre_alloc(holder, seq(length(fill, ps)), length(fill, ps), prefix)

    return run


def extend(new: float) -> Callable[[KvPool, Holder, int], object]:
    return lambda pool, holder, ps: pool.prepare_for_extend(holder, seq(length(new, ps)), length(new, ps))


CASES = {
    "extend, first": Case(extend(5.5)),
    "extend, later": Case(extend(8.5), before=extend(4.5)),
    "extend, into what is promised": Case(extend(7), before=promised(8, 4.5)),
    "decode, a token": Case(lambda pool, holder, ps: pool.prepare_for_decode(holder, 1), before=extend(4)),
    "decode, several": Case(lambda pool, holder, ps: pool.prepare_for_decode(holder, 2 * ps + 1), before=extend(4.5)),
    "pre_alloc, first": Case(pre_alloc(8.5, 8)),
    "pre_alloc, first, with little of the prefix": Case(pre_alloc(8.5, 2)),
    "pre_alloc, longer": Case(pre_alloc(8.5, 8), before=promised(4.5, 4.5)),
    "pre_alloc, back and longer": Case(pre_alloc(8.5, None), before=promised(5, 4.5)),
    "pre_alloc, back": Case(pre_alloc(5, None), before=promised(5, 4.5)),
    "pre_alloc, back and shorter": Case(pre_alloc(3.5, None), before=promised(8, 4.5)),
    "pre_alloc, shorter": Case(pre_alloc(4.5, 4.5), before=promised(8, 4.5)),
    "a chunk": Case(lambda pool, holder, ps: pool.prepare_chunk(holder.record, 6 * ps), before=promised(8, 4.5)),
}


@dataclass(frozen=True)
class Books:
    free: dict[Component, frozenset[int]]
    evictable: dict[Component, frozenset[int]]
    locked: dict[Component, frozenset[int]]
    leases: int
    taken_rows: list[int]
    rows: list[list[list[int]]]  # of every table
    promised: int
    records: list[dict[str, object]]


def books_of(world: World) -> Books:
    pool = world.pool
    evictable, locked = pool.prefix.cached_pages()
    components = pool.layout.components
    tables = [pool.rows] if pool.window is None else [pool.rows, pool.window.rows]
    return Books(
        free={one: frozenset(pool.supply.allocators[one].free_page_ids().tolist()) for one in components},
        evictable={one: frozenset(evictable.of(one).tolist()) for one in components},
        locked={one: frozenset(locked.of(one).tolist()) for one in components},
        leases=pool.prefix.stats().leases,
        taken_rows=pool.rows.taken_rows(),
        rows=[[table.view(row, 0, table.max_pages).tolist() for row in range(table.max_rows)] for table in tables],
        promised=pool.stats().promised,
        records=[fields_of(holder.kv) for holder in (world.holder, world.other) if holder.kv is not None],
    )


def fields_of(record: ReqKvInfo) -> dict[str, object]:
    fields = {name: getattr(record, name) for name in ReqKvInfo.__slots__ if name not in ("prefix_lock", "_gone")}
    return fields | {"lease": None if record.prefix_lock is None else record.prefix_lock.length}


def settle(world: World) -> None:
    """What a window has left behind may be freed by an operation that fails afterwards: here it is freed anyway."""
    for holder in (world.holder, world.other):
        if holder.kv is not None:
            world.pool.free_swa_out_of_window_slots(holder.kv, holder.kv.kv_committed_len)


def assert_undone(before: Books, after: Books) -> None:
    """Nothing but what is cached may have changed: some of it may be free now."""
    for component, evictable in before.evictable.items():
        assert after.evictable[component] <= evictable, component
        evicted = evictable - after.evictable[component]
        assert after.free[component] == before.free[component] | evicted, component
    assert (after.locked, after.leases) == (before.locked, before.leases)
    assert (after.rows, after.taken_rows) == (before.rows, before.taken_rows)
    assert after.promised == before.promised
    assert after.records == before.records


# ---------------------------------------------------------------------------------------- the test


def layouts(page_size: int) -> dict[str, KvLayout]:
    window = {1: 3, 4: 7, 16: 24}[page_size]
    return {
        "full": KvLayout(page_size),
        "swa": KvLayout(page_size, full=False, window=window),
        "full+swa": KvLayout(page_size, window=window),
        "full+state": KvLayout(page_size, state=True),
        "state": KvLayout(page_size, full=False, state=True),
        "full+swa+state": KvLayout(page_size, window=window, state=True),
    }


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("layout", layouts(4))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", ["roomy", "full"])
def test_an_exception_at_any_step_undoes_the_earlier_ones(
    wire: Wire, world: str, case: str, layout: str, page_size: int
) -> None:
    fail_at_every_step(wire, world, case, layout, page_size)


@pytest.mark.parametrize("layout", layouts(4))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", ["nothing is shared", "full, with a compiled tree"])
def test_also_with_another_prefix_cache(wire: Wire, world: str, case: str, layout: str) -> None:
    fail_at_every_step(wire, world, case, layout, 4)


NEEDS_PAGES = [
    "extend, first", "extend, later", "decode, a token", "decode, several", "pre_alloc, first", "pre_alloc, longer",
    "pre_alloc, back and longer",
]  # fmt: skip


@pytest.mark.parametrize("layout", [name for name, layout in layouts(4).items() if layout.full])
@pytest.mark.parametrize("case", NEEDS_PAGES)
def test_a_refusal_changes_nothing_either(case: str, layout: str) -> None:
    """For want of pages of full attention, which are taken after the window's promise."""
    sizes = {Component.FULL: 16, Component.SWA: 60, Component.STATE: 9}
    made = World(make_pool(layouts(4)[layout], "UnifiedRadixCache", sizes))
    pool, holder = made.pool, made.holder
    CASES[case].before(pool, holder, 4)
    rest = seq(4 * pool.free_pages, 9000)
    assert isinstance(pool.pre_alloc(made.other, rest, len(rest), 0), PreAllocated)
    before = books_of(made)
    refused = CASES[case].operation(pool, holder, 4)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.NO_PAGES
    made.check()
    assert books_of(made) == before
    pool.release_kv_cache(made.other, rest)
    assert not isinstance(CASES[case].operation(pool, holder, 4), Refused)
    made.check()


@pytest.mark.parametrize("layout", layouts(4))
@pytest.mark.parametrize("world", ["roomy", "full"])
def test_a_hand_off_that_cannot_be_opened_has_failed(wire: Wire, world: str, layout: str) -> None:
    """What a window frees for it cannot be brought back; so the record goes back to what the tree has."""
    for step in range(1, 100):
        made = WORLDS[world](layouts(4)[layout])
        promised(8, 4.5)(made.pool, made.holder, 4)
        record = made.holder.record
        wire.left = step
        try:
            made.pool.open_incoming(record, 16)
        except InjectedError:
            made.check()
            made.pool.abandon_incoming(record)
            made.check()
            assert made.pool.can_go_back(record, record.kv_committed_len)
            compute(made.pool, made.holder, 32)
            made.check()
            made.pool.release_kv_cache(made.holder, seq(32))
            made.check()
        else:
            wire.left = None
            return
    raise AssertionError("never got through")


def test_what_is_made_to_fail_is_what_an_allocation_consists_of(wire: Wire) -> None:
    """Of the whole: with a prefix to lock, and something of every component to evict."""
    fail_at_every_step(wire, "full", "extend, first", "full+swa+state", 4)
    cache = UnifiedRadixCache.__name__
    assert wire.calls.count(f"{cache}.evict") == len(Component)
    assert set(wire.calls) >= {
        f"{cache}.match_prefix", f"{cache}.lock", f"{cache}.pages", "RowTable.acquire", "RowTable.write",
        "SlidingWindow.promise", "SlidingWindow.draw", "StateSlots.checkpoint", "Supply.obtain", "Supply.evict",
        "PageAllocator.allocate", "ReqKvInfo.__init__", "TransitionLog.record",
    }  # fmt: skip


def fail_at_every_step(wire: Wire, world: str, case: str, layout: str, page_size: int) -> None:
    """`wire.calls` are those of the operation that got through."""

    def prepared() -> World:
        made = WORLDS[world](layouts(page_size)[layout])
        CASES[case].before(made.pool, made.holder, page_size)
        return made

    def attempt(failing_step: int | None = None) -> None:
        wire.left, wire.calls = failing_step, []
        try:
            assert not isinstance(CASES[case].operation(made.pool, made.holder, page_size), Refused)
        finally:
            wire.left = None
            made.check()

    made = prepared()
    made.check()
    untouched = books_of(made)
    settle(made)
    settled = books_of(made)
    made = prepared()
    for step in range(1, 500):
        try:
            attempt(step)
        except InjectedError:
            if books_of(made) != untouched:  # something was evicted, or left behind by a window
                settle(made)
                assert_undone(settled, books_of(made))
                attempt()
                made = prepared()
        else:
            return
    raise AssertionError("never got through")
