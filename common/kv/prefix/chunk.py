"""`ChunkCache`: the prefix cache that shares nothing. Owns no page, ever; all it is given comes back as tail."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from baton.common.kv.errors import InvariantViolation, OwnershipError
from baton.common.kv.prefix.interface import I32, Inserted, PrefixLease, PrefixMatch, PrefixStats, Span

_NO_PAGES: I32 = np.empty(0, dtype=np.int32)
_NO_PAGES.flags.writeable = False


class ChunkCache:
    """No state at all."""

    evictable_pages = 0
    locked_pages = 0

    def match_prefix(self, tokens: I32) -> PrefixMatch:
        return PrefixMatch(length=0)

    def evictable_pages_in(self, match: PrefixMatch) -> int:
        return 0

    def lock(self, match: PrefixMatch) -> PrefixLease | None:
        return None

    def unlock(self, lease: PrefixLease) -> None:
        raise OwnershipError("a ChunkCache gives out no leases, so none can end here")

    def pages(self, lease: PrefixLease) -> I32:
        raise OwnershipError("a ChunkCache gives out no leases")

    def insert(self, lease: PrefixLease | None, tokens: I32, pages: I32) -> Inserted:
        nothing = Span(0, 0)
        return Inserted(lease=lease, duplicate=nothing, locked=nothing, tail=Span(0, len(tokens)), pages=_NO_PAGES)

    def evict(self, pages: int) -> I32:
        return _NO_PAGES

    def clear(self) -> I32:
        return _NO_PAGES

    def cached_pages(self) -> tuple[I32, I32]:
        return _NO_PAGES, _NO_PAGES

    def check(self, leases: Iterable[PrefixLease]) -> None:
        held = sum(1 for _ in leases)
        if held:
            raise InvariantViolation(f"{held} records hold leases that a ChunkCache never gave out")

    def stats(self) -> PrefixStats:
        return PrefixStats(
            nodes=0, leases=0, evictable_pages=0, locked_pages=0, eviction_queue=0, evicted_pages_total=0
        )
