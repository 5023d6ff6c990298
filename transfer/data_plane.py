"""Carries out what the session machines ask of the data plane (`session/effects.py`), over whatever lanes there are.

Owns: the two halves (`incoming.py`, `outgoing.py`), the lanes under them (`peer_lanes.py`), and how much is done in one
turn. Never: a decision about a hand-off, a control frame, or a wait: everything happens in `execute` and `poll` of the
one owner thread, in portions, so that timers and heartbeats are never late.

A fence waits for copies of its hand-off that have begun and are not done, which there are where pools lie on a device
(`pool_copier.py`, and pulls that end later); else it is immediate, since this thread is the only one that copies into
or out of pages. What a transport may still touch is a staging slot, and that stays leased (quarantined) until its
operation has ended.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import assert_never

from baton.common.config import TransferConfig
from baton.common.engine.batch import KvMemory
from baton.common.errors import ConfigError
from baton.common.ids import Stamp, WorkerId
from baton.common.kv.layout import Component
from baton.common.messages import LaneAddress, Member, Probe, ProbeReady
from baton.common.trace import Args, Recorder
from baton.transfer.digest import RegionDigest
from baton.transfer.incoming import Incoming
from baton.transfer.lane_probes import LaneProbes
from baton.transfer.link import LaneView
from baton.transfer.outgoing import Outgoing
from baton.transfer.peer_lanes import PeerLanes
from baton.transfer.plane_parts import PlaneParts
from baton.transfer.pool_copier import HostCopier, PoolCopier
from baton.transfer.session.effects import (
    CloseSink,
    DataEffect,
    DataEvent,
    FenceSink,
    FenceSource,
    Landed,
    LandRegion,
    PrepareSink,
    RegionReady,
    SendFrame,
    SendRegion,
)
from baton.transfer.session.ledger import handoff_name
from baton.transfer.staging import StagingHandler, unit_rows
from baton.transfer.stalls import STALLED_S
from baton.transfer.transports.base import DirectTransport, LatePullTransport, PullTransport, StagedTransport

TURN_S = 0.004
"""About as long the copies of one `poll` may take; at least one is made."""
LANE_BUSY_S = 0.001
"""How soon a lane or a copier is asked again for an end that it cannot announce."""


@dataclass(frozen=True, slots=True)
class DataPlaneSnapshot:
    """For `baton status` and metrics. Slots: free, reserved, leased (of which nobody waits for: quarantined)."""

    lanes: dict[WorkerId, list[LaneView]]
    receive_slots: tuple[int, int, int]
    send_slots: tuple[int, int, int]
    waiting_sinks: int
    open_sinks: int
    open_operations: int
    stray: int  # what came over the lanes and was refused


class DataPlane:
    """See the module. `staged`, `direct`, `pull` and `late` are the lanes that this process has; `config.lanes` orders
    them, and `missing` says why others of those are not here. `copier` knows the pools of `memory`; without one they
    are host memory, and with one that does not reach them from the host there are lanes with slots alone (staged and
    late). Raises ConfigError when there are such and a page is larger than their slots."""

    def __init__(
        self,
        config: TransferConfig,
        memory: KvMemory,
        staged: Sequence[StagedTransport],
        pull: Sequence[PullTransport] = (),
        direct: Sequence[DirectTransport] = (),
        copier: PoolCopier | None = None,
        stalled_s: float = STALLED_S,
        late: Sequence[LatePullTransport] = (),
        missing: Mapping[str, str] | None = None,
    ) -> None:
        self._copier = copier or HostCopier(unit_rows(memory))
        assert self._copier.host_pools or not (pull or direct), "lanes without slots need pools in host memory"
        handler = StagingHandler(self._copier, RegionDigest(config.digest), memory.layers, memory)
        for component in memory.layout.components if staged or late else ():
            _check_unit_fits(component, handler.unit_bytes(component), config.region_bytes)
        self._lanes = PeerLanes(config, staged, direct, pull, late, missing)
        self._events: list[DataEvent] = []
        self.trace: Recorder | None = None  # of this thread: gets every copy
        numbers = count(1)
        parts = PlaneParts(config, handler, self._lanes, self._answer, lambda: next(numbers), stalled_s)
        self._incoming, self._outgoing = Incoming(parts), Outgoing(parts)
        self._frames: list[SendFrame] = []
        component = memory.layout.components[0]
        self._probes = LaneProbes(
            self._lanes,
            (self._incoming.ring, self._outgoing.ring),
            (component, handler.unit_bytes(component)),
            parts.next_op,
            self._incoming.is_idle,
            lambda peer, body: self._frames.append(SendFrame(peer.worker, peer.epoch, body)),
        )

    # ------------------------------------------------------------------------------------------- peers

    def addresses(self) -> tuple[LaneAddress, ...]:
        """What peers need to reach this process, in order of preference."""
        return self._lanes.addresses()

    def set_peers(self, peers: Sequence[Member], now: float) -> None:
        """The processes that this one receives from."""
        self._lanes.set_peers(peers, now)

    def shut_out(self, peer: Stamp) -> None:
        """A process that is no member any more gets nothing, also over a connection that it has."""
        self._lanes.shut_out(peer)

    def lane_gbps(self, peer: WorkerId, lane: str) -> float:
        """What regions of hand-offs with `peer` reached on `lane` lately, in either direction, or what a probe found;
        0.0: not known. On a pull lane only the receiver sees bytes move."""
        return self._lanes.gbps(peer, lane)

    # ----------------------------------------------------------------------------------------- effects

    def execute(self, effect: DataEffect, now: float) -> list[DataEvent]:
        """Starts one effect. Returns what can be answered already, of this and of others."""
        match effect:
            case PrepareSink():
                self._incoming.prepare(effect, now)
            case LandRegion():
                self._incoming.land(effect, now)
            case SendRegion():
                self._outgoing.send(effect)
            case FenceSink():
                self._incoming.fence(effect.key, now)
            case FenceSource():
                self._outgoing.fence(effect.key)
            case CloseSink():
                self._incoming.close(effect.key, now)
            case _:
                assert_never(effect)
        return self._take_events()

    def poll(self, now: float) -> list[DataEvent]:
        """Goes on with everything under way, for about TURN_S."""
        end = time.perf_counter() + TURN_S
        for event in self._lanes.poll(now):
            if not (self._probes.on_operation(event) or self._incoming.on_operation(event, now)):
                self._outgoing.on_operation(event)
        for peer, lane in self._lanes.take_to_measure():
            self._probes.want(peer, lane, now)
        self._probes.step(now)
        self._incoming.prepare_waiting(now)
        while any([self._incoming.step(now), self._outgoing.step(now)]) and time.perf_counter() < end:
            pass
        return self._take_events()

    def wait_s(self, now: float) -> float | None:
        """How long `poll` may be left uncalled when no wake source of a lane speaks up; None: as long as you like."""
        link_due = self._lanes.next_deadline()
        waits = [
            self._incoming.wait_s(now),
            self._outgoing.wait_s(now),
            self._probes.wait_s(now),
            LANE_BUSY_S if self._lanes.busy or self._incoming.copying or self._outgoing.copying else None,
            max(0.0, link_due - now) if link_due is not None else None,
        ]
        return min((wait for wait in waits if wait is not None), default=None)

    def on_frame(self, body: Probe | ProbeReady, peer: Stamp, now: float) -> None:
        """A peer measures a lane to here, or is ready for being measured. What there is to say: `take_frames`."""
        if isinstance(body, Probe):
            self._probes.serve(body, peer, now)
        else:
            self._probes.on_ready(body, peer)

    def take_frames(self) -> list[SendFrame]:
        """Frames to send, of probes; they may be lost."""
        frames, self._frames = self._frames, []
        return frames

    def snapshot(self, now: float) -> DataPlaneSnapshot:
        return DataPlaneSnapshot(
            lanes=self._lanes.views(now),
            receive_slots=self._incoming.ring.counts,
            send_slots=self._outgoing.ring.counts,
            waiting_sinks=self._incoming.waiting,
            open_sinks=self._incoming.open,
            open_operations=self._incoming.operations + self._outgoing.operations,
            stray=self._lanes.stray,
        )

    def close(self) -> None:
        """Ends all lanes and copies; staging memory is safe to drop afterwards."""
        self._lanes.close()
        self._copier.close()

    # ---------------------------------------------------------------------------------------- internal

    def _answer(self, event: DataEvent) -> None:
        if self.trace is not None:
            _record(self.trace, event)
        self._events.append(event)

    def _take_events(self) -> list[DataEvent]:
        events, self._events = self._events, []
        return events


def _record(trace: Recorder, event: DataEvent) -> None:
    """The copy that has just been made, if it tells of one."""
    match event:
        case Landed():
            name, took_s = "scatter", event.scatter_s
        case RegionReady():
            name, took_s = "gather", event.gather_s
        case _:
            return
    ended_s = time.perf_counter()
    args: Args = {"handoff": handoff_name(event.key), "seq": event.seq, "bytes": event.nbytes}
    trace.slice(name, ended_s - took_s, ended_s, args)


def _check_unit_fits(component: Component, unit_bytes: int, region_bytes: int) -> None:
    if unit_bytes > region_bytes:
        reason = f"a page of {component} KV has {unit_bytes} bytes and travels whole, in a staging slot of this size"
        nearest = f"at least {unit_bytes}, and transfer.staging_ring_bytes for transfer.credit_regions of them"
        raise ConfigError("transfer.region_bytes", region_bytes, reason, nearest)
