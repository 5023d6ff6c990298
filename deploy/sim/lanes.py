"""One worker's lanes, as its receiving half sees them: which one a hand-off takes, which move nothing.

Owns the choice, the real `Stalls`, and the memory of lanes that failed. Never: bytes, or the end of a hand-off. A lane
hangs (`Network.hang`) when it takes what is sent and delivers nothing; it breaks nothing, and its peer lives.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.common.ids import Stamp
from baton.deploy.sim.schedule import Schedule
from baton.deploy.sim.settings import WorldSettings
from baton.transfer.link import AVOID_S
from baton.transfer.session.effects import PULL_LANES, LandRegion
from baton.transfer.stalls import BEHIND_SILENCE_S, Path, Stalls

STAGED_LANE = "zmq"
PULL_LANE = "local"
DIRECT_LANE = "tcp"


class SimLanes:
    """`look_later` asks for a call of `look`, when the process is running by then. Pulls wait for nobody: no stalls."""

    def __init__(self, settings: WorldSettings, schedule: Schedule, look_later: Callable[[float], None]) -> None:
        pull, direct = settings.pull_lane, settings.direct_lane
        self._most = ((pull, PULL_LANE), (pull + direct, DIRECT_LANE), (1.0, STAGED_LANE))
        self._schedule = schedule
        self._stalls = Stalls(settings.liveness.dead_after_s + BEHIND_SILENCE_S)
        self._look_later = look_later
        self._looks = False
        self._avoided_until_s: dict[Path, float] = {}

    def choose(self, peer: Stamp) -> str:
        """By lot; another one when that has failed not long ago, if this world has another one."""
        lot, at_least = self._schedule.rng.random(), 0.0
        able: list[str] = []
        for most, lane in self._most:
            if at_least <= lot < most:
                able.insert(0, lane)
            elif most > at_least:
                able.append(lane)
            at_least = most
        return next((lane for lane in able if not self._is_avoided((lane, peer))), able[0])

    def began(self, effect: LandRegion) -> None:
        """Its bytes are waited for."""
        if effect.lane in PULL_LANES:
            return
        self._stalls.began((effect.lane, effect.peer), effect.chunk.nbytes)
        if not self._looks:
            self._stalls.look(self._schedule.now)
            self._look_again()

    def ended(self, effect: LandRegion) -> None:
        """They have come, or are not wanted any more."""
        if effect.lane not in PULL_LANES:
            self._stalls.ended((effect.lane, effect.peer), effect.chunk.nbytes)

    def look(self) -> list[Path]:
        """Those that have stalled; they are avoided for a while."""
        stalled = self._stalls.look(self._schedule.now)
        self._look_again()
        for path in stalled:
            self._avoid(path)
        return stalled

    def given_up(self, lane: str, peer: Stamp) -> None:
        """A hand-off ends while it waits for something on this lane."""
        if self._stalls.is_suspicious((lane, peer)):
            self._avoid((lane, peer))

    def _look_again(self) -> None:
        wait_s = self._stalls.wait_s()
        self._looks = wait_s is not None
        if wait_s is not None:
            self._look_later(wait_s)

    def _avoid(self, path: Path) -> None:
        self._avoided_until_s[path] = self._schedule.now + AVOID_S

    def _is_avoided(self, path: Path) -> bool:
        until_s = self._avoided_until_s.get(path)
        if until_s is not None and until_s <= self._schedule.now:
            del self._avoided_until_s[path]
            return False
        return until_s is not None
