"""A pool that says what it caches, and what uses it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from baton.common.kv.layout import KvLayout
from baton.common.kv.pool import KvPool, Refused
from baton.common.kv.prefix.names import PrefixCacheName
from baton.common.kv.record import ReqKvInfo

PAGE = 4


@dataclass
class Holder:
    kv: ReqKvInfo | None = None


def make_pool(cache: PrefixCacheName = "radix", pages: int = 24, layout: KvLayout | None = None) -> KvPool:
    layout = layout or KvLayout(PAGE)
    return KvPool(layout, dict.fromkeys(layout.components, pages + 1), 4, 64, cache, events=True)


def use(pool: KvPool, rng: Random) -> None:
    """One request of few different tokens, computed in chunks; or cached pages are given up."""
    if rng.random() < 0.2:
        pool.evict(rng.randint(1, 6)) if rng.random() < 0.8 else pool.clear_cache()
        return
    tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 40))]
    holder = Holder()
    for end in sorted({rng.randint(1, len(tokens)), len(tokens)}):
        if holder.kv is not None and end <= holder.kv.kv_committed_len:
            continue
        if isinstance(pool.prepare_for_extend(holder, tokens, end), Refused):
            break
        assert holder.kv is not None
        pool.take_state_copies([holder.kv])
        if rng.random() < 0.7:
            pool.cache_unfinished_req(holder, tokens)
    if holder.kv is not None:
        pool.release_kv_cache(holder, tokens, rng.random() < 0.9)
