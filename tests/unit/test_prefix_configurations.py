"""Prefix caches by name: which models each fits, and what is said when it does not."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from baton.common.config import ClusterConfig, from_mapping
from baton.common.config_checks import validate
from baton.common.errors import ConfigError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.chunk import ChunkCache
from baton.common.kv.prefix.compiled import compiled_library
from baton.common.kv.prefix.configurations import CONFIGURATIONS, make_prefix_cache, shares_prefixes
from baton.common.kv.prefix.interface import PrefixCache
from baton.common.kv.prefix.names import PrefixCacheName
from baton.common.kv.prefix.radix_cpp import RadixCacheCpp
from baton.common.kv.prefix.tree import UnifiedRadixCache

LAYOUTS = {
    "full": KvLayout(4),
    "swa": KvLayout(4, full=False, window=8),
    "state": KvLayout(4, full=False, state=True),
    "full+swa": KvLayout(4, window=8),
    "full+state": KvLayout(4, state=True),
    "swa+state": KvLayout(4, full=False, window=8, state=True),
    "full+swa+state": KvLayout(4, window=8, state=True),
}
EVERY = set(LAYOUTS)

FITS: dict[PrefixCacheName, tuple[type[PrefixCache], set[str]]] = {
    "radix": (RadixCacheCpp, EVERY),
    "chunk": (ChunkCache, EVERY),
    "ChunkCache": (ChunkCache, EVERY),
    "SWAChunkCache": (ChunkCache, {"full+swa", "full+swa+state"}),
    "PureSWAChunkCache": (ChunkCache, {"swa", "swa+state"}),
    "RadixCache": (UnifiedRadixCache, {"full"}),
    "RadixCacheCpp": (RadixCacheCpp, EVERY),
    "LMCRadixCache": (RadixCacheCpp, {"full"}),
    "SWARadixCache": (UnifiedRadixCache, {"full+swa"}),
    "PureSWARadixCache": (UnifiedRadixCache, {"swa"}),
    "MambaRadixCache": (UnifiedRadixCache, {"state", "full+state"}),
    "UnifiedRadixCache": (UnifiedRadixCache, EVERY),
}


@pytest.mark.parametrize("name", FITS)
def test_each_name_fits_its_models_and_no_other(name: PrefixCacheName) -> None:
    kind, fits = FITS[name]
    if kind is RadixCacheCpp and compiled_library() is None:
        kind = UnifiedRadixCache
    for layout_name, layout in LAYOUTS.items():
        if layout_name in fits:
            assert type(make_prefix_cache(name, layout)) is kind
        else:
            with pytest.raises(ConfigError) as refused:
                make_prefix_cache(name, layout)
            assert refused.value.field == "kv.prefix_cache"
            assert any(component in refused.value.reason for component in Component)


def test_a_refusal_names_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="needs state, which this model lacks; cannot keep swa, which this model has"):
        make_prefix_cache("MambaRadixCache", KvLayout(4, window=8))


def test_a_cache_over_an_external_store_needs_one() -> None:
    kv = {"prefix_cache": "LMCRadixCache"}
    with pytest.raises(ConfigError, match=r"kv\.prefix_cache.*kv\.tiers\.external=file:///path"):
        validate(from_mapping(ClusterConfig, {"kv": kv}))
    validate(from_mapping(ClusterConfig, {"kv": {**kv, "tiers": {"external": "file:///mnt/kv"}}}))


@pytest.mark.parametrize("name", FITS)
def test_tiers_lie_below_caches_that_keep_something(name: PrefixCacheName) -> None:
    shares = FITS[name][0] is not ChunkCache
    assert shares is shares_prefixes(name)
    config = from_mapping(ClusterConfig, {"kv": {"prefix_cache": name, "tiers": {"external": "file:///mnt/kv"}}})
    if shares:
        validate(config)
    else:
        with pytest.raises(ConfigError, match=r"kv\.tiers.*keeps nothing"):
            validate(config)


def test_every_name_can_be_configured() -> None:
    assert set(FITS) == set(CONFIGURATIONS) == set(get_args(PrefixCacheName))
    for name in FITS:
        config = from_mapping(ClusterConfig, {"kv": {"prefix_cache": name}})
        assert dataclasses.asdict(config.kv)["prefix_cache"] == name
    with pytest.raises(ConfigError, match="must be one of radix, chunk, ChunkCache"):
        from_mapping(ClusterConfig, {"kv": {"prefix_cache": "LruCache"}})
