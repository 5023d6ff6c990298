"""Which lane to which peer, and why. Pure: told what transports report, it answers which lane an attempt shall use.

Owns: the state of every (peer, lane), how much faster a lane must be to come before the order, the avoidance of a lane
that failed, and the schedule for trying it again. Never: a socket, or a change of lane within an attempt: a lane is
chosen when a hand-off is prepared, and the next attempt may get another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from baton.common.ids import Stamp, WorkerId
from baton.common.messages import LaneAddress

CONNECT_TIMEOUT_S = 15.0
"""An opening link that has not been proven by then is given up, and tried again later."""
PATIENCE_S = 1.5
"""So long a hand-off waits for a better lane that is still connecting."""
RETRY_S = 2.0
CLEARLY_FASTER = 1.3
"""Another lane is taken instead of the first in order when it is so many times as fast. Once taken, it stays for as
long as it is faster at all."""
AVOID_S = 10.0
"""So long a lane that failed under a hand-off is passed over for that peer."""


class LaneStatus(StrEnum):
    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"
    ABSENT = "absent"  # one of the two sides does not have it


@dataclass(frozen=True, slots=True)
class LaneView:
    """One lane to one peer at one moment, as `choose_lane` sees it."""

    lane: str
    status: LaneStatus
    reason: str = ""  # why it is not up
    age_s: float = 0.0  # in this status
    avoided: bool = False
    gbps: float = 0.0  # lately reached, or found by a probe; 0.0: not known, or not to be looked at


@dataclass(frozen=True, slots=True)
class Chosen:
    lane: str
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """A lane is about to come up; ask again."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoLane:
    reason: str


def choose_lane(views: Sequence[LaneView], current: str = "") -> Chosen | Wait | NoLane:
    """Of the lanes that are up and have not just failed the first in order, or one that is clearly faster; `current` is
    the one in use. A lane before all these that is about to come up is waited for, but not long; one that just failed
    is taken when it is all there is."""
    passed: list[str] = []
    fit: list[LaneView] = []
    for view in views:
        if view.status is LaneStatus.UP and not view.avoided:
            fit.append(view)
        elif view.status is LaneStatus.CONNECTING and view.age_s < PATIENCE_S and not fit:
            return Wait(f"{view.lane} is connecting")
        elif not fit:
            why = view.reason or view.status
            passed.append(f"{view.lane} ({'failed a moment ago' if view.avoided else why})")
    if fit:
        return _choose_fastest(fit, current, passed)
    for view in views:
        if view.status is LaneStatus.UP:
            return Chosen(view.lane, f"failed a moment ago, but nothing else is up: {'; '.join(passed)}")
    for view in views:
        if view.status is LaneStatus.CONNECTING:
            return Wait(f"{view.lane} is connecting")
    return NoLane("; ".join(passed) or "no lane is configured")


def _choose_fastest(fit: Sequence[LaneView], current: str, passed: Sequence[str]) -> Chosen:
    first, best = fit[0], max(fit, key=lambda view: view.gbps)
    known = ", ".join(f"{view.lane} {view.gbps:.2f}" for view in fit if view.gbps > 0)
    over = f"passed over: {'; '.join(passed) or 'none'}"
    if first.gbps > 0 and best.gbps > first.gbps * (1.0 if best.lane == current else CLEARLY_FASTER):
        return Chosen(best.lane, f"faster, in GB/s: {known}; {over}")
    return Chosen(first.lane, f"preferred over the rest; {f'in GB/s: {known}; ' if known else ''}{over}")


@dataclass(slots=True)
class _Lane:
    address: LaneAddress | None
    status: LaneStatus
    since_s: float
    reason: str = ""
    avoid_until_s: float = float("-inf")
    retry_at_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class OpenLink:
    """The transport of `lane` shall open (or open again) its link to `peer`."""

    peer: Stamp
    lane: str
    address: LaneAddress


@dataclass(frozen=True, slots=True)
class CloseLink:
    peer: Stamp
    lane: str


class Links:
    """All lanes to all peers that this process receives from. `lanes` in order of preference; `gbps` tells what is
    known of the speed of one, where speed is to matter. `missing`: why those of them are not here."""

    def __init__(
        self,
        lanes: Sequence[str],
        gbps: Callable[[WorkerId, str], float] | None = None,
        missing: Mapping[str, str] | None = None,
    ) -> None:
        self._order = tuple(lanes)
        self._gbps = gbps
        self._missing = missing or {}
        self._peers: dict[Stamp, dict[str, _Lane]] = {}
        self._due_s = float("inf")  # before that no lane has anything to be tried again

    def set_peers(self, peers: Iterable[tuple[Stamp, Sequence[LaneAddress]]], now: float) -> list[OpenLink | CloseLink]:
        """The whole set. A peer that restarted is another peer."""
        wanted = dict(peers)
        effects: list[OpenLink | CloseLink] = []
        for peer in self._peers.keys() - wanted.keys():
            lanes = self._peers.pop(peer)
            effects += [CloseLink(peer, name) for name, lane in lanes.items() if lane.address is not None]
        for peer, addresses in wanted.items():
            if peer not in self._peers:
                by_lane = {address.lane: address for address in addresses if address.lane not in self._missing}
                self._peers[peer] = {name: self._new_lane(name, by_lane.get(name), now) for name in self._order}
                effects += [OpenLink(peer, name, by_lane[name]) for name in self._order if name in by_lane]
                self._due_s = min(self._due_s, now + CONNECT_TIMEOUT_S)
        return effects

    def knows(self, peer: Stamp) -> bool:
        return peer in self._peers

    def on_up(self, peer: Stamp, lane: str, now: float) -> None:
        self._move(peer, lane, LaneStatus.UP, "", now)

    def on_down(self, peer: Stamp, lane: str, reason: str, now: float) -> None:
        self._move(peer, lane, LaneStatus.DOWN, reason, now)

    def on_failure(self, peer: Stamp, lane: str, now: float) -> None:
        """A hand-off broke on this lane: avoid it for a while. Whether the link is up is the transport's to say."""
        state = self._peers.get(peer, {}).get(lane)
        if state is not None:
            state.avoid_until_s = now + AVOID_S

    def on_timer(self, now: float) -> list[OpenLink | CloseLink]:
        """Gives up links that do not come up, and tries again those that are down."""
        if now < self._due_s:
            return []
        effects: list[OpenLink | CloseLink] = []
        for peer, lanes in self._peers.items():
            for name, lane in lanes.items():
                if now < lane.retry_at_s or lane.address is None:
                    continue
                if lane.status is LaneStatus.CONNECTING:
                    self._move(peer, name, LaneStatus.DOWN, lane.reason or "no answer", now)
                    effects.append(CloseLink(peer, name))
                else:
                    self._move(peer, name, LaneStatus.CONNECTING, lane.reason, now)
                    effects.append(OpenLink(peer, name, lane.address))
        times = (lane.retry_at_s for lanes in self._peers.values() for lane in lanes.values())
        self._due_s = min(times, default=float("inf"))
        return effects

    def next_deadline(self) -> float | None:
        """When `on_timer` is wanted; perhaps a little early."""
        return self._due_s if self._due_s < float("inf") else None

    def views(self, peer: Stamp, now: float) -> list[LaneView]:
        return [
            LaneView(
                name,
                lane.status,
                lane.reason,
                now - lane.since_s,
                now < lane.avoid_until_s,
                self._gbps(peer.worker, name) if self._gbps is not None else 0.0,
            )
            for name, lane in self._peers.get(peer, {}).items()
        ]

    def is_up(self, peer: Stamp, lane: str) -> bool:
        state = self._peers.get(peer, {}).get(lane)
        return state is not None and state.status is LaneStatus.UP

    def choose(self, peer: Stamp, now: float, current: str = "") -> Chosen | Wait | NoLane:
        """`current`: the lane that hand-offs with this peer use."""
        if peer not in self._peers:
            return NoLane("the peer is not a member")
        return choose_lane(self.views(peer, now), current)

    def snapshot(self, now: float) -> dict[WorkerId, list[LaneView]]:
        return {peer.worker: self.views(peer, now) for peer in self._peers}

    def _new_lane(self, name: str, address: LaneAddress | None, now: float) -> _Lane:
        if address is None:
            return _Lane(None, LaneStatus.ABSENT, now, self._missing.get(name, "the peer does not have it"))
        return _Lane(address, LaneStatus.CONNECTING, now, retry_at_s=now + CONNECT_TIMEOUT_S)

    def _move(self, peer: Stamp, name: str, status: LaneStatus, reason: str, now: float) -> None:
        lane = self._peers.get(peer, {}).get(name)
        if lane is None:
            return  # a late report about a peer that has left
        lane.since_s = lane.since_s if lane.status is status else now
        lane.status, lane.reason = status, reason
        match status:
            case LaneStatus.CONNECTING:
                lane.retry_at_s = now + CONNECT_TIMEOUT_S
            case LaneStatus.DOWN:
                lane.retry_at_s = now + RETRY_S
            case _:
                lane.retry_at_s = float("inf")
        self._due_s = min(self._due_s, lane.retry_at_s)
