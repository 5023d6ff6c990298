"""RadixCache against a dict: every aligned prefix that is cached -> the page that holds its last page of tokens.

The dict is the specification: a match is the longest chain of known prefixes, an insertion keeps what is not known
yet, an eviction takes the pages used longest ago and never one that has a live page behind it or a lease on it.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.common.kv.errors import InvariantViolation, OwnershipError
from baton.common.kv.prefix.chunk import ChunkCache
from baton.common.kv.prefix.interface import I32, PrefixLease, PrefixMatch
from baton.common.kv.prefix.radix import RadixCache

Prefix = tuple[int, ...]

# Pages of tokens differ in their last token only, so that comparing has to look all the way; a tail fills no page.
page_symbols = st.lists(st.integers(0, 2), max_size=7)
tails = st.integers(0, 15)


@dataclass
class Held:
    prefix: Prefix
    lease: PrefixLease


@dataclass
class Remembered:
    prefix: Prefix
    match: PrefixMatch
    evicted_since: bool = False  # a page of it
    eviction_since: bool = False  # of anything: a refusal may be over-cautious, but only then


class TreeMachine(RuleBasedStateMachine):
    page_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.cache = RadixCache(self.page_size)
        self.page_of: dict[Prefix, int] = {}
        self.last_use: dict[Prefix, int] = {}
        self.held: list[Held] = []
        self.remembered: list[Remembered] = []
        self.next_page = 1
        self.uses = 0

    # ------------------------------------------------------------------------------------ the model

    def tokens(self, symbols: list[int], tail: int) -> I32:
        pages = [[7] * (self.page_size - 1) + [symbol] for symbol in symbols]
        return np.array([token for page in pages for token in page] + [9] * (tail % self.page_size), dtype=np.int32)

    def known(self, symbols: Prefix) -> Prefix:
        length = 0
        while length < len(symbols) and symbols[: length + 1] in self.page_of:
            length += 1
        return symbols[:length]

    def pages_to(self, prefix: Prefix) -> list[int]:
        return [self.page_of[prefix[:n]] for n in range(1, len(prefix) + 1)]

    def locked(self) -> set[Prefix]:
        return {held.prefix[:n] for held in self.held for n in range(1, len(held.prefix) + 1)}

    def forget(self, pages: list[int]) -> None:
        gone = {prefix for prefix, page in self.page_of.items() if page in pages}
        assert len(gone) == len(pages) == len(set(pages)), "evicted pages that were not cached, or one twice"
        assert not gone & self.locked(), "evicted under a lease"
        for prefix in gone:
            del self.page_of[prefix]
        assert all(prefix[:-1] in self.page_of or len(prefix) == 1 for prefix in self.page_of), "not a leaf"
        left = [self.last_use[prefix] for prefix in set(self.page_of) - self.locked()]
        assert not left or not gone or max(self.last_use[p] for p in gone) <= min(left), "not the least recently used"
        for memory in self.remembered:
            memory.eviction_since |= bool(gone)
            memory.evicted_since |= any(memory.prefix[: len(prefix)] == prefix for prefix in gone)

    # ------------------------------------------------------------------------------------ the rules

    @rule(symbols=page_symbols, tail=tails)
    def match(self, symbols: list[int], tail: int) -> None:
        match = self.cache.match_prefix(self.tokens(symbols, tail))
        known = self.known(tuple(symbols))
        assert match.length == len(known) * self.page_size
        pinned = {known[:n] for n in range(1, len(known) + 1)} - self.locked()
        assert self.cache.evictable_pages_in(match) == len(pinned)
        if known:
            self.remembered.append(Remembered(known, match))

    @precondition(lambda self: self.remembered)
    @rule(data=st.data())
    def lock(self, data: st.DataObject) -> None:
        memory = self.remembered.pop(data.draw(st.integers(0, len(self.remembered) - 1)))
        lease = self.cache.lock(memory.match)
        if lease is None:
            assert memory.eviction_since
            return
        assert not memory.evicted_since
        assert lease.length == len(memory.prefix) * self.page_size
        self.held.append(Held(memory.prefix, lease))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.cache.unlock(held.lease)
        self.uses += 1
        for n in range(1, len(held.prefix) + 1):
            self.last_use[held.prefix[:n]] = self.uses
        with pytest.raises(OwnershipError):
            self.cache.unlock(held.lease)

    @rule(symbols=page_symbols, tail=tails, data=st.data())
    def insert(self, symbols: list[int], tail: int, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from([None, *range(len(self.held))]))
        held = None if old is None else self.held.pop(old)
        start = () if held is None else held.prefix
        whole = start + tuple(symbols)
        tokens = self.tokens(list(whole), tail)
        given_pages = list(range(self.next_page, self.next_page + len(symbols) + (tail % self.page_size > 0)))
        self.next_page += len(given_pages)
        kept = self.cache.insert(None if held is None else held.lease, tokens, np.array(given_pages, dtype=np.int32))

        assert kept.duplicate.start == len(start) * self.page_size
        assert kept.duplicate.end == kept.locked.start
        assert kept.locked.end == kept.tail.start == len(whole) * self.page_size
        assert kept.tail.end == len(tokens)
        known = max(self.known(whole), start, key=len)
        assert kept.locked.start == len(known) * self.page_size
        for n in range(len(known) + 1, len(whole) + 1):
            self.page_of[whole[:n]] = given_pages[n - len(start) - 1]
        assert kept.pages.tolist() == self.pages_to(whole)[len(start) :]
        if not whole:
            assert kept.lease is None
            return
        assert kept.lease is not None
        assert kept.lease.length == len(whole) * self.page_size
        self.held.append(Held(whole, kept.lease))
        if held is not None:
            with pytest.raises(OwnershipError):
                self.cache.unlock(held.lease)  # it was consumed

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        expected = min(count, len(set(self.page_of) - self.locked()))
        gone = self.cache.evict(count).tolist()
        assert len(gone) == expected
        self.forget(gone)

    @rule()
    def clear(self) -> None:
        self.forget(self.cache.clear().tolist())
        assert set(self.page_of) == self.locked()

    @invariant()
    def tree_says_what_the_dict_says(self) -> None:
        self.cache.check([held.lease for held in self.held])
        evictable, locked = self.cache.cached_pages()
        expected = {self.page_of[prefix] for prefix in self.locked()}
        assert sorted(locked.tolist()) == sorted(expected)
        assert sorted(evictable.tolist()) == sorted(set(self.page_of.values()) - expected)
        assert (self.cache.evictable_pages, self.cache.locked_pages) == (len(evictable), len(locked))
        for held in self.held:
            assert self.cache.pages(held.lease).tolist() == self.pages_to(held.prefix)


class TreeMachinePage1(TreeMachine):
    page_size = 1


class TreeMachinePage16(TreeMachine):
    page_size = 16


TestTreePage1 = TreeMachinePage1.TestCase
TestTreePage4 = TreeMachine.TestCase
TestTreePage16 = TreeMachinePage16.TestCase
TestTreePage1.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTreePage4.settings = TestTreePage16.settings = TestTreePage1.settings


def ints(*values: int) -> I32:
    return np.array(values, dtype=np.int32)


def test_a_split_keeps_the_locks_of_both_halves() -> None:
    cache = RadixCache(1)
    long = cache.insert(None, ints(1, 2, 3, 4), ints(11, 12, 13, 14)).lease
    short = cache.lock(cache.match_prefix(ints(1, 2, 9)))
    assert long is not None
    assert short is not None
    assert cache.pages(long).tolist() == [11, 12, 13, 14]
    assert cache.pages(short).tolist() == [11, 12]
    cache.unlock(long)
    assert cache.evictable_pages == 2
    assert sorted(cache.clear().tolist()) == [13, 14]
    assert cache.pages(short).tolist() == [11, 12]


def test_a_lease_is_of_one_cache() -> None:
    ours, other = RadixCache(1), RadixCache(1)
    lease = ours.insert(None, ints(1), ints(5)).lease
    assert lease is not None
    with pytest.raises(InvariantViolation):
        other.check([lease])
    with pytest.raises(InvariantViolation):
        ours.check([])
    with pytest.raises(OwnershipError):
        ChunkCache().unlock(lease)
    with pytest.raises(InvariantViolation):
        ChunkCache().check([lease])


def test_fewer_pages_than_tokens_are_refused() -> None:
    with pytest.raises(OwnershipError):
        RadixCache(2).insert(None, ints(1, 2, 3, 4), ints(5))


def test_stale_queue_entries_do_not_pile_up() -> None:
    """A prefix that is locked and unlocked for ever must not make the eviction queue grow for ever."""
    cache = RadixCache(1)
    lease = cache.insert(None, ints(1, 2), ints(5, 6)).lease
    assert lease is not None
    cache.unlock(lease)
    for _ in range(1000):
        again = cache.lock(cache.match_prefix(ints(1, 2)))
        assert again is not None
        cache.unlock(again)
    assert cache.stats().eviction_queue < 100
    assert sorted(cache.evict(5).tolist()) == [5, 6]
