"""Who is let in at a gateway, and who is not, compared with what must be: an oracle of the simulator.

Owns: an account of its own of who waits, who has been given to workers, and what each key has had, made from what goes
into a gateway and what comes out. Never: asks the code that it judges.

- F1  Nobody waits while a worker has room; nobody is let in without.
- F2  In a key, the most urgent is first, and of those the first. Nobody is more urgent than his key may be.
- F3  While two keys wait all the time, neither gets ahead of the other, for its weight, by more than twice what one
      prompt and the answers under way can be.
- F4  The gateway holds as many as it may. Who has no place has more there than others, for his weight.
- F5  A key is refused for its limits when it is beyond them, and only then; and told when it is not any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from baton.common.engine.core_api import MembershipView, SendTo
from baton.common.errors import ErrorCode
from baton.common.ids import RequestId, Stamp
from baton.common.messages import Load, Submit
from baton.deploy.admission import LEAST_RETRY_S, MOST_RETRY_S
from baton.deploy.admission_queue import ANSWER_TOKEN_WORK, Tenant
from baton.deploy.gateway_states import RequestEnded, TokensArrived
from baton.deploy.sim.clients import ClientRequest

ROUNDING = 1e-6
MINUTE_S = 60.0


class _Allowance:
    """What is left of so much in a minute, none of which is saved up for longer. It may be overdrawn."""

    def __init__(self, per_minute: float | None) -> None:
        self._per_minute = math.inf if per_minute is None else per_minute
        self._left, self._at_s = max(1.0, self._per_minute), -math.inf

    def take(self, amount: float, now: float) -> None:
        self._left, self._at_s = self._left_at(now) - amount, now

    def wait_s(self, now: float) -> float:
        """Until one more is within it."""
        return max(0.0, (1.0 - self._left_at(now)) * MINUTE_S / self._per_minute)

    def _left_at(self, now: float) -> float:
        if math.isinf(self._left):
            return self._left
        return min(max(1.0, self._per_minute), self._left + (now - self._at_s) * self._per_minute / MINUTE_S)


class _Key:
    """What one has had, and has there."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.work = 0.0
        self.waiting = 0
        self.answers = 0  # that those who were let in may still be given, at most
        self.requests = _Allowance(tenant.requests_per_minute)
        self.tokens = _Allowance(tenant.tokens_per_minute)

    def wait_s(self, now: float) -> float:
        return max(self.requests.wait_s(now), self.tokens.wait_s(now))

    @property
    def served(self) -> float:
        return self.work / self.tenant.weight

    @property
    def length(self) -> float:
        return self.waiting / self.tenant.weight


@dataclass(slots=True)
class _Race:
    """Two keys that have been waiting all the time: how far the one was ahead, least and most."""

    least: float
    most: float
    bound: float


class AdmissionWatch:
    """Of one gateway."""

    def __init__(self, name: str, rows: int, ahead: int, max_requests: int) -> None:
        self._name = name
        self._rows = rows
        self._ahead = ahead
        self._max_requests = max_requests
        self._heard: dict[Stamp, Load] = {}
        self._loads: dict[Stamp, Load] = {}  # of decode workers; as long as nothing was heard, what the view says
        self._draining: set[Stamp] = set()  # for good
        self._silent: set[Stamp] = set()
        self._room = 0
        self._waiting: dict[RequestId, ClientRequest] = {}  # in the order of their arrival
        self._inside: dict[RequestId, ClientRequest] = {}
        self._keys: dict[str, _Key] = {}
        self._races: dict[tuple[str, str], _Race] = {}
        self._longest_prompt = 0
        self._newest: ClientRequest | None = None  # of which nothing has been said yet

    # ------------------------------------------------------------------------------------- what goes in

    def view(self, view: MembershipView) -> None:
        decode = [member for member in view.members if member.role == "decode"]
        self._draining |= {member.stamp for member in decode if member.load.draining}
        self._loads = {member.stamp: self._heard.get(member.stamp, member.load) for member in decode}
        self._silent = {member.stamp for member in decode if member.stamp.worker in view.silent}
        self._room = sum(self._room_of(stamp) for stamp in self._loads)

    def heard(self, stamp: Stamp, load: Load) -> None:
        self._heard[stamp] = load
        before = self._room_of(stamp) if stamp in self._loads else 0
        if load.draining:
            self._draining.add(stamp)
        if stamp in self._loads:
            self._loads[stamp] = load
            self._room += self._room_of(stamp) - before

    def _room_of(self, stamp: Stamp) -> int:
        load = self._loads[stamp]
        if stamp in self._silent or stamp in self._draining:
            return 0
        return self._ahead + (min(load.running, self._rows) if load.queued else self._rows)

    def asked(self, request: ClientRequest) -> None:
        """Before what comes of it."""
        key = self._keys.setdefault(request.tenant.name, _Key(request.tenant))
        key.waiting += 1
        self._waiting[request.request_id] = request
        self._longest_prompt = max(self._longest_prompt, len(request.prompt))
        self._newest = request

    def finished(self, request_id: RequestId) -> None:
        """It takes no room any more, though its end may be told later."""
        request = self._inside.pop(request_id, None)
        if request is not None:
            self._keys[request.tenant.name].answers -= request.sampling.max_tokens

    # ------------------------------------------------------------------------------------ what comes out

    def says(self, effects: Iterable[object], now: float) -> None:
        """All that came of one event."""
        before = len(self._inside)
        newest, self._newest = self._newest, None
        if newest is not None:
            self._limited(newest, effects, now)
        for effect in effects:
            match effect:
                case SendTo(body=Submit(request_id=request_id)) if request_id in self._waiting:
                    self._let_in(self._waiting[request_id])
                case TokensArrived(request_id=request_id, tokens=tokens):
                    self._said(self._inside[request_id], len(tokens), now)
                case RequestEnded(request_id=request_id):
                    self._ended(effect)
                case _:
                    pass
        self._look(before)
        self._race()

    def _limited(self, request: ClientRequest, effects: Iterable[object], now: float) -> None:
        """F5"""
        key, request_id = self._keys[request.tenant.name], request.request_id
        wait_s = key.wait_s(now)
        for effect in effects:
            if isinstance(effect, RequestEnded) and effect.request_id == request_id and effect.failure is not None:
                if effect.failure.code is ErrorCode.RATE_LIMITED:
                    told_s = effect.retry_after_s or 0.0
                    clipped_s = min(max(wait_s, LEAST_RETRY_S), MOST_RETRY_S)
                    right = wait_s > 0 and abs(told_s - clipped_s) <= ROUNDING
                    assert right, f"{request_id} is to wait {told_s} s, and is within its limits in {wait_s} s (F5)"
                return
        assert wait_s <= ROUNDING, f"{request_id} is let in, {wait_s} s before it is within the limits of its key (F5)"
        key.requests.take(1, now)
        key.tokens.take(len(request.prompt), now)

    def _let_in(self, request: ClientRequest) -> None:
        key = self._keys[request.tenant.name]
        own = (one for one in self._waiting.values() if one.tenant.name == request.tenant.name)
        most_urgent = request.tenant.top_priority
        first = min(own, key=lambda one: max(one.priority, most_urgent))  # of equals the first that came
        assert first is request, f"{self._name} lets {request.request_id} in before {first.request_id} (F2)"
        del self._waiting[request.request_id]
        self._inside[request.request_id] = request
        key.waiting -= 1
        key.work += len(request.prompt)
        key.answers += request.sampling.max_tokens

    def _said(self, request: ClientRequest, tokens: int, now: float) -> None:
        key = self._keys[request.tenant.name]
        key.work += ANSWER_TOKEN_WORK * tokens
        key.tokens.take(tokens, now)

    def _ended(self, effect: RequestEnded) -> None:
        inside = self._inside.pop(effect.request_id, None)
        if inside is not None:
            self._keys[inside.tenant.name].answers -= inside.sampling.max_tokens
            return
        request = self._waiting.pop(effect.request_id, None)
        if request is None:
            return  # a turn of a session that had one under way
        key = self._keys[request.tenant.name]
        key.waiting -= 1
        if effect.failure is not None and effect.failure.code is ErrorCode.OVERLOADED:
            held = len(self._waiting) + len(self._inside)
            assert held >= self._max_requests - 1, f"{self._name} is full with {held} of {self._max_requests} (F4)"
            most = max((one.length for one in self._keys.values() if one is not key), default=0.0)
            own = (key.waiting + 1) / key.tenant.weight
            assert own >= most - ROUNDING, f"{effect.request_id} has no place, though its key has less (F4)"

    def _look(self, before: int) -> None:
        room, inside = self._room, len(self._inside)
        assert not self._waiting or inside >= room, (
            f"{self._name}: {len(self._waiting)} wait, and {inside} of {room} are let in (F1)"
        )
        assert inside <= max(before, room), f"{self._name} lets in more than there is room for: {inside} of {room} (F1)"
        held = inside + len(self._waiting)
        assert held <= self._max_requests, f"{self._name} holds {held} of {self._max_requests} (F4)"

    def _race(self) -> None:
        """F3"""
        for (name, one), (other_name, other) in combinations(self._keys.items(), 2):
            if not one.waiting or not other.waiting:
                self._races.pop((name, other_name), None)
                continue
            ahead, bound = one.served - other.served, max(self._bound(one), self._bound(other))
            race = self._races.setdefault((name, other_name), _Race(ahead, ahead, bound))
            race.least, race.most = min(race.least, ahead), max(race.most, ahead)
            race.bound = max(race.bound, bound)
            apart = race.most - race.least
            assert apart <= 2 * race.bound + ROUNDING, f"{name} and {other_name} are {apart:.0f} apart (F3)"

    def _bound(self, key: _Key) -> float:
        return (self._longest_prompt + ANSWER_TOKEN_WORK * key.answers) / key.tenant.weight
