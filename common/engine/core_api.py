"""The border between an engine core and the shell that runs it: events in, effects and batches out.

Cores are pure and synchronous. The shell (`loop.py` in a worker, the simulator in tests) feeds them events with the
time, runs the batches they plan, and carries out the effects they return.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from baton.common.compat import NO_GROUP
from baton.common.engine.batch import Batch, StepResult
from baton.common.ids import Stamp, WorkerId
from baton.common.kv.census import Holding
from baton.common.kv.record import ReqKvInfo
from baton.common.messages import Body, Load, Member


class FromPeer(Struct, frozen=True):
    """A request-level wire message and who sent it: for a decode core those of gateways, for a gateway those of decode
    workers and everybody's Heartbeat."""

    sender: Stamp
    body: Body


class SendTo(Struct, frozen=True):
    """Effect: a wire message to a worker. `epoch` 0 sends it to whoever sits there now."""

    worker: WorkerId
    epoch: int
    body: Body


@dataclass(frozen=True, slots=True)
class MembershipView:
    """Who is in the cluster. A stamp that was in an earlier view and is missing here is proven dead. `silent` are
    members that have not been heard for `dead_after_s`: avoid them, but they prove nothing."""

    version: int
    members: tuple[Member, ...]
    silent: frozenset[WorkerId] = frozenset()


def group_in(view: MembershipView, stamp: Stamp) -> str:
    """Of this process: hand-offs stay within it (baton.common.compat)."""
    return next((member.group for member in view.members if member.stamp == stamp), NO_GROUP)


@dataclass(frozen=True, slots=True)
class Drain:
    """Admit nothing new; finish what runs. `idle` tells when that is done."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """After `Drain`: there is no time left to finish what runs. Who asked for it is told to go on elsewhere."""


class EngineCore(Protocol):
    """A worker's brain. `Event` and `Effect` are this module's values and those of `baton.transfer.api`; a core
    matches on the ones it knows and fails loudly on any other. `stray_messages`: those of peers that are not for its
    role, counted and not heard."""

    stray_messages: int

    def handle(self, event: object, now: float) -> list[object]: ...

    def next_batch(self, now: float) -> Batch | None: ...

    def on_layers(self, layers: int, now: float) -> list[object]:
        """In the middle of a step whose batch asked for it: see `ModelRunner.launch`."""
        ...

    def on_step(self, result: StepResult, now: float) -> list[object]: ...

    def on_timer(self, now: float) -> list[object]: ...

    def next_deadline(self) -> float | None: ...

    def load(self) -> Load: ...

    def holdings(self) -> Iterable[Holding]: ...

    def records(self) -> list[ReqKvInfo]:
        """Those of `holdings`, for who looks often."""
        ...

    @property
    def idle(self) -> bool: ...
