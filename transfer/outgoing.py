"""The sending half of the data plane: gives regions to their lanes, gathered where these want it.

Owns: the ring of send slots, the regions that wait for their turn (`region_queue.py`), and sends under way. Never: a
decision about a hand-off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.common.config import TransferConfig
from baton.common.errors import ErrorCode
from baton.common.ids import HandoffKey, Stamp
from baton.common.messages import Failure
from baton.transfer.caps import Caps
from baton.transfer.peer_lanes import PeerLanes
from baton.transfer.region_queue import RegionQueue
from baton.transfer.session.effects import (
    DataEvent,
    RegionReady,
    SendRegion,
    SourceFenced,
    SourceLaneFailed,
)
from baton.transfer.staging import SlotLease, StagingHandler, StagingRing
from baton.transfer.transports.base import Ended, OperationEnd


@dataclass(frozen=True, slots=True)
class _Send:
    """A region on its way out of a slot, or straight out of its pages."""

    effect: SendRegion
    lease: SlotLease | None
    started_s: float


class Outgoing:
    """`answer` takes the events for the endpoint; `next_op` numbers operations, over both halves."""

    def __init__(
        self,
        config: TransferConfig,
        caps: Caps,
        handler: StagingHandler,
        lanes: PeerLanes,
        answer: Callable[[DataEvent], None],
        next_op: Callable[[], int],
    ) -> None:
        self._handler = handler
        self._lanes = lanes
        self._answer = answer
        self._next_op = next_op
        self.ring = StagingRing(config.staging_ring_bytes, config.region_bytes)
        half = max(
            1, self.ring.slots // 2
        )  # a receiver that leaves what it was promised lying takes no more from others
        self._to_send: RegionQueue[SendRegion] = RegionQueue(caps, half)  # through slots
        self._to_offer: RegionQueue[SendRegion] = RegionQueue(caps, 1)  # straight out of the pages
        self._places: dict[HandoffKey, tuple[str, Stamp]] = {}
        self._ops: dict[int, _Send] = {}

    def send(self, effect: SendRegion) -> None:
        """Queues it; it starts in its turn (`step`)."""
        nbytes = self._bytes_of(effect)
        staged = effect.lane in self._lanes.staged
        if effect.lane not in self._lanes.transports:
            self._fail(effect, "this process does not have it")
        elif staged and nbytes > self.ring.slot_bytes:
            self._fail(effect, "the region is larger than a slot")
        else:
            self._places[effect.key] = (effect.lane, effect.peer)
            queue, holds = (self._to_send, 1) if staged else (self._to_offer, 0)
            queue.put(effect.lane, effect.peer, effect.key, effect.priority, effect, nbytes, holds)

    def fence(self, key: HandoffKey) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            queue = self._to_send if place[0] in self._lanes.staged else self._to_offer
            queue.forget(*place, key)
        for op, under_way in list(self._ops.items()):
            if under_way.effect.key == key:
                self._lanes.cancel(under_way.effect.lane, op)
        self._answer(SourceFenced(key))

    def step(self, now: float) -> bool:
        """Gathers and sends one region, or digests one that leaves its pages without a copy. False: none may start."""
        effect = self._to_send.take(now) if self.ring.free else None
        effect = self._to_offer.take(now) if effect is None else effect
        if effect is not None:
            self._start(effect)
        return effect is not None

    def on_operation(self, event: OperationEnd) -> None:
        """An operation has ended, so its memory is ours again. Whoever started it may be gone."""
        sent = self._ops.pop(event.op)
        effect = sent.effect
        if isinstance(event, Ended):
            self._fail(effect, event.reason)
        else:
            ended_s = time.perf_counter()
            nbytes = self._bytes_of(effect)
            self._lanes.note_moved(effect.peer.worker, effect.lane, nbytes, sent.started_s, ended_s)
        if sent.lease is not None:
            self.ring.give_back(sent.lease)
            self._to_send.ended(effect.lane, effect.peer, 1)

    def _start(self, effect: SendRegion) -> None:
        started = time.perf_counter()
        source = self._handler.rows_of(effect.span)
        if effect.lane in self._lanes.pull:
            nbytes, digest = source.nbytes, self._handler.digest(source, effect.seq)
        elif effect.lane in self._lanes.direct:
            nbytes, digest = source.nbytes, self._handler.digest(source, effect.seq)
            op = self._start_op(effect, None)
            self._lanes.direct[effect.lane].send(op, effect.peer, effect.tag, source)
        else:
            lease = self.ring.lease_free(effect.key, effect.seq)
            assert lease is not None, "taken from the queue without a free slot"
            payload = self._handler.gather(source, lease.view)
            nbytes, digest = len(payload), self._handler.digest_staged(source, payload, effect.seq)
            op = self._start_op(effect, lease)
            self._lanes.staged[effect.lane].send(op, effect.peer, effect.tag, payload)
        self._answer(RegionReady(effect.key, effect.seq, effect.tag, nbytes, digest, time.perf_counter() - started))

    def _start_op(self, effect: SendRegion, lease: SlotLease | None) -> int:
        op = self._next_op()
        self._ops[op] = _Send(effect, lease, time.perf_counter())
        return op

    def _bytes_of(self, effect: SendRegion) -> int:
        return self._handler.rows_of(effect.span).nbytes

    def _fail(self, effect: SendRegion, reason: str) -> None:
        failure = Failure(code=ErrorCode.INTERNAL, reason=f"lane {effect.lane}: {reason}")
        self._answer(SourceLaneFailed(effect.key, failure))

    def wait_s(self, now: float) -> float | None:
        """How soon it wants to go on; None: not before something happens."""
        waits = [self._to_offer.wait_s(now), self._to_send.wait_s(now) if self.ring.free else None]
        return min((wait for wait in waits if wait is not None), default=None)

    @property
    def slots(self) -> tuple[int, int, int]:
        """Free, reserved, leased."""
        return self.ring.free, self.ring.reserved, self.ring.leased

    @property
    def operations(self) -> int:
        return len(self._ops)
