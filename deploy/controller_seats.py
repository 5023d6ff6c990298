"""States of a seat of the cluster, and what a controller can want: the words of `controller_core`. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from msgspec import Struct

from baton.common.by_name import ByName
from baton.common.ids import WorkerId
from baton.common.messages import Body, Member, Membership

COMPUTE_ROLES = frozenset({"prefill", "decode"})
"""Roles that exchange KV pages."""


@dataclass(frozen=True, slots=True)
class SeatSpec(ByName):
    """A place in the cluster that is to be filled at all times. `role` is that of its next process, and of the one that
    sits there unless it is `Leaving` or `Killing`; the name is for ever, whatever role it was given for. `revision`: of
    the settings that its next process is started with; `fallback`: of those that it has again if that one does not come
    up (0: it is known to). `extra`: wanted only while an upgrade is under way."""

    worker: WorkerId
    role: str
    revision: int = 1
    extra: bool = False
    fallback: int = 0


@dataclass(frozen=True, slots=True)
class GivenUp(ByName):
    """A revision that did not come up."""

    revision: int
    reason: str


# ----------------------------------------------------------------------------------------- seat states


@dataclass(frozen=True, slots=True)
class Vacant:
    """Nobody sits here. A process is started at `start_at_s`."""

    start_at_s: float


@dataclass(frozen=True, slots=True)
class Starting:
    """A process was started and has not been admitted yet: it loads its model."""

    incarnation: int
    deadline_s: float


class Live(Struct, frozen=True):
    """Admitted, and a member until proven dead."""

    member: Member
    since_s: float
    heard_s: float
    knows: int = 0  # the version of the membership that it goes by


class Leaving(Struct, frozen=True):
    """A member that takes nothing new and finishes what it has, until `deadline_s`. Its seat has the role that its
    successor will have."""

    member: Member
    since_s: float
    heard_s: float
    deadline_s: float
    knows: int = 0  # as above


@dataclass(frozen=True, slots=True)
class Killing:
    """To be gone, not proven gone. `member` is still published when it was admitted (C1). `planned`: no failure."""

    incarnation: int
    member: Member | None
    reason: str
    retry_at_s: float
    planned: bool = False


@dataclass(frozen=True, slots=True)
class Retired:
    """Shut down for good."""


SeatState = Vacant | Starting | Live | Leaving | Killing | Retired


# --------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a process for this seat; report `on_start_failed` or, later, `on_dead`."""

    spec: SeatSpec
    incarnation: int


@dataclass(frozen=True, slots=True)
class DrainWorker:
    """Tell the process to take nothing new; report `on_drained` when what it had has ended. Telling it twice is
    harmless."""

    worker: WorkerId
    incarnation: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill the process for sure, then report `on_dead`. Repeated until that report; killing twice is harmless."""

    worker: WorkerId
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Send this view to these members of it."""

    membership: Membership
    readers: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a process that is not (yet) a member."""

    member: Member
    body: Body


@dataclass(frozen=True, slots=True)
class Keep:
    """An upgrade is over: it has come up, or was given up. These are the seats from now on, also for the next
    controller; new workers are of the revision that `serves`."""

    specs: tuple[SeatSpec, ...]
    serves: int
    given_up: GivenUp | None


Effect = StartWorker | DrainWorker | KillWorker | Publish | Reply | Keep


@dataclass(frozen=True, slots=True)
class Refused:
    """What was asked of the controller is not done, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class SeatStatus(ByName):
    """What an operator is told of one seat. `role`, `revision`: of the process that is there, or of the next one.
    `differs`: of what its group does not share with the first one, field -> "its != theirs"."""

    worker: WorkerId
    role: str
    state: str
    incarnation: int
    detail: str
    restarts: int
    revision: int = 1
    group: str = ""
    release: str = ""
    differs: Mapping[str, str] = field(default_factory=dict)


def incarnation_of(state: SeatState) -> int:
    """Of the process that sits there; 0 when nobody does."""
    match state:
        case Live() | Leaving():
            return state.member.stamp.incarnation
        case Starting() | Killing():
            return state.incarnation
        case Vacant() | Retired():
            return 0
        case _:
            assert_never(state)


def member_of(state: SeatState) -> Member | None:
    match state:
        case Live() | Leaving() | Killing():
            return state.member
        case Vacant() | Starting() | Retired():
            return None
        case _:
            assert_never(state)
