"""Conversations, as a gateway knows them: whose they are, where their KV lies, whether a turn is under way. Pure.

Owns: the table of open sessions. Never: KV (a decode worker's slot does), text, or the choice of a worker for a first
turn. A session that is not used for `ttl_s` is over, here and, by its own clock, on its worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.common.errors import ErrorCode
from baton.common.ids import RequestId, SessionId, Stamp
from baton.common.messages import Failure


@dataclass(slots=True)
class Session:
    """`worker`: who ended the last turn, and may have its KV. `turns` have ended with their answer."""

    session_id: SessionId
    owner: str
    used_s: float
    worker: Stamp | None = None
    turns: int = 0
    running: RequestId | None = None


class SessionBook:
    """At most `limit` sessions."""

    def __init__(self, limit: int, ttl_s: float) -> None:
        self._limit = limit
        self._ttl_s = ttl_s
        self._sessions: dict[SessionId, Session] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, session_id: SessionId, owner: str, now: float) -> Failure | None:
        assert session_id not in self._sessions, "ids are random"
        if len(self._sessions) >= self._limit:
            return Failure(code=ErrorCode.OVERLOADED, reason=f"{self._limit} sessions are open already")
        self._sessions[session_id] = Session(session_id, owner, now)
        return None

    def find(self, session_id: SessionId, owner: str) -> Session | Failure:
        """Someone else's session is told like one that does not exist: nobody learns which ids are in use."""
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            reason = "there is no such session: it was closed, has expired, or never was yours"
            return Failure(code=ErrorCode.SESSION_NOT_FOUND, reason=reason)
        return session

    def begin_turn(self, session_id: SessionId, owner: str, request_id: RequestId) -> Session | Failure:
        session = self.find(session_id, owner)
        if isinstance(session, Session):
            if session.running is not None:
                return Failure(code=ErrorCode.SESSION_BUSY, reason="a turn of this session is still being answered")
            session.running = request_id
        return session

    def end_turn(self, session: Session, worker: Stamp | None, now: float) -> Stamp | None:
        """`worker` ended it with its answer; None when it has none. Returns a worker whose slot is out of date."""
        session.running = None
        session.used_s = now
        if session.session_id in self._sessions:  # not closed meanwhile
            self._sessions[session.session_id] = self._sessions.pop(session.session_id)
        if worker is None:
            return None
        before, session.worker = session.worker, worker
        session.turns += 1
        return before if before is not None and before != worker else None

    def close(self, session: Session) -> None:
        """A turn that is under way goes on, as one without a session."""
        del self._sessions[session.session_id]

    def is_open(self, session: Session) -> bool:
        return self._sessions.get(session.session_id) is session

    def pop_expired(self, now: float) -> list[Session]:
        """Sessions with a turn under way are in use."""
        expired = []
        for session in list(self._sessions.values()):
            if session.used_s + self._ttl_s > now:
                break
            if session.running is None:
                expired.append(self._sessions.pop(session.session_id))
        return expired

    def next_deadline(self) -> float | None:
        """Of the first idle one; a busy one is looked at again when its turn ends."""
        return next((one.used_s + self._ttl_s for one in self._sessions.values() if one.running is None), None)
