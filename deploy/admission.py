"""Who is let in at a gateway, when, and who is refused at once. Pure.

Owns: the room that decode workers have, the queue before them, the limits of API keys, and the measured speed. Never:
which worker somebody is given (`routing`), or a request's outcome (`gateway_core`).

A worker has room for as many as it has rows, and `dispatch_ahead_requests` more, so that its own queue never runs dry.
While it says that somebody waits there (for pages, say) it has room for as many as it runs, and those. So what cannot
be served yet waits here, where keys are told apart, and not there. Every gateway counts its own: two of them fill a
worker twice, and share it by its queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from baton.common.config import GatewayConfig
from baton.common.engine.core_api import MembershipView
from baton.common.errors import ErrorCode
from baton.common.ids import RequestId, Stamp
from baton.common.messages import Failure, Load
from baton.deploy.admission_limits import QueueSpeed, RateLimits
from baton.deploy.admission_queue import FairQueue, Tenant
from baton.deploy.routing.loads import Loads

LEAST_RETRY_S = 1.0
MOST_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class Refused:
    failure: Failure
    retry_after_s: float


@final
class Admission:
    """`refusal`, then `enter`; `next_in` as long as there is somebody and room."""

    def __init__(self, settings: GatewayConfig, rows: int) -> None:
        """`rows`: requests that a decode worker runs at a time."""
        self._rows = rows
        self._ahead = settings.dispatch_ahead_requests
        self._max_requests = settings.max_inflight_requests
        self._max_tokens = settings.max_queued_tokens
        self._queue = FairQueue()
        self._limits = RateLimits()
        self._speed = QueueSpeed()
        self._rooms: dict[Stamp, int] = {}  # of decode workers that are there and answer
        self._loads = Loads()
        self.room = 0  # of all together
        self.nobody_since_s: float | None = 0.0  # has there been any room; None: there is some

    # ---------------------------------------------------------------------------------------- the cluster

    def on_view(self, view: MembershipView, now: float) -> None:
        decode = [member for member in view.members if member.role == "decode"]
        self._loads.keep({member.stamp for member in decode})
        before = self._rooms.keys()
        self._rooms = {
            member.stamp: self._room_of(self._loads.of(member))
            for member in decode
            if member.stamp.worker not in view.silent
        }
        if self._rooms.keys() != before:
            self._speed.forget()
        self._count(sum(self._rooms.values()), now)

    def heard(self, stamp: Stamp, load: Load, now: float) -> None:
        known = self._loads.heard(stamp, load)
        if stamp in self._rooms:
            before, self._rooms[stamp] = self._rooms[stamp], self._room_of(known)
            self._count(self.room + self._rooms[stamp] - before, now)

    def _room_of(self, load: Load) -> int:
        if load.draining:
            return 0
        return (min(load.running, self._rows) if load.queued else self._rows) + self._ahead

    def _count(self, room: int, now: float) -> None:
        self.room = room
        if room:
            self.nobody_since_s = None
        elif self.nobody_since_s is None:
            self.nobody_since_s = now

    # ------------------------------------------------------------------------------------------- requests

    def __contains__(self, request_id: RequestId) -> bool:
        """It waits here."""
        return request_id in self._queue

    @property
    def queued(self) -> int:
        return len(self._queue)

    def refusal(self, tenant: Tenant, priority: int, timeout_s: float, now: float) -> Refused | None:
        """Why one more is not to wait here, room or not; None: it may. What is not known is no reason."""
        wait_s, limit = self._limits.wait_s(tenant, now)
        if wait_s > 0:
            return _refused(ErrorCode.RATE_LIMITED, f"this key may ask for {limit}", wait_s)
        expected_s = self.wait_s(tenant, priority)
        if expected_s is not None and expected_s > timeout_s:
            reason = f"its turn would come in about {expected_s:.1f} s, and it has {timeout_s:.1f} s"
            return _refused(ErrorCode.DEADLINE_UNREACHABLE, reason, expected_s - timeout_s)
        return None

    def give_way(self, tenant: Tenant, tokens: int, in_flight: int) -> list[RequestId] | None:
        """Who loses his place to a prompt of so many tokens of this key, so that there is one and the tokens are not
        too many; mostly nobody. None: nobody does, and there is none. `in_flight`: all that have not ended."""
        leaving: list[RequestId] = []
        if in_flight >= self._max_requests:
            victim = self._queue.last_of_longest(tenant)
            if victim is None:
                return None
            leaving.append(victim)
        waiting = self._queue.tokens - sum(map(self._queue.tokens_of, leaving))
        excess = min(waiting, waiting + tokens - self._max_tokens)  # one that waits alone may be as long as it is
        if excess > 0:
            heaviest = self._queue.last_of_heaviest(tenant, tokens, excess, leaving)
            return None if heaviest is None else [*leaving, *heaviest]
        return leaving

    def full(self, tenant: Tenant, in_flight: int) -> Refused:
        """What is said to who has no place, or loses it."""
        reason = (
            f"{in_flight} requests are in flight (gateway.max_inflight_requests: {self._max_requests}), prompts of "
            f"{self._queue.tokens} tokens wait (gateway.max_queued_tokens: {self._max_tokens})"
        )
        return _refused(ErrorCode.OVERLOADED, reason, self.wait_s(tenant, 0) or 0.0)

    def wait_s(self, tenant: Tenant, priority: int) -> float | None:
        """Until one that comes now would have its turn, by what was measured; None: not known."""
        speed = self._speed.tokens_per_s
        return self._queue.tokens_before(tenant, priority) / speed if speed else None

    def enter(self, request_id: RequestId, tenant: Tenant, priority: int, tokens: int, now: float) -> None:
        """It waits for its turn, if only for a moment."""
        self._limits.admitted(tenant, tokens, now)
        self._queue.join(request_id, tenant, priority, tokens)

    def next_in(self, in_flight: int, now: float) -> RequestId | None:
        """Whose turn it is; None: nobody's, or there is no room. `in_flight`: all that have not ended."""
        if not self._queue or in_flight - len(self._queue) >= self.room:
            return None
        request_id, tokens = self._queue.pop()
        self._speed.left(tokens, now, waiting=bool(self._queue))
        return request_id

    def rest(self, now: float) -> None:
        """Nobody else has a turn for now."""
        if self._queue:
            self._speed.waits(now)

    def left(self, request_id: RequestId) -> None:
        """It has ended, wherever it was."""
        if request_id in self._queue:
            self._queue.leave(request_id)
            if not self._queue:
                self._speed.emptied()

    def said(self, tenant: Tenant, tokens: int, now: float) -> None:
        """So many more tokens of an answer to this key have come."""
        self._queue.said(tenant, tokens)
        self._limits.said(tenant, tokens, now)

    def lengths(self) -> Mapping[str, tuple[int, int]]:
        """(requests, tokens of their prompts) that wait, by key."""
        return self._queue.lengths()


def _refused(code: ErrorCode, reason: str, wait_s: float) -> Refused:
    return Refused(Failure(code=code, reason=reason), min(max(wait_s, LEAST_RETRY_S), MOST_RETRY_S))
