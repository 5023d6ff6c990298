"""What a gateway knows of the workers that it chooses from, kept up to date; and the choice. Pure.

Owns: the last load of each member, how many requests this gateway has placed on it, and the seats of either role.
Never: knows a request, or sends anything.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import numpy as np
import numpy.typing as npt

from baton.common.engine.core_api import MembershipView
from baton.common.ids import Stamp
from baton.common.messages import Load
from baton.deploy.routing.seats import Seats

Role = Literal["prefill", "decode"]


class Router:
    """`on_view`, `heard` and `placed` tell it news; `choose` answers."""

    def __init__(self) -> None:
        self._seats: dict[Role, Seats] = {"prefill": Seats(), "decode": Seats()}  # those who could take a request now
        self._loads: dict[Stamp, Load] = {}
        self._placed: dict[Stamp, int] = {}  # requests on decode workers, and prompts on prefill workers

    def on_view(self, view: MembershipView) -> None:
        """Who is there now. What was placed on somebody who is not stays counted until it is taken back."""
        alive = {member.stamp for member in view.members}
        self._loads = {stamp: load for stamp, load in self._loads.items() if stamp in alive}
        self._seats = {"prefill": self._seats_of(view, "prefill"), "decode": self._seats_of(view, "decode")}

    def heard(self, stamp: Stamp, load: Load) -> None:
        """A heartbeat."""
        self._loads[stamp] = load
        for seats in self._seats.values():
            seats.heard(stamp, load)

    def placed(self, stamp: Stamp, more: int) -> None:
        """So many more (or fewer) of this gateway's requests are there."""
        placed = self._placed.get(stamp, 0) + more
        self._placed[stamp] = placed
        if not placed:
            del self._placed[stamp]
        for seats in self._seats.values():
            seats.placed(stamp, placed)

    def choose(self, role: Role, prompt: npt.NDArray[np.int32], refused_by: Collection[Stamp] = ()) -> Stamp | None:
        """The worker for a prompt, none of `refused_by`; None when there is no candidate."""
        return self._seats[role].choose(prompt, refused_by)

    def seats(self, role: Role) -> Seats:
        """Who is there and has been heard."""
        return self._seats[role]

    @property
    def idle(self) -> bool:
        """Nothing of this gateway's is anywhere."""
        return not self._placed

    def _seats_of(self, view: MembershipView, role: Role) -> Seats:
        members = [one for one in view.members if one.role == role and one.stamp.worker not in view.silent]
        seats = Seats(one.stamp for one in members)
        for one in members:
            seats.heard(one.stamp, self._loads.get(one.stamp, one.load))
            seats.placed(one.stamp, self._placed.get(one.stamp, 0))
        return seats
