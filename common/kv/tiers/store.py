"""What a level below the pool is: a bounded place that keeps pages by key.

Owns: the interface, its counters, and the error of a place that cannot be opened. Never: knows requests, page ids, or
the levels above and below (`tiers.Tiers` does).

A store is a cache: it may lose any page at any time, and says so by not having it. Trouble with its medium (full,
damaged, gone) is counted and comes back as "not there" or "not written", never as an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.common.errors import BatonError
from baton.common.kv.tiers.keys import PageKey

Bytes = npt.NDArray[np.uint8]
Demote = Callable[[PageKey, Bytes], None]
"""Takes a page that is leaving a store. The bytes are lent for the call."""


class StoreUnavailable(BatonError):
    """A level cannot be opened. The message names the level, the place, and the reason."""


@dataclass(slots=True)
class StoreCounters:
    """In pages, since start."""

    hits: int = 0
    misses: int = 0  # asked for, and not there (any more), or damaged
    written: int = 0
    evicted: int = 0
    damaged: int = 0  # found, but not what it should have been
    failed_writes: int = 0


class PageStore(Protocol):
    """Implementations: `host.HostStore`, `disk.DiskStore`, `external.SharedDirectoryStore`. Used by one thread; the
    counters may be read by any. `page_bytes` is the size of every page."""

    name: str
    page_bytes: int
    capacity_bytes: int
    counters: StoreCounters

    @property
    def used_bytes(self) -> int: ...

    def known_prefix(self, keys: Sequence[PageKey]) -> int:
        """How many of these, from the first on, are there. A hint: a page may be lost before it is read. No use."""
        ...

    def read(self, key: PageKey, out: Bytes) -> bool:
        """Copies the page to `out`; a use. False: not there; what lies in `out` then is undefined."""
        ...

    def write(self, key: PageKey, data: Bytes, demote: Demote | None = None) -> bool:
        """Keeps a copy; a use. A page that is there already is not copied. Pages that must leave for it, least recently
        used first, go to `demote`. False: it could not be kept."""
        ...

    def close(self) -> None: ...
