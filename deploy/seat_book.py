"""The seats of a cluster: which are wanted, from which revision, and whose turn it is to be replaced. Pure.

Owns: what is remembered of each seat, and how a changed plan is worked off. Never: moves a seat to another state, or
wants anything done (`controller_core` does).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from baton.common.ids import WorkerId
from baton.deploy.controller_seats import (
    COMPUTE_ROLES,
    GivenUp,
    Keep,
    Leaving,
    Live,
    SeatSpec,
    SeatState,
    Vacant,
)
from baton.deploy.turns import Turn, next_to_replace


@dataclass(slots=True)
class Seat:
    """`surplus`: not wanted any more, so whoever sits here leaves, and the seat with him. `proven`: the revision of the
    last process that stayed here for a while (None: there was none yet); `revision`: that of the last one."""

    spec: SeatSpec
    state: SeatState
    proven: int | None
    revision: int = 1
    tries: int = 0  # to start one of a revision that is not proven
    surplus: bool = False
    last_incarnation: int = 0
    restarts: int = 0
    failures_in_row: int = 0
    started_at_s: list[float] = field(default_factory=list)  # within the restart window
    last_failure: str = ""

    @property
    def is_outdated(self) -> bool:
        """It was started with another revision than is wanted."""
        return self.revision != self.spec.revision

    @property
    def is_proven(self) -> bool:
        """Somebody of the revision that is wanted has stayed here for a while, whoever sits here now."""
        return self.proven == self.spec.revision


class SeatBook:
    """`first_incarnation`: of seats that are added."""

    def __init__(self, specs: Iterable[SeatSpec], now: float) -> None:
        specs = tuple(specs)
        known = {spec.fallback or spec.revision for spec in specs if not spec.extra}
        self.seats = {spec.worker: Seat(spec, Vacant(now), _proven(spec, known)) for spec in specs}
        self.first_incarnation = 1
        self.given_up: GivenUp | None = None  # the upgrade that was the last change
        self._is_kept = not any(spec.fallback for spec in specs)
        self._used: dict[WorkerId, int] = {}  # incarnations of seats that are gone

    def want(self, specs: Iterable[SeatSpec], now: float) -> None:
        """These, from now on. The roles of seats that are there stay as they are, but where somebody leaves who was not
        wanted any more: who comes there next was asked for with a role."""
        wanted = {spec.worker: spec for spec in specs}
        self.given_up = None
        self._is_kept = not any(spec.fallback for spec in wanted.values())
        known = {seat.proven for seat in self.seats.values() if seat.proven is not None}
        for worker, seat in self.seats.items():
            spec = wanted.get(worker)
            comes_anew = seat.surplus and not isinstance(seat.state, Live)
            seat.surplus = spec is None
            if spec is not None and spec.revision != seat.spec.revision:
                seat.tries = 0
            if spec is not None:
                seat.spec = spec if comes_anew else replace(spec, role=seat.spec.role)
        for worker, spec in wanted.items():
            if worker not in self.seats:
                last = max(self.first_incarnation - 1, self._used.get(worker, 0))
                self.seats[worker] = Seat(spec, Vacant(now), _proven(spec, known), last_incarnation=last)

    def remove(self, seat: Seat) -> None:
        """Nobody sits there. Its incarnations are never given again, should it come back."""
        self._used[seat.spec.worker] = seat.last_incarnation
        del self.seats[seat.spec.worker]

    @property
    def upgrading(self) -> bool:
        """Somewhere the revision that is wanted has not proven itself."""
        return any(not (seat.surplus or seat.spec.extra or seat.is_proven) for seat in self.seats.values())

    @property
    def changing(self) -> bool:
        """The cluster is not yet as it is wanted, but for those who have died."""
        return self.upgrading or any(seat.is_outdated or self.is_surplus(seat) for seat in self.seats.values())

    def is_surplus(self, seat: Seat) -> bool:
        """Nobody shall sit there any more."""
        return seat.surplus or (seat.spec.extra and not self.upgrading)

    def has_peer(self, seat: Seat, *, but_extra: bool = False) -> bool:
        """Somebody else of its role takes requests, and stays."""
        others = [one for one in self.seats.values() if one is not seat and one.spec.role == seat.spec.role]
        stay = [one for one in others if not (self.is_surplus(one) or (but_extra and one.spec.extra))]
        return any(isinstance(one.state, Live) for one in stay)

    def may_leave(self, seat: Seat) -> bool:
        """Who is not wanted any more waits for another one of its role. A prefill worker does not where nobody is to be
        one: decode workers do without. (Who was one may be forgotten with the controller that had made him one.)"""
        wanted = any(one.spec.role == seat.spec.role and not self.is_surplus(one) for one in self.seats.values())
        return self.has_peer(seat) or (seat.spec.role == "prefill" and not wanted)

    def prove(self, stay_s: float, now: float) -> None:
        """Who has stayed for so long has proven his revision."""
        for seat in self.seats.values():
            stays = isinstance(seat.state, Live) and now >= seat.state.since_s + stay_s
            if stays and seat.proven != seat.revision:
                seat.proven, seat.tries = seat.revision, 0

    def next_outdated(self) -> Seat | None:
        """Whose process is to leave for one of the revision that is wanted; None: nobody's, or not yet."""
        seats = [seat for seat in self.seats.values() if not self.is_surplus(seat)]
        if not any(seat.is_outdated for seat in seats):
            return None
        turns = [
            Turn(
                seat.spec.worker,
                seat.spec.role,
                there=isinstance(seat.state, Live) and (seat.is_outdated or seat.is_proven),
                outdated=seat.is_outdated,
                alone=not self.has_peer(seat),
            )
            for seat in seats
        ]
        worker = next_to_replace(turns)
        return None if worker is None else self.seats[worker]

    def give_up_upgrade(self, revision: int, reason: str) -> None:
        """It does not come up: where it is not there yet, the one before stays, or comes back."""
        self.given_up, self._is_kept = GivenUp(revision, reason), False
        for seat in self.seats.values():
            if seat.spec.revision != revision or seat.is_proven:
                continue
            if isinstance(seat.state, Live | Leaving) and seat.revision == revision:
                seat.proven = revision
            elif seat.proven is None:
                seat.surplus = True
            else:
                seat.spec = replace(seat.spec, revision=seat.proven)

    def keep(self) -> Keep | None:
        """Once, when an upgrade is over. Told to who remembers for the next controller: that one would begin a revision
        again that was given up, or give up one that has proven itself."""
        if self._is_kept or self.upgrading:
            return None
        self._is_kept = True
        there = [one for one in self.seats.values() if not (self.is_surplus(one) and isinstance(one.state, Vacant))]
        # Who still leaves is nobody that the next controller may overlook.
        specs = tuple(replace(one.spec, fallback=0, extra=self.is_surplus(one)) for one in there)
        return Keep(specs, self._serves(specs), self.given_up)

    def _serves(self, specs: Collection[SeatSpec]) -> int:
        """The revision of most workers, but not one that was given up as long as any are of another one."""
        failed = self.given_up.revision if self.given_up is not None else 0
        counts = Counter(spec.revision for spec in specs if spec.role in COMPUTE_ROLES and not spec.extra)
        return min(counts, key=lambda revision: (revision == failed, -counts[revision], revision))


def _proven(spec: SeatSpec, known: Collection[int]) -> int | None:
    """The revision that is known to come up there. None: none is."""
    return spec.revision if spec.revision in known else spec.fallback or None
