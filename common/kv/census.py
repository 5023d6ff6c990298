"""Who owns which page: `Holding` (what a core says it holds), `Census` (the count per class).

Owns no state. The classes are those of docs/KV-OWNERSHIP.md; they partition the allocatable pages of a pool, and the
slots of its recurrent states, at every moment: component by component.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from baton.common.ids import HandoffKey
from baton.common.kv.layout import Component
from baton.common.kv.record import ReqKvInfo


class OwnerClass(StrEnum):
    """To whom a record belongs. Pages that are free or cached have no record."""

    REQUEST = "request"
    SESSION = "session"  # one conversation, between two turns
    INCOMING = "incoming"  # a decode-side hand-off: promised, bytes still arriving
    OUTGOING = "outgoing"  # a prefill-side hand-off: being read
    QUARANTINED = "quarantined"  # a reader or writer could not be proven finished


class Holding(Struct, frozen=True):
    """One record and its owner, as a core reports it. Every live record of a pool is in exactly one holding."""

    owner_class: OwnerClass
    owner: str | HandoffKey
    record: ReqKvInfo

    @property
    def owner_id(self) -> str:
        """For people."""
        return str(self.owner)


@dataclass(frozen=True, slots=True)
class Census:
    """Pages per class, of one component. `unaccounted` is 0, or there is a bug. The census of a whole pool is that of
    its first component, with those of the `others` beside it."""

    free: int
    request: int
    session: int
    cached_evictable: int
    cached_locked: int
    incoming: int
    outgoing: int
    quarantined: int
    total: int
    component: Component = Component.FULL
    others: tuple[Census, ...] = ()

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
        """Nothing but free and evictable pages, of any component: what a worker must come back to when all requests
        have ended."""
        return self.free + self.cached_evictable == self.total and all(one.idle for one in self.others)

    def by_class(self) -> dict[str, int]:
        """Of this component, for people and for messages."""
        return {
            "total": self.total,
            "free": self.free,
            "cached": self.cached_evictable,
            "cached_locked": self.cached_locked,
            "request": self.request,
            "session": self.session,
            "incoming": self.incoming,
            "outgoing": self.outgoing,
            "quarantined": self.quarantined,
        }

    def __str__(self) -> str:
        what = "slots" if self.component is Component.STATE else "pages"
        lost = f", {self.unaccounted} UNACCOUNTED" if self.unaccounted else ""
        return (
            f"{self.total} {self.component} {what}: {self.free} free, {self.cached_evictable} cached,"
            f" {self.cached_locked} cached+locked, {self.request} request, {self.session} session,"
            f" {self.incoming} incoming, {self.outgoing} outgoing, {self.quarantined} quarantined{lost}"
            + "".join(f"; {one}" for one in self.others)
        )


def take_census(
    component: Component,
    owned: Iterable[tuple[OwnerClass, int]],
    *,
    total: int,
    free: int,
    evictable: int,
    locked: int,
) -> Census:
    """Adds up what the records own beyond their protected prefix (which is the tree's), and the pool's gauges."""
    sums = dict.fromkeys(OwnerClass, 0)
    for owner_class, count in owned:
        sums[owner_class] += count
    return Census(
        free=free,
        request=sums[OwnerClass.REQUEST],
        session=sums[OwnerClass.SESSION],
        cached_evictable=evictable,
        cached_locked=locked,
        incoming=sums[OwnerClass.INCOMING],
        outgoing=sums[OwnerClass.OUTGOING],
        quarantined=sums[OwnerClass.QUARANTINED],
        total=total,
        component=component,
    )
