"""Requests that wait for pages. Owns the queue and its order; asks admission; never fails or starts anybody itself.

Order: retracted requests first (they had been running), each group by arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from baton.common.config import DecodeConfig
from baton.common.kv.pool import KvPool, PreAllocated, Refused
from baton.decode.admission import BACKFILL_WINDOW, ActiveRequest, Admission, Admitted, Candidate
from baton.decode.request import DecodeRequest
from baton.decode.sessions import Sessions


class WaitingRequests:
    """`stir` says that something changed (pages came back, somebody arrived): until then a refusal stands."""

    def __init__(self, pool: KvPool, config: DecodeConfig, sessions: Sessions) -> None:
        self._admission = Admission(pool, config.num_reserved_decode_tokens, config.max_running_requests)
        self._sessions = sessions
        self._queue: list[DecodeRequest] = []
        self._may_fit = False

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(self._queue)

    def add(self, request: DecodeRequest) -> None:
        self._queue.append(request)
        self.stir()

    def put_back(self, request: DecodeRequest) -> None:
        """A retracted one."""
        ahead = sum(one.times.retractions > 0 and one.number < request.number for one in self._queue)
        self._queue.insert(ahead, request)
        self.stir()

    def discard(self, request: DecodeRequest) -> None:
        if request in self._queue:
            self._queue.remove(request)
            self.stir()

    def stir(self) -> None:
        self._may_fit = True

    def admit(self, active: Iterable[ActiveRequest]) -> tuple[DecodeRequest, PreAllocated | Refused] | None:
        """The next request that owns its pages now, or the head and why it must wait. None: nothing to try."""
        if not self._queue or not self._may_fit:
            return None
        window = self._queue[: 1 + BACKFILL_WINDOW]
        candidates: list[Candidate] = []

        def looked_at() -> Iterator[Candidate]:
            """Mostly the head alone."""
            for one in window:
                candidates.append(self._candidate(one))
                yield candidates[-1]

        verdict = self._admission.admit(looked_at(), active)
        assert verdict is not None, "the queue is not empty"
        if isinstance(verdict, Admitted):
            request, slot = self._queue.pop(verdict.index), candidates[verdict.index].slot
            if slot is not None:
                self._sessions.lend(slot, request)
            return request, verdict.allocation
        self._may_fit = False
        return window[0], verdict

    def _candidate(self, request: DecodeRequest) -> Candidate:
        fill, max_prefix = request.fill_tokens, request.max_prefix
        slot = self._sessions.find(request.session_id)
        if slot is not None and (reusable := self._sessions.reusable(slot, fill[:max_prefix])):
            max_prefix = reusable
        else:
            slot = None
        return Candidate(
            holder=request,
            request_id=request.key[0],
            tokens=fill,
            max_prefix=max_prefix,
            total_len=request.total_len,
            retracted=request.times.retractions > 0,
            slot=slot,
        )
