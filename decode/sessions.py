"""Sessions: what a decode worker keeps of a conversation between its turns.

Owns: one slot per session, with the KV record of the last turn, its limit and its time. Never: decides what a turn
computes, or frees a page itself (the pool's release does: a session that ends leaves its KV in the prefix cache).

A record is in one place: with the slot between turns, with the request during one. A turn that ends without its answer
does not come back here; the next one finds no slot and starts from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from baton.common.ids import SessionId
from baton.common.kv.census import Holding, OwnerClass
from baton.common.kv.errors import OwnershipError
from baton.common.kv.pool import KvPool
from baton.common.kv.prefix.interface import I32
from baton.common.kv.record import ReqKvInfo, take_kv
from baton.decode.request import DecodeRequest


class SessionSlot:
    """A `KvHolder`. `tokens` are those whose KV the record holds."""

    __slots__ = ("effective_len", "kv", "session_id", "since_s", "tokens")

    def __init__(self, session_id: SessionId, kv: ReqKvInfo, tokens: I32, effective_len: int, since_s: float) -> None:
        self.session_id = session_id
        self.effective_len = effective_len  # what others may find of it, once it ends
        self.kv: ReqKvInfo | None = kv
        self.tokens = tokens
        self.since_s = since_s

    @property
    def record(self) -> ReqKvInfo:
        assert self.kv is not None, f"{self!r} has lent its record"
        return self.kv

    def __repr__(self) -> str:
        return f"<SessionSlot {self.session_id} {self.kv!r}>"


class Sessions:
    """Oldest first: the order in which slots are given up. `on_cached` hears what a slot left in the prefix cache,
    `on_freed` that a row and pages came back, whatever ended it."""

    def __init__(
        self,
        pool: KvPool,
        limit: int,
        ttl_s: float,
        on_cached: Callable[[I32], None],
        on_freed: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._on_cached = on_cached
        self._on_freed = on_freed
        self._limit = limit
        self._ttl_s = ttl_s
        self._slots: dict[SessionId, SessionSlot] = {}
        self.open = True  # turns that end may be kept
        self.expired = 0

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, session_id: SessionId) -> SessionSlot | None:
        return self._slots.get(session_id)

    def reusable(self, slot: SessionSlot, tokens: I32) -> int:
        """How many tokens of KV a turn over `tokens` finds in the slot. 0 when it leaves the conversation before what
        the slot shares with the prefix cache: then the slot is of no use. A sliding window or a recurrent state cannot
        go back to every length; then the turn goes back to what is shared."""
        most = min(len(slot.tokens), len(tokens))
        differ = np.flatnonzero(slot.tokens[:most] != tokens[:most])
        common = int(differ[0]) if len(differ) else most
        protected = slot.record.cache_protected_len
        if self._pool.can_go_back(slot.record, min(common, slot.record.kv_committed_len)):
            return common
        return protected if common >= protected else 0

    def lend(self, slot: SessionSlot, request: DecodeRequest) -> None:
        """The turn owns the record now, and the session has no slot until it comes back."""
        assert request.kv is None, f"{request.key} owns KV already"
        del self._slots[slot.session_id]
        request.kv = take_kv(slot)
        request.session_protected_len = request.kv.cache_protected_len

    def keep(self, request: DecodeRequest, now: float) -> None:
        """A turn has ended with its answer: its record stays for the next one."""
        record = request.record
        if request.session_protected_len is not None and record.cache_protected_len != request.session_protected_len:
            raise OwnershipError(f"a later turn of {request.session_id} moved what the first one shares: {record!r}")
        tokens = request.known_tokens[: record.kv_committed_len]
        effective_len = request.effective_kv_committed_len
        self.close(request.session_id)  # a turn that was placed twice: the later one counts
        slot = SessionSlot(request.session_id, take_kv(request), tokens, effective_len, now)
        self._slots[request.session_id] = slot
        while len(self._slots) > self._limit:
            self.release_oldest()

    def close(self, session_id: SessionId) -> bool:
        """False: there is no such slot."""
        slot = self._slots.pop(session_id, None)
        if slot is not None:
            self._pool.release_kv_cache(slot, slot.tokens, effective_len=slot.effective_len)
            self._on_cached(slot.tokens[: slot.effective_len])
            self._on_freed()
        return slot is not None

    def release_oldest(self) -> bool:
        """Gives up the session that has been idle longest. False: there is none."""
        return bool(self._slots) and self.close(next(iter(self._slots)))

    def drain(self) -> None:
        """Gives up all of them; no turn is kept any more."""
        self.open = False
        while self.release_oldest():
            pass

    def expire(self, now: float) -> None:
        while self._slots and (due_s := self.next_deadline()) is not None and due_s <= now:
            self.release_oldest()
            self.expired += 1

    def next_deadline(self) -> float | None:
        return next(iter(self._slots.values())).since_s + self._ttl_s if self._slots else None

    def holdings(self) -> Iterable[Holding]:
        for slot in self._slots.values():
            yield Holding(OwnerClass.SESSION, slot.session_id, slot.record)

    def records(self) -> list[ReqKvInfo]:
        return [slot.record for slot in self._slots.values()]
