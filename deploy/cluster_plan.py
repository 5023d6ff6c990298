"""What a cluster shall be, and how it stands: what its controller is created with, is told, and tells. Pure.

Owns: the seats with their places on nodes, the settings of each revision. Never: what becomes of a seat meanwhile
(`seat_book.py`), or how a plan is made from another one (`changing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.common.by_name import ByName
from baton.common.config import ClusterConfig, PlacementConfig
from baton.common.messages import Member
from baton.deploy.autoscale import Policy
from baton.deploy.controller_seats import COMPUTE_ROLES, GivenUp, Keep, SeatSpec, SeatStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(ByName):
    """What Ray must find on a node to put a process there."""

    num_cpus: float = 0
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    node_labels: tuple[str, ...] = ()
    spread: bool = False


def place_of(role: str, placement: PlacementConfig) -> Place:
    """Of a process of this role: prefill, decode, gateway or controller. A worker's place is that of the role for which
    its seat was made, also when it has another one later."""
    named = {f"baton_{role}": 1.0} if placement.resources == "role" else {}
    if role not in COMPUTE_ROLES:
        return Place(resources=named, node_labels=placement.node_labels)
    return Place(
        num_cpus=placement.cpus,
        num_gpus=placement.gpus,
        resources=named,
        node_labels=placement.node_labels,
        spread=placement.strategy == "spread",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSeat(ByName):
    """One process the cluster shall have, at first in this role, and where it is placed by the settings with which its
    seat was made; those of its revision may say otherwise. `cores`: where these pin them."""

    spec: SeatSpec
    cores: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Settings(ByName):
    """Of one revision of a cluster."""

    config: ClusterConfig
    class_paths: Mapping[str, str]
    policy: Policy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan(ByName):
    """Everything a controller needs, also the one that Ray restarts."""

    config: ClusterConfig
    run_dir: str
    seats: tuple[PlannedSeat, ...]
    class_paths: Mapping[str, str]  # of each role: what its processes run
    launched_at_ms: int  # wall clock
    policy: Policy | None = None  # by which workers change their role; None: they keep it
    revision: int = 1  # of `config` and `class_paths`
    before: Mapping[int, Settings] = field(default_factory=dict)  # those of all other revisions
    given_up: GivenUp | None = None  # the last upgrade, until the next one

    @property
    def lasting(self) -> tuple[PlannedSeat, ...]:
        """Those that are still there when an upgrade is over."""
        return tuple(seat for seat in self.seats if not seat.spec.extra)

    @property
    def next_revision(self) -> int:
        """One that no process has ever had."""
        return max(self.revision, *self.before) + 1 if self.before else self.revision + 1

    @property
    def halted(self) -> str:
        """What became of the last upgrade, when it was given up; else ""."""
        if self.given_up is None:
            return ""
        failed = f"revision {self.given_up.revision} was given up: {self.given_up.reason}"
        return f"{failed}; revision {self.revision} serves"

    def after(self, kept: Keep) -> ClusterPlan:
        """What the cluster shall be from now on, as an upgrade is over, with as many workers as are asked for."""
        specs = {spec.worker: spec for spec in kept.specs}
        seats = [
            replace(seat, spec=replace(specs[seat.spec.worker], role=seat.spec.role))
            for seat in self.seats
            if seat.spec.worker in specs
        ]
        others = {**self.before, self.revision: Settings(self.config, self.class_paths, self.policy)}
        own = others.pop(kept.serves)
        workers = self.config.prefill + self.config.decode
        return replace(
            self,
            config=replace(own.config, prefill=self.config.prefill, decode=self.config.decode),
            class_paths=own.class_paths,
            policy=None if own.policy is None else replace(own.policy, workers=workers),
            seats=tuple(seats),
            revision=kept.serves,
            before=others,
            given_up=kept.given_up,
        )

    def settings(self, revision: int) -> Settings:
        """What processes of this revision are started with."""
        return self.before.get(revision, Settings(self.config, self.class_paths))


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStatus(ByName):
    """`revision` grows with every change of a seat; `wait_status` waits for it."""

    revision: int
    address: str
    ready: bool
    finished: bool
    version: int
    seats: tuple[SeatStatus, ...]
    members: tuple[Member, ...]
    transitions: tuple[str, ...]
    changing: bool = False  # the cluster is not yet as the plan has it
    halted: str = ""  # which revision the last upgrade gave up, why, and which one serves
    given_up: int = 0  # that revision
