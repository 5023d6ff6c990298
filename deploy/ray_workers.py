"""A gateway's workers, asked over Ray for what people and scrapers want to know; never for a request.

Owns: how long they may take to answer, and that one trace is recorded at a time. Never: what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from ray.actor import ActorHandle

from baton.common.errors import ErrorCode, RequestError
from baton.common.ids import CONTROLLER, WorkerId
from baton.common.kv.layout import Component
from baton.common.log import EventLog
from baton.common.trace import ProcessTrace
from baton.deploy.controller_seats import COMPUTE_ROLES
from baton.deploy.ray_side import find_process
from baton.deploy.status import ClusterView, SeatView
from baton.transfer.io import IoThread
from baton.transfer.process import actor_name
from baton.transfer.reports import HandoffTimes, WorkerMetrics

STATUS_TIMEOUT_S = 3.0
RECORD_GRACE_S = 10.0
"""For a step that is under way when a recording begins and when it ends, and for the way of the spans."""

_log = EventLog("baton.gateway")


class RayWorkers:
    """`Workers` over their Ray actors, found by name. Ray's calls wait, so they run on threads of their own."""

    def __init__(self, cluster: str, io: IoThread) -> None:
        self._cluster = cluster
        self._io = io
        self._recording = asyncio.Lock()

    async def statuses(self) -> Mapping[str, object]:
        return await asyncio.to_thread(self._ask_all, "status")

    async def cluster(self) -> ClusterView:
        return await asyncio.to_thread(self._cluster_view)

    def _cluster_view(self) -> ClusterView:
        controller = find_process(self._cluster, CONTROLLER)
        try:
            status = None if controller is None else ray.get(controller.status.remote(), timeout=STATUS_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            _log.warning("controller_without_answer", error=str(error)[:200])
            return ClusterView()
        if status is None:
            return ClusterView()
        seats = [
            SeatView(
                worker=seat.worker,
                role=seat.role,
                state=seat.state,
                incarnation=seat.incarnation,
                detail=seat.detail,
                revision=seat.revision,
                group=seat.group,
                release=seat.release,
                differs=dict(seat.differs),
            )
            for seat in status.seats
        ]
        return ClusterView(seats=seats, given_up=status.halted)

    async def page_owner(self, worker: str, page: int, component: Component | None) -> str:
        owner: str = await asyncio.to_thread(self._ask_one, worker, "page_owner", page, component)
        return owner

    async def metrics(self) -> Mapping[str, WorkerMetrics]:
        """The controller's, too."""
        return await asyncio.to_thread(self._ask_all, "metrics", others=(CONTROLLER,))

    async def handoffs(self, worker: str) -> list[HandoffTimes]:
        times: list[HandoffTimes] = await asyncio.to_thread(self._ask_one, worker, "handoffs")
        return times

    async def record(self, seconds: float) -> list[ProcessTrace]:
        if self._recording.locked():
            raise RequestError(ErrorCode.OVERLOADED, "a trace is being recorded already", retry_after_s=seconds)
        async with self._recording:
            found = await asyncio.to_thread(self._ask_all, "record", seconds, patience_s=seconds + RECORD_GRACE_S)
        return [trace for _, trace in sorted(found.items())]

    def _ask_all(
        self,
        method: str,
        *arguments: object,
        patience_s: float = STATUS_TIMEOUT_S,
        others: tuple[WorkerId, ...] = (),
    ) -> dict[str, Any]:
        """Of each worker's `method`, and that of `others`. Those that do not answer in time are left out: nobody must
        hang on the one process that is ill."""
        actors = self._actors()
        for name in others:
            if (actor := find_process(self._cluster, name)) is not None:
                actors[name] = actor
        refs = {getattr(actor, method).remote(*arguments): worker for worker, actor in actors.items()}
        answered, _ = ray.wait(list(refs), num_returns=len(refs), timeout=patience_s) if refs else ([], [])
        answers: dict[str, Any] = {}
        for reference in answered:
            try:
                answers[refs[reference]] = ray.get(reference)
            except ray.exceptions.RayError as error:
                _log.warning("worker_without_answer", worker=refs[reference], asked=method, error=str(error)[:200])
        return answers

    def _ask_one(self, worker: str, method: str, *arguments: object) -> Any:
        """Raises RequestError, also that of the worker."""
        actors = self._actors()
        actor = actors.get(WorkerId(worker))
        if actor is None:
            reason = f"there is no worker {worker!r} with pages: there are {', '.join(sorted(actors)) or 'none'}"
            raise RequestError(ErrorCode.INVALID_REQUEST, reason, "worker")
        try:
            return ray.get(getattr(actor, method).remote(*arguments), timeout=STATUS_TIMEOUT_S)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RequestError):
                raise error.cause from None
            raise RequestError(ErrorCode.NO_WORKER, f"{worker} cannot tell: {error.cause}", "worker") from error
        except ray.exceptions.RayError as error:
            raise RequestError(ErrorCode.NO_WORKER, f"{worker} does not answer", "worker") from error

    def _actors(self) -> dict[WorkerId, ActorHandle]:
        """Of the members that hold KV."""
        found = {}
        for member in self._io.snapshot().members:
            if member.role in COMPUTE_ROLES:
                actor = find_process(self._cluster, actor_name(member.stamp.worker, member.stamp.incarnation))
                if actor is not None:
                    found[member.stamp.worker] = actor
        return found
