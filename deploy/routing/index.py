"""Which prefixes are cached where, as far as a gateway knows: `PrefixIndex`. Pure.

Owns: for each worker process the names of its cached pages, and up to which of its KvEvents it knows them. Never: asks
a worker anything by itself (`wants` says what to ask for), or names a page that was not in that very process's tree.

- X1  What is known of a process is what its tree held after its KvEvents number `seq`: batches are taken in order, and
      up to MOST_AHEAD of them wait for those before; a snapshot is taken when it is whole and newer.
- X2  A worker is asked when its heartbeat before last already named a batch that is not here: one that is only late is
      not missing. It is asked again when nothing has come for `resend_s`.
- X3  A new process in a seat is a new worker: of its predecessor nothing is known any more.
- X4  At most `max_pages` names are kept, of all workers together. What would be too many is not added, and counted;
      what is known is still true then, and never more than there is. A tree that holds a page holds all before it, so
      one name tells of those that had no room, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from baton.common.ids import Stamp
from baton.common.messages import MAX_PAGE_NAMES, KvEvents, KvEventsWanted, KvSnapshot


@dataclass(frozen=True, slots=True)
class IndexCounts:
    """`behind`: workers of whose news some are missing."""

    pages: int = 0
    refused_pages: int = 0
    behind: int = 0


NO_INDEX = IndexCounts()

MOST_AHEAD = 64
"""Further ones are asked for again, once their turn has come."""


@final
class _Known:
    """Of one worker process. `behind`: what its last heartbeat named and was not here then."""

    __slots__ = ("ahead", "asked_s", "behind", "names", "parts", "parts_bytes", "parts_seq", "seq")

    def __init__(self) -> None:
        self.names: set[int] = set()
        self.seq = 0
        self.behind = 0
        self.asked_s = float("-inf")  # or something came
        self.ahead: dict[int, KvEvents] = {}
        self.parts: dict[int, bytes] = {}  # of a snapshot that is not whole yet
        self.parts_seq = 0
        self.parts_bytes = 0


@final
class PrefixIndex:
    """`alive` first says who there is."""

    def __init__(self, max_pages: int, resend_s: float) -> None:
        self._max_pages = max_pages
        self._resend_s = resend_s
        self._known: dict[Stamp, _Known] = {}
        self.pages = 0
        self.refused_pages = 0  # for want of room

    # ------------------------------------------------------------------------------------------ news

    def alive(self, stamps: Iterable[Stamp]) -> None:
        """These workers are there, and no others."""
        known = {stamp: self._known.get(stamp) or _Known() for stamp in stamps}
        self.pages -= sum(len(one.names) for stamp, one in self._known.items() if stamp not in known)
        self._known = known

    def on_events(self, sender: Stamp, message: KvEvents, now: float) -> None:
        known = self._known.get(sender)
        if known is None or not known.seq < message.seq <= known.seq + MOST_AHEAD:
            return
        known.ahead[message.seq] = message
        self._take_ahead(known, now)

    def on_snapshot(self, sender: Stamp, message: KvSnapshot, now: float) -> None:
        known = self._known.get(sender)
        if known is None or message.seq <= known.seq or message.seq < known.parts_seq or message.part >= message.parts:
            return
        if message.seq > known.parts_seq:
            known.parts, known.parts_seq, known.parts_bytes = {}, message.seq, 0
        self._keep_part(known, message)
        known.asked_s = now
        if len(known.parts) < message.parts:
            return
        self.pages -= len(known.names)
        known.names, known.seq = set(), message.seq
        for names in known.parts.values():
            self._add(known, _unpacked(names))
        known.parts = {}
        known.ahead = {seq: batch for seq, batch in known.ahead.items() if seq > known.seq}
        self._take_ahead(known, now)

    def _keep_part(self, known: _Known, message: KvSnapshot) -> None:
        """Of what there will be no room for in the end, nothing is kept until then, either."""
        names = message.names
        if known.parts_bytes + len(names) > 8 * (self._max_pages + MAX_PAGE_NAMES):
            self.refused_pages += len(names) // 8
            names = b""
        known.parts_bytes += len(names) - len(known.parts.get(message.part, b""))
        known.parts[message.part] = names

    def wants(self, sender: Stamp, seq: int, now: float) -> KvEventsWanted | None:
        """A heartbeat named batch `seq`. What to ask its sender for, if anything."""
        known = self._known.get(sender)
        if known is None:
            return None
        behind, known.behind = known.behind, seq if seq > known.seq else 0
        if behind <= known.seq or now < known.asked_s + self._resend_s:
            return None
        known.asked_s = now
        return KvEventsWanted(first_seq=known.seq + 1)

    def _take_ahead(self, known: _Known, now: float) -> None:
        """Those whose turn has come."""
        while (batch := known.ahead.pop(known.seq + 1, None)) is not None:
            known.seq, known.asked_s = batch.seq, now
            before = len(known.names)
            known.names.difference_update(_unpacked(batch.removed))
            self.pages += len(known.names) - before
            self._add(known, _unpacked(batch.stored))

    def _add(self, known: _Known, names: Sequence[int]) -> None:
        before, room = len(known.names), self._max_pages - self.pages
        if len(names) <= room:
            known.names.update(names)
        else:
            fresh = [name for name in dict.fromkeys(names) if name not in known.names]
            known.names.update(fresh[:room])
            self.refused_pages += len(fresh) - room if len(fresh) > room else 0
        self.pages += len(known.names) - before

    # ------------------------------------------------------------------------------------- questions

    def is_current(self, stamp: Stamp) -> bool:
        """Nothing is known to be missing of what that process has said."""
        known = self._known.get(stamp)
        return known is not None and known.behind <= known.seq

    def counts(self) -> IndexCounts:
        behind = sum(not self.is_current(stamp) for stamp in self._known)
        return IndexCounts(self.pages, self.refused_pages, behind)

    def names_of(self, stamp: Stamp) -> Collection[int]:
        """What is cached there."""
        known = self._known.get(stamp)
        return known.names if known is not None else ()


def _unpacked(names: bytes) -> list[int]:
    unpacked: list[int] = np.frombuffer(names, dtype="<u8").tolist()
    return unpacked
