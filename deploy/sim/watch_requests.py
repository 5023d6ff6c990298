"""What a gateway owes its clients and the decode workers that it has asked: an oracle beside its core.

A worker that is not told that nobody listens any more computes on for nobody; a turn that goes anywhere is computed
anew; and in the end each has its answer. So what a gateway says is compared with what it has heard.

- R1  Who was given a request and is not listened to any more is told so in the same step, unless he has said his last
      word or is gone.
- R2  Nobody is asked once more who has refused, nor anybody who has said that he drains, but for a turn of the session
      whose KV he has.
- R3  A turn says how many were answered before it, and goes first to who ended the last one, if he is there.
- R4  A request ends by its deadline.
- R5  A session is there for as long as it may be after its last turn has ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.common.engine.core_api import FromPeer, MembershipView, SendTo
from baton.common.errors import ErrorCode
from baton.common.ids import RequestId, SessionId
from baton.common.messages import CancelRequest, Heartbeat, Output, Submit
from baton.deploy.gateway_states import RequestEnded

_REFUSALS = frozenset({ErrorCode.OVERLOADED, ErrorCode.DRAINING, ErrorCode.INTERNAL})


@dataclass(slots=True)
class _Asked:
    """A request that has not ended. `epoch`: of the process that its newest placement was given to; 0: of none yet."""

    deadline_s: float
    session_id: SessionId
    epoch: int = 0
    placement: int = -1
    told: bool = False  # that nobody listens any more
    answered: bool = False  # the client has what it wanted of this placement
    over: bool = False  # its last word was heard
    refused_by: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Session:
    turns: int = 0
    epoch: int = 0  # of who ended the last one
    used_s: float = -math.inf


class RequestWatch:
    """Of one gateway."""

    def __init__(self, name: str, session_ttl_s: float) -> None:
        self._name = name
        self._session_ttl_s = session_ttl_s
        self._asked: dict[RequestId, _Asked] = {}
        self._sessions: dict[SessionId, _Session] = {}
        self._listed: frozenset[int] = frozenset()
        self._able: frozenset[int] = frozenset()
        self._draining: set[int] = set()

    def asked(self, request_id: RequestId, session_id: SessionId, deadline_s: float) -> None:
        """By a client, before what comes of it."""
        self._asked[request_id] = _Asked(deadline_s, session_id)

    def opened(self, session_id: SessionId, now: float) -> None:
        self._session(session_id).used_s = now

    def told(self, view: MembershipView) -> None:
        """Before what comes of it."""
        self._listed = frozenset(one.stamp.epoch for one in view.members)
        self._able = frozenset(one.stamp.epoch for one in view.members if one.stamp.worker not in view.silent)
        self._draining &= self._listed

    def hears(self, event: FromPeer) -> None:
        """Before what comes of it."""
        body, epoch = event.body, event.sender.epoch
        if isinstance(body, Heartbeat):
            if body.load.draining:
                self._draining.add(epoch)
        elif isinstance(body, Output) and (body.finish_reason or body.failure is not None):
            asked = self._asked.get(body.request_id)
            if asked is not None and (asked.epoch, asked.placement) == (epoch, body.placement):
                asked.over, asked.answered = True, asked.answered or bool(body.finish_reason)
                if body.failure is not None and body.failure.code in _REFUSALS:
                    asked.refused_by |= {epoch}

    def says(self, effects: Sequence[object], now: float) -> None:
        """All that came of one event."""
        for effect in effects:
            if isinstance(effect, SendTo) and isinstance(effect.body, CancelRequest):
                cancel = effect.body
                asked = self._asked.get(cancel.request_id)
                if asked is not None and (asked.epoch, asked.placement) == (effect.epoch, cancel.placement):
                    asked.told, asked.answered = True, asked.answered or cancel.answered
        for effect in effects:
            if isinstance(effect, SendTo) and isinstance(effect.body, Submit):
                self._submits(effect.body, effect.epoch)
            elif isinstance(effect, RequestEnded) and (ended := self._asked.pop(effect.request_id, None)) is not None:
                self._must_be_told(effect.request_id, ended)
                if ended.session_id:
                    self._used(effect, self._session(ended.session_id), now)
                if ended.session_id and ended.answered and effect.finish_reason:
                    session = self._session(ended.session_id)
                    session.turns, session.epoch = session.turns + 1, ended.epoch

    def _used(self, ended: RequestEnded, session: _Session, now: float) -> None:
        """R5"""
        idle_s = now - session.used_s
        if ended.failure is not None and ended.failure.code is ErrorCode.SESSION_NOT_FOUND:
            gone = idle_s >= self._session_ttl_s
            assert gone, f"{self._name} has no session for {ended.request_id}, last used {idle_s:.3f} s ago"
        else:
            session.used_s = now

    def _session(self, session_id: SessionId) -> _Session:
        return self._sessions.setdefault(session_id, _Session())

    def _submits(self, submit: Submit, epoch: int) -> None:
        asked = self._asked[submit.request_id]
        if asked.placement == submit.placement:
            return
        self._must_be_told(submit.request_id, asked)
        assert epoch not in asked.refused_by, f"{self._name} asks for {submit.request_id} again where it was refused"
        session = self._session(asked.session_id) if asked.session_id else _Session()
        turns = session.turns
        assert submit.session_turn == turns, f"{self._name}: {submit.request_id} is turn {turns}: {submit.session_turn}"
        if session.turns and asked.placement < 0 and session.epoch in self._able:
            assert epoch == session.epoch, f"{self._name} gives {submit.request_id} to one who has not its session"
        kept = session.turns > 0 and epoch == session.epoch
        assert kept or epoch not in self._draining, f"{self._name} gives {submit.request_id} to one who drains"
        asked.epoch, asked.placement = epoch, submit.placement
        asked.told = asked.answered = asked.over = False

    def _must_be_told(self, request_id: RequestId, asked: _Asked) -> None:
        """R1"""
        knows = asked.told or asked.over or asked.epoch not in self._listed
        assert knows, f"{self._name} does not say that nobody listens to placement {asked.placement} of {request_id}"

    def timer(self, now: float) -> None:
        """R4, after what came of it. Who asked first has to be answered first: all have equally much time."""
        request_id, first = next(iter(self._asked.items()), ("", None))
        late = first is not None and first.deadline_s <= now and not first.answered
        assert not late, f"{self._name} has forgotten the deadline of {request_id}"
