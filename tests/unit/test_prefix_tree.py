"""The prefix tree, case by case: what locks, splits, tombstones and checkpoints do. The property test has the rest."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.kv.errors import InvariantViolation, OwnershipError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.chunk import ChunkCache
from baton.common.kv.prefix.interface import I32, GroupPages
from baton.common.kv.prefix.tree import UnifiedRadixCache


def ints(*values: int) -> I32:
    return np.array(values, dtype=np.int32)


def full(*values: int) -> GroupPages:
    return GroupPages(full=ints(*values))


def full_cache(page_size: int = 1) -> UnifiedRadixCache:
    return UnifiedRadixCache(KvLayout(page_size))


def test_a_split_keeps_the_locks_of_both_halves() -> None:
    cache = full_cache()
    long = cache.insert(None, ints(1, 2, 3, 4), full(11, 12, 13, 14)).lease
    short = cache.lock(cache.match_prefix(ints(1, 2, 9)))
    assert long is not None
    assert short is not None
    assert cache.pages(long).full.tolist() == [11, 12, 13, 14]
    assert cache.pages(short).full.tolist() == [11, 12]
    cache.unlock(long)
    assert cache.evictable.full == 2
    assert sorted(cache.clear().full.tolist()) == [13, 14]
    assert cache.pages(short).full.tolist() == [11, 12]


def test_a_lease_is_of_one_cache() -> None:
    ours, other = full_cache(), full_cache()
    lease = ours.insert(None, ints(1), full(5)).lease
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
        full_cache(2).insert(None, ints(1, 2, 3, 4), full(5))


def test_stale_queue_entries_do_not_pile_up() -> None:
    """A prefix that is locked and unlocked for ever must not make the eviction queues grow for ever."""
    cache = UnifiedRadixCache(KvLayout(1, window=2, state=True))
    lease = cache.insert(None, ints(1, 2), GroupPages(ints(5, 6), ints(7, 8), ints(9))).lease
    assert lease is not None
    cache.unlock(lease)
    for _ in range(1000):
        again = cache.lock(cache.match_prefix(ints(1, 2)))
        assert again is not None
        cache.unlock(again)
    assert max(cache.stats().eviction_queue) < 100
    assert sorted(cache.evict(Component.FULL, 5).full.tolist()) == [5, 6]
    assert cache.match_prefix(ints(1, 2)).length == 0
