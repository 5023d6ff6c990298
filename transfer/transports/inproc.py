"""The lane inside one process: for tests and simulations of everything above a lane. Thread-safe, and faults on demand.

Owns: a hub, through which the transports of one process meet. Never: a copy that a real lane would not make, or a
promise that a real lane does not keep.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from baton.common.ids import Stamp
from baton.common.messages import LaneAddress
from baton.transfer.transports.base import (
    TAG_TAKEN,
    Bytes,
    Ended,
    LinkDown,
    LinkUp,
    Received,
    Sent,
    TransportEvent,
    Watcher,
)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One end of a region, waiting for the other."""

    owner: InprocTransport
    op: int
    peer: Stamp
    memory: Bytes


class InprocHub:
    """Where transports meet. `damage(n)` flips a bit in each of the next `n` regions; `hold()` stops deliveries until
    `resume()`, so that a test can cancel what is under way."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.members: dict[Stamp, InprocTransport] = {}
        self.sends: dict[tuple[Stamp, int], _Waiting] = {}  # (receiver, tag)
        self.receives: dict[tuple[Stamp, int], _Waiting] = {}
        self._to_damage = 0
        self._held = False

    def damage(self, regions: int) -> None:
        with self.lock:
            self._to_damage = regions

    def hold(self) -> None:
        with self.lock:
            self._held = True

    def resume(self) -> None:
        with self.lock:
            self._held = False
            for receiver, tag in list(self.receives):
                self.match(receiver, tag)

    def match(self, receiver: Stamp, tag: int) -> None:
        """Delivers when both ends are there. The lock is held."""
        receive, send = self.receives.get((receiver, tag)), self.sends.get((receiver, tag))
        if self._held or receive is None or send is None or receive.peer != send.owner.stamp:
            return
        del self.receives[receiver, tag], self.sends[receiver, tag]
        send.owner.report(Sent(send.op))
        if len(send.memory) != len(receive.memory):
            reason = f"{len(send.memory)} bytes came for a region of {len(receive.memory)}"
            receive.owner.report(Ended(receive.op, reason, peer_lost=False))
            return
        receive.memory[:] = send.memory
        if self._to_damage > 0:
            self._to_damage -= 1
            receive.memory[len(receive.memory) // 2] ^= np.uint8(1)
        receive.owner.report(Received(receive.op, receive.memory))


class InprocTransport:
    """See StagedTransport."""

    lane = "inproc"
    stray = 0  # who is not in the hub cannot say anything

    def __init__(self, stamp: Stamp, hub: InprocHub, watcher: Watcher) -> None:
        self.stamp = stamp
        self._hub = hub
        self._watcher = watcher
        self._events: deque[TransportEvent] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        watcher.register(self._wake_fd)
        with hub.lock:
            hub.members[stamp] = self

    def address(self) -> LaneAddress:
        return LaneAddress(lane=self.lane, address={"pid": os.getpid()})

    def open(self, peer: Stamp, address: LaneAddress) -> None:
        with self._hub.lock:
            here = peer in self._hub.members and address.address.get("pid") == os.getpid()
            self.report(LinkUp(peer) if here else LinkDown(peer, "not in this process"))

    def close_link(self, peer: Stamp) -> None:
        with self._hub.lock:
            self._end_all("link closed", peer_lost=False, peer=peer, tables=(self._hub.receives,))

    def shut_out(self, peer: Stamp) -> None:
        with self._hub.lock:
            self._end_all("shut out", peer_lost=False, peer=peer)

    def receive(self, op: int, peer: Stamp, tag: int, slot: Bytes) -> None:
        with self._hub.lock:
            if peer not in self._hub.members:
                self.report(Ended(op, "peer is gone", peer_lost=True))
                return
            self._hub.receives[self.stamp, tag] = _Waiting(self, op, peer, slot)
            self._hub.match(self.stamp, tag)

    def send(self, op: int, peer: Stamp, tag: int, payload: Bytes) -> None:
        with self._hub.lock:
            if (peer, tag) in self._hub.sends:
                self.report(Ended(op, TAG_TAKEN, peer_lost=False))
                return
            self._hub.sends[peer, tag] = _Waiting(self, op, peer, payload)
            self._hub.match(peer, tag)

    def cancel(self, op: int) -> None:
        with self._hub.lock:
            self._end_all("cancelled", peer_lost=False, op=op)

    def poll(self) -> list[TransportEvent]:
        with self._hub.lock:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            events = list(self._events)
            self._events.clear()
            return events

    @property
    def busy(self) -> bool:
        return False

    def close(self) -> None:
        with self._hub.lock:
            if self._hub.members.pop(self.stamp, None) is None:
                return
            self._end_all("closed", peer_lost=False)
            for other in self._hub.members.values():
                other._end_all("peer is gone", peer_lost=True, peer=self.stamp)
            self._watcher.unregister(self._wake_fd)
            os.close(self._wake_fd)

    def report(self, event: TransportEvent) -> None:
        """The hub's lock is held."""
        self._events.append(event)
        os.eventfd_write(self._wake_fd, 1)

    def _end_all(
        self,
        reason: str,
        peer_lost: bool,
        peer: Stamp | None = None,
        op: int | None = None,
        tables: Iterable[dict[tuple[Stamp, int], _Waiting]] = (),
    ) -> None:
        for table in tables or (self._hub.sends, self._hub.receives):
            for key, waiting in list(table.items()):
                if waiting.owner is self and peer in (None, waiting.peer) and op in (None, waiting.op):
                    del table[key]
                    self.report(Ended(waiting.op, reason, peer_lost))
