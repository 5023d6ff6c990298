"""Regions of one direction that wait to be started: by lane, by peer, and then in turns. Pure.

Owns: their order (`turns.py`), the caps (`caps.py`), and how much of a peer may be under way on a lane at once. That
window is what makes an order worth something: once started, regions to one peer follow one another on the wire, and a
small hand-off waits for no more than the window. Never: a slot, a transport, or a clock.

A peer whose window is full is set aside until something of it ends; so a slow or hung peer costs the others nothing.
Cost: O(lanes) per region.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.common.ids import HandoffKey, Stamp
from baton.transfer.caps import Caps
from baton.transfer.turns import Turns

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    what: T
    nbytes: int
    holds: int


@dataclass(slots=True)
class _Path(Generic[T]):
    """One peer on one lane."""

    turns: Turns[_Item[T]] = field(default_factory=Turns)
    under_way: int = 0


@dataclass(slots=True)
class _Lane(Generic[T]):
    paths: dict[Stamp, _Path[T]] = field(default_factory=dict)
    ready: OrderedDict[Stamp, _Path[T]] = field(default_factory=OrderedDict)  # something waits, and may start


class RegionQueue(Generic[T]):
    """`window`: nothing more is started with a peer on a lane while so much is held there, in whatever items hold."""

    def __init__(self, caps: Caps, window: int) -> None:
        assert window > 0
        self._caps = caps
        self._window = window
        self._lanes: OrderedDict[str, _Lane[T]] = OrderedDict()
        self._waiting = 0

    def put(self, lane: str, peer: Stamp, key: HandoffKey, priority: int, what: T, nbytes: int, holds: int) -> None:
        """`holds`: of the window, from when it is started until `ended`."""
        one = self._lanes.setdefault(lane, _Lane())
        path = one.paths.setdefault(peer, _Path())
        path.turns.put(key, priority, _Item(what, nbytes, holds), nbytes)
        self._waiting += 1
        if path.under_way < self._window:
            one.ready[peer] = path

    def take(self, now: float) -> T | None:
        """Starts the next one. Lanes take turns, and on each lane its peers. None: nothing may start now."""
        if not self._waiting:
            return None
        for name, lane in self._lanes.items():
            if not lane.ready or self._caps.wait_s(name, now) > 0:
                continue
            peer, path = next(iter(lane.ready.items()))
            item = path.turns.take()
            assert item is not None, f"{peer} is ready and has nothing to start"
            self._waiting -= 1
            path.under_way += item.holds
            if len(path.turns) and path.under_way < self._window:
                lane.ready.move_to_end(peer)
            else:
                del lane.ready[peer]
            self._caps.spend(name, item.nbytes, now)
            self._lanes.move_to_end(name)
            return item.what
        return None

    def ended(self, lane: str, peer: Stamp, holds: int) -> None:
        """What was started is no longer under way."""
        one = self._lanes[lane]
        path = one.paths[peer]
        path.under_way -= holds
        assert path.under_way >= 0, f"more ended than was started with {peer} on {lane}"
        if len(path.turns) and path.under_way < self._window:
            one.ready[peer] = path
        self._tidy(one, peer)

    def forget(self, lane: str, peer: Stamp, key: HandoffKey) -> None:
        """Drops what waits of the hand-off. What was started is under way until `ended`. Unknown is fine."""
        one = self._lanes.get(lane)
        path = one.paths.get(peer) if one is not None else None
        if one is not None and path is not None:
            self._waiting -= len(path.turns)
            path.turns.forget(key)
            self._waiting += len(path.turns)
            if not len(path.turns):
                one.ready.pop(peer, None)
            self._tidy(one, peer)

    def wait_s(self, now: float) -> float | None:
        """How soon `take` has something; None: not before something is put or ends."""
        if not self._waiting:
            return None
        waits = [self._caps.wait_s(name, now) for name, lane in self._lanes.items() if lane.ready]
        return min(waits, default=None)

    @property
    def paths(self) -> int:
        """Peers, by lane, that are remembered."""
        return sum(len(lane.paths) for lane in self._lanes.values())

    def _tidy(self, lane: _Lane[T], peer: Stamp) -> None:
        path = lane.paths[peer]
        if not path.turns.remembers and path.under_way == 0:
            del lane.paths[peer]
