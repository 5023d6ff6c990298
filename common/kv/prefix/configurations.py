"""The prefix caches by name: what the field calls them, and which models each is for. Owns no state.

There are the tree (`UnifiedRadixCache`), the same tree compiled (`RadixCacheCpp`) and none (`ChunkCache`). A name says
which, and what a model's KV must consist of; "radix" and "chunk" fit every model. The compiled tree answers like the
other in everything and is the faster one (docs/benchmarks/prefix.md), so that "radix" means it; where it cannot be
compiled, the one in Python takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from baton.common.errors import ConfigError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.prefix.chunk import ChunkCache
from baton.common.kv.prefix.compiled import compiled_library
from baton.common.kv.prefix.interface import PrefixCache
from baton.common.kv.prefix.names import PrefixCacheName
from baton.common.kv.prefix.radix_cpp import RadixCacheCpp
from baton.common.kv.prefix.tree import UnifiedRadixCache


class CacheKind(StrEnum):
    RADIX = "radix"
    RADIX_CPP = "RadixCacheCpp"
    CHUNK = "chunk"


@dataclass(frozen=True, slots=True)
class Configuration:
    """`needs` and `lacks`: components that the model must have, and must not have."""

    kind: CacheKind
    needs: frozenset[Component] = field(default_factory=frozenset)
    lacks: frozenset[Component] = field(default_factory=frozenset)


_FULL = frozenset({Component.FULL})
_SWA = frozenset({Component.SWA})
_STATE = frozenset({Component.STATE})

CONFIGURATIONS: Mapping[PrefixCacheName, Configuration] = {
    "radix": Configuration(CacheKind.RADIX_CPP),
    "chunk": Configuration(CacheKind.CHUNK),
    "ChunkCache": Configuration(CacheKind.CHUNK),  # what is never shared needs no window and no checkpoint either
    "SWAChunkCache": Configuration(CacheKind.CHUNK, needs=_FULL | _SWA),
    "PureSWAChunkCache": Configuration(CacheKind.CHUNK, needs=_SWA, lacks=_FULL),
    "RadixCache": Configuration(CacheKind.RADIX, needs=_FULL, lacks=_SWA | _STATE),
    "RadixCacheCpp": Configuration(CacheKind.RADIX_CPP),
    "LMCRadixCache": Configuration(CacheKind.RADIX_CPP, needs=_FULL, lacks=_SWA | _STATE),  # over kv.tiers.external
    "SWARadixCache": Configuration(CacheKind.RADIX, needs=_FULL | _SWA, lacks=_STATE),
    "PureSWARadixCache": Configuration(CacheKind.RADIX, needs=_SWA, lacks=_FULL | _STATE),
    "MambaRadixCache": Configuration(CacheKind.RADIX, needs=_STATE, lacks=_SWA),
    "UnifiedRadixCache": Configuration(CacheKind.RADIX),
}


def make_prefix_cache(name: PrefixCacheName, layout: KvLayout) -> PrefixCache:
    """Raises ConfigError when the configuration is not one for this layout."""
    configuration = CONFIGURATIONS[name]
    _check_fits(name, configuration, layout)
    match configuration.kind:
        case CacheKind.RADIX:
            return UnifiedRadixCache(layout)
        case CacheKind.RADIX_CPP:
            library = compiled_library()
            return UnifiedRadixCache(layout) if library is None else RadixCacheCpp(library, layout)
        case CacheKind.CHUNK:
            return ChunkCache()


def shares_prefixes(name: PrefixCacheName) -> bool:
    return CONFIGURATIONS[name].kind is not CacheKind.CHUNK


def _check_fits(name: PrefixCacheName, configuration: Configuration, layout: KvLayout) -> None:
    have = frozenset(layout.components)
    wrong = [
        f"needs {component}, which this model lacks"
        for component in Component
        if component in configuration.needs - have
    ]
    wrong += [
        f"cannot keep {component}, which this model has"
        for component in Component
        if component in configuration.lacks & have
    ]
    if wrong:
        raise ConfigError("kv.prefix_cache", name, "; ".join(wrong), f"{configuration.kind} fits every model")
