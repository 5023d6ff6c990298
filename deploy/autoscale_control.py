"""The autoscaling policy at the controller's side: what it looks at, and what it asks for. Pure.

Owns: when the next look is due, and the demand of all gateways. Never: decides that somebody moves (the policy does) or
may move (`ControllerCore.replace_worker` does).
"""

from __future__ import annotations

from baton.common.messages import Member
from baton.deploy.autoscale import Flip, Policy, Role, Scaler, Seat
from baton.deploy.controller_core import ControllerCore
from baton.deploy.controller_seats import COMPUTE_ROLES, Effect, Refused
from baton.deploy.demand import DemandSum

LOOK_S = 1.0


class AutoscaleControl:
    """`look` when `due_s` has come."""

    def __init__(self, policy: Policy, now: float) -> None:
        self.due_s = now
        self._scaler = Scaler(policy)
        self._demand = DemandSum()

    def look(self, core: ControllerCore, now: float) -> tuple[list[Effect], tuple[Flip, ...]]:
        """What the controller is to do, and why. Nothing before a look is due."""
        if now < self.due_s:
            return [], ()
        self.due_s = now + LOOK_S
        live = core.live_members()
        demand = self._demand.heard(
            {one.stamp: one.load.demand for one in live if one.role == "gateway" and one.load.demand is not None}
        )
        seats = {one.stamp.worker: _seat(one) for one in live if one.role in COMPUTE_ROLES}
        changing = core.book.changing or len(seats) < self._scaler.policy.workers
        self._scaler, flips = self._scaler.look(demand, seats, changing, now)
        effects: list[Effect] = []
        for flip in flips:
            found = core.replace_worker(flip.worker, flip.role, now)
            effects += [] if isinstance(found, Refused) else found
        return effects, flips


def _seat(member: Member) -> Seat:
    role: Role = "prefill" if member.role == "prefill" else "decode"
    return Seat(role, member.load.queued + member.load.running)
