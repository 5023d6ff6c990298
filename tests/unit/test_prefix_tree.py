"""The prefix tree in both implementations, case by case: what locks, splits, tombstones and checkpoints do.
`test_prefix_costs.py` has what it all costs, the property test (`tests/property/test_kv_tree.py`) the rest.
"""

from __future__ import annotations

import numpy as np
import pytest
from prefix_rig import Trees, given, held, ints

from baton.common.kv.errors import InvariantViolation, OwnershipError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.chunk import ChunkCache
from baton.common.kv.prefix.interface import I32, GroupCounts, GroupPages, PrefixCache, PrefixLease

FULL, SWA, STATE = Component.FULL, Component.SWA, Component.STATE


def cached(cache: PrefixCache, tokens: I32, pages: GroupPages) -> None:
    cache.unlock(held(cache.insert(None, tokens, pages).lease))


def match_len(cache: PrefixCache, *tokens: int) -> int:
    return cache.match_prefix(ints(*tokens)).length


# ------------------------------------------------------------------------------------------ full attention


def test_a_split_keeps_the_locks_of_both_halves(trees: Trees) -> None:
    cache = trees.full()
    long = held(cache.insert(None, ints(1, 2, 3, 4), given([11, 12, 13, 14])).lease)
    short = held(cache.lock(cache.match_prefix(ints(1, 2, 9))))
    assert cache.pages(long).full.tolist() == [11, 12, 13, 14]
    assert cache.pages(short).full.tolist() == [11, 12]
    cache.unlock(long)
    assert cache.evictable.full == 2
    assert sorted(cache.clear().full.tolist()) == [13, 14]
    assert cache.pages(short).full.tolist() == [11, 12]


def test_what_goes_next_is_foretold_and_left_alone(trees: Trees) -> None:
    cache = trees.full()
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


def test_a_lease_that_only_copied_leaves_the_order_of_eviction(trees: Trees) -> None:
    cache = trees.full()
    cached(cache, ints(1, 2), given([11, 12]))
    cached(cache, ints(7), given([17]))
    ((_, match),) = cache.coldest(1)
    lease = held(cache.lock(match))
    assert [tokens.tolist() for tokens, _ in cache.coldest(99)] == [[7]]
    cache.unlock(lease, used=False)
    cache.check([])
    assert [tokens.tolist() for tokens, _ in cache.coldest(99)] == [[1, 2], [7]]
    assert cache.evict(FULL, 2).full.tolist() == [11, 12]


def test_what_was_never_used_goes_in_the_order_in_which_it_came(trees: Trees) -> None:
    cache = trees.full()
    for n in (1, 2, 3):
        cache.unlock(held(cache.insert(None, ints(n), given([10 + n])).lease), used=False)
    for _ in range(2):  # foretelling leaves the order as it is
        assert [tokens.tolist() for tokens, _ in cache.coldest(1)] == [[1]]
    for _ in range(200):  # so often that the queue is tidied up
        cache.unlock(held(cache.lock(cache.match_prefix(ints(1)))), used=False)
    assert cache.evict(FULL, 9).full.tolist() == [11, 12, 13]


def test_a_lease_is_of_one_cache(trees: Trees) -> None:
    ours, other = trees.full(), trees.full()
    lease = held(ours.insert(None, ints(1), given([5])).lease)
    match = ours.match_prefix(ints(1))
    with pytest.raises(OwnershipError):
        ours.pages(PrefixLease(1))
    for use in (other.pages, other.unlock, lambda lease: other.insert(lease, ints(1, 2), given([6]))):
        with pytest.raises(OwnershipError):
            use(lease)
    for look in (other.lock, other.evictable_in):
        with pytest.raises(AssertionError):
            look(match)
    with pytest.raises(InvariantViolation):
        other.check([lease])
    with pytest.raises(InvariantViolation):
        ours.check([])
    with pytest.raises(OwnershipError):
        ChunkCache().unlock(lease)
    with pytest.raises(InvariantViolation):
        ChunkCache().check([lease])
    ours.check([lease])


def test_a_lease_that_is_over_is_refused(trees: Trees) -> None:
    cache = trees.full()
    lease = held(cache.insert(None, ints(1, 2), given([5, 6])).lease)
    cache.unlock(lease)
    for use in (cache.pages, cache.unlock, lambda lease: cache.insert(lease, ints(1, 2, 3), given([7]))):
        with pytest.raises(OwnershipError):
            use(lease)
    with pytest.raises(InvariantViolation):
        cache.check([lease])
    cache.check([])


def test_a_match_is_not_mistaken_for_what_came_to_its_place(trees: Trees) -> None:
    """All nodes that a match may have pointed to are gone, and as many new ones are there."""
    cache = trees.full()
    cached(cache, ints(1, 2), given([11, 12]))
    cached(cache, ints(1, 3), given([21, 13]))
    matches = [cache.match_prefix(ints(*tokens)) for tokens in ((1,), (1, 2), (1, 3))]
    assert [match.length for match in matches] == [1, 2, 2]
    cache.clear()
    cached(cache, ints(4, 5), given([14, 15]))
    cached(cache, ints(4, 6), given([24, 16]))
    assert [cache.lock(match) for match in matches] == [None, None, None]
    assert [cache.evictable_in(match) for match in matches] == [GroupCounts()] * 3
    cache.check([])


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
def test_what_cannot_be_is_refused_and_changes_nothing(trees: Trees, layout: KvLayout, pages: GroupPages) -> None:
    cache = trees.of(layout)
    with pytest.raises(OwnershipError):
        cache.insert(None, ints(1, 2, 3, 4), pages)
    assert cache.stats().nodes == 0


def test_stale_queue_entries_do_not_pile_up(trees: Trees) -> None:
    """A prefix that is locked and unlocked for ever must not make the eviction queues grow for ever."""
    cache = trees.of(KvLayout(1, window=2, state=True))
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


def test_sliding_pages_become_tombstones_and_the_full_pages_stay(trees: Trees) -> None:
    cache = trees.sliding()
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


def test_a_live_page_that_is_given_revives_a_tombstone(trees: Trees) -> None:
    cache = trees.sliding()
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


def test_a_lease_locks_the_window_at_its_end_and_no_more(trees: Trees) -> None:
    cache = trees.sliding()
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


def test_a_lease_that_moves_on_lets_the_old_window_go(trees: Trees) -> None:
    cache = trees.sliding()
    first = held(cache.insert(None, ints(1, 2, 3), given([11, 12, 13], [21, 22, 23])).lease)
    kept = cache.insert(first, ints(1, 2, 3, 4, 5, 6), given([14, 15, 16], [24, 25, 26]))
    assert not first.live
    assert cache.locked == GroupCounts(full=6, swa=2)
    assert cache.pages(held(kept.lease)).swa.tolist() == [0, 0, 0, 0, 25, 26]
    assert kept.pages.swa.tolist() == [0, 25, 26]
    assert sorted(cache.evict(SWA, 99).swa.tolist()) == [21, 22, 23, 24]


def test_what_could_not_be_matched_is_not_taken(trees: Trees) -> None:
    """The request's own window has moved past what its last whole page needs."""
    cache = trees.of(KvLayout(4, window=6))
    tokens = np.arange(18, dtype=np.int32)
    kept = cache.insert(None, tokens, given([11, 12, 13, 14, 15], [0, 0, 0, 24, 25]))  # 16 needs [8, 16)
    assert kept.lease is None
    assert kept.tail.counts == GroupCounts(full=5, swa=2)
    assert cache.stats().nodes == 0
    kept = cache.insert(None, tokens, given([11, 12, 13, 14, 15], [0, 0, 23, 24, 25]))
    assert held(kept.lease).length == 16
    assert kept.taken.counts == GroupCounts(full=4, swa=2)
    assert kept.tail.counts == GroupCounts(full=1, swa=1)


def test_a_match_whose_window_was_evicted_since_is_refused(trees: Trees) -> None:
    cache = trees.sliding()
    cached(cache, ints(1, 2, 3, 4), given(range(11, 15), range(21, 25)))
    match = cache.match_prefix(ints(1, 2, 3, 4))
    cache.evict(SWA, 3)
    assert cache.lock(match) is None
    cache.check([])


def test_the_window_used_last_goes_last(trees: Trees) -> None:
    cache = trees.sliding()
    cached(cache, ints(1, 2, 3), given([11, 12, 13], [21, 22, 23]))
    cached(cache, ints(5, 6, 7), given([14, 15, 16], [24, 25, 26]))
    cache.unlock(held(cache.lock(cache.match_prefix(ints(1, 2, 3)))))
    assert cache.evict(SWA, 4).swa.tolist() == [21, 24, 25, 26]  # 21 was in no window
    assert (match_len(cache, 1, 2, 3), match_len(cache, 5, 6, 7)) == (3, 0)


def test_the_callers_arrays_stay_the_callers(trees: Trees) -> None:
    """A row is written again while the tree has its pages, and eviction leaves the row alone."""
    cache = trees.sliding()
    offered = given([11, 12, 13], [21, 22, 23])
    cached(cache, ints(1, 2, 3), offered)
    cache.evict(SWA, 1)
    assert offered.swa.tolist() == [21, 22, 23]
    offered.full[:] = offered.swa[:] = 99
    gone = cache.clear()
    assert (sorted(gone.full.tolist()), sorted(gone.swa.tolist())) == ([11, 12, 13], [22, 23])


def test_a_split_changes_neither_locks_nor_age_of_a_window(trees: Trees) -> None:
    cache = trees.sliding()
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


def test_layers_that_see_only_themselves_need_no_pages(trees: Trees) -> None:
    """A window of one token: every length is usable, with or without pages, and no empty node stays behind."""
    cache = trees.of(KvLayout(1, full=False, window=1))
    lease = held(cache.insert(None, ints(1, 2), given(swa=[5, 6])).lease)
    assert cache.locked == GroupCounts()
    assert sorted(cache.evict(SWA, 9).swa.tolist()) == [5, 6]
    assert match_len(cache, 1, 2) == 2
    cache.check([lease])
    cache.unlock(lease)
    assert cache.stats().nodes == 0


# ------------------------------------------------------------------------------------------ checkpoints


def test_a_match_ends_where_a_checkpoint_is(trees: Trees) -> None:
    cache = trees.recurrent()
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


def test_a_state_between_pages_stays_the_callers(trees: Trees) -> None:
    cache = trees.recurrent(page_size=2)
    cached(cache, ints(1, 2), given([11], state=1))
    kept = cache.insert(None, ints(1, 2, 3, 4, 5), given([12, 13, 14], state=2))
    assert held(kept.lease).length == 2  # and the pages behind it could not be matched
    assert kept.tail.counts == GroupCounts(full=2, state=1)
    assert kept.duplicate.counts == GroupCounts(full=1)


def test_a_locked_checkpoint_stays_and_the_oldest_other_goes(trees: Trees) -> None:
    cache = trees.recurrent()
    for n in (1, 2, 3):
        cached(cache, ints(n, 8), given([2 * n, 2 * n + 1], state=n))
    lease = held(cache.lock(cache.match_prefix(ints(1, 8))))
    assert cache.evict(STATE, 1).state.tolist() == [2]
    assert cache.evictable == GroupCounts(full=4, state=1)  # its FULL part stays, the next to go
    assert cache.evict(FULL, 1).full.tolist() == [5]
    cache.unlock(lease)
    assert cache.evict(STATE, 9).state.tolist() == [3, 1]
    assert match_len(cache, 1, 8) == 0


def test_a_new_checkpoint_does_not_inherit_the_use_of_the_one_before(trees: Trees) -> None:
    cache = trees.recurrent()
    cached(cache, ints(1), given([11], state=1))
    cached(cache, ints(2), given([12], state=2))
    lease = held(cache.lock(cache.match_prefix(ints(1))))
    assert cache.evict(STATE, 1).state.tolist() == [2]
    cache.unlock(lease, used=False)
    cache.unlock(held(cache.insert(None, ints(2), given([13], state=3)).lease), used=False)
    assert cache.evict(STATE, 1).state.tolist() == [3]


def test_a_match_whose_checkpoint_was_evicted_since_is_refused(trees: Trees) -> None:
    cache = trees.recurrent()
    cached(cache, ints(1, 2), given([11, 12], state=1))
    match = cache.match_prefix(ints(1, 2))
    cache.evict(STATE, 1)
    assert cache.lock(match) is None
    assert cache.evictable_in(match) == GroupCounts(full=2)


def test_a_match_that_was_evicted_since_pins_nothing(trees: Trees) -> None:
    cache = trees.recurrent()
    cached(cache, ints(1, 2), given([11, 12], state=1))
    match = cache.match_prefix(ints(1, 2))
    cache.evict(FULL, 2)
    assert cache.evictable_in(match) == GroupCounts()
    assert cache.lock(match) is None


def test_a_full_page_takes_along_what_is_cached_at_it(trees: Trees) -> None:
    cache = trees.of(KvLayout(1, window=3, state=True))
    cached(cache, ints(1, 2, 3), given([11, 12, 13], [21, 22, 23], 1))
    gone = cache.evict(FULL, 1)
    assert (gone.full.tolist(), gone.swa.tolist(), gone.state.tolist()) == ([13], [23], [1])
    assert cache.evictable == GroupCounts(full=2, swa=2)


def test_without_pages_a_long_conversation_goes_with_its_last_checkpoint(trees: Trees) -> None:
    """Keys cost no pages, so nothing but this would ever remove them."""
    cache = trees.of(KvLayout(1, full=False, state=True))
    tokens = np.arange(3000, dtype=np.int32)
    lease: PrefixLease | None = None
    for length in range(1, 3001):
        lease = cache.insert(lease, tokens[:length], given(state=length)).lease
    assert cache.evict(STATE, 9999).counts == GroupCounts(state=2999)
    assert match_len(cache, *range(3000)) == 3000
    cache.unlock(held(lease))
    assert cache.evict(STATE, 1).state.tolist() == [3000]
    assert cache.stats().nodes == 0


def test_every_component_must_be_able_to_go_on(trees: Trees) -> None:
    cache = trees.of(KvLayout(1, window=3, state=True))
    cached(cache, ints(1, 2, 3), given([11, 12, 13], [21, 22, 23], 1))
    cached(cache, ints(1, 2, 3, 4, 5, 6), given(range(31, 37), [0, 0, 0, 24, 25, 26], 2))
    assert match_len(cache, 1, 2, 3, 4, 5, 6) == 6
    cache.evict(SWA, 4)  # all but the window of the longer one
    assert (match_len(cache, 1, 2, 3, 4, 5), match_len(cache, 1, 2, 3, 4, 5, 6)) == (0, 6)
    cache.evict(SWA, 1)
    assert match_len(cache, 1, 2, 3, 4, 5, 6) == 0
