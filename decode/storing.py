"""What goes from the pool to the tiers below it, and what is kept in place while it is read.

Owns: the stores that are under way, each with what keeps its pages in place, and the memory of what was stored. Never:
reads a page, or frees one.

Pages are copied from where they are: those of the prefix tree under a lease, those of a request that is being retracted
in its own record, until the store has ended. Written through, that happens as soon as the tree has them. Written back,
it happens when they are next in line to be evicted and fewer than a `SHARE`-th of the pool is free: ahead of need, so
that nobody who needs a page waits for it. What must be evicted before it was copied is lost to the tiers, as cached
pages may be.

At most a `SHARE`-th of the pool is being stored for the cache at a time. A lease keeps all that leads to the pages in
place, too, which may be much more: so while somebody lacks pages, nothing more is written back unless what it keeps
from being evicted is within that share.

Others wait for the pages of a retracted request, or of a conversation that was given up for them; so such a store is
cut short when it takes too long, and nobody waits for it any more, whether it ends or not (a tier may hang).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.common.config import TiersConfig
from baton.common.kv.pool import KvPool
from baton.common.kv.prefix.interface import I32, NO_IDS, PrefixLease, PrefixMatch
from baton.common.kv.tiers.api import AbortStore, JobId, PagesStored, StorePages
from baton.common.kv.tiers.keys import KEY_BYTES, PageKey, PageKeys
from baton.common.units import page_floor
from baton.decode.request import DecodeRequest
from baton.decode.restoring import Landed

SHARE = 4
MOST_BEHIND = 64
LAG = 8
"""Of what is to be stored ahead of eviction, the part that may go before the next look: one costs milliseconds."""


@dataclass(slots=True)
class _Store:
    """What one store reads, and who keeps it in place: `lease`, or the record of `retracted`. Others wait for it until
    `deadline_s` (None: nobody does, any more)."""

    keys: tuple[PageKey, ...]
    pages: I32
    lease: PrefixLease | None
    retracted: DecodeRequest | None
    pinned: int  # pages that could be evicted before
    deadline_s: float | None = None


class Stores:
    """`keys` None: there are no tiers."""

    def __init__(self, pool: KvPool, keys: PageKeys | None, config: TiersConfig) -> None:
        self._pool = pool
        self._keys = keys if pool.layout.only_full else None
        self._through = config.write == "through"
        self._least_pages = config.restore_min_pages
        self._most_s = config.restore_deadline_s
        self._most_pages = max(1, pool.total_pages // SHARE)
        self._count = 0
        self._open: dict[JobId, _Store] = {}
        self._pages_open = 0
        # By page id, the name under which its content was stored last. A page that holds something else by now has
        # another name, so this is never wrong of the page. The tiers may have lost it since: nobody hears of that.
        self._stored_as = np.zeros((pool.total_pages + 1, KEY_BYTES), dtype=np.uint8)
        self._being_read = np.zeros(pool.total_pages + 1, dtype=np.bool_)
        # By its last page id, a digest of a prefix all of whose pages were stored: saves making the names again.
        self._clean: dict[int, int] = {}
        # Counted from the first page that was ever evicted: so many of those that go, or went, next need no store.
        self._clean_until = 0
        self._behind: deque[I32] = deque(maxlen=MOST_BEHIND)  # prefixes of which a part has to wait for another store

    def __len__(self) -> int:
        return len(self._open)

    @property
    def awaited(self) -> bool:
        """Whether pages that others need come back soon."""
        return any(store.deadline_s is not None for store in self._open.values())

    @property
    def retracted(self) -> int:
        """Requests whose pages are being copied."""
        return sum(store.retracted is not None for store in self._open.values())

    def cached(self, tokens: I32, lacking: bool = False) -> list[StorePages]:
        """Tokens were offered to the tree: what of its pages goes down now. `lacking`: somebody waits for pages."""
        if self._keys is None:
            return []
        return self._of_the_tree(tokens) if self._through else self._ahead_of_eviction(lacking)

    def found(self, landed: Landed) -> None:
        """What was restored need not be stored."""
        if len(landed.keys):
            self._stored_as[landed.page_ids] = _as_rows(landed.keys)

    def await_these(self, begun: Iterable[StorePages], now: float) -> None:
        """Somebody waits for the pages that these keep in place."""
        for command in begun:
            self._open[command.job].deadline_s = now + self._most_s

    def retract(self, request: DecodeRequest, now: float) -> StorePages | None:
        """A running request is to give its pages back: they go down first. None: not worth it."""
        if self._keys is None:
            return None
        # The next step may have been planned already: then the newest position counts as committed and is not there.
        valid = min(request.record.kv_committed_len, request.fill_len)
        known = page_floor(valid, self._pool.page_size)
        pages = self._pool.pages_of(request.record, 0, known)
        keys = self._keys.of(request.known_tokens[:known])
        new = self._new(keys, pages)
        if len(new) < self._least_pages:
            return None
        command = self._begin(keys, pages, new, None, request)
        self.await_these([command], now)
        return command

    def cut_short(self, now: float) -> list[AbortStore]:
        """Those that take too long for who waits for their pages. Each once."""
        late = [job for job, one in self._open.items() if one.deadline_s is not None and one.deadline_s <= now]
        for job in late:
            self._open[job].deadline_s = None
        return [AbortStore(job) for job in late]

    def next_deadline(self) -> float | None:
        if not self._open:
            return None
        return min((one.deadline_s for one in self._open.values() if one.deadline_s is not None), default=None)

    def go_on(self, event: PagesStored, lacking: bool = False) -> list[StorePages]:
        """A store has ended, and others may be begun; not before those who lack pages had those that came free."""
        # After one that was dropped, the next would be, too.
        if self._keys is None or lacking or not event.pages:
            return []
        if not self._through:
            return self._ahead_of_eviction()
        return self._of_the_tree(self._behind.popleft()) if self._behind else []

    def end(self, event: PagesStored) -> DecodeRequest | None:
        """Nobody reads the pages any more. Returns the retracted request whose pages they were."""
        store = self._open.pop(event.job)
        self._pages_open -= len(store.pages)
        self._being_read[store.pages] = False
        assert 0 <= event.pages <= len(store.pages), (event, len(store.pages))
        if event.pages:
            self._stored_as[store.pages[: event.pages]] = _as_rows(store.keys[: event.pages])
        if store.lease is not None:
            self._pool.end_copy(store.lease)
        return store.retracted

    def _of_the_tree(self, tokens: I32) -> list[StorePages]:
        command = self._under(tokens, self._pool.prefix.match_prefix(tokens))
        return [] if command is None else [command]

    def _ahead_of_eviction(self, lacking: bool = False) -> list[StorePages]:
        wanted = self._most_pages - self._pool.free_pages - self._pages_open
        until = self._pool.prefix.stats().evicted_total.full + min(wanted, self._pool.evictable_pages)
        if wanted <= 0 or until <= self._clean_until + self._most_pages // LAG:
            return []
        commands = []
        for tokens, match in self._pool.prefix.coldest(wanted):
            pinned = sum(store.pinned for store in self._open.values()) + self._pool.prefix.evictable_in(match).full
            if lacking and pinned > self._most_pages:
                continue
            if (command := self._under(tokens, match)) is not None:
                commands.append(command)
        if not self._open:
            self._clean_until = until
        return commands

    def _under(self, tokens: I32, match: PrefixMatch) -> StorePages | None:
        """What of the match was not stored under its names yet, as much as may be under way."""
        assert self._keys is not None
        evictable = self._pool.evictable_pages
        lease = self._pool.begin_copy(match)
        if lease is None:
            return None
        tokens, pages = tokens[: lease.length], self._pool.prefix.pages(lease).full
        last, digest = int(pages[-1]), hash(tokens.tobytes())
        keys = self._keys.of(tokens) if self._clean.get(last) != digest else []
        new = self._new(keys, pages) if keys else NO_IDS
        if not len(new) and not self._being_read[pages].any():
            self._clean[last] = digest
        room = max(0, self._most_pages - self._pages_open)
        if self._through and len(new) > room:  # written back, the next look finds it
            self._behind.append(tokens)
        if not len(new[:room]):
            self._pool.end_copy(lease)
            return None
        return self._begin(keys, pages, new[:room], lease, None, evictable - self._pool.evictable_pages)

    def _new(self, keys: Sequence[PageKey], pages: I32) -> I32:
        """Indices of the pages that were not stored under these names, and are not being."""
        differ = (self._stored_as[pages] != _as_rows(keys)).any(axis=1)
        return np.flatnonzero(differ & ~self._being_read[pages]).astype(np.int32)

    def _begin(
        self,
        keys: Sequence[PageKey],
        pages: I32,
        chosen: I32,
        lease: PrefixLease | None,
        retracted: DecodeRequest | None,
        pinned: int = 0,
    ) -> StorePages:
        self._count += 1
        job, names = JobId(self._count), tuple(keys[index] for index in chosen)
        self._open[job] = _Store(names, pages[chosen], lease, retracted, pinned)
        self._pages_open += len(chosen)
        self._being_read[pages[chosen]] = True
        return StorePages(job, names, pages[chosen])


def _as_rows(keys: Sequence[PageKey]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), KEY_BYTES)
