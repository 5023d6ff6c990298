"""Measures lanes to peers: a few small transfers of bytes that mean nothing, when a link has come up or failed.

Owns: which lanes are still to be measured, the one probe under way, and what peers are served for theirs. Never: a page
that is anybody's: bytes travel between staging slots, or from null page to null page. What it finds goes to
`PeerLanes.set_speed`.

Bounds: one probe at a time in a process, PROBE_ROUNDS times PROBE_BYTES, after the hand-offs with that peer where they
end soon; as a source one per peer and MOST_SERVED in all. What does not end is tried PROBE_TRIES times; after that the
lane is known by what hand-offs reach on it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from baton.common.ids import HandoffId, HandoffKey, Stamp
from baton.common.kv.layout import Component
from baton.common.messages import Probe, ProbeReady
from baton.transfer.peer_lanes import PeerLanes
from baton.transfer.staging import SlotLease, StagingRing
from baton.transfer.transports.base import Ended, OperationEnd, PullFailed, Rows

PROBE_BYTES = 512 << 10
PROBE_ROUNDS = 3
PROBE_WATCH_S = 0.002
"""So long one round of a pull that ends later is watched. One that takes longer says nothing of the lane: what other
work the device has is not known here. Then the order of lanes counts."""
PROBE_TIMEOUT_S = 2.0
"""For all rounds at the receiver, and for one at the source."""
PROBE_TRIES = 3
"""A peer may not know this process yet when its link is up."""
PATIENCE_S = 5.0
"""So long a probe waits for the hand-offs with its peer to end."""
RECHECK_S = 0.05
MOST_SERVED = 8
FIRST_TAG = 1 << 39
"""Tags of hand-offs count from below, on top of a part of the epoch (`endpoint.py`): none of them is one of these."""
_NOBODY = HandoffKey(HandoffId(-1), 0)


@dataclass(slots=True)
class _Measuring:
    """The probe under way. `op`: once the source is ready."""

    peer: Stamp
    lane: str
    tag: int
    until_s: float
    tries: int
    took_s: list[float] = field(default_factory=list)
    op: int | None = None
    started_s: float = 0.0


@dataclass(slots=True)
class _Served:
    peer: Stamp
    lane: str
    until_s: float


class LaneProbes:
    """`rings`: (receive, send). `unit`: a component of the pool, and the bytes of its units. `is_idle`: no hand-off
    with that peer is open. `send`: takes a frame for a peer."""

    def __init__(
        self,
        lanes: PeerLanes,
        rings: tuple[StagingRing, StagingRing],
        unit: tuple[Component, int],
        next_op: Callable[[], int],
        is_idle: Callable[[Stamp], bool],
        send: Callable[[Stamp, Probe | ProbeReady], None],
    ) -> None:
        self._lanes = lanes
        self._receive_ring, self._send_ring = rings
        self._component, self._unit_bytes = unit
        self._next_op = next_op
        self._is_idle = is_idle
        self._send = send
        self._wanted: OrderedDict[tuple[Stamp, str], tuple[float, int]] = OrderedDict()  # since when; tries made
        self._current: _Measuring | None = None
        self._next_tag = FIRST_TAG
        self._served: dict[int, _Served] = {}  # by op
        self._ops: dict[int, tuple[StagingRing, SlotLease] | None] = {}  # not ended yet, also of what was given up

    # ---------------------------------------------------------------------------------------- receiver

    def want(self, peer: Stamp, lane: str, now: float) -> None:
        self._wanted.setdefault((peer, lane), (now, 0))

    def step(self, now: float) -> None:
        """Begins what is wanted, and gives up what takes too long."""
        if self._current is not None and now >= self._current.until_s:
            failed, self._current = self._current, None
            if failed.op is not None:
                self._lanes.cancel(failed.lane, failed.op)
            if failed.tries < PROBE_TRIES:
                self._wanted.setdefault((failed.peer, failed.lane), (now, failed.tries))
        if self._current is None and (pair := self._next_pair(now)) is not None:
            _, tries = self._wanted.pop(pair)
            self._begin(*pair, tries + 1, now)
        for op, served in list(self._served.items()):
            if now >= served.until_s:
                del self._served[op]
                self._lanes.cancel(served.lane, op)

    def on_ready(self, ready: ProbeReady, peer: Stamp) -> None:
        """The source's bytes wait to be asked for: the clock starts."""
        current = self._current
        if current is None or (current.peer, current.tag, current.op) != (peer, ready.tag, None):
            return  # of a probe that was given up
        op = self._next_op()
        current.started_s = time.perf_counter()
        if current.lane in self._lanes.direct:
            self._ops[op] = None
            self._lanes.direct[current.lane].receive(op, peer, current.tag, self._null_rows(self._nbytes(current.lane)))
        else:
            lease = self._receive_ring.lease_free(_NOBODY, 0)
            if lease is None:
                self._current = None  # hand-offs need them all
                return
            self._ops[op] = (self._receive_ring, lease)
            slot = lease.view[: self._nbytes(current.lane)]
            self._lanes.staged[current.lane].receive(op, peer, current.tag, slot)
        current.op = op

    def _next_pair(self, now: float) -> tuple[Stamp, str] | None:
        for peer, lane in list(self._wanted):
            if not self._lanes.is_up(peer, lane):
                del self._wanted[peer, lane]  # it is wanted again when it comes up
            elif self._is_idle(peer) or now - self._wanted[peer, lane][0] > PATIENCE_S:
                return peer, lane
        return None

    def _begin(self, peer: Stamp, lane: str, tries: int, now: float) -> None:
        if lane not in self._lanes.pull and lane not in self._lanes.late:
            self._current = _Measuring(peer, lane, 0, now + PROBE_TIMEOUT_S, tries)
            self._ask(self._current)
            return
        rows, took_s = self._null_rows(PROBE_BYTES), []
        for _ in range(PROBE_ROUNDS):
            started = time.perf_counter()
            if not self._pulled(peer, lane, rows):
                return
            took_s.append(time.perf_counter() - started)
        self._lanes.set_speed(peer.worker, lane, rows.nbytes, min(took_s))

    def _pulled(self, peer: Stamp, lane: str, rows: Rows) -> bool:
        if lane in self._lanes.pull:
            return self._lanes.pull[lane].pull(peer, rows, rows) is None
        pulling = self._lanes.late[lane].begin_pull(peer, rows, rows)
        if isinstance(pulling, PullFailed):
            return False
        until_s = time.perf_counter() + PROBE_WATCH_S
        while not pulling.done():  # to ask again in the next turn would measure turns
            if time.perf_counter() > until_s:
                return False
            time.sleep(0)  # other threads of this process go on
        return pulling.failed is None

    def _ask(self, current: _Measuring) -> None:
        current.tag, current.op = self._next_tag, None
        self._next_tag += 1
        self._send(current.peer, Probe(lane=current.lane, tag=current.tag, nbytes=self._nbytes(current.lane)))

    def _on_round(self, current: _Measuring, event: OperationEnd) -> None:
        if isinstance(event, Ended):
            self._current = None
            return
        current.took_s.append(time.perf_counter() - current.started_s)
        if len(current.took_s) < PROBE_ROUNDS:
            self._ask(current)
        else:
            self._current = None
            self._lanes.set_speed(current.peer.worker, current.lane, self._nbytes(current.lane), min(current.took_s))

    # ------------------------------------------------------------------------------------------ source

    def serve(self, probe: Probe, peer: Stamp, now: float) -> None:
        """A peer measures a lane to here."""
        busy = len(self._served) >= MOST_SERVED or any(served.peer == peer for served in self._served.values())
        if busy or probe.lane not in self._lanes.transports or probe.nbytes != self._nbytes(probe.lane):
            return
        op = self._next_op()
        if probe.lane in self._lanes.direct:
            self._ops[op] = None
            self._lanes.direct[probe.lane].send(op, peer, probe.tag, self._null_rows(probe.nbytes))
        elif probe.lane in self._lanes.staged and (lease := self._send_ring.lease_free(_NOBODY, 0)) is not None:
            self._ops[op] = (self._send_ring, lease)
            payload = lease.view[: probe.nbytes]
            payload[:] = 0  # what was in the slot is not this peer's business
            self._lanes.staged[probe.lane].send(op, peer, probe.tag, payload)
        else:
            return
        self._served[op] = _Served(peer, probe.lane, now + PROBE_TIMEOUT_S)
        self._send(peer, ProbeReady(tag=probe.tag))

    # -------------------------------------------------------------------------------------------- both

    def on_operation(self, event: OperationEnd) -> bool:
        """False: not one of a probe."""
        if event.op not in self._ops:
            return False
        held = self._ops.pop(event.op)
        if held is not None:
            ring, lease = held
            ring.give_back(lease)
        self._served.pop(event.op, None)
        current = self._current
        if current is not None and current.op == event.op:
            self._on_round(current, event)
        return True

    def wait_s(self, now: float) -> float | None:
        """How soon `step` is wanted; None: not before something happens."""
        times = [served.until_s - now for served in self._served.values()]
        times += [self._current.until_s - now] if self._current is not None else []
        times += [RECHECK_S] if self._wanted and self._current is None else []
        return max(0.0, min(times)) if times else None

    def _nbytes(self, lane: str) -> int:
        """Both sides say the same: their configuration and layout are the same."""
        if lane in self._lanes.staged:
            return min(PROBE_BYTES, self._send_ring.slot_bytes)
        return self._null_rows(PROBE_BYTES).nbytes

    def _null_rows(self, nbytes: int) -> Rows:
        """The null page, as often as makes about `nbytes`: nobody reads it, and anybody may write it."""
        return Rows(self._component, np.zeros(max(1, nbytes // self._unit_bytes), dtype=np.int32), 0, self._unit_bytes)
