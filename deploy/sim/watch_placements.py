"""What a decode worker owes the gateways that have given it requests: an oracle beside its core, told of each event.

A request that is forgotten, kept too long or taken in where it should not be is mended by its gateway, which asks
again, goes elsewhere, or ends it by its own clock. So each event is compared with what must come of it *in the same
step*.

- D1  Who drains takes nothing new, and nobody waits beyond the bound. A later turn of a session is refused, where that
      is wanted, exactly when nothing of the session is there.
- D2  A placement ends by its deadline; and at once when its gateway cancels it, is lost or says nothing, when that has
      placed it here once more, or when all is handed over. One that is over does not begin again.
      Only a turn that has ended with its answer leaves its KV to the next one.
- D3  What is said of an answer follows what was said before, or repeats it. The last word is repeated until it is
      acknowledged.
- D4  Each placement that has not ended counts in the load that a worker tells: gateways have room by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.common.config import DecodeConfig, TransferConfig
from baton.common.engine.core_api import FromPeer, HandOver, MembershipView, SendTo
from baton.common.errors import ErrorCode
from baton.common.ids import RequestId, SessionId, Stamp
from baton.common.kv.census import OwnerClass
from baton.common.messages import CancelRequest, Failure, FinishAck, Load, Output, Resume, Submit, Submitted
from baton.decode.core import DecodeCore

PlacementKey = tuple[RequestId, int]
MOST_OVER = 1024
"""Ends that are remembered: a Submit may come once more."""


@dataclass(slots=True)
class _Placement:
    gateway: Stamp
    deadline_s: float
    said: int  # outputs that its gateway has, or was sent
    session_id: SessionId


@dataclass(slots=True)
class _Over:
    gateway: Stamp
    said_s: float  # its last word, the last time
    heard_s: float = math.inf  # that nobody waits for that any more ...
    number: int = 0  # ... as how manyeth of those whom somebody may have stopped waiting for


class PlacementWatch:
    """Of one decode worker."""

    def __init__(self, name: str, core: DecodeCore, config: DecodeConfig, transfer: TransferConfig) -> None:
        self._name = name
        self._core = core
        self._config = config
        self._transfer = transfer
        self._open: dict[PlacementKey, _Placement] = {}
        self._over: dict[PlacementKey, _Over] = {}  # the last ones
        self._unheard: dict[PlacementKey, _Over] = {}  # of these, those whose last word is not acknowledged
        self._heard = 0
        self._looked_s = 0.0
        self._listed: frozenset[Stamp] = frozenset()
        self._gone: frozenset[Stamp] = frozenset()  # since the view before
        self._version = 0
        self._look_at_s = math.inf  # nobody is late before
        self._queued = 0
        self._has_session = False
        self._still_holds = False  # of what is submitted again: its pages, until nobody writes into them
        self._answered = False  # elsewhere, of the request that is cancelled now
        self.answered: set[SessionId] = set()  # sessions of which a turn has ended with its answer

    def before(self, event: object) -> None:
        """It is going to be handled."""
        if isinstance(event, FromPeer) and isinstance(event.body, Submit):
            submit = event.body
            self._queued = self._core.queued
            self._has_session = bool(submit.session_id) and self._holds(submit.session_id, OwnerClass.SESSION)
            self._still_holds = self._holds(f"{submit.request_id}#{submit.placement}", *OwnerClass)

    def _holds(self, owner: str, *classes: OwnerClass) -> bool:
        return any(one.owner_class in classes and one.owner_id == owner for one in self._core.holdings())

    def after(self, event: object, effects: Sequence[object], now: float) -> None:
        if isinstance(event, FromPeer) and isinstance(event.body, Submit):
            self._submitted(event.sender, event.body, effects, now)
        self._answered = isinstance(event, FromPeer) and isinstance(event.body, CancelRequest) and event.body.answered
        if isinstance(event, MembershipView) and event.version >= self._version:
            self._left(event, now)
        self.says(effects, now)
        self._answered = False
        match event:
            case FromPeer(sender, CancelRequest() as cancel):
                key = cancel.request_id, cancel.placement
                placement = self._open.get(key)
                assert placement is None or placement.gateway != sender, f"{self._name} goes on with {key}, cancelled"
                self._heard += 1
                if placement is None and key not in self._over:  # it may be overtaken by its Cancel
                    self._remember(key, _Over(sender, now, now, self._heard))
            case FromPeer(sender, FinishAck() as ack):
                self._acknowledged((ack.request_id, ack.placement), sender, now)
            case FromPeer(sender, Resume() as resume):
                key = resume.request_id, resume.placement
                again = [one.body for one in effects if isinstance(one, SendTo) and isinstance(one.body, Output)]
                from_there = any(_key_of(one) == key and one.first_index <= resume.next_index for one in again)
                assert from_there, f"{self._name} does not say what {sender} lacks: {resume}"
            case MembershipView() if event.version == self._version:
                self._viewed(event)
            case HandOver():
                assert not self._open, f"{self._name} keeps {list(self._open)} to itself, and leaves"
            case _:
                pass

    def _submitted(self, sender: Stamp, submit: Submit, effects: Sequence[object], now: float) -> None:
        key = submit.request_id, submit.placement
        answers = [one.body for one in effects if isinstance(one, SendTo)]
        for answer in answers:
            if isinstance(answer, Output) and answer.failure is not None and _key_of(answer) == key:
                self._refused(submit, answer.failure)
        known = key in self._open or key in self._unheard or self._still_holds
        if known or not any(isinstance(one, Submitted) and _key_of(one) == key for one in answers):
            return
        over = self._over.pop(key, None)
        assert over is None or not self._is_recent(over, now), f"{self._name} begins {key} again, which is over"
        self._let_in(submit)
        older = [other for other, one in self._open.items() if other[0] == key[0] and one.gateway == sender]
        placement = self._open[key] = _Placement(
            sender, now + submit.ttl_s, len(submit.outputs) // 4, SessionId(submit.session_id)
        )
        self._look_at_s = min(self._look_at_s, placement.deadline_s)
        ended = {_key_of(one) for one in answers if isinstance(one, Output) and _is_last(one)}
        assert ended.issuperset(older), f"{self._name} answers {older} beside {key}"

    def _is_recent(self, over: _Over, now: float) -> bool:
        """Not too long ago, nor behind too many others, for it to be forgotten."""
        behind = self._heard - over.number
        return now < over.heard_s + self._transfer.tombstone_ttl_s and behind < self._transfer.max_tombstones

    def _acknowledged(self, key: PlacementKey, gateway: Stamp, now: float) -> None:
        self._heard += 1
        if (over := self._unheard.get(key)) is not None and over.gateway == gateway:
            del self._unheard[key]
            over.heard_s, over.number = now, self._heard

    def _let_in(self, submit: Submit) -> None:
        """D1"""
        assert not self._core.load().draining, f"{self._name} drains, and takes {submit.request_id} in"
        most = self._config.max_queued_requests
        assert self._queued < most, f"{self._name} takes {submit.request_id} in behind {self._queued} of {most}"
        lost = submit.session_turn > 0 and not self._has_session and self._config.lost_session == "fail"
        assert not lost, f"{self._name} answers {submit.request_id} without what its session had"

    def _refused(self, submit: Submit, failure: Failure) -> None:
        match failure.code:
            case ErrorCode.DRAINING:
                assert self._core.load().draining, f"{self._name} refuses {submit.request_id}: {failure}"
            case ErrorCode.OVERLOADED:
                full = self._queued >= self._config.max_queued_requests
                assert full, f"{self._name} refuses {submit.request_id} behind {self._queued}"
            case ErrorCode.SESSION_LOST:
                lost = submit.session_turn > 0 and not self._has_session
                assert lost, f"{self._name} has the session of {submit.request_id}: {failure}"
            case _:
                pass

    def _left(self, view: MembershipView, now: float) -> None:
        """Nobody acknowledges for a gateway that is gone; what is said to it in this event is over at once."""
        listed = frozenset(member.stamp for member in view.members)
        self._gone = self._listed - listed
        self._version, self._listed = view.version, listed
        for key, over in [*self._unheard.items()]:
            if over.gateway in self._gone:
                self._acknowledged(key, over.gateway, now)

    def _viewed(self, view: MembershipView) -> None:
        for key, one in self._open.items():
            lost = one.gateway in self._gone or one.gateway.worker in view.silent
            assert not lost, f"{self._name} goes on with {key} of {one.gateway}, which is gone or silent"

    def look(self, now: float) -> None:
        """Now and then: what was due when it was last looked is done by now."""
        before_s = self._looked_s - self._transfer.resend_after_s
        for key, over in self._unheard.items():
            assert over.said_s > before_s, f"{self._name} does not repeat its last word of {key}"
        self._looked_s = now

    def timer(self, effects: Iterable[object], now: float) -> None:
        self.says(effects, now)
        if now >= self._look_at_s:
            for key, one in self._open.items():
                assert one.deadline_s > now, f"{self._name} has forgotten the deadline of {key}"
            self._look_at_s = min((one.deadline_s for one in self._open.values()), default=math.inf)

    def counts(self, load: Load) -> None:
        """D4"""
        told = load.queued + load.running
        assert told >= len(self._open), f"{self._name} counts {told} requests, and has {len(self._open)}"

    def says(self, effects: Iterable[object], now: float) -> None:
        for effect in effects:
            if isinstance(effect, SendTo) and isinstance(effect.body, Output):
                self._said(effect.body, now)

    def _said(self, output: Output, now: float) -> None:
        """D3"""
        key = _key_of(output)
        placement = self._open.get(key)
        if placement is None:
            if (over := self._unheard.get(key)) is not None:
                over.said_s = now
            return
        end = output.first_index + len(output.tokens) // 4
        assert output.first_index <= placement.said, f"{self._name} leaves a gap in {key}: {output}"
        placement.said = max(placement.said, end)
        if _is_last(output):
            del self._open[key]
            if output.finish_reason or self._answered:
                self.answered.add(placement.session_id)
            elif placement.session_id and not self._holds(placement.session_id, OwnerClass.SESSION):
                self.answered.discard(placement.session_id)  # the turn had what was kept, and nobody has it now
            over = self._unheard[key] = _Over(placement.gateway, now)
            self._remember(key, over)
            if placement.gateway in self._gone:
                self._acknowledged(key, placement.gateway, now)
            if len(self._unheard) > self._config.max_queued_requests:
                oldest = next(iter(self._unheard))
                self._acknowledged(oldest, self._unheard[oldest].gateway, now)  # it is not said again

    def _remember(self, key: PlacementKey, over: _Over) -> None:
        self._over[key] = over
        if len(self._over) > MOST_OVER:
            del self._over[next(iter(self._over))]


def _key_of(body: Output | Submitted) -> PlacementKey:
    return body.request_id, body.placement


def _is_last(output: Output) -> bool:
    return bool(output.finish_reason) or output.failure is not None
