"""What of a request's missing KV is asked from the tiers below the pool, before a prefill worker is.

Owns: the restores that are under way: which request each is for, where it starts, when it is cut short. Never: writes a
page, moves a length, or decides what follows (`core.DecodeCore` commits what landed and goes on with the rest).

A restore is a source of KV like a prefill worker's hand-off: from `begin` until `PagesRestored` the request's pages
from `start` on belong to it, whatever happens to the request meanwhile; what it says has landed is valid, nothing else.
What is known of the tree is not asked for, nor is the last token of a request without outputs: somebody has to compute
it for its logits. Only whole pages have names.

Models with sliding or recurrent layers are not restored: what those layers keep is good only at the end of the tokens,
and the page of a middle has no use without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from baton.common.config import TiersConfig
from baton.common.kv.pool import KvPool
from baton.common.kv.prefix.interface import I32
from baton.common.kv.tiers.api import AbortRestore, JobId, PagesRestored, RestorePages
from baton.common.kv.tiers.keys import PageKey, PageKeys
from baton.common.units import page_floor, whole_pages
from baton.decode.request import DecodeRequest


@dataclass(slots=True)
class _Restore:
    request: DecodeRequest
    start: int  # tokens
    command: RestorePages
    deadline_s: float
    aborted: bool = False


class Landed(NamedTuple):
    """KV of the request's [start, until) is in its pages, which are the request's again. until == start: nothing.
    `page_ids` have it, and `keys` are their names in the tiers."""

    request: DecodeRequest
    start: int
    until: int
    keys: tuple[PageKey, ...]
    page_ids: I32


class Restores:
    """`keys` None: there are no tiers. At most one restore per request at a time."""

    def __init__(self, pool: KvPool, keys: PageKeys | None, config: TiersConfig) -> None:
        self._pool = pool
        self._keys = keys if pool.layout.only_full else None
        self._config = config
        self._count = 0
        self._open: dict[JobId, _Restore] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, request: DecodeRequest, now: float) -> RestorePages | None:
        """For a request that was just admitted: its pages are promised. None: not worth asking."""
        if self._keys is None:
            return None
        page_size, start = self._keys.page_size, request.record.kv_committed_len
        end = page_floor(request.max_prefix, page_size)
        pages = whole_pages(end - start, page_size)
        # A session may own a part of a page: that page is computed, and what follows is new to everybody.
        if start % page_size or pages < self._config.restore_min_pages:
            return None
        keys = self._keys.of(request.fill_tokens[:end])
        self._count += 1
        command = RestorePages(
            job=JobId(self._count),
            keys=tuple(keys[whole_pages(start, page_size) :]),
            page_ids=np.ascontiguousarray(self._pool.pages_of(request.record, start, end)),
            at_least=self._config.restore_min_pages,
        )
        self._open[command.job] = _Restore(request, start, command, now + self._config.restore_deadline_s)
        return command

    def abort(self, job: JobId) -> AbortRestore:
        """The request is over; its pages are the restore's until that has ended."""
        self._open[job].aborted = True
        return AbortRestore(job)

    def end(self, event: PagesRestored) -> Landed:
        """It has ended, one way or the other."""
        restore = self._open.pop(event.job)
        start, keys, page_ids = restore.start, restore.command.keys, restore.command.page_ids
        assert 0 <= event.pages <= len(keys), (event, len(keys))
        until = start + event.pages * self._pool.page_size
        return Landed(restore.request, start, until, keys[: event.pages], page_ids[: event.pages])

    def cut_short(self, now: float) -> list[AbortRestore]:
        """Those that take too long: what has landed is kept, the rest comes from elsewhere. Each once."""
        late = [job for job, restore in self._open.items() if not restore.aborted and restore.deadline_s <= now]
        return [self.abort(job) for job in late]

    def next_deadline(self) -> float | None:
        if not self._open:
            return None
        return min((one.deadline_s for one in self._open.values() if not one.aborted), default=None)
