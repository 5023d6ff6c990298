"""The prefix tree, case by case: what locks, splits, tombstones and checkpoints do, and what it all costs.
The property test (`tests/property/test_kv_tree.py`) has the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType

import numpy as np
import pytest

from baton.common.kv.errors import InvariantViolation, OwnershipError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.chunk import ChunkCache
from baton.common.kv.prefix.interface import I32, GroupCounts, GroupPages, PrefixLease
from baton.common.kv.prefix.tree import UnifiedRadixCache

FULL, SWA, STATE = Component.FULL, Component.SWA, Component.STATE


def ints(*values: int) -> I32:
    return np.array(values, dtype=np.int32)


def given(full: Sequence[int] = (), swa: Sequence[int] = (), state: int = 0) -> GroupPages:
    return GroupPages(ints(*full), ints(*swa), ints(*([state] if state else [])))


def full_cache(page_size: int = 1) -> UnifiedRadixCache:
    return UnifiedRadixCache(KvLayout(page_size))


def sliding_cache() -> UnifiedRadixCache:
    """A window of 3 tokens: whoever stands at length L needs the pages of L - 2 and L - 1."""
    return UnifiedRadixCache(KvLayout(1, window=3))


def recurrent_cache(page_size: int = 1) -> UnifiedRadixCache:
    return UnifiedRadixCache(KvLayout(page_size, state=True))


def held(lease: PrefixLease | None) -> PrefixLease:
    assert lease is not None
    return lease


def cached(cache: UnifiedRadixCache, tokens: I32, pages: GroupPages) -> None:
    cache.unlock(held(cache.insert(None, tokens, pages).lease))


def match_len(cache: UnifiedRadixCache, *tokens: int) -> int:
    return cache.match_prefix(ints(*tokens)).length


# ------------------------------------------------------------------------------------------ full attention


def test_a_split_keeps_the_locks_of_both_halves() -> None:
    cache = full_cache()
    long = held(cache.insert(None, ints(1, 2, 3, 4), given([11, 12, 13, 14])).lease)
    short = held(cache.lock(cache.match_prefix(ints(1, 2, 9))))
    assert cache.pages(long).full.tolist() == [11, 12, 13, 14]
    assert cache.pages(short).full.tolist() == [11, 12]
    cache.unlock(long)
    assert cache.evictable.full == 2
    assert sorted(cache.clear().full.tolist()) == [13, 14]
    assert cache.pages(short).full.tolist() == [11, 12]


def test_what_goes_next_is_foretold_and_left_alone() -> None:
    cache = full_cache()
    cached(cache, ints(1, 2, 3), given([11, 12, 13]))
    cached(cache, ints(1, 4), given([11, 14]))
    cached(cache, ints(7), given([17]))
    before = cache.stats()
    foretold = [(tokens.tolist(), match.length) for tokens, match in cache.coldest(3)]
    assert foretold == [([1, 2, 3], 3), ([1, 4], 2)]  # two leaves of the first path, and a page of the second
    assert [tokens.tolist() for tokens, _ in cache.coldest(99)] == [[1, 2, 3], [1, 4], [7]]
    assert cache.stats() == before
    assert cache.evict(FULL, 3).full.tolist() == [12, 13, 14]
    assert [tokens.tolist() for tokens, _ in cache.coldest(1)] == [[1]]  # a leaf by now


def test_a_lease_that_only_copied_leaves_the_order_of_eviction() -> None:
    cache = full_cache()
    cached(cache, ints(1, 2), given([11, 12]))
    cached(cache, ints(7), given([17]))
    ((_, match),) = cache.coldest(1)
    lease = held(cache.lock(match))
    assert [tokens.tolist() for tokens, _ in cache.coldest(99)] == [[7]]
    cache.unlock(lease, used=False)
    cache.check([])
    assert [tokens.tolist() for tokens, _ in cache.coldest(99)] == [[1, 2], [7]]
    assert cache.evict(FULL, 2).full.tolist() == [11, 12]


def test_what_was_never_used_goes_in_the_order_in_which_it_came() -> None:
    cache = full_cache()
    for n in (1, 2, 3):
        cache.unlock(held(cache.insert(None, ints(n), given([10 + n])).lease), used=False)
    for _ in range(2):  # foretelling leaves the order as it is
        assert [tokens.tolist() for tokens, _ in cache.coldest(1)] == [[1]]
    for _ in range(200):  # so often that the queue is tidied up
        cache.unlock(held(cache.lock(cache.match_prefix(ints(1)))), used=False)
    assert cache.evict(FULL, 9).full.tolist() == [11, 12, 13]


def test_a_lease_is_of_one_cache() -> None:
    ours, other = full_cache(), full_cache()
    lease = held(ours.insert(None, ints(1), given([5])).lease)
    with pytest.raises(OwnershipError):
        ours.pages(PrefixLease(1))
    with pytest.raises(InvariantViolation):
        other.check([lease])
    with pytest.raises(InvariantViolation):
        ours.check([])
    with pytest.raises(OwnershipError):
        ChunkCache().unlock(lease)
    with pytest.raises(InvariantViolation):
        ChunkCache().check([lease])


@pytest.mark.parametrize(
    ("layout", "pages"),
    [
        (KvLayout(2), given([5])),  # too few
        (KvLayout(2), given([5, 0])),  # the null page
        (KvLayout(2), given([5, 6], [7, 8])),  # no layer slides
        (KvLayout(2), given([5, 6], state=1)),  # no layer is recurrent
        (KvLayout(2, window=2), given([5, 6], [7])),
        (KvLayout(2, full=False, window=2), given([5, 6], [7, 8])),
        (KvLayout(2, state=True), GroupPages(full=ints(5, 6), state=ints(1, 2))),  # a sequence has one state
        (KvLayout(2, state=True), GroupPages(full=ints(5, 6), state=ints(0))),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(layout: KvLayout, pages: GroupPages) -> None:
    cache = UnifiedRadixCache(layout)
    with pytest.raises(OwnershipError):
        cache.insert(None, ints(1, 2, 3, 4), pages)
    assert cache.stats().nodes == 0


def test_stale_queue_entries_do_not_pile_up() -> None:
    """A prefix that is locked and unlocked for ever must not make the eviction queues grow for ever."""
    cache = UnifiedRadixCache(KvLayout(1, window=2, state=True))
    cached(cache, ints(1, 2), given([5, 6], [7, 8], 9))
    for _ in range(1000):
        cache.unlock(held(cache.lock(cache.match_prefix(ints(1, 2)))))
    assert max(cache.stats().eviction_queue) < 100
    assert sorted(cache.evict(FULL, 5).full.tolist()) == [5, 6]
    assert match_len(cache, 1, 2) == 0


def test_a_chunk_cache_gives_everything_back_as_tail() -> None:
    kept = ChunkCache().insert(None, ints(1, 2), given([5, 6], [0, 7], 8))
    assert kept.lease is None
    assert kept.tail.counts == GroupCounts(2, 1, 1)
    assert kept.taken.counts == kept.duplicate.counts == GroupCounts()


# ------------------------------------------------------------------------------------------ sliding windows


def test_sliding_pages_become_tombstones_and_the_full_pages_stay() -> None:
    cache = sliding_cache()
    cached(cache, ints(1, 2, 3, 4, 5, 6), given(range(11, 17), range(21, 27)))
    assert cache.evict(SWA, 4).swa.tolist() == [21, 22, 23, 24]
    assert cache.evictable == GroupCounts(full=6, swa=2)
    assert match_len(cache, 1, 2, 3, 4, 5, 6, 7) == 6  # its window is alive
    assert match_len(cache, 1, 2, 3, 4, 5) == 0  # needs the page of token 4, and nothing shorter is better off
    assert cache.evict(SWA, 1).counts == GroupCounts(swa=1)
    assert match_len(cache, 1, 2, 3, 4, 5, 6) == 0
    assert cache.evictable == GroupCounts(full=6, swa=1)  # never in the way of whoever wants pages
    assert cache.evict(FULL, 6).counts == GroupCounts(full=6, swa=1)
    assert cache.stats().nodes == 0


def test_a_live_page_that_is_given_revives_a_tombstone() -> None:
    cache = sliding_cache()
    cached(cache, ints(1, 2, 3, 4), given(range(11, 15), range(21, 25)))
    cache.evict(SWA, 3)
    kept = cache.insert(None, ints(1, 2, 3, 4), given(range(31, 35), [0, 0, 43, 44]))
    assert kept.taken.swa.tolist() == [43]
    assert kept.duplicate.swa.tolist() == [44]
    assert kept.duplicate.full.tolist() == [31, 32, 33, 34]
    assert kept.pages.full.tolist() == [11, 12, 13, 14]
    assert kept.pages.swa.tolist() == [0, 0, 43, 24]
    assert match_len(cache, 1, 2, 3, 4) == 4
    cache.check([held(kept.lease)])


def test_a_lease_locks_the_window_at_its_end_and_no_more() -> None:
    cache = sliding_cache()
    cached(cache, ints(1, 2, 3, 4, 5, 6), given(range(11, 17), range(21, 27)))
    match = cache.match_prefix(ints(1, 2, 3, 4, 9))
    assert cache.evictable_in(match) == GroupCounts(full=4, swa=2)
    lease = held(cache.lock(match))
    assert (cache.locked, cache.evictable) == (GroupCounts(full=4, swa=2), GroupCounts(full=2, swa=4))
    assert cache.evictable_in(cache.match_prefix(ints(1, 2, 3, 4))) == GroupCounts()
    assert cache.pages(lease).swa.tolist() == [0, 0, 23, 24]
    assert cache.evict(SWA, 99).swa.tolist() == [21, 22, 25, 26]
    assert cache.pages(lease).full.tolist() == [11, 12, 13, 14]
    cache.check([lease])
    cache.unlock(lease)
    assert sorted(cache.evict(SWA, 99).swa.tolist()) == [23, 24]


def test_a_lease_that_moves_on_lets_the_old_window_go() -> None:
    cache = sliding_cache()
    first = held(cache.insert(None, ints(1, 2, 3), given([11, 12, 13], [21, 22, 23])).lease)
    kept = cache.insert(first, ints(1, 2, 3, 4, 5, 6), given([14, 15, 16], [24, 25, 26]))
    assert not first.live
    assert cache.locked == GroupCounts(full=6, swa=2)
    assert cache.pages(held(kept.lease)).swa.tolist() == [0, 0, 0, 0, 25, 26]
    assert kept.pages.swa.tolist() == [0, 25, 26]
    assert sorted(cache.evict(SWA, 99).swa.tolist()) == [21, 22, 23, 24]


def test_what_could_not_be_matched_is_not_taken() -> None:
    """The request's own window has moved past what its last whole page needs."""
    cache = UnifiedRadixCache(KvLayout(4, window=6))
    tokens = np.arange(18, dtype=np.int32)
    kept = cache.insert(None, tokens, given([11, 12, 13, 14, 15], [0, 0, 0, 24, 25]))  # 16 needs [8, 16)
    assert kept.lease is None
    assert kept.tail.counts == GroupCounts(full=5, swa=2)
    assert cache.stats().nodes == 0
    kept = cache.insert(None, tokens, given([11, 12, 13, 14, 15], [0, 0, 23, 24, 25]))
    assert held(kept.lease).length == 16
    assert kept.taken.counts == GroupCounts(full=4, swa=2)
    assert kept.tail.counts == GroupCounts(full=1, swa=1)


def test_a_match_whose_window_was_evicted_since_is_refused() -> None:
    cache = sliding_cache()
    cached(cache, ints(1, 2, 3, 4), given(range(11, 15), range(21, 25)))
    match = cache.match_prefix(ints(1, 2, 3, 4))
    cache.evict(SWA, 3)
    assert cache.lock(match) is None
    cache.check([])


def test_the_window_used_last_goes_last() -> None:
    cache = sliding_cache()
    cached(cache, ints(1, 2, 3), given([11, 12, 13], [21, 22, 23]))
    cached(cache, ints(5, 6, 7), given([14, 15, 16], [24, 25, 26]))
    cache.unlock(held(cache.lock(cache.match_prefix(ints(1, 2, 3)))))
    assert cache.evict(SWA, 4).swa.tolist() == [21, 24, 25, 26]  # 21 was in no window
    assert (match_len(cache, 1, 2, 3), match_len(cache, 5, 6, 7)) == (3, 0)


def test_the_callers_arrays_stay_the_callers() -> None:
    """A row is written again while the tree has its pages, and eviction leaves the row alone."""
    cache = sliding_cache()
    offered = given([11, 12, 13], [21, 22, 23])
    cached(cache, ints(1, 2, 3), offered)
    cache.evict(SWA, 1)
    assert offered.swa.tolist() == [21, 22, 23]
    offered.full[:] = offered.swa[:] = 99
    gone = cache.clear()
    assert (sorted(gone.full.tolist()), sorted(gone.swa.tolist())) == ([11, 12, 13], [22, 23])


def test_a_split_changes_neither_locks_nor_age_of_a_window() -> None:
    cache = sliding_cache()
    cached(cache, ints(5, 6), given([17, 18], [27, 28]))
    cached(cache, ints(1, 2, 3, 4, 5, 6), given(range(11, 17), range(21, 27)))
    long = held(cache.lock(cache.match_prefix(ints(1, 2, 3, 4, 5, 6))))
    middle = held(cache.lock(cache.match_prefix(ints(1, 2, 3, 4, 5))))  # inside of the other's window
    cache.check([long, middle])
    assert cache.evict(SWA, 2).swa.tolist() == [27, 28]  # older than all of the longer one
    cache.unlock(long)
    assert cache.evict(SWA, 9).swa.tolist() == [21, 22, 23, 26]
    cache.unlock(middle)
    assert sorted(cache.evict(SWA, 9).swa.tolist()) == [24, 25]


def test_layers_that_see_only_themselves_need_no_pages() -> None:
    """A window of one token: every length is usable, with or without pages, and no empty node stays behind."""
    cache = UnifiedRadixCache(KvLayout(1, full=False, window=1))
    lease = held(cache.insert(None, ints(1, 2), given(swa=[5, 6])).lease)
    assert cache.locked == GroupCounts()
    assert sorted(cache.evict(SWA, 9).swa.tolist()) == [5, 6]
    assert match_len(cache, 1, 2) == 2
    cache.check([lease])
    cache.unlock(lease)
    assert cache.stats().nodes == 0


# ------------------------------------------------------------------------------------------ checkpoints


def test_a_match_ends_where_a_checkpoint_is() -> None:
    cache = recurrent_cache()
    cached(cache, ints(1, 2, 3, 4, 5, 6), given(range(11, 17), state=1))
    assert match_len(cache, 1, 2, 3, 4, 5) == 0
    kept = cache.insert(None, ints(1, 2, 3), given([31, 32, 33], state=2))  # splits the node there
    assert (kept.taken.state.tolist(), kept.pages.state_slot) == ([2], 2)
    assert match_len(cache, 1, 2, 3, 4, 5) == 3
    assert match_len(cache, 1, 2, 3, 4, 5, 6, 7) == 6
    again = cache.insert(kept.lease, ints(1, 2, 3, 4, 5, 6), given([34, 35, 36], state=3))
    assert (again.duplicate.state.tolist(), again.pages.state_slot) == ([3], 1)
    assert cache.pages(held(again.lease)).state_slot == 1
    cache.check([held(again.lease)])


def test_a_state_between_pages_stays_the_callers() -> None:
    cache = recurrent_cache(page_size=2)
    cached(cache, ints(1, 2), given([11], state=1))
    kept = cache.insert(None, ints(1, 2, 3, 4, 5), given([12, 13, 14], state=2))
    assert held(kept.lease).length == 2  # and the pages behind it could not be matched
    assert kept.tail.counts == GroupCounts(full=2, state=1)
    assert kept.duplicate.counts == GroupCounts(full=1)


def test_a_locked_checkpoint_stays_and_the_oldest_other_goes() -> None:
    cache = recurrent_cache()
    for n in (1, 2, 3):
        cached(cache, ints(n, 8), given([2 * n, 2 * n + 1], state=n))
    lease = held(cache.lock(cache.match_prefix(ints(1, 8))))
    assert cache.evict(STATE, 1).state.tolist() == [2]
    assert cache.evictable == GroupCounts(full=4, state=1)  # its FULL part stays, the next to go
    assert cache.evict(FULL, 1).full.tolist() == [5]
    cache.unlock(lease)
    assert cache.evict(STATE, 9).state.tolist() == [3, 1]
    assert match_len(cache, 1, 8) == 0


def test_a_match_whose_checkpoint_was_evicted_since_is_refused() -> None:
    cache = recurrent_cache()
    cached(cache, ints(1, 2), given([11, 12], state=1))
    match = cache.match_prefix(ints(1, 2))
    cache.evict(STATE, 1)
    assert cache.lock(match) is None
    assert cache.evictable_in(match) == GroupCounts(full=2)


def test_a_match_that_was_evicted_since_pins_nothing() -> None:
    cache = recurrent_cache()
    cached(cache, ints(1, 2), given([11, 12], state=1))
    match = cache.match_prefix(ints(1, 2))
    cache.evict(FULL, 2)
    assert cache.evictable_in(match) == GroupCounts()
    assert cache.lock(match) is None


def test_a_full_page_takes_along_what_is_cached_at_it() -> None:
    cache = UnifiedRadixCache(KvLayout(1, window=3, state=True))
    cached(cache, ints(1, 2, 3), given([11, 12, 13], [21, 22, 23], 1))
    gone = cache.evict(FULL, 1)
    assert (gone.full.tolist(), gone.swa.tolist(), gone.state.tolist()) == ([13], [23], [1])
    assert cache.evictable == GroupCounts(full=2, swa=2)


def test_without_pages_a_long_conversation_goes_with_its_last_checkpoint() -> None:
    """Keys cost no pages, so nothing but this would ever remove them."""
    cache = UnifiedRadixCache(KvLayout(1, full=False, state=True))
    tokens = np.arange(3000, dtype=np.int32)
    lease: PrefixLease | None = None
    for length in range(1, 3001):
        lease = cache.insert(lease, tokens[:length], given(state=length)).lease
    assert cache.evict(STATE, 9999).counts == GroupCounts(state=2999)
    assert match_len(cache, *range(3000)) == 3000
    cache.unlock(held(lease))
    assert cache.evict(STATE, 1).state.tolist() == [3000]
    assert cache.stats().nodes == 0


def test_every_component_must_be_able_to_go_on() -> None:
    cache = UnifiedRadixCache(KvLayout(1, window=3, state=True))
    cached(cache, ints(1, 2, 3), given([11, 12, 13], [21, 22, 23], 1))
    cached(cache, ints(1, 2, 3, 4, 5, 6), given(range(31, 37), [0, 0, 0, 24, 25, 26], 2))
    assert match_len(cache, 1, 2, 3, 4, 5, 6) == 6
    cache.evict(SWA, 4)  # all but the window of the longer one
    assert (match_len(cache, 1, 2, 3, 4, 5), match_len(cache, 1, 2, 3, 4, 5, 6)) == (0, 6)
    cache.evict(SWA, 1)
    assert match_len(cache, 1, 2, 3, 4, 5, 6) == 0


# ------------------------------------------------------------------------------------------ costs


class CallCount:
    """How many functions are called, generators resumed and built-ins used: the same on every machine."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.calls = 0
        sys.setprofile(self._count)
        try:
            self.result = action()
        finally:
            sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, arg: object) -> None:
        self.calls += event in ("call", "c_call")


LAYOUTS = [
    KvLayout(4),
    KvLayout(4, window=6),
    KvLayout(4, full=False, window=6),
    KvLayout(4, state=True),
    KvLayout(4, full=False, state=True),
    KvLayout(4, window=6, state=True),
]


class Filled:
    """A tree of `leaves` conversations of 24 tokens; their first 8 are the same."""

    def __init__(self, layout: KvLayout, leaves: int) -> None:
        self.layout = layout
        self.cache = UnifiedRadixCache(layout)
        self.next_id = 1
        for leaf in range(leaves):
            self.cache.unlock(self.insert(self.tokens(leaf)))
        for component in layout.components:  # queue entries that are out of date are dropped once, by the first
            self.cache.evict(component, 1)

    def tokens(self, leaf: int) -> I32:
        return np.concatenate((np.arange(8), np.full(16, 1000 + leaf))).astype(np.int32)

    def insert(self, tokens: I32) -> PrefixLease:
        pages = range(self.next_id, self.next_id + len(tokens) // 4)
        self.next_id = pages.stop
        offered = given(
            pages if self.layout.full else (),
            pages if self.layout.window else (),
            pages[0] if self.layout.state else 0,
        )
        return held(self.cache.insert(None, tokens, offered).lease)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_costs_do_not_grow_with_the_tree(layout: KvLayout) -> None:
    costs = []
    for leaves in (20, 2000):
        filled = Filled(layout, leaves)
        cache, known, new = filled.cache, filled.tokens(leaves // 2), filled.tokens(leaves)
        match = CallCount(lambda cache=cache, known=known: cache.match_prefix(known))
        assert match.result.length == 24
        lock = CallCount(lambda cache=cache, match=match: cache.lock(match.result))
        unlock = CallCount(lambda cache=cache, lock=lock: cache.unlock(lock.result))
        insert = CallCount(lambda filled=filled, new=new: filled.insert(new))
        counts = CallCount(lambda cache=cache: (cache.evictable, cache.locked))
        evict = [CallCount(lambda cache=cache, one=one: cache.evict(one, 1)) for one in layout.components]
        costs.append([cost.calls for cost in (match, lock, unlock, insert, counts, *evict)])
    assert costs[0] == costs[1]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_evicting_costs_the_same_per_leaf_however_many_there_are(layout: KvLayout) -> None:
    """But for the depth of a heap, which is the logarithm that no call counts."""
    per_leaf = []
    for leaves in (100, 1600):
        cache = Filled(layout, leaves).cache
        per_leaf.append(CallCount(cache.clear).calls / leaves)
        assert cache.stats().nodes == 0
    assert per_leaf[1] < 1.1 * per_leaf[0]
