"""Which lanes to which peers move nothing though they were asked to. Pure: told what was asked for, what ended, and the
time.

A lane that hangs (a firewall that forgot a connection, a fabric that lost its way) ends nothing: its peer lives and
speaks, so only the deadline of a hand-off would end it, which is the request's. Owns: since when nothing has ended on
each path, as seen by this process: while that was stopped itself, nobody else is blamed. Never: ends anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.common.ids import Stamp

STALLED_S = 5.0
BEHIND_SILENCE_S = 2.0
"""So much longer than `liveness.dead_after_s`: that a peer has fallen silent says more than that its lanes have."""
SLOWEST_BYTES_PER_S = 2e6
"""A lane gets so much more time as this takes for what it was asked for. A slower one is of no use for KV."""
SUSPICIOUS_S = 2.0
"""A hand-off that is given up when its lane has been quiet for so long makes the next ones avoid that."""
LOOK_EVERY_S = 0.5

Path = tuple[str, Stamp]  # lane, peer


@dataclass(slots=True)
class _Quiet:
    """Something is under way. `since_s`: when the last operation ended, or the first of them began."""

    since_s: float
    operations: int = 0
    nbytes: int = 0


class Stalls:
    """As many entries as paths with an operation under way. Each may be quiet for `stalled_s`, and longer where much is
    asked for."""

    def __init__(self, stalled_s: float = STALLED_S) -> None:
        self._stalled_s = stalled_s
        self._paths: dict[Path, _Quiet] = {}
        self._seen_s = 0.0  # of time in which this process looked
        self._looked_at_s: float | None = None

    def began(self, path: Path, nbytes: int) -> None:
        """An operation of `nbytes`."""
        quiet = self._paths.setdefault(path, _Quiet(self._seen_s))
        quiet.operations += 1
        quiet.nbytes += nbytes

    def ended(self, path: Path, nbytes: int) -> None:
        """One of them, one way or the other."""
        quiet = self._paths[path]
        quiet.since_s = self._seen_s
        quiet.operations -= 1
        quiet.nbytes -= nbytes
        if not quiet.operations:
            del self._paths[path]

    def look(self, now: float) -> list[Path]:
        """Those that have stalled; each has its time once more afterwards. To be called with every turn."""
        if not self._paths:
            self._looked_at_s = None
            return []
        if self._looked_at_s is None:
            self._looked_at_s = now
        if now - self._looked_at_s < LOOK_EVERY_S:
            return []
        self._seen_s += min(now - self._looked_at_s, 2 * LOOK_EVERY_S)
        self._looked_at_s = now
        stalled = [path for path, quiet in self._paths.items() if self._seen_s - quiet.since_s > self._allowed_s(quiet)]
        for path in stalled:
            self._paths[path].since_s = self._seen_s
        return stalled

    def is_suspicious(self, path: Path) -> bool:
        """Something is under way on it, and nothing has ended for a while."""
        quiet = self._paths.get(path)
        return quiet is not None and self._seen_s - quiet.since_s >= SUSPICIOUS_S

    def wait_s(self) -> float | None:
        """How soon `look` is wanted; None: not before something begins."""
        return LOOK_EVERY_S if self._paths else None

    def _allowed_s(self, quiet: _Quiet) -> float:
        return self._stalled_s + quiet.nbytes / SLOWEST_BYTES_PER_S
