"""What workers have cached, and what gateways believe of that: oracles over page logs, feeds and indexes.

- I1  A worker's log names what its tree holds: no page more, none less, each by all tokens up to its end.
- I2  A gateway's index never says of a process what the tree of that very process has never held.
- I3  When all is quiet the index of each gateway is what the trees hold; where it has too little room, part of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from baton.common.ids import Stamp
from baton.common.kv.events import page_names
from baton.common.kv.pool import KvPool
from baton.common.kv.prefix.compiled_dump import Dump
from baton.common.kv.prefix.node import Node
from baton.common.kv.prefix.radix_cpp import RadixCacheCpp
from baton.common.kv.prefix.tree import UnifiedRadixCache
from baton.common.messages import KvEvents
from baton.deploy.routing.index import PrefixIndex

_NOTHING: frozenset[int] = frozenset()


class CacheWatch:
    """What each process has ever said that it holds (I2). With I1 that is what its tree held."""

    def __init__(self) -> None:
        self._held: dict[Stamp, set[int]] = {}

    def said(self, stamp: Stamp, batch: KvEvents) -> None:
        self._held.setdefault(stamp, set()).update(np.frombuffer(batch.stored, dtype="<u8").tolist())

    def look(self, stamps: Iterable[Stamp], index: PrefixIndex) -> None:
        for stamp in stamps:
            strange = set(index.names_of(stamp)) - self._held.get(stamp, _NOTHING)
            assert not strange, f"an index says that {stamp} holds pages that it never held: {strange}"


def assert_named(pool: KvPool) -> None:
    """I1, as far as it can be seen from counts; `is_known` looks at each name."""
    if pool.events is not None:
        cached = pool.prefix.evictable.full + pool.prefix.locked.full
        assert pool.events.cached == cached, f"a log names {pool.events.cached} pages, and the tree holds {cached}"


def is_known(index: PrefixIndex, pools: Mapping[Stamp, KvPool]) -> bool:
    """I3."""
    for stamp, pool in pools.items():
        known = set(index.names_of(stamp))
        held = names_in(pool) if pool.events is not None else set()
        named = set(pool.events.held().tolist()) if pool.events is not None else set()
        assert named == held, f"the log of {stamp} names other pages than its tree holds"
        if known != held and not (index.refused_pages and known <= held):
            return False
    return True


def names_in(pool: KvPool) -> set[int]:
    """Of the pages of its tree, made from nothing but its keys."""
    cache = pool.prefix
    if isinstance(cache, UnifiedRadixCache):
        return _names_below(cache.page_tree.root.children.values(), pool.page_size)
    if isinstance(cache, RadixCacheCpp):
        tree = cache.compiled
        tree.done(tree.library.dump(tree.pointer))
        dump = Dump(pool.layout, tree.table().tolist(), tree.ids())
        return _names_below(dump.nodes[0].children.values(), pool.page_size)
    return set()


def _names_below(nodes: Iterable[Node], page_size: int) -> set[int]:
    names: set[int] = set()
    waiting = [(node, 0) for node in nodes]
    while waiting:
        node, parent = waiting.pop()
        own = list(page_names(np.frombuffer(node.key, dtype=np.int32), page_size, parent))
        names.update(own)
        waiting += [(child, own[-1]) for child in node.children.values()]
    return names
