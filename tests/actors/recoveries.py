"""How long recovery takes, as soak tests measure it: from a kill until a successor serves, and until streams go on."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from harness import Outcome, Question

from baton.common.errors import RequestError
from baton.common.ids import WorkerId
from baton.deploy.client import Client, ClusterUnreachable
from baton.deploy.launch import ClusterHandle, LaunchError

PATIENCE_S = 60.0


@dataclass(slots=True)
class Successions:
    """Watches seats: from the moment of a kill until a later incarnation takes requests there."""

    cluster: ClusterHandle
    took_s: list[float] = field(default_factory=list)
    gone: int = 0  # seats that were taken away meanwhile
    stop: threading.Event = field(default_factory=threading.Event)
    _open: dict[WorkerId, tuple[float, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def killed(self, worker: WorkerId, incarnation: int) -> None:
        with self._lock:
            self._open.setdefault(worker, (time.monotonic(), incarnation))

    def run(self) -> None:
        status = self.cluster.status()
        while not (self.stop.is_set() and not self._open):
            now = time.monotonic()
            seats = {seat.worker: seat for seat in status.seats}
            with self._lock:
                for worker, (killed_s, incarnation) in list(self._open.items()):
                    seat = seats.get(worker)
                    if not seats:
                        continue  # the controller has only begun
                    if seat is None:
                        self.gone += 1
                    elif not (seat.state == "live" and seat.incarnation > incarnation):
                        assert now - killed_s < PATIENCE_S, f"{worker} has no successor: {seat}"
                        continue
                    else:
                        self.took_s.append(now - killed_s)
                    del self._open[worker]
            try:
                status = self.cluster.wait_change(status, 0.2)
            except LaunchError:
                self.stop.wait(0.1)  # the controller is being restarted


@dataclass(frozen=True, slots=True)
class Streamed:
    """`gaps`: (when it began, how long it was) between two pieces of an answer that were further apart than usual."""

    outcome: Outcome
    gaps: tuple[tuple[float, float], ...]
    placements: int


def stream(client: Client, asked: Question, long_s: float) -> Streamed:
    """As `harness.ask`, piece by piece."""
    start_s = last_s = time.monotonic()
    text, error, gaps, placements = "", None, list[tuple[float, float]](), 0
    try:
        with client.stream(
            list(asked.prompt),
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            seed=asked.seed,
            ignore_eos=True,
        ) as pieces:
            for piece in pieces:
                now = time.monotonic()
                if now - last_s > long_s:
                    gaps.append((last_s, now - last_s))
                last_s = now
                text += piece
            placements = pieces.answer.placements
    except (RequestError, ClusterUnreachable) as failure:
        error = failure
    outcome = Outcome(asked, text if error is None else None, error, time.monotonic() - start_s)
    return Streamed(outcome, tuple(gaps), placements)


def row(name: str, times_s: list[float]) -> str:
    """Of a table: how many, p50, p99 and the longest."""
    if not times_s:
        return f"| {name} | 0 | | | |"
    ordered = sorted(times_s)
    half, most = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"| {name} | {len(ordered)} | {half:.2f} | {most:.2f} | {ordered[-1]:.2f} |"
