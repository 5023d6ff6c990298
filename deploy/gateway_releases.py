"""Placements that a gateway has given up: their workers are told until they let go (G3 of `gateway_core`). Pure.

Owns: who is still to be told, and the ends of requests that wait for their worker's account of its time. Never: decides
that a placement is over, or that a request has ended.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from baton.common.deadlines import Deadlines
from baton.common.ids import RequestId, Stamp
from baton.common.messages import CancelRequest, FinishAck, Output, Timeline
from baton.deploy.gateway_states import GatewayEffect, RequestEnded, to_worker

PlacementKey = tuple[RequestId, int]
"""A request, and which of its placements."""

GRACE_S = 30.0
"""Behind the deadline of its request a worker must have given up by itself."""


@dataclass(frozen=True, slots=True)
class _Release:
    """A placement that was given up. Its worker is told until it says goodbye, is gone, or must have given up."""

    worker: Stamp
    expires_s: float
    answered: bool  # the client has its answer: a session keeps the turn


class Releases:
    """`resend_s`: between two words to a worker that has not let go."""

    def __init__(self, resend_s: float) -> None:
        self._resend_s = resend_s
        self._open: dict[PlacementKey, _Release] = {}
        self._timers: Deadlines[PlacementKey] = Deadlines()
        self._finished: dict[RequestId, RequestEnded] = {}  # told when the last placement's account is here, or due

    def give_up(
        self,
        key: PlacementKey,
        worker: Stamp,
        deadline_s: float,
        now: float,
        out: list[GatewayEffect],
        *,
        answered: bool,
    ) -> None:
        """Tells the worker to let go, again and again until it has. `deadline_s`: of the request; `answered`: the
        client has its answer."""
        self._open[key] = _Release(worker, deadline_s + GRACE_S, answered)
        out.append(_cancel(key, self._open[key]))
        again_s = now + self._resend_s  # and then a finished answer is told without the worker's account
        self._timers.set(key, min(again_s, deadline_s) if now < deadline_s else again_s)

    def finish(self, ended: RequestEnded) -> None:
        """Its last placement has been given up: this is told with the account of its worker, or without."""
        self._finished[ended.request_id] = ended

    def cancel(self, request_id: RequestId) -> RequestEnded | None:
        """Whoever was to be told of this end does not wait for the account."""
        return self._finished.pop(request_id, None)

    def let_go(self, sender: Stamp, key: PlacementKey, last: Output | None, out: list[GatewayEffect]) -> None:
        """Answers what came of a placement that is not current; `last`: its last word."""
        release = self._open.get(key)
        if last is None:
            answered = release is not None and release.answered
            out.append(to_worker(sender, CancelRequest(request_id=key[0], placement=key[1], answered=answered)))
            return
        out.append(to_worker(sender, FinishAck(request_id=key[0], placement=key[1])))
        if release is not None and release.worker == sender:
            self._forget(key, last.timeline, out)

    def keep(self, alive: Container[Stamp], out: list[GatewayEffect]) -> None:
        """Whoever is not among these need not be told any more."""
        for key in [key for key, release in self._open.items() if release.worker not in alive]:
            self._forget(key, None, out)

    def on_timer(self, now: float, out: list[GatewayEffect]) -> None:
        for key in self._timers.pop_due(now):
            release = self._open[key]
            self._tell_finished(key, None, out)
            if now >= release.expires_s:
                self._forget(key, None, out)
            else:
                out.append(_cancel(key, release))
                self._timers.set(key, now + self._resend_s)

    def next_s(self) -> float | None:
        """When `on_timer` has something to do."""
        return self._timers.next_s()

    @property
    def idle(self) -> bool:
        return not (self._open or self._finished)

    def _forget(self, key: PlacementKey, timeline: Timeline | None, out: list[GatewayEffect]) -> None:
        """Its worker has said goodbye, perhaps with an account of its time; or it is not told any more."""
        del self._open[key]
        self._timers.drop(key)
        self._tell_finished(key, timeline, out)

    def _tell_finished(self, key: PlacementKey, timeline: Timeline | None, out: list[GatewayEffect]) -> None:
        ended = self._finished.get(key[0])
        if ended is not None and ended.placements == key[1] + 1:
            del self._finished[key[0]]
            out.append(replace(ended, timeline=timeline))


def _cancel(key: PlacementKey, release: _Release) -> GatewayEffect:
    cancel = CancelRequest(request_id=key[0], placement=key[1], answered=release.answered)
    return to_worker(release.worker, cancel)
