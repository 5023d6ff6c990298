"""Who may start on this decode worker, and when: asks for room to grow before it promises pages.

Owns the count of requests that have overtaken the head of the queue, nothing else. Never reads a clock, never retracts
or cancels anybody. Asking and allocating are one call (`admit`): its answer is a holder that owns pages, or a refusal
after which nothing has changed.

All arithmetic is in pages, for each paged component of the model by itself. With R = `num_reserved_decode_tokens`,
after an admission at least this must be available (free, or cached and unlocked; of sliding pages: not promised):

    max(sum over active requests and the admitted one of pages(their next min(R, remaining) tokens),
        what the running request that may grow longest lacks when every other running one has been retracted)

A sequence grows in sliding pages until it fills its window, and not any more then. A recurrent state never grows.

Retracted requests come first in the queue and are never overtaken, so what they need is never given away. With nothing
active, a request is admitted as soon as it fits: refusing it could not make anything better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from baton.common.ids import RequestId
from baton.common.kv.layout import Component
from baton.common.kv.pool import KvPool, PreAllocated, RefusalReason, Refused
from baton.common.kv.prefix.interface import I32
from baton.common.kv.record import KvHolder, ReqKvInfo
from baton.common.units import whole_pages
from baton.decode.sessions import SessionSlot

MAX_BACKFILL = 16
"""Requests that may overtake one head of the queue. More would let small ones starve a large one."""

BACKFILL_WINDOW = 8
"""How far behind the head one call looks. Bounds the cost of a step in which nobody fits."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A queued request. `tokens` are those whose KV it needs before it can run (`fill_len = len(tokens)`); of a cached
    prefix at most `max_prefix` is used; it never holds more than `total_len` tokens of KV (prompt + max_tokens)."""

    holder: KvHolder
    request_id: RequestId
    tokens: I32
    max_prefix: int
    total_len: int
    retracted: bool = False
    slot: SessionSlot | None = None
    """What the conversation's last turn left. It grows in place; whoever is admitted takes it over."""


class ActiveRequest(Struct, frozen=True):
    """A request that owns pages: running, in transfer, or waiting for its first step. Only running ones can be
    retracted."""

    record: ReqKvInfo
    total_len: int
    running: bool


@dataclass(frozen=True, slots=True)
class Admitted:
    """queue[index] owns its record now."""

    index: int
    allocation: PreAllocated


class Admission:
    """One per decode core. At most `max_active` requests own pages at a time."""

    def __init__(self, pool: KvPool, num_reserved_decode_tokens: int, max_active: int) -> None:
        self._pool = pool
        self._max_active = max_active
        self._reserved_tokens = num_reserved_decode_tokens
        self._head: RequestId | None = None
        self._overtaken = 0

    def admit(self, queue: Iterable[Candidate], active: Iterable[ActiveRequest]) -> Admitted | Refused | None:
        """Admits one request of `queue`, or says why the head must wait; None when the queue is empty. The queue's
        order is the core's: retracted requests first, then by arrival. Call again until it refuses.

        When the head does not fit, one behind it may overtake (backfill): at most MAX_BACKFILL times per head, and
        never a retracted request.
        """
        candidates = iter(queue)
        head = next(candidates, None)
        if head is None:
            return None
        requests = list(active)
        paged = self._pool.layout.paged
        load = {component: _Load.of(component, requests, self._reserved_tokens, self._pool) for component in paged}
        crowd = len(requests)
        # One that comes back goes before everybody for a moment: that does not begin the count anew.
        if head.request_id != self._head and not head.retracted:
            self._head, self._overtaken = head.request_id, 0
        refusal = self._pre_alloc(head, crowd, load)
        if isinstance(refusal, PreAllocated):
            return Admitted(0, refusal)
        if head.retracted or refusal.reason in (RefusalReason.NO_ROW, RefusalReason.TOO_LONG):
            return refusal
        for index in range(1, 1 + BACKFILL_WINDOW):
            if self._overtaken >= MAX_BACKFILL or (candidate := next(candidates, None)) is None:
                break
            allocation = self._pre_alloc(candidate, crowd, load)
            if isinstance(allocation, PreAllocated):
                self._overtaken += 1
                return Admitted(index, allocation)
        return refusal

    def _pre_alloc(self, candidate: Candidate, active: int, load: Mapping[Component, _Load]) -> PreAllocated | Refused:
        """The check and the act. On refusal nothing has changed."""
        pool, fill_len = self._pool, len(candidate.tokens)
        holder = candidate.holder if candidate.slot is None else candidate.slot
        if active >= self._max_active:
            return Refused(RefusalReason.NO_ROW)
        if active:
            taken = self._taken(candidate, holder.kv)
            for component, others in load.items():
                growth = _growth_pages(pool, component, fill_len, candidate.total_len, self._reserved_tokens)
                room = max(others.growth_pages + growth, others.finish_alone_pages)
                available = pool.parts.available(component)
                short = taken[component] + room - available
                if taken[component] <= available and short > 0:
                    return Refused(RefusalReason.NO_ROOM_TO_GROW, short)
        return pool.pre_alloc(holder, candidate.tokens, fill_len, candidate.max_prefix)

    def _taken(self, candidate: Candidate, record: ReqKvInfo | None) -> dict[Component, int]:
        """Pages that the pre-allocation takes from what is available."""
        pool, fill_len = self._pool, len(candidate.tokens)
        if record is None:
            demand = pool.demand(candidate.tokens, fill_len, candidate.max_prefix)
            return {component: demand.of(component) for component in pool.layout.paged}
        needed, held = pool.parts.needed, record.kv_allocated_len
        return {one: max(0, needed(one, fill_len) - needed(one, held)) for one in pool.layout.paged}


@dataclass(frozen=True, slots=True)
class _Load:
    """What the active requests may still need of one component, in pages."""

    growth_pages: int
    finish_alone_pages: int

    @staticmethod
    def of(component: Component, requests: Sequence[ActiveRequest], reserved_tokens: int, pool: KvPool) -> _Load:
        growth = retractable = 0
        longest = 0  # most pages that one running request lacks for its longest possible answer
        needed, total = pool.parts.needed, pool.supply.total(component)
        for request in requests:
            allocated = request.record.kv_allocated_len
            growth += _growth_pages(pool, component, allocated, request.total_len, reserved_tokens)
            if request.running:
                held = own = needed(component, allocated)
                if component is Component.FULL:  # what is shared does not come back; of promised pages all do
                    own -= whole_pages(request.record.cache_protected_len, pool.page_size)
                retractable += own
                longest = max(longest, min(needed(component, request.total_len), total) - held + own)
        return _Load(growth, max(0, longest - retractable))


def _growth_pages(pool: KvPool, component: Component, length: int, total_len: int, reserved_tokens: int) -> int:
    grown = length + min(reserved_tokens, max(0, total_len - length))
    return pool.parts.needed(component, grown) - pool.parts.needed(component, length)
