"""Everything that is known by (peer, lane): the transports of this process, their links, what they moved and how fast.

Owns: the transports, the states of their links (`link.py`), and speeds. Never: a hand-off, or a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import assert_never

from baton.common.config import TransferConfig
from baton.common.ids import Stamp, WorkerId
from baton.common.kv.page_layout import PageLayout, layout_of
from baton.common.log import EventLog
from baton.common.messages import LaneAddress, Member
from baton.transfer.link import Chosen, CloseLink, LaneView, Links, NoLane, OpenLink, Wait
from baton.transfer.session.effects import PULL_LANES
from baton.transfer.speed import LaneSpeeds
from baton.transfer.transports.base import (
    DirectTransport,
    Ended,
    LatePullTransport,
    LinkDown,
    LinkUp,
    OperationEnd,
    Placed,
    PullTransport,
    Received,
    Sent,
    StagedTransport,
    Transport,
)

_log = EventLog("baton.transfer")


class PeerLanes:
    """`staged`, `direct`, `pull` and `late` are the lanes that this process has; `config.lanes` orders them. `missing`
    says why others of those are not here."""

    def __init__(
        self,
        config: TransferConfig,
        staged: Sequence[StagedTransport],
        direct: Sequence[DirectTransport],
        pull: Sequence[PullTransport],
        late: Sequence[LatePullTransport] = (),
        missing: Mapping[str, str] | None = None,
    ) -> None:
        self.staged = {transport.lane: transport for transport in staged}
        self.direct = {transport.lane: transport for transport in direct}
        self.pull = {transport.lane: transport for transport in pull}
        self.late = {transport.lane: transport for transport in late}
        self.slotted = self.staged.keys() | self.late.keys()
        """Where a region has a slot on either side while it is under way: for its bytes, or for what of them its digest
        is made of."""
        assert self.pull.keys() | self.late.keys() <= PULL_LANES, "the session machines must know which lanes pull"
        assert not (self.staged.keys() | self.direct.keys()) & PULL_LANES
        self.transports: dict[str, Transport] = {**self.staged, **self.direct, **self.pull, **self.late}
        self._order = tuple(lane for lane in config.lanes if lane in self.transports)
        missing = {lane: reason for lane, reason in (missing or {}).items() if lane not in self.transports}
        told = tuple(lane for lane in config.lanes if lane in self.transports or lane in missing)
        self._speeds = LaneSpeeds()
        self._measured = config.lane_choice == "measured" and len(self._order) > 1
        self._links = Links(told, self._usable_gbps if self._measured else None, missing)
        self._caps: dict[str, float] = {lane: gbps for lane, gbps in asdict(config.lane_max_gbps).items() if gbps}
        self._to_measure: list[tuple[Stamp, str]] = []
        self._in_use: dict[Stamp, str] = {}
        self._layouts: dict[Stamp, PageLayout | None] = {}
        self.version = 0  # another one after every change that a choice of lane may depend on

    def addresses(self) -> tuple[LaneAddress, ...]:
        """What peers need to reach this process, in order of preference."""
        return tuple(self.transports[lane].address() for lane in self._order)

    def set_peers(self, peers: Sequence[Member], now: float) -> None:
        """The processes that this one receives from."""
        self._carry_out(self._links.set_peers([(peer.stamp, peer.lanes) for peer in peers], now))
        self._layouts = {peer.stamp: layout_of(peer.fingerprint) for peer in peers}
        self.version += 1
        for stamp in [stamp for stamp in self._in_use if not self._links.knows(stamp)]:
            del self._in_use[stamp]

    def shut_out(self, peer: Stamp) -> None:
        """It is no member any more: what it still asks for over an open connection is not answered either."""
        for transport in self.transports.values():
            transport.shut_out(peer)

    def take_to_measure(self) -> list[tuple[Stamp, str]]:
        """Lanes that came up or failed since the last call, where their speed matters."""
        pairs, self._to_measure = self._to_measure, []
        return pairs if self._measured else []

    def is_up(self, peer: Stamp, lane: str) -> bool:
        return self._links.is_up(peer, lane)

    def layout_of(self, peer: Stamp) -> PageLayout | None:
        """Of the pages of a peer that is known; None: in one that is not known here."""
        return self._layouts.get(peer)

    def knows(self, peer: Stamp) -> bool:
        return self._links.knows(peer)

    def cancel(self, lane: str, op: int) -> None:
        """On a lane that has operations: all but those that pull."""
        transport = self.staged.get(lane) or self.direct[lane]
        transport.cancel(op)

    def poll(self, now: float) -> Iterable[OperationEnd]:
        """The ends of operations. News of links are dealt with here."""
        for lane, transport in self.transports.items():
            for event in transport.poll():
                match event:
                    case Received() | Placed() | Sent() | Ended():
                        yield event
                    case LinkUp():
                        self._links.on_up(event.peer, lane, now)
                        self._to_measure.append((event.peer, lane))
                        self.version += 1
                    case LinkDown():
                        self._links.on_down(event.peer, lane, event.reason, now)
                        self.version += 1
                        _log.info("link_down", peer=event.peer.worker, lane=lane, reason=event.reason)
                    case _:
                        assert_never(event)
        self._carry_out(self._links.on_timer(now))

    @property
    def busy(self) -> bool:
        """A transport has something on its way whose end no wake source announces."""
        return any(transport.busy for transport in self.transports.values())

    @property
    def stray(self) -> int:
        """What has come over the lanes and was refused."""
        return sum(transport.stray for transport in self.transports.values())

    def next_deadline(self) -> float | None:
        return self._links.next_deadline()

    # ----------------------------------------------------------------------------------------- choices

    def choose(self, peer: Stamp, now: float) -> Chosen | Wait | NoLane:
        return self._links.choose(peer, now, self._in_use.get(peer, ""))

    def use(self, peer: Stamp, chosen: Chosen) -> None:
        """A hand-off with `peer` takes this lane: said aloud when it is another one than before."""
        if self._in_use.get(peer) != chosen.lane:
            self._in_use[peer] = chosen.lane
            _log.info("lane", peer=peer.worker, lane=chosen.lane, reason=chosen.reason)

    def on_failure(self, peer: Stamp, lane: str, reason: str, now: float) -> None:
        """A hand-off broke on it while receiving."""
        _log.warning("lane_failed", peer=peer.worker, lane=lane, reason=reason)
        self._links.on_failure(peer, lane, now)
        self._to_measure.append((peer, lane))
        self.version += 1

    # ---------------------------------------------------------------------------------------- measures

    def note_moved(self, peer: WorkerId, lane: str, nbytes: int, started_s: float, ended_s: float) -> None:
        self._speeds.note(peer, lane, nbytes, started_s, ended_s)

    def set_speed(self, peer: WorkerId, lane: str, nbytes: int, took_s: float) -> None:
        """As a probe found it."""
        self._speeds.set(peer, lane, nbytes, took_s)
        _log.info("lane_measured", peer=peer, lane=lane, gbps=round(nbytes / took_s / 1e9, 3))

    def gbps(self, peer: WorkerId, lane: str) -> float:
        return self._speeds.gbps(peer, lane)

    def _usable_gbps(self, peer: WorkerId, lane: str) -> float:
        """A probe does not mind the cap of a lane; hand-offs do."""
        return min(self._speeds.gbps(peer, lane), self._caps.get(lane, inf))

    def views(self, now: float) -> dict[WorkerId, list[LaneView]]:
        return self._links.snapshot(now)

    def close(self) -> None:
        """Ends all lanes; staging memory is safe to drop afterwards."""
        for transport in self.transports.values():
            transport.close()

    def _carry_out(self, effects: Sequence[OpenLink | CloseLink]) -> None:
        for effect in effects:
            match effect:
                case OpenLink(peer, lane, address):
                    self.transports[lane].open(peer, address)
                case CloseLink(peer, lane):
                    self.transports[lane].close_link(peer)
                case _:
                    assert_never(effect)
