"""What a worker tells the gateways of its prefix tree: numbered batches of changes, and snapshots for who missed some.

Owns: the numbers (without gaps, from 1, anew with each process), the last batches, and who wants to hear. Pure. Never:
sends anything again by itself. Who has missed a batch sees by the number in the worker's next heartbeat (`Load.kv_seq`)
that it is behind, and asks: for the batches, where they are still here, or else it is given a snapshot.

For readers outside of the cluster the same events go to whoever publishes them (`PublishPages`).
"""

from __future__ import annotations

from collections import deque
from typing import final

import numpy as np
from msgspec import Struct

from baton.common.engine.core_api import MembershipView, SendTo
from baton.common.ids import Stamp
from baton.common.kv.events import AllRemoved, PageEvent, PageLog, PagesRemoved, PagesStored
from baton.common.kv.pool import KvPool
from baton.common.messages import MAX_PAGE_NAMES, KvEvents, KvEventsWanted, KvSnapshot

KEPT_BATCHES = 256
"""Behind so many a snapshot is sent."""
KEPT_NAMES = 1 << 16
"""And of the kept batches together; in the frames that answer one question, too."""


class PublishPages(Struct, frozen=True):
    """Effect: for who publishes events to the outside."""

    events: list[PageEvent]


@final
class KvFeed:
    """`indexed`: gateways want to hear. `published`: outsiders do."""

    def __init__(self, log: PageLog, *, indexed: bool, published: bool) -> None:
        self._log = log
        self._indexed = indexed
        self._published = published
        self._gateways: tuple[Stamp, ...] = ()
        self._asked: dict[Stamp, int] = {}  # who wants what from which number on
        self._kept: deque[KvEvents] = deque()
        self._kept_names = 0
        self.seq = 0  # of the newest batch

    @classmethod
    def of(cls, pool: KvPool, *, indexed: bool, published: bool = False) -> KvFeed | None:
        """None: nobody wants to hear of this pool, or it has nothing to say."""
        if pool.events is None or not (indexed or published):
            return None
        return cls(pool.events, indexed=indexed, published=published)

    def on_view(self, view: MembershipView) -> None:
        self._gateways = tuple(member.stamp for member in view.members if member.role == "gateway")
        self._asked = {stamp: first for stamp, first in self._asked.items() if stamp in self._gateways}

    def on_wanted(self, sender: Stamp, message: KvEventsWanted) -> None:
        """A gateway is behind."""
        if self._indexed and sender in self._gateways:
            self._asked[sender] = message.first_seq

    @property
    def waiting(self) -> bool:
        """`take` has something to say."""
        return self._log.waiting or bool(self._asked)

    def take(self) -> list[object]:
        """Effects: news to all gateways, and answers to those who asked."""
        if not self.waiting:
            return []
        out: list[object] = []
        events = self._log.take()
        if events and self._indexed:
            for batch in self._batches(events):
                out += [_to(gateway, batch) for gateway in self._gateways]
        for gateway, first in self._asked.items():
            out += self._answer(gateway, first)
        self._asked.clear()
        if events and self._published:
            out.append(PublishPages(events))
        return out

    def _batches(self, events: list[PageEvent]) -> list[KvEvents]:
        """What has changed in the end, whatever happened on the way."""
        stored, removed = self._changes(events)
        batches = []
        for start in range(0, max(len(stored), len(removed)), MAX_PAGE_NAMES):
            part = slice(start, start + MAX_PAGE_NAMES)
            self.seq += 1
            batch = KvEvents(seq=self.seq, stored=_packed(stored[part]), removed=_packed(removed[part]))
            batches.append(batch)
            self._kept.append(batch)
            self._kept_names += _size(batch)
        while len(self._kept) > KEPT_BATCHES or (self._kept and self._kept_names > KEPT_NAMES):
            self._kept_names -= _size(self._kept.popleft())
        return batches

    def _changes(self, events: list[PageEvent]) -> tuple[list[int], list[int]]:
        last: dict[int, bool] = {}  # name -> whether it is there after all events
        for event in events:
            match event:
                case PagesStored():
                    last.update(dict.fromkeys(event.names, True))
                case PagesRemoved() | AllRemoved():
                    last.update(dict.fromkeys(event.names, False))
        return [name for name, there in last.items() if there], [name for name, there in last.items() if not there]

    def _answer(self, gateway: Stamp, first: int) -> list[object]:
        """The batches from `first` on, or everything that is cached."""
        if first > self.seq:
            return []
        if self._kept and self._kept[0].seq <= first:
            return [_to(gateway, batch) for batch in self._kept if batch.seq >= first]
        held = self._log.held()
        parts = max(1, -(-len(held) // MAX_PAGE_NAMES))
        return [
            _to(
                gateway,
                KvSnapshot(
                    seq=self.seq,
                    part=part,
                    parts=parts,
                    names=held[part * MAX_PAGE_NAMES : (part + 1) * MAX_PAGE_NAMES].astype("<u8").tobytes(),
                ),
            )
            for part in range(parts)
        ]


def _to(gateway: Stamp, body: KvEvents | KvSnapshot) -> SendTo:
    return SendTo(gateway.worker, gateway.epoch, body)


def _packed(names: list[int]) -> bytes:
    return np.array(names, dtype="<u8").tobytes()


def _size(batch: KvEvents) -> int:
    return (len(batch.stored) + len(batch.removed)) // 8
