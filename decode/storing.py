"""What goes from the pool to the tiers below it, and who owns the pages while they are read.

Owns: the stores that are under way, each with a `StoringLease` on what it reads, and the memory of what was stored.
Never: reads a page, or frees one (the core gives back to the pool what `end` returns).

Written through, pages go down as soon as the prefix tree has them: a lease on the tree keeps them in place and as they
are. Written back, they go down when the tree gives them up: they are in nobody's hands but ours from then on, and free
only once they are stored. So that nobody who needs a page waits for that, pages are given up ahead of need, when fewer
than `low_pages` are free; what the pool must evict at once is lost to the tiers, as cached pages may be.

At most a `SHARE`-th of the pool is being stored at a time: the rest can always be evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.common.config import TiersConfig
from baton.common.kv.layout import KvLayout
from baton.common.kv.prefix.interface import I32, NO_IDS, PrefixCache, PrefixLease
from baton.common.kv.tiers.api import EvictedRun, JobId, PagesStored, StorePages
from baton.common.kv.tiers.keys import KEY_BYTES, PageKey, PageKeys
from baton.common.units import whole_pages
from baton.decode.restoring import can_be_tiered

SHARE = 4
LOW_SHARE = 16
"""Written back, so much of the pool is kept free by giving pages up ahead of need."""


@dataclass(frozen=True, slots=True)
class StoringLease:
    """What one store reads. Written through: pages of the tree, kept by `lease`. Written back: `owned` pages, ours
    until the store has ended."""

    job: JobId
    keys: tuple[PageKey, ...]
    pages: I32
    lease: PrefixLease | None
    owned: I32


class Stores:
    """`keys` None: there are no tiers. `total_pages` as `KvPool.total_pages`."""

    def __init__(self, layout: KvLayout, keys: PageKeys | None, config: TiersConfig, total_pages: int) -> None:
        self._keys = keys if can_be_tiered(layout) else None
        self._through = config.write == "through"
        self._most_pages = max(1, total_pages // SHARE)
        self._low_pages = total_pages // LOW_SHARE
        self._count = 0
        self._open: dict[JobId, StoringLease] = {}
        self._pages_open = 0
        # By page id, the name under which its content was stored last. A page that holds something else by now has
        # another name, so this is never wrong, whatever has become of the page; at worst it is stored again.
        self._stored_as = np.zeros((total_pages + 1, KEY_BYTES), dtype=np.uint8)
        self.skipped_pages = 0

    def __len__(self) -> int:
        return len(self._open)

    # ------------------------------------------------------------------------------------ written through

    def through(self, tokens: I32, prefix: PrefixCache) -> StorePages | None:
        """After tokens were offered to the tree: what it has of them and was not stored yet. None: nothing to do."""
        if self._keys is None or not self._through:
            return None
        lease = prefix.lock(prefix.match_prefix(tokens))
        if lease is None:
            return None
        keys, pages = self._keys.of(tokens[: lease.length]), prefix.pages(lease).full
        chosen = self._new(keys, pages)
        if not len(chosen):
            prefix.unlock(lease)
            return None
        return self._begin([keys[index] for index in chosen], pages[chosen], lease, owned=NO_IDS)

    # --------------------------------------------------------------------------------------- written back

    def wanted(self, free_pages: int) -> int:
        """How many pages the tree should give up now, ahead of need."""
        if self._keys is None or self._through:
            return 0
        short = self._low_pages - free_pages - self._pages_open
        return max(0, min(short, self._most_pages - self._pages_open))

    def back(self, runs: Iterable[EvictedRun]) -> tuple[StorePages | None, I32]:
        """Consumes the pages that the tree gave up. Those in the second part are free now: they were stored before, or
        there is no room for more stores."""
        assert self._keys is not None
        keys: list[PageKey] = []
        parts: list[I32] = [NO_IDS]
        for run in runs:
            keys += self._keys.of(run.tokens)[whole_pages(len(run.tokens), self._keys.page_size) - len(run.pages) :]
            parts.append(run.pages)
        pages = np.concatenate(parts)
        chosen = self._new(keys, pages)
        free = np.delete(pages, chosen)
        if not len(chosen):
            return None, free
        owned = pages[chosen]
        return self._begin([keys[index] for index in chosen], owned, None, owned), free

    # ---------------------------------------------------------------------------------------------- both

    def end(self, event: PagesStored, prefix: PrefixCache) -> I32:
        """Nobody reads the pages any more. Returns those that are to be freed."""
        lease = self._open.pop(event.job)
        self._pages_open -= len(lease.pages)
        assert 0 <= event.pages <= len(lease.pages), (event, len(lease.pages))
        if event.pages:
            self._stored_as[lease.pages[: event.pages]] = _as_rows(lease.keys[: event.pages])
        if lease.lease is not None:
            prefix.unlock(lease.lease)
        return lease.owned

    def leases(self) -> Iterable[PrefixLease]:
        """What the tree is locked by on our account."""
        return [one.lease for one in self._open.values() if one.lease is not None]

    def owned_pages(self) -> I32:
        """Neither free nor cached nor any request's: ours."""
        return np.concatenate([NO_IDS, *(one.owned for one in self._open.values())])

    def _new(self, keys: Sequence[PageKey], pages: I32) -> I32:
        """Indices of the pages that were not stored under these names, the first ones, as many as may be under way."""
        if not len(pages):
            return NO_IDS
        new = np.flatnonzero((self._stored_as[pages] != _as_rows(keys)).any(axis=1)).astype(np.int32)
        room = max(0, self._most_pages - self._pages_open)
        self.skipped_pages += max(0, len(new) - room)
        return new[:room]

    def _begin(self, keys: list[PageKey], pages: I32, lease: PrefixLease | None, owned: I32) -> StorePages:
        self._count += 1
        job = JobId(self._count)
        self._open[job] = StoringLease(job, tuple(keys), pages, lease, owned)
        self._pages_open += len(pages)
        return StorePages(job, tuple(keys), pages)


def _as_rows(keys: Sequence[PageKey]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), KEY_BYTES)
