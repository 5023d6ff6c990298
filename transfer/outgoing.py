"""The sending half of the data plane: gives regions to their lanes, gathered where these want it.

Owns: the ring of send slots, the regions that wait for one, and sends under way. Never: a decision about a hand-off.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.common.config import TransferConfig
from baton.common.errors import ErrorCode
from baton.common.ids import HandoffKey
from baton.common.messages import Failure
from baton.transfer.peer_lanes import PeerLanes
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
        handler: StagingHandler,
        lanes: PeerLanes,
        answer: Callable[[DataEvent], None],
        next_op: Callable[[], int],
    ) -> None:
        self._handler = handler
        self._lanes = lanes
        self._answer = answer
        self._next_op = next_op
        self._ring = StagingRing(config.staging_ring_bytes, config.region_bytes)
        self._to_send: deque[SendRegion] = deque()
        self._ops: dict[int, _Send] = {}

    def send(self, effect: SendRegion) -> None:
        self._to_send.append(effect)

    def fence(self, key: HandoffKey) -> None:
        self._to_send = deque(effect for effect in self._to_send if effect.key != key)
        for op, under_way in list(self._ops.items()):
            if under_way.effect.key == key:
                self._lanes.cancel(under_way.effect.lane, op)
        self._answer(SourceFenced(key))

    def copies(self) -> Iterator[None]:
        """Yields after each region that was gathered and sent."""
        while self._to_send:
            effect = self._to_send[0]
            if effect.lane not in self._lanes.transports:
                self._fail(effect, "this process does not have it")
            elif effect.lane in self._lanes.staged and self._bytes_of(effect) > self._ring.slot_bytes:
                self._fail(effect, "the region is larger than a slot")
            elif not self._start(effect):
                return
            self._to_send.popleft()
            yield

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
            self._ring.give_back(sent.lease)

    def _start(self, effect: SendRegion) -> bool:
        """False: no slot is free."""
        started = time.perf_counter()
        source = self._handler.rows_of(effect.span)
        if effect.lane in self._lanes.pull:
            nbytes, digest = source.nbytes, self._handler.digest(source, effect.seq)
        elif effect.lane in self._lanes.direct:
            nbytes, digest = source.nbytes, self._handler.digest(source, effect.seq)
            op = self._start_op(effect, None)
            self._lanes.direct[effect.lane].send(op, effect.peer, effect.tag, source)
        else:
            lease = self._ring.lease_free(effect.key, effect.seq)
            if lease is None:
                return False
            payload = self._handler.gather(source, lease.view)
            nbytes, digest = len(payload), self._handler.digest_staged(source, payload, effect.seq)
            op = self._start_op(effect, lease)
            self._lanes.staged[effect.lane].send(op, effect.peer, effect.tag, payload)
        self._answer(RegionReady(effect.key, effect.seq, effect.tag, nbytes, digest, time.perf_counter() - started))
        return True

    def _start_op(self, effect: SendRegion, lease: SlotLease | None) -> int:
        op = self._next_op()
        self._ops[op] = _Send(effect, lease, time.perf_counter())
        return op

    def _bytes_of(self, effect: SendRegion) -> int:
        return self._handler.rows_of(effect.span).nbytes

    def _fail(self, effect: SendRegion, reason: str) -> None:
        failure = Failure(code=ErrorCode.INTERNAL, reason=f"lane {effect.lane}: {reason}")
        self._answer(SourceLaneFailed(effect.key, failure))

    def wait_s(self) -> float | None:
        """How soon it wants to go on; None: not before something happens."""
        can_send = bool(self._to_send) and (self._ring.free > 0 or self._to_send[0].lane not in self._lanes.staged)
        return 0.0 if can_send else None

    @property
    def slots(self) -> tuple[int, int, int]:
        """Free, reserved, leased."""
        return self._ring.free, self._ring.reserved, self._ring.leased

    @property
    def operations(self) -> int:
        return len(self._ops)
