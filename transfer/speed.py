"""How fast a lane to a peer really is: a moving average over the regions that moved on it. Pure.

Owns: the averages. Never: a clock, or a choice of lane (that is `link.py`).

Regions overlap, and each one's own time would count the wire several times. So a region takes the time from its start,
or from the end of the one before it, to its end: what comes out is the speed of the lane while it had work.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.common.ids import WorkerId

MEASURED_FROM_BYTES = 256 << 10
"""A smaller region tells the latency of a lane, not its speed."""
HALF_LIFE_BYTES = 64 << 20
"""After so many bytes more, what was measured before counts half."""


@dataclass(slots=True)
class _Speed:
    moved_bytes: float = 0.0
    busy_s: float = 0.0
    last_end_s: float = float("-inf")


class LaneSpeeds:
    """By (peer, lane). As many as there are pairs that moved something."""

    def __init__(self) -> None:
        self._speeds: dict[tuple[WorkerId, str], _Speed] = {}

    def note(self, peer: WorkerId, lane: str, nbytes: int, started_s: float, ended_s: float) -> None:
        """A region of `nbytes` has moved. Ends are told in order."""
        speed = self._speeds.setdefault((peer, lane), _Speed())
        took_s = ended_s - max(started_s, speed.last_end_s)
        speed.last_end_s = ended_s
        if nbytes >= MEASURED_FROM_BYTES:
            keep = 0.5 ** (nbytes / HALF_LIFE_BYTES)
            speed.moved_bytes = speed.moved_bytes * keep + nbytes
            speed.busy_s = speed.busy_s * keep + took_s

    def set(self, peer: WorkerId, lane: str, nbytes: int, took_s: float) -> None:
        """What a probe found, in place of all that was known; the hand-offs that follow soon outweigh it."""
        speed = self._speeds.setdefault((peer, lane), _Speed())
        speed.moved_bytes, speed.busy_s = nbytes, took_s

    def gbps(self, peer: WorkerId, lane: str) -> float:
        """Gigabytes (1e9) per second; 0.0: not known."""
        speed = self._speeds.get((peer, lane))
        return speed.moved_bytes / speed.busy_s / 1e9 if speed is not None and speed.busy_s > 0 else 0.0
