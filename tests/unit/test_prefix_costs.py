"""What the prefix tree's calls cost, counted without a clock: never more because the tree is larger."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest
from prefix_rig import Trees, given, held

from baton.common.kv.layout import KvLayout
from baton.common.kv.prefix.interface import I32, PrefixCache, PrefixLease
from baton.common.kv.prefix.radix_cpp import RadixCacheCpp


class Cost:
    """`calls`: how many functions are called, generators resumed and built-ins used; `work`: what the compiled tree
    looks at. Neither depends on the machine."""

    def __init__(self, cache: PrefixCache, action: Callable[[], object]) -> None:
        self.calls = 0
        before = work(cache)
        collects = gc.isenabled()
        gc.disable()  # what a collection calls on behalf of others is none of this
        sys.setprofile(self._count)
        try:
            self.result = action()
        finally:
            sys.setprofile(None)
            if collects:
                gc.enable()
        self.work = work(cache) - before

    def _count(self, frame: FrameType, event: str, arg: object) -> None:
        self.calls += event in ("call", "c_call")


def work(cache: PrefixCache) -> int:
    return cache.work if isinstance(cache, RadixCacheCpp) else 0


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

    def __init__(self, trees: Trees, layout: KvLayout, leaves: int) -> None:
        self.layout = layout
        self.cache = trees.of(layout)
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
def test_costs_do_not_grow_with_the_tree(trees: Trees, layout: KvLayout) -> None:
    costs = []
    for leaves in (20, 2000):
        filled = Filled(trees, layout, leaves)
        cache, known, new = filled.cache, filled.tokens(leaves // 2), filled.tokens(leaves)
        match = Cost(cache, lambda cache=cache, known=known: cache.match_prefix(known))
        assert match.result.length == 24
        lock = Cost(cache, lambda cache=cache, match=match: cache.lock(match.result))
        unlock = Cost(cache, lambda cache=cache, lock=lock: cache.unlock(lock.result))
        insert = Cost(cache, lambda filled=filled, new=new: filled.insert(new))
        counts = Cost(cache, lambda cache=cache: (cache.evictable, cache.locked))
        evict = [Cost(cache, lambda cache=cache, one=one: cache.evict(one, 1)) for one in layout.components]
        costs.append([match, lock, unlock, insert, counts, *evict])
    small, large = costs
    assert [cost.calls for cost in small] == [cost.calls for cost in large]
    assert max(cost.work for cost in large) < 60  # how many places of a hash table a look-up takes is chance


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_evicting_costs_the_same_per_leaf_however_many_there_are(trees: Trees, layout: KvLayout) -> None:
    """But for the depth of a heap, which is the logarithm that nothing here counts."""
    calls, looks = [], []
    for leaves in (100, 1600):
        cache = Filled(trees, layout, leaves).cache
        cost = Cost(cache, cache.clear)
        calls.append(cost.calls / leaves)
        looks.append(cost.work / leaves)
        assert cache.stats().nodes == 0
    assert calls[1] < 1.1 * calls[0]
    assert looks[1] <= 2 * looks[0]
