"""`HostStore`: pages in host memory. Owns one block of memory and which slot of it holds which page.

Never: checks what it kept (memory is trusted as the pool's is), or outlives its process.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from baton.common.huge_pages import ask_for_huge_pages
from baton.common.kv.tiers.keys import PageKey
from baton.common.kv.tiers.store import Bytes, Demote, StoreCounters, StoreUnavailable
from baton.common.units import format_bytes


class HostStore:
    """As many slots as fit in `capacity_bytes`; committed by the system when first written. Raises StoreUnavailable
    when it holds no page, or is more than the system promises."""

    name = "host"

    def __init__(self, capacity_bytes: int, page_bytes: int) -> None:
        slots = capacity_bytes // page_bytes
        if slots == 0:
            raise StoreUnavailable(f"host tier: {format_bytes(capacity_bytes)} hold no page of {page_bytes} bytes")
        self.page_bytes = page_bytes
        self.capacity_bytes = capacity_bytes
        self.counters = StoreCounters()
        try:
            block = mmap.mmap(-1, slots * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise StoreUnavailable(f"host tier: {format_bytes(capacity_bytes)} cannot be had: {error}") from error
        ask_for_huge_pages(block)
        self._slots: Bytes = np.frombuffer(block, dtype=np.uint8).reshape(slots, page_bytes)
        self._free = list(range(slots - 1, -1, -1))
        self._slot_of: OrderedDict[PageKey, int] = OrderedDict()  # least recently used first

    @property
    def used_bytes(self) -> int:
        return len(self._slot_of) * self.page_bytes

    def known_prefix(self, keys: Sequence[PageKey]) -> int:
        return next((index for index, key in enumerate(keys) if key not in self._slot_of), len(keys))

    def read(self, key: PageKey, out: Bytes) -> bool:
        slot = self._slot_of.get(key)
        if slot is None:
            self.counters.misses += 1
            return False
        self._slot_of.move_to_end(key)
        out[:] = self._slots[slot]
        self.counters.hits += 1
        return True

    def write(self, key: PageKey, data: Bytes, demote: Demote | None = None) -> bool:
        if key in self._slot_of:
            self._slot_of.move_to_end(key)
            return True
        slot = self._free.pop() if self._free else self._evict(demote)
        self._slots[slot] = data
        self._slot_of[key] = slot
        self.counters.written += 1
        return True

    def close(self) -> None:
        """Memory goes with the object."""

    def _evict(self, demote: Demote | None) -> int:
        key, slot = self._slot_of.popitem(last=False)
        if demote is not None:
            demote(key, self._slots[slot])
        self.counters.evicted += 1
        return slot
