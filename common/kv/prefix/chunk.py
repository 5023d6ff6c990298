"""`ChunkCache`: the prefix cache that shares nothing. Owns no page, ever; all it is given comes back as tail."""

from __future__ import annotations

from collections.abc import Iterable

from baton.common.kv.errors import InvariantViolation, OwnershipError
from baton.common.kv.layout import Component
from baton.common.kv.prefix.interface import (
    I32,
    GroupCounts,
    GroupPages,
    Inserted,
    PrefixLease,
    PrefixMatch,
    PrefixStats,
)
from baton.common.kv.prefix.node import live_ids

_NONE = GroupCounts()
_NO_PAGES = GroupPages()


class ChunkCache:
    """No state at all."""

    evictable = _NONE
    locked = _NONE

    def match_prefix(self, tokens: I32) -> PrefixMatch:
        return PrefixMatch(length=0)

    def evictable_in(self, match: PrefixMatch) -> GroupCounts:
        return _NONE

    def lock(self, match: PrefixMatch) -> PrefixLease | None:
        return None

    def unlock(self, lease: PrefixLease, *, used: bool = True) -> None:
        raise OwnershipError("a ChunkCache gives out no leases, so none can end here")

    def pages(self, lease: PrefixLease) -> GroupPages:
        raise OwnershipError("a ChunkCache gives out no leases")

    def insert(self, lease: PrefixLease | None, tokens: I32, given: GroupPages) -> Inserted:
        tail = GroupPages(given.full, live_ids(given.swa), given.state)
        return Inserted(lease=lease, taken=_NO_PAGES, duplicate=_NO_PAGES, tail=tail, pages=_NO_PAGES)

    def coldest(self, count: int) -> list[tuple[I32, PrefixMatch]]:
        return []

    def evict(self, component: Component, count: int) -> GroupPages:
        return _NO_PAGES

    def clear(self) -> GroupPages:
        return _NO_PAGES

    def cached_pages(self) -> tuple[GroupPages, GroupPages]:
        return _NO_PAGES, _NO_PAGES

    def check(self, leases: Iterable[PrefixLease]) -> None:
        held = sum(1 for _ in leases)
        if held:
            raise InvariantViolation(f"{held} records hold leases that a ChunkCache never gave out")

    def stats(self) -> PrefixStats:
        return PrefixStats(nodes=0, leases=0, evictable=_NONE, locked=_NONE, eviction_queue=_NONE, evicted_total=_NONE)
