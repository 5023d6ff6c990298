"""What the pool answers: plain values. Owns nothing, decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from baton.common.kv.layout import Component
from baton.common.kv.prefix.interface import I32, GroupCounts, PrefixStats


class RefusalReason(StrEnum):
    """Why nothing was allocated. Adversity, not a bug."""

    NO_PAGES = "no_pages"  # or slots: even after evicting everything evictable
    NO_ROW = "no_row"
    TOO_LONG = "too_long"  # longer than a row, or than the whole pool: waiting does not help
    NO_ROOM_TO_GROW = "no_room_to_grow"  # admission: fits now, but active requests need the room


class Refused(Struct, frozen=True):
    """Nothing changed. `short_pages` more pages (or slots) of the component that was short would have been enough (0
    when they were not the reason)."""

    reason: RefusalReason
    short_pages: int = 0


class PreAllocated(Struct, frozen=True):
    """The holder owns a record. KV of [0, prefix_len) is valid; that of [prefix_len, fill_len) is to be written, where
    layers attend to everything into `pages` (a copy). `prefix_len` is page-aligned."""

    prefix_len: int
    pages: I32


class Extended(Struct, frozen=True):
    """The lengths moved; `new_pages` pages that keep every token were allocated for it."""

    new_pages: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What a pre-allocation would take now of each component: `new` from what is available, and `pinned`, which is
    evictable now and would be locked. What sliding layers lock is in their promise already."""

    prefix_len: int
    new: GroupCounts
    pinned: GroupCounts

    def of(self, component: Component) -> int:
        return self.new.of(component) + self.pinned.of(component)


@dataclass(frozen=True, slots=True)
class KvStats:
    """Gauges, and the prefix cache's counters. Conservation, per component: free + evictable + locked + owned == total.
    `promised` are the sliding pages that records own, read from the tree, or may still come to need."""

    total: GroupCounts
    free: GroupCounts
    promised: int
    free_rows: int
    total_rows: int
    prefix: PrefixStats

    @property
    def owned(self) -> GroupCounts:
        """By records: requests and hand-offs."""
        counts = zip(self.total, self.free, self.prefix.evictable, self.prefix.locked, strict=True)
        return GroupCounts(*(total - free - evictable - locked for total, free, evictable, locked in counts))
