"""KvPool against a model of bytes: every token that is computed or lands writes, into its place, what it is and all
that came before it; every step moves the running state of its sequence on. What the next step would read must read back
its own history, after any sequence of operations: all committed tokens of full attention, the live window of sliding
layers, the state. One page given to two owners, freed early or mapped wrongly shows as another's history.

Refusals are predicted too: pages and slots are refused exactly when they are short, and promises are always kept.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from baton.common.clock import VirtualClock
from baton.common.kv.census import Holding, OwnerClass
from baton.common.kv.checker import InvariantChecker, who_holds
from baton.common.kv.errors import OwnershipError, UseAfterMoveError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.pool import KvPool, PreAllocated, RefusalReason, Refused
from baton.common.kv.prefix.interface import I32
from baton.common.kv.record import ReqKvInfo, take_kv
from baton.common.kv.transitions import TransitionLog
from baton.common.units import page_floor

ROW_WIDTH_PAGES = 9
MAX_ROWS = 5
FRESH = hash(())

# Few symbols in few shapes, so that prefixes are shared and part in the middle of a page.
shapes = st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=7), st.integers(0, 15), st.integers(0, 1))


@dataclass
class Request:
    """A request or a hand-off, and what the model knows of it."""

    name: str
    tokens: list[int]
    owner_class: OwnerClass
    kv: ReqKvInfo | None = None
    committed: int = 0
    allocated: int = 0
    incoming: tuple[int, dict[Component, I32]] | None = None  # where an open hand-off starts, and what it writes

    @property
    def record(self) -> ReqKvInfo:
        assert self.kv is not None
        return self.kv


@dataclass
class Memory:
    """(component, page, offset) -> the token history written there; a state has offset 0."""

    page_size: int
    cells: dict[tuple[Component, int, int], int] = field(default_factory=dict)

    def write(self, component: Component, page: int, offset: int, history: list[int]) -> None:
        assert page > 0, "a write into the null page"
        self.cells[component, page, offset] = hash(tuple(history))

    def holds(self, component: Component, page: int, offset: int, history: list[int]) -> bool:
        return self.cells.get((component, page, offset)) == hash(tuple(history))


class PoolMachine(RuleBasedStateMachine):
    layout = KvLayout(4)
    prefix_cache = "radix"

    @initialize(num_pages=st.integers(6, 30), swa_pages=st.integers(2, 30), slots=st.integers(3, 9), log=st.booleans())
    def start(self, num_pages: int, swa_pages: int, slots: int, log: bool) -> None:
        self.page_size = self.layout.page_size
        transitions = TransitionLog(VirtualClock(), capacity=200) if log else None
        sizes = {Component.FULL: num_pages, Component.SWA: swa_pages, Component.STATE: slots}
        self.step_tokens = self.page_size * 2 + 1
        self.pool = KvPool(
            self.layout,
            {component: sizes[component] for component in self.layout.components},
            MAX_ROWS,
            ROW_WIDTH_PAGES * self.page_size,
            self.prefix_cache,
            transitions,
            self.step_tokens,
        )
        self.memory = Memory(self.page_size)
        self.requests: list[Request] = []
        self.made = 0

    # ------------------------------------------------------------------------------------ helpers

    def sequence(self, shape: tuple[list[int], int, int]) -> list[int]:
        symbols, tail, symbol = shape
        body = [token for s in symbols for token in [5] * (self.page_size - 1) + [s]]
        return body + [symbol] * (tail % self.page_size)

    def new_request(self, shape: tuple[list[int], int, int], owner_class: OwnerClass) -> Request:
        self.made += 1
        return Request(f"r{self.made}", self.sequence(shape), owner_class)

    @property
    def calm(self) -> list[Request]:
        """Those that no hand-off writes for."""
        return [request for request in self.requests if request.incoming is None]

    def pick(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from(self.calm))

    def row(self, request: Request, component: Component, length: int) -> I32:
        if component is Component.FULL or not self.layout.full:
            return self.pool.pages_for_row(request.record, length)
        pages = self.pool.swa_pages_for_row(request.record, length)
        assert pages is not None
        return pages

    def compute(self, request: Request, start: int, end: int) -> None:
        """What a forward pass does to tokens [start, end)."""
        if start == end:
            return
        record = request.record
        assert start >= record.cache_protected_len, "a write into pages that others read"
        self.reads_its_history(request, start)
        copies = self.pool.take_state_copies([record])
        for source, target in () if copies is None else copies.tolist():
            self.memory.cells[Component.STATE, target, 0] = (
                self.memory.cells[Component.STATE, source, 0] if source else FRESH
            )
        for component in self.layout.paged:
            pages = self.row(request, component, end)
            for token in range(start, end):
                page, offset = int(pages[token // self.page_size]), token % self.page_size
                self.memory.write(component, page, offset, request.tokens[: token + 1])
        if self.layout.state:
            assert self.memory.holds(Component.STATE, record.state_slot, 0, request.tokens[:start])
            self.memory.write(Component.STATE, record.state_slot, 0, request.tokens[:end])

    def reads_its_history(self, request: Request, known: int) -> None:
        """What a query at position `known` sees."""
        first = {Component.FULL: 0, Component.SWA: max(0, known - self.layout.window + 1)}
        for component in self.layout.paged:
            pages = self.row(request, component, known)
            for token in range(first[component], known):
                page, offset = int(pages[token // self.page_size]), token % self.page_size
                assert self.memory.holds(component, page, offset, request.tokens[: token + 1]), (request, token, page)

    def available(self) -> dict[Component, int]:
        return {component: self.pool.parts.available(component) for component in self.layout.components}

    def growth(self, request: Request, length: int) -> dict[Component, int]:
        """What more it takes when it grows to `length` tokens."""
        needed, states = self.pool.parts.needed, (Component.STATE,)
        return {
            one: needed(one, max(length, request.allocated)) - needed(one, request.allocated)
            for one in self.layout.components
            if one not in states
        }

    def expect(
        self, result: object, request: Request, length: int, needed: dict[Component, int], before: dict[Component, int]
    ) -> bool:
        """True when the operation succeeded; checks that it should have, or that a refusal was right."""
        short = {one: count - before[one] for one, count in needed.items()}
        if not isinstance(result, Refused):
            assert max(short.values(), default=0) <= 0
            return True
        if length > self.pool.longest:
            assert result.reason is RefusalReason.TOO_LONG
        elif request.kv is None and len(self.requests) == MAX_ROWS:
            assert result.reason is RefusalReason.NO_ROW
        else:
            assert result.reason is RefusalReason.NO_PAGES
            assert result.short_pages > 0
            order = (Component.SWA, Component.FULL, Component.STATE)
            assert result.short_pages == next(short[one] for one in order if short.get(one, 0) > 0)
        assert self.available() == before
        return False

    # ------------------------------------------------------------------------------------ allocation

    @rule(shape=shapes, cut=st.integers(0, 40), outgoing=st.booleans())
    def extend_new(self, shape: tuple[list[int], int, int], cut: int, outgoing: bool) -> None:
        request = self.new_request(shape, OwnerClass.OUTGOING if outgoing else OwnerClass.REQUEST)
        new_len = max(1, len(request.tokens) - cut)
        known = self.pool.demand(request.tokens, new_len, new_len - 1).prefix_len
        new_len = min(new_len, known + self.step_tokens)
        demand, before = self.pool.demand(request.tokens, new_len, new_len - 1), self.available()
        needed = {component: demand.of(component) for component in self.layout.components}
        result = self.pool.prepare_for_extend(request, request.tokens, new_len)
        if not self.expect(result, request, new_len, needed, before):
            assert request.kv is None
            return
        assert result == demand.prefix_len <= page_floor(new_len - 1, self.page_size)
        assert {one: before[one] - now for one, now in self.available().items()} == needed
        self.requests.append(request)
        request.committed = request.allocated = new_len
        self.compute(request, int(result), new_len)  # type: ignore[call-overload]

    @precondition(lambda self: self.calm)
    @rule(data=st.data(), more=st.integers(0, 20))
    def extend_further(self, data: st.DataObject, more: int) -> None:
        request = self.pick(data)
        new_len = min(len(request.tokens), request.committed + min(more, self.step_tokens))
        needed, before = self.growth(request, new_len), self.available()
        result = self.pool.prepare_for_extend(request, request.tokens, new_len)
        if self.expect(result, request, new_len, needed, before):
            assert result == request.committed
            self.compute(request, request.committed, new_len)
            request.committed, request.allocated = new_len, max(request.allocated, new_len)

    @precondition(lambda self: self.calm)
    @rule(data=st.data(), n=st.integers(1, 3))
    def decode(self, data: st.DataObject, n: int) -> None:
        request = self.pick(data)
        if request.committed < request.allocated:
            return  # some of its KV is still missing: it does not run
        new = request.allocated + n
        needed, before = self.growth(request, new), self.available()
        result = self.pool.prepare_for_decode(request, n)
        if self.expect(result, request, new, needed, before):
            del request.tokens[request.committed :]
            request.tokens += [data.draw(st.integers(0, 1)) for _ in range(n)]
            self.compute(request, request.committed, new)
            request.committed = request.allocated = new

    @rule(shape=shapes, spare=st.integers(0, 20))
    def pre_alloc(self, shape: tuple[list[int], int, int], spare: int) -> None:
        request = self.new_request(shape, OwnerClass.INCOMING)
        fill_len, max_prefix = len(request.tokens), max(0, len(request.tokens) - spare)
        demand, before = self.pool.demand(request.tokens, fill_len, max_prefix), self.available()
        needed = {component: demand.of(component) for component in self.layout.components}
        result = self.pool.pre_alloc(request, request.tokens, fill_len, max_prefix)
        if not self.expect(result, request, fill_len, needed, before):
            assert request.kv is None
            return
        assert isinstance(result, PreAllocated)
        assert result.prefix_len == demand.prefix_len <= max_prefix
        assert len(result.pages) == demand.new.full
        assert {one: before[one] - now for one, now in self.available().items()} == needed
        request.committed, request.allocated = result.prefix_len, fill_len
        self.requests.append(request)

    @precondition(lambda self: self.calm)
    @rule(data=st.data())
    def pre_alloc_again(self, data: st.DataObject) -> None:
        """As the next turn of a conversation does: it may go back, and grow or shrink."""
        request = self.pick(data)
        record = request.record
        fill_len = data.draw(st.integers(record.cache_protected_len, len(request.tokens)))
        committed = min(request.committed, data.draw(st.integers(record.cache_protected_len, fill_len)))
        if fill_len <= self.pool.longest and not self.pool.can_go_back(record, committed):
            with pytest.raises(OwnershipError):
                self.pool.pre_alloc(request, request.tokens, fill_len, committed)
            return
        needed, before = self.growth(request, fill_len), self.available()
        result = self.pool.pre_alloc(request, request.tokens, fill_len, committed)
        if not self.expect(result, request, fill_len, needed, before):
            return
        assert isinstance(result, PreAllocated)
        assert result.prefix_len == page_floor(committed, self.page_size)
        request.committed, request.allocated = committed, fill_len
        if self.layout.full:
            expected = self.pool.pages_of(request.record, result.prefix_len, fill_len)
            assert result.pages.tolist() == expected.tolist()

    # ------------------------------------------------------------------------------------ filling

    @precondition(lambda self: self.calm)
    @rule(data=st.data())
    def compute_a_chunk(self, data: st.DataObject) -> None:
        request = self.pick(data)
        most = min(request.allocated, len(request.tokens), request.committed + self.step_tokens)
        until = data.draw(st.integers(request.committed, max(request.committed, most)))
        self.pool.prepare_chunk(request.record, until)
        self.compute(request, request.committed, until)
        self.pool.commit_incoming(request.record, until)
        request.committed = until
        with pytest.raises(OwnershipError):
            self.pool.commit_incoming(request.record, request.allocated + 1)

    @precondition(lambda self: self.calm)
    @rule(data=st.data())
    def open_a_hand_off(self, data: st.DataObject) -> None:
        request = self.pick(data)
        start = page_floor(request.committed, self.page_size)
        if not start < request.allocated <= len(request.tokens) or start < request.record.cache_protected_len:
            return
        request.incoming = (start, self.pool.open_incoming(request.record, start))
        request.committed = request.record.kv_committed_len
        assert self.pool.lands_in_part or request.committed == request.record.cache_protected_len

    @precondition(lambda self: len(self.calm) < len(self.requests))
    @rule(data=st.data(), share=st.integers(0, 3))
    def end_a_hand_off(self, data: st.DataObject, share: int) -> None:
        """All of it lands, or a part does."""
        request = data.draw(st.sampled_from([one for one in self.requests if one.incoming is not None]))
        assert request.incoming is not None
        (start, pages), total = request.incoming, request.allocated
        landed = total if share == 3 else page_floor(start + (total - start) * share // 3, self.page_size)
        self.land(request, start, landed, pages)
        request.incoming = None
        if landed == total or (self.pool.lands_in_part and landed >= request.committed):
            self.pool.commit_incoming(request.record, landed)
            request.committed = landed
        else:
            self.pool.abandon_incoming(request.record)

    def land(self, request: Request, start: int, landed: int, pages: dict[Component, I32]) -> None:
        total, window_start = request.allocated, self.layout.live_from(request.allocated)
        begins = {Component.FULL: start, Component.SWA: max(start, window_start)}
        for component in self.layout.paged:
            for token in range(begins[component], landed):
                page = int(pages[component][(token - begins[component]) // self.page_size])
                self.memory.write(component, page, token % self.page_size, request.tokens[: token + 1])
        if self.layout.state:
            (slot,) = pages[Component.STATE].tolist()
            self.memory.write(Component.STATE, slot, 0, request.tokens[:total] if landed == total else [99])

    # ------------------------------------------------------------------------------------ caching, ending

    @precondition(lambda self: self.calm)
    @rule(data=st.data())
    def cache_unfinished(self, data: st.DataObject) -> None:
        request = self.pick(data)
        self.pool.cache_unfinished_req(request, request.tokens)
        if self.prefix_cache != "chunk" and self.pool.lands_in_part:
            assert self.pool.match_len(request.tokens[: request.committed]) == page_floor(
                request.committed, self.page_size
            )

    @precondition(lambda self: self.calm)
    @rule(data=st.data(), insert=st.booleans())
    def cache_finished(self, data: st.DataObject, insert: bool) -> None:
        request = self.pick(data)
        handled = data.draw(st.integers(request.record.cache_protected_len, request.committed))
        self.pool.cache_finished_req(request, request.tokens, insert, kv_len_to_handle=handled)

    @precondition(lambda self: self.calm)
    @rule(data=st.data(), insert=st.booleans(), whole=st.booleans())
    def release(self, data: st.DataObject, insert: bool, whole: bool) -> None:
        request = self.pick(data)
        old = request.record
        kept = None if whole else data.draw(st.integers(0, request.committed))
        aligned = request.committed % self.page_size == 0 and old.swa_evicted_seqlen <= old.cache_protected_len
        self.pool.release_kv_cache(request, request.tokens, insert, effective_len=kept)
        self.requests.remove(request)
        assert request.kv is None
        with pytest.raises(UseAfterMoveError):
            _ = old.kv_committed_len
        if insert and whole and self.prefix_cache != "chunk" and (self.pool.lands_in_part or aligned):
            assert self.pool.match_len(request.tokens) >= page_floor(request.committed, self.page_size)

    @precondition(lambda self: self.calm)
    @rule(data=st.data(), owner_class=st.sampled_from(OwnerClass))
    def hand_over(self, data: st.DataObject, owner_class: OwnerClass) -> None:
        old = self.pick(data)
        new = Request(old.name + "'", old.tokens, owner_class, take_kv(old), old.committed, old.allocated)
        assert old.kv is None
        self.requests[self.requests.index(old)] = new
        with pytest.raises(OwnershipError):
            self.pool.prepare_for_decode(old)

    @precondition(lambda self: self.calm)
    @rule(data=st.data())
    def free_behind_the_window(self, data: st.DataObject) -> None:
        request = self.pick(data)
        self.pool.free_swa_out_of_window_slots(request.record, request.committed)
        assert self.pool.free_swa_out_of_window_slots(request.record, request.committed) == 0

    @rule(n=st.integers(0, 10))
    def evict(self, n: int) -> None:
        evictable = self.pool.evictable_pages
        free = self.pool.free_pages
        assert self.pool.evict(n) == min(n, evictable)
        assert self.pool.free_pages == free + min(n, evictable)

    @rule()
    def clear_cache(self) -> None:
        self.pool.clear_cache()
        assert set(self.pool.prefix.evictable) == {0}

    # ------------------------------------------------------------------------------------ what must hold

    def holdings(self) -> list[Holding]:
        return [Holding(r.owner_class, r.name, r.record) for r in self.requests]

    @invariant()
    def the_books_add_up(self) -> None:
        census = InvariantChecker().check(self.pool, self.holdings())
        stats = self.pool.stats()
        for one in (census, *census.others):
            assert one.accounted == one.total == self.pool.supply.total(one.component)
            assert stats.owned.of(one.component) == one.accounted - one.free - one.cached
        assert stats.free_rows == MAX_ROWS - len(self.requests)

    @invariant()
    def promises_can_be_kept(self) -> None:
        """Whatever is promised and not yet drawn can be drawn."""
        window = self.pool.window
        if window is not None:
            undrawn = window.promised - sum(window.held_pages(request.record) for request in self.requests)
            assert 0 <= undrawn <= self.pool.supply.available(Component.SWA)

    @invariant()
    def every_request_reads_its_own_history(self) -> None:
        for request in self.requests:
            record = request.record
            assert (record.kv_committed_len, record.kv_allocated_len) == (request.committed, request.allocated)
            self.reads_its_history(request, request.committed)
            if self.pool.states is not None and record.state_source != 0:
                slot = self.pool.states.readable(record)
                assert self.memory.holds(Component.STATE, slot, 0, request.tokens[: request.committed])
            elif self.pool.states is not None:
                assert request.committed == 0

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for request in self.requests:
            self.pool.release_kv_cache(request, request.tokens)
        assert InvariantChecker().check(self.pool, []).idle
        self.pool.clear_cache()
        for component in self.layout.components:
            assert self.pool.supply.free(component) == self.pool.supply.total(component)
            assert self.pool.parts.available(component) == self.pool.supply.total(component)
            assert who_holds(self.pool, 1, [], component).owner == "free"


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


CACHES = ["radix", "UnifiedRadixCache", "chunk"]
"""The first is the tree that is compiled, where it can be; the second is not."""


def run(name: str, page_size: int, cache: str, examples: int) -> None:
    machine = type("Machine", (PoolMachine,), {"layout": layouts(page_size)[name], "prefix_cache": cache})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None, print_blob=True)
    )


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", layouts(4))
def test_pool(name: str, page_size: int, cache: str) -> None:
    run(name, page_size, cache, {"radix": 15, "UnifiedRadixCache": 8, "chunk": 5}[cache])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", layouts(4))
def test_pool_on_many_examples(name: str, page_size: int, cache: str) -> None:
    run(name, page_size, cache, 300 if cache == "chunk" else 2000)
