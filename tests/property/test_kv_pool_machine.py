"""KvPool against a model of bytes: every token that is computed or lands writes, into its place, what it is and all
that came before it. Every committed token of every request must read back its own history, after any sequence of
operations; one page given to two owners, freed early or mapped wrongly shows as another's history.

Refusals are predicted too: pages are refused exactly when they are short.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.common.clock import VirtualClock
from baton.common.kv.census import Census, Holding, OwnerClass
from baton.common.kv.checker import InvariantChecker, who_holds
from baton.common.kv.errors import OwnershipError, UseAfterMoveError
from baton.common.kv.pool import KvPool, PreAllocated, RefusalReason, Refused
from baton.common.kv.record import ReqKvInfo, take_kv
from baton.common.kv.transitions import TransitionLog
from baton.common.units import page_floor, pages_for_tokens

ROW_WIDTH_PAGES = 9
MAX_ROWS = 5

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


@dataclass
class Memory:
    """(page, offset) -> the token history written there."""

    page_size: int
    cells: dict[tuple[int, int], int] = field(default_factory=dict)

    def write(self, page: int, offset: int, history: list[int]) -> None:
        self.cells[page, offset] = hash(tuple(history))

    def holds(self, page: int, offset: int, history: list[int]) -> bool:
        return self.cells.get((page, offset)) == hash(tuple(history))


class PoolMachine(RuleBasedStateMachine):
    page_size = 4
    prefix_cache = "radix"

    @initialize(num_pages=st.integers(6, 30), log=st.booleans())
    def start(self, num_pages: int, log: bool) -> None:
        transitions = TransitionLog(VirtualClock(), capacity=200) if log else None
        width = ROW_WIDTH_PAGES * self.page_size
        self.pool = KvPool(num_pages, self.page_size, MAX_ROWS, width, self.prefix_cache, transitions)
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

    def pick(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from(self.requests))

    def compute(self, request: Request, start: int, end: int) -> None:
        """What a forward pass, or bytes that land, do to tokens [start, end)."""
        assert request.kv is not None
        assert start >= request.kv.cache_protected_len, "a write into pages that others read"
        pages = self.pool.pages_for_row(request.kv, end)
        for token in range(start, end):
            page, offset = pages[token // self.page_size], token % self.page_size
            self.memory.write(int(page), offset, request.tokens[: token + 1])

    def fits(self, pages: int) -> bool:
        return pages <= self.pool.available_pages

    def too_long(self, length: int) -> bool:
        return length > min(self.pool.max_context_len, self.pool.total_pages * self.page_size)

    def expect(self, result: object, request: Request, length: int, pinned: int = 0, needed: int = 0) -> bool:
        """True when the operation succeeded; checks that a refusal was right and changed nothing."""
        if not isinstance(result, Refused):
            return True
        if self.too_long(length):
            assert result.reason is RefusalReason.TOO_LONG
        elif request.kv is None and len(self.requests) == MAX_ROWS:
            assert result.reason is RefusalReason.NO_ROW
        else:
            assert result.reason is RefusalReason.NO_PAGES
            assert result.short_pages == needed + pinned - self.pool.available_pages
            assert result.short_pages > 0
        return False

    # ------------------------------------------------------------------------------------ allocation

    @rule(shape=shapes, cut=st.integers(0, 40), outgoing=st.booleans())
    def extend_new(self, shape: tuple[list[int], int, int], cut: int, outgoing: bool) -> None:
        request = self.new_request(shape, OwnerClass.OUTGOING if outgoing else OwnerClass.REQUEST)
        new_len = max(1, len(request.tokens) - cut)
        demand = self.pool.demand(request.tokens, new_len, new_len - 1)
        before = self.pool.available_pages
        result = self.pool.prepare_for_extend(request, request.tokens, new_len)
        if not self.expect(result, request, new_len, demand.pinned_pages, demand.new_pages):
            assert request.kv is None
            assert self.pool.available_pages == before
            return
        assert result == demand.prefix_len <= page_floor(new_len - 1, self.page_size)
        assert before - self.pool.available_pages == demand.new_pages + demand.pinned_pages
        self.requests.append(request)
        request.committed = request.allocated = new_len
        self.compute(request, int(result), new_len)  # type: ignore[call-overload]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), more=st.integers(0, 20))
    def extend_further(self, data: st.DataObject, more: int) -> None:
        request = self.pick(data)
        new_len = min(len(request.tokens), request.committed + more)
        result = self.pool.prepare_for_extend(request, request.tokens, new_len)
        needed = pages_for_tokens(new_len, self.page_size) - pages_for_tokens(request.allocated, self.page_size)
        if self.expect(result, request, new_len, needed=needed):
            assert result == request.committed
            self.compute(request, request.committed, new_len)
            request.committed, request.allocated = new_len, max(request.allocated, new_len)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), n=st.integers(1, 3))
    def decode(self, data: st.DataObject, n: int) -> None:
        request = self.pick(data)
        if request.committed < request.allocated:
            return  # bytes of a hand-off are still missing: it does not run
        new = request.allocated + n
        result = self.pool.prepare_for_decode(request, n)
        needed = pages_for_tokens(new, self.page_size) - pages_for_tokens(request.allocated, self.page_size)
        if self.expect(result, request, new, needed=needed):
            del request.tokens[request.committed :]
            request.tokens += [data.draw(st.integers(0, 1)) for _ in range(n)]
            self.compute(request, request.committed, new)
            request.committed = request.allocated = new

    @rule(shape=shapes, spare=st.integers(0, 20))
    def pre_alloc(self, shape: tuple[list[int], int, int], spare: int) -> None:
        request = self.new_request(shape, OwnerClass.INCOMING)
        fill_len, max_prefix = len(request.tokens), max(0, len(request.tokens) - spare)
        demand = self.pool.demand(request.tokens, fill_len, max_prefix)
        result = self.pool.pre_alloc(request, request.tokens, fill_len, max_prefix)
        if not self.expect(result, request, fill_len, demand.pinned_pages, demand.new_pages):
            assert request.kv is None
            return
        assert isinstance(result, PreAllocated)
        assert result.prefix_len == demand.prefix_len <= max_prefix
        assert len(result.pages) == demand.new_pages
        request.committed, request.allocated = result.prefix_len, fill_len
        self.requests.append(request)

    @precondition(lambda self: any(r.kv and r.committed <= len(r.tokens) for r in self.requests))
    @rule(data=st.data())
    def pre_alloc_again(self, data: st.DataObject) -> None:
        request = self.pick(data)
        fill_len = len(request.tokens)
        result = self.pool.pre_alloc(request, request.tokens, fill_len, fill_len)
        needed = pages_for_tokens(fill_len, self.page_size) - pages_for_tokens(request.allocated, self.page_size)
        if not self.expect(result, request, fill_len, needed=needed):
            return
        assert isinstance(result, PreAllocated)
        assert result.prefix_len == page_floor(min(request.committed, fill_len), self.page_size)
        request.allocated = max(request.allocated, fill_len)
        expected = self.pool.pages_of(request.kv, result.prefix_len, fill_len)  # type: ignore[arg-type]
        assert result.pages.tolist() == expected.tolist()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        request = self.pick(data)
        until = data.draw(st.integers(request.committed, min(request.allocated, len(request.tokens))))
        self.compute(request, request.committed, until)
        assert request.kv is not None
        self.pool.commit_incoming(request.kv, until)
        request.committed = until
        with pytest.raises(OwnershipError):
            self.pool.commit_incoming(request.kv, request.allocated + 1)

    # ------------------------------------------------------------------------------------ caching, ending

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cache_unfinished(self, data: st.DataObject) -> None:
        request = self.pick(data)
        self.pool.cache_unfinished_req(request, request.tokens)
        if self.prefix_cache == "radix":
            assert self.pool.match_len(request.tokens[: request.committed]) == page_floor(
                request.committed, self.page_size
            )

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), insert=st.booleans())
    def cache_finished(self, data: st.DataObject, insert: bool) -> None:
        request = self.pick(data)
        assert request.kv is not None
        handled = data.draw(st.integers(request.kv.cache_protected_len, request.committed))
        self.pool.cache_finished_req(request, request.tokens, insert, kv_len_to_handle=handled)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), insert=st.booleans(), whole=st.booleans())
    def release(self, data: st.DataObject, insert: bool, whole: bool) -> None:
        request = self.pick(data)
        old = request.kv
        assert old is not None
        kept = None if whole else data.draw(st.integers(0, request.committed))
        self.pool.release_kv_cache(request, request.tokens, insert, effective_len=kept)
        self.requests.remove(request)
        assert request.kv is None
        with pytest.raises(UseAfterMoveError):
            _ = old.kv_committed_len
        if insert and whole and self.prefix_cache == "radix":
            assert self.pool.match_len(request.tokens) >= page_floor(request.committed, self.page_size)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), owner_class=st.sampled_from(OwnerClass))
    def hand_over(self, data: st.DataObject, owner_class: OwnerClass) -> None:
        old = self.pick(data)
        new = Request(old.name + "'", old.tokens, owner_class, take_kv(old), old.committed, old.allocated)
        assert old.kv is None
        self.requests[self.requests.index(old)] = new
        with pytest.raises(OwnershipError):
            self.pool.prepare_for_decode(old)

    @rule(n=st.integers(0, 10))
    def evict(self, n: int) -> None:
        evictable = self.pool.evictable_pages
        free = self.pool.free_pages
        assert self.pool.evict(n) == min(n, evictable)
        assert self.pool.free_pages == free + min(n, evictable)

    @rule()
    def clear_cache(self) -> None:
        self.pool.clear_cache()
        assert self.pool.evictable_pages == 0

    # ------------------------------------------------------------------------------------ what must hold

    def holdings(self) -> list[Holding]:
        return [Holding(r.owner_class, r.name, r.kv) for r in self.requests if r.kv is not None]

    @invariant()
    def the_books_add_up(self) -> None:
        census = InvariantChecker().check(self.pool, self.holdings())
        assert isinstance(census, Census)
        assert census.accounted == census.total == self.pool.total_pages
        stats = self.pool.stats()
        assert stats.owned_pages == census.accounted - census.free - census.cached
        assert stats.free_rows == MAX_ROWS - len(self.requests)

    @invariant()
    def every_token_reads_its_own_history(self) -> None:
        for request in self.requests:
            record = request.kv
            assert record is not None
            assert (record.kv_committed_len, record.kv_allocated_len) == (request.committed, request.allocated)
            pages = self.pool.pages_for_row(record, record.kv_allocated_len)
            for token in range(request.committed):
                page, offset = int(pages[token // self.page_size]), token % self.page_size
                assert self.memory.holds(page, offset, request.tokens[: token + 1]), (request.name, token, page)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for request in self.requests:
            self.pool.release_kv_cache(request, request.tokens)
        assert InvariantChecker().check(self.pool, []).idle
        self.pool.clear_cache()
        assert self.pool.free_pages == self.pool.total_pages
        assert who_holds(self.pool, 1, []).owner == "free"


class PoolMachinePage1(PoolMachine):
    page_size = 1


class PoolMachinePage16(PoolMachine):
    page_size = 16


class ChunkPoolMachine(PoolMachine):
    prefix_cache = "chunk"


class ChunkPoolMachinePage1(ChunkPoolMachine):
    page_size = 1


class ChunkPoolMachinePage16(ChunkPoolMachine):
    page_size = 16


TestRadixPoolPage1 = PoolMachinePage1.TestCase
TestRadixPoolPage4 = PoolMachine.TestCase
TestRadixPoolPage16 = PoolMachinePage16.TestCase
TestChunkPoolPage1 = ChunkPoolMachinePage1.TestCase
TestChunkPoolPage4 = ChunkPoolMachine.TestCase
TestChunkPoolPage16 = ChunkPoolMachinePage16.TestCase
TestRadixPoolPage1.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestRadixPoolPage4.settings = TestRadixPoolPage16.settings = TestRadixPoolPage1.settings
TestChunkPoolPage1.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
TestChunkPoolPage4.settings = TestChunkPoolPage16.settings = TestChunkPoolPage1.settings
