"""The names of prefix caches that a configuration may choose; `configurations.py` says what each is and needs."""

from __future__ import annotations

from typing import Literal

PrefixCacheName = Literal[
    "radix",
    "chunk",
    "ChunkCache",
    "SWAChunkCache",
    "PureSWAChunkCache",
    "RadixCache",
    "RadixCacheCpp",
    "LMCRadixCache",
    "SWARadixCache",
    "PureSWARadixCache",
    "MambaRadixCache",
    "UnifiedRadixCache",
]

WITHOUT_SHARING: frozenset[PrefixCacheName] = frozenset({"chunk", "ChunkCache", "SWAChunkCache", "PureSWAChunkCache"})
"""Those that keep nothing of a request that has ended."""
