"""What every process actor of a cluster (prefill, decode, gateway) offers to the controller, and in which threads.

Owns: the method names, their concurrency groups, `ProcessReport`. Never: behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import ray

from baton.common.messages import Member, Membership

HEALTH = "health"
WATCH = "watch"
INQUIRY = "inquiry"
CONCURRENCY_GROUPS = {HEALTH: 4, WATCH: 4, INQUIRY: 2}
"""Threads per group. `health` answers at once, while `start` loads and while the engine is stuck: who does not answer
there is killed. `watch` only waits. `inquiry` is what people ask: it may wait for the engine, so it has no thread of
the others, however many ask."""

MethodT = TypeVar("MethodT", bound=Callable[..., object])


def in_group(group: str) -> Callable[[MethodT], MethodT]:
    """Ray's decorator for an actor method, with its type kept."""
    return cast(Callable[[MethodT], MethodT], ray.method(concurrency_group=group))


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """What a live process knows: itself when it has loaded, and the last membership it was told."""

    member: Member | None
    view: Membership | None


class ProcessActor(Protocol):
    """Constructed with one `ProcessSpec`. The constructor registers the process and returns quickly."""

    def start(self) -> None:
        """Loads, opens sockets, says Hello until admitted. Raises when this cannot work. Called again, after a
        controller was restarted, it does nothing: the first call may have died with the controller that made it."""

    def progress(self) -> list[str]:
        """What `start` has said so far, one line per step. Group `health`."""

    def watch(self, watcher: int) -> None:
        """Returns when the process is told to end, or when another watcher comes. Group `watch`."""

    def report(self) -> ProcessReport:
        """For a controller that was restarted. Group `health`."""

    def rejoin(self, controller_address: str) -> None:
        """The controller is there now. Group `health`."""
