"""The sending half of the data plane: gives regions to their lanes, gathered where these want it.

Owns: the ring of send slots, the regions that wait for their turn (`region_queue.py`), gathers and sends under way.
Never: a decision about a hand-off.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from baton.common.errors import ErrorCode
from baton.common.ids import HandoffKey, Stamp
from baton.common.messages import Failure
from baton.transfer.digest import digest_of
from baton.transfer.plane_parts import PlaneParts
from baton.transfer.pool_copier import Copying
from baton.transfer.region_queue import RegionQueue
from baton.transfer.session.effects import (
    RegionReady,
    SendRegion,
    SourceFenced,
    SourceLaneFailed,
)
from baton.transfer.staging import SlotLease
from baton.transfer.transports.base import Bytes, Ended, OperationEnd, Rows


@dataclass(frozen=True, slots=True)
class _Region:
    """What is to be sent, and the pages that it lies in."""

    effect: SendRegion
    source: Rows


@dataclass(frozen=True, slots=True)
class _Gather:
    """A region on its way from its pages into a slot; or what its digest is made of, where its receiver pulls the rest
    from the pages."""

    region: _Region
    lease: SlotLease
    payload: Bytes
    copying: Copying
    started_s: float


@dataclass(frozen=True, slots=True)
class _Send:
    """A region on its way out of a slot, or straight out of its pages."""

    region: _Region
    lease: SlotLease | None
    started_s: float


class Outgoing:
    def __init__(self, parts: PlaneParts) -> None:
        caps = parts.new_caps()
        self._handler = parts.handler
        self._lanes = parts.lanes
        self._answer = parts.answer
        self._next_op = parts.next_op
        self.ring = parts.new_ring()
        # A receiver that leaves what it was promised lying takes no more than half from others.
        self._to_send: RegionQueue[_Region] = RegionQueue(caps, max(1, self.ring.slots // 2))  # through slots
        self._to_offer: RegionQueue[_Region] = RegionQueue(caps, 1)  # straight out of the pages
        self._places: dict[HandoffKey, tuple[str, Stamp]] = {}
        self._gathers: list[_Gather] = []
        self._ops: dict[int, _Send] = {}

    def send(self, effect: SendRegion) -> None:
        """Queues it; it starts in its turn (`step`)."""
        region = _Region(effect, self._handler.rows_of(effect.span))
        nbytes = region.source.nbytes
        slotted = effect.lane in self._lanes.slotted
        if effect.lane not in self._lanes.transports:
            self._fail(effect, "this process does not have it")
        elif slotted and nbytes > self.ring.slot_bytes:
            self._fail(effect, "the region is larger than a slot")
        else:
            self._places[effect.key] = (effect.lane, effect.peer)
            queue, holds = (self._to_send, 1) if slotted else (self._to_offer, 0)
            queue.put(effect.lane, effect.peer, effect.key, effect.priority, region, nbytes, holds)

    def fence(self, key: HandoffKey) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            queue = self._to_send if place[0] in self._lanes.slotted else self._to_offer
            queue.forget(*place, key)
        for op, under_way in list(self._ops.items()):
            if under_way.region.effect.key == key:
                self._lanes.cancel(under_way.region.effect.lane, op)
        self._answer_fenced(key)

    def step(self, now: float) -> bool:
        """Sends what has been gathered; and gathers one region, or digests one that leaves its pages without a copy.
        False: none may start."""
        if self._gathers:
            self._end_gathers()
        region = self._to_send.take(now) if self.ring.free else None
        region = self._to_offer.take(now) if region is None else region
        if region is not None:
            self._start(region)
        return region is not None

    def on_operation(self, event: OperationEnd) -> None:
        """An operation has ended, so its memory is ours again. Whoever started it may be gone."""
        sent = self._ops.pop(event.op)
        effect, nbytes = sent.region.effect, sent.region.source.nbytes
        if isinstance(event, Ended):
            self._fail(effect, event.reason)
        else:
            self._lanes.note_moved(effect.peer.worker, effect.lane, nbytes, sent.started_s, time.perf_counter())
        if sent.lease is not None:
            self._free_slot(effect, sent.lease)

    def _start(self, region: _Region) -> None:
        started = time.perf_counter()
        effect, source = region.effect, region.source
        if effect.lane in self._lanes.slotted:
            lease = self.ring.lease_free(effect.key, effect.seq)
            assert lease is not None, "taken from the queue without a free slot"
            if effect.lane in self._lanes.late:
                reading = self._handler.read_for_digest(source, effect.seq, lease.view)
                payload, copying = reading.data, reading.copying
            else:
                payload = lease.view[: source.nbytes]
                copying = self._handler.copier.gather(source, payload)
            self._gathers.append(_Gather(region, lease, payload, copying, started))
            self._end_gathers()
            return
        digest = self._handler.digest(source, effect.seq)
        if effect.lane in self._lanes.direct:
            op = self._start_op(region, None)
            self._lanes.direct[effect.lane].send(op, effect.peer, effect.tag, source)
        self._answer_ready(region, digest, started)

    def _end_gathers(self) -> None:
        """Sends or digests what is in its slot now; of a hand-off that was fenced meanwhile, that ends the fence."""
        for gather in [gather for gather in self._gathers if gather.copying.done()]:
            self._gathers.remove(gather)
            region, effect = gather.region, gather.region.effect
            if effect.key not in self._places:
                self._free_slot(effect, gather.lease)
                self._answer_fenced(effect.key)
            elif effect.lane in self._lanes.late:
                digest = digest_of(gather.payload)
                self._free_slot(effect, gather.lease)
                self._answer_ready(region, digest, gather.started_s)
            else:
                digest = self._handler.digest_staged(region.source, gather.payload, effect.seq)
                op = self._start_op(region, gather.lease)
                self._lanes.staged[effect.lane].send(op, effect.peer, effect.tag, gather.payload)
                self._answer_ready(region, digest, gather.started_s)

    def _answer_ready(self, region: _Region, digest: int, started_s: float) -> None:
        effect, took_s = region.effect, time.perf_counter() - started_s
        self._answer(RegionReady(effect.key, effect.seq, effect.tag, region.source.nbytes, digest, took_s))

    def _answer_fenced(self, key: HandoffKey) -> None:
        """Not before the last gather has let go of the pages."""
        if not any(gather.region.effect.key == key for gather in self._gathers):
            self._answer(SourceFenced(key))

    def _free_slot(self, effect: SendRegion, lease: SlotLease) -> None:
        self.ring.give_back(lease)
        self._to_send.ended(effect.lane, effect.peer, 1)

    def _start_op(self, region: _Region, lease: SlotLease | None) -> int:
        op = self._next_op()
        self._ops[op] = _Send(region, lease, time.perf_counter())
        return op

    def _fail(self, effect: SendRegion, reason: str) -> None:
        failure = Failure(code=ErrorCode.INTERNAL, reason=f"lane {effect.lane}: {reason}")
        self._answer(SourceLaneFailed(effect.key, failure))

    def wait_s(self, now: float) -> float | None:
        """How soon it wants to go on; None: not before something happens."""
        waits = [self._to_offer.wait_s(now), self._to_send.wait_s(now) if self.ring.free else None]
        return min((wait for wait in waits if wait is not None), default=None)

    @property
    def copying(self) -> bool:
        """A gather is under way, whose end nothing announces."""
        return bool(self._gathers)

    @property
    def operations(self) -> int:
        """Regions in a slot or on their way out of pages."""
        return len(self._gathers) + len(self._ops)
