"""What a controller may want of its seats, and when: an oracle beside its core.

A cluster in which too many leave, or come up too often, still answers: others take the work. So each order is compared
with what was true when it was given. Owns an account of the orders of one controller; its successor has its own.

- S1  A seat has at most `max_restarts_per_minute` processes in a minute (C4).
- S2  Nobody changes his role who is the last of it (C5); the next process in his seat has the new one.
- S3  Whoever leaves for an upgrade does so when all others are there (C6).
- S4  Nobody who has not begun by himself is told to leave while no other worker of his role takes requests: one that
      was published, and was told neither to leave nor to die. Seen from what controllers say, not from their seats.
      But where nobody is to be a prefill worker, one need not wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.common.config import LivenessConfig
from baton.common.ids import Stamp, WorkerId
from baton.common.messages import Member, Membership
from baton.deploy.controller_core import ControllerCore
from baton.deploy.controller_seats import COMPUTE_ROLES, DrainWorker, SeatSpec

MINUTE_S = 60.0


class SeatWatch:
    """Of one controller."""

    def __init__(self, core: ControllerCore, liveness: LivenessConfig) -> None:
        self._core = core
        self._most = liveness.max_restarts_per_minute
        self._started_s: dict[WorkerId, list[float]] = {}
        self._roles: dict[WorkerId, str] = {}  # that an operator wants

    def starts(self, spec: SeatSpec, now: float) -> None:
        recent = [at_s for at_s in self._started_s.get(spec.worker, ()) if at_s > now - MINUTE_S]
        assert len(recent) < self._most, f"{spec.worker} is started at {now} after {recent} (S1)"
        self._started_s[spec.worker] = [*recent, now]
        wanted = self._roles.get(spec.worker, spec.role)
        assert spec.role == wanted, f"{spec.worker} becomes {spec.role}, and was to become {wanted} (S2)"

    def flipped(self, worker: WorkerId, role: str, live: Iterable[Member]) -> None:
        """That was granted; `live`: who took requests before."""
        own = next(one for one in live if one.stamp.worker == worker)
        others = [one for one in live if one is not own and one.role == own.role]
        assert others, f"{worker} was the last {own.role} worker, and leaves (S2)"
        self._roles[worker] = role

    def wants(self, specs: Iterable[SeatSpec]) -> None:
        """Another cluster: a seat that is not in it may come again with any role."""
        there = {spec.worker for spec in specs}
        self._roles = {worker: role for worker, role in self._roles.items() if worker in there}

    def upgrades(self, effects: Iterable[object]) -> None:
        """What came of a change, or of the time."""
        leaving = {one.worker for one in effects if isinstance(one, DrainWorker)}
        if not leaving:
            return
        seats = {seat.spec.worker: seat for seat in self._core.book.seats.values()}
        going = {worker for worker in leaving if not self._core.book.is_surplus(seats[worker])}
        states = {one.worker: one.state for one in self._core.status()}
        away = {
            worker
            for worker, state in states.items()
            if state != "live" and not self._core.book.is_surplus(seats[worker])
        }
        assert len(going) <= 1, f"{going} leave at once (S3)"
        assert not going or away <= leaving, f"{going} leave while {away} are not there (S3)"


class LeaveWatch:
    """Of all controllers of a world (S4)."""

    def __init__(self) -> None:
        self._published: dict[Stamp, str] = {}  # -> role
        self._going: set[Stamp] = set()

    def published(self, membership: Membership) -> None:
        self._published = {member.stamp: member.role for member in membership.members}

    def dies(self, worker: WorkerId, incarnation: int) -> None:
        """By order."""
        self._going |= {one for one in self._published if (one.worker, one.incarnation) == (worker, incarnation)}

    def leaves(self, stamp: Stamp, role: str, wanted: bool) -> None:
        """`wanted`: that role is one that the cluster is to have, or cannot be without."""
        if stamp in self._going:
            return  # told again, by the next controller
        self._going.add(stamp)
        others = [one for one, its in self._published.items() if its == role and one not in self._going]
        assert others or not wanted or role not in COMPUTE_ROLES, f"{stamp} leaves, the last {role} worker (S4)"
