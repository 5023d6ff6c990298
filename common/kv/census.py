"""Who owns which page: `Holding` (what a core says it holds), `Census` (the count per class).

Owns no state. The classes are those of KV_CONTRACT §1; they partition the allocatable pages of a pool at every moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from baton.common.kv.record import ReqKvInfo
from baton.common.units import pages_for_tokens, whole_pages


class OwnerClass(StrEnum):
    """To whom a record belongs. Pages that are free or cached have no record."""

    REQUEST = "request"
    SESSION = "session"  # one conversation, between two turns
    INCOMING = "incoming"  # a decode-side hand-off: promised, bytes still arriving
    OUTGOING = "outgoing"  # a prefill-side hand-off: being read
    QUARANTINED = "quarantined"  # a reader or writer could not be proven finished


@dataclass(frozen=True, slots=True)
class Holding:
    """One record and its owner, as a core reports it. Every live record of a pool is in exactly one holding."""

    owner_class: OwnerClass
    owner_id: str
    record: ReqKvInfo


@dataclass(frozen=True, slots=True)
class Census:
    """Pages per class. `unaccounted` is 0, or there is a bug."""

    free: int
    request: int
    session: int
    cached_evictable: int
    cached_locked: int
    incoming: int
    outgoing: int
    quarantined: int
    total: int

    @property
    def cached(self) -> int:
        return self.cached_evictable + self.cached_locked

    @property
    def accounted(self) -> int:
        return self.free + self.request + self.session + self.cached + self.incoming + self.outgoing + self.quarantined

    @property
    def unaccounted(self) -> int:
        return self.total - self.accounted

    @property
    def idle(self) -> bool:
        """Nothing but free and evictable pages: what a worker must come back to when all requests have ended."""
        return self.free + self.cached_evictable == self.total

    def __str__(self) -> str:
        return (
            f"{self.total} pages: {self.free} free, {self.cached_evictable} cached, {self.cached_locked} cached+locked,"
            f" {self.request} request, {self.session} session, {self.incoming} incoming, {self.outgoing} outgoing,"
            f" {self.quarantined} quarantined" + (f", {self.unaccounted} UNACCOUNTED" if self.unaccounted else "")
        )


def take_census(
    holdings: Iterable[Holding], *, page_size: int, total: int, free: int, evictable: int, locked: int
) -> Census:
    """Counts what the records own beyond their protected prefix (which is the tree's) and adds the pool's gauges."""
    owned = dict.fromkeys(OwnerClass, 0)
    for holding in holdings:
        record = holding.record
        pages = pages_for_tokens(record.kv_allocated_len, page_size)
        owned[holding.owner_class] += pages - whole_pages(record.cache_protected_len, page_size)
    return Census(
        free=free,
        request=owned[OwnerClass.REQUEST],
        session=owned[OwnerClass.SESSION],
        cached_evictable=evictable,
        cached_locked=locked,
        incoming=owned[OwnerClass.INCOMING],
        outgoing=owned[OwnerClass.OUTGOING],
        quarantined=owned[OwnerClass.QUARANTINED],
        total=total,
    )
