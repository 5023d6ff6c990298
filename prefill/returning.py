"""KV that the decode worker has and this one lacks, asked back instead of computed again.

In the second turn of a conversation the decode worker has the first prompt and its answer, and offers for what follows.
This worker knows the prompt at best; to compute what was asked for it needs the answer's KV too. It opens a hand-off
with the roles turned round (`transfer.api.return_key`), into pages that it has promised to the request anyway, and
computes from there on when it has ended. A return that fails costs its time, nothing else: what is missing is computed.

Owns: the returns that are under way, and the measured speeds that say whether one is worth it. Never: moves a length,
frees a page, or decides what follows (`core.PrefillCore` does). From `begin` until its one end, the pages are the
return's, whatever happens to the request meanwhile.

Only for models whose layers all attend to every token: what others keep of the middle of a sequence is of no use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from baton.common.config import KvReturn
from baton.common.ids import HandoffKey, Stamp
from baton.common.kv.layout import Component
from baton.common.kv.pool import KvPool
from baton.common.messages import Failure
from baton.common.units import pages_for_tokens
from baton.prefill.request import SourceRequest
from baton.transfer.api import AbortSink, OfferReceived, OpenSink, SinkCommitted, SinkFailed, return_key

LEAST_PAGES = 4
"""Fewer are computed in less time than it takes to ask for them."""
CLEARLY = 2.0
"""So many times faster than computing a return must be: it also takes the peer's time."""
ASKING_S = 0.005
"""What asking takes, before the first byte is on its way: a message each way, and the rest of a step there."""
UNKNOWN_TOKENS_PER_S = 5000.0
"""What a return is taken to reach where nothing was measured: a slow network, a large model."""
FORGOTTEN_AFTER_S = 60.0
"""A peer from which returns were slow, or failed, is tried again then."""
PATIENCE_S = 1.0
"""A return gets so much more time than computing would take (or twice that, where that is not known). Then what has
landed is kept, and the rest computed."""


class Speed:
    """Tokens per second, recent work counting most and large work more than small."""

    KEEP = 0.9

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens = self.KEEP * self._tokens + tokens
        self._seconds = self.KEEP * self._seconds + seconds

    @property
    def tokens_per_s(self) -> float:
        """0.0: nothing was measured."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def seconds(self, tokens: int) -> float | None:
        """What so many take. None: nothing was measured, or nothing ever came."""
        return tokens * self._seconds / self._tokens if self._tokens > 0 else None


def is_worth_it(compute_s: float | None, return_s: float) -> bool:
    """Whether asking is clearly faster than computing, whose speed must be known."""
    return compute_s is not None and CLEARLY * return_s <= compute_s


def expected_s(tokens: int, nbytes: int, lane_gbps: float) -> float:
    """Of a return from a peer that none came from lately, by what the receiver has measured on the lane to it (0.0:
    nothing)."""
    moving_s = nbytes / (lane_gbps * 1e9) if lane_gbps > 0 and nbytes > 0 else tokens / UNKNOWN_TOKENS_PER_S
    return ASKING_S + moving_s


@dataclass(frozen=True, slots=True)
class _Return:
    request: SourceRequest
    start: int  # tokens [start, until) are on their way
    until: int
    began_s: float


class Returned(NamedTuple):
    """The request's [0, until) is in its pages, which are its own again."""

    request: SourceRequest
    until: int


class Returns:
    """At most one per request and offer, under a key that follows from the offer's."""

    def __init__(self, pool: KvPool, mode: KvReturn, computing: Speed, page_bytes: int) -> None:
        self._pool = pool
        self._mode: KvReturn = mode if pool.layout.only_full else "off"
        self._computing = computing
        self._page_bytes = page_bytes  # 0: not known
        self._open: dict[HandoffKey, _Return] = {}
        self._measured: dict[Stamp, tuple[Speed, float]] = {}  # by peer, and when the last one ended

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[SourceRequest]:
        return (one.request for one in self._open.values())

    def holds(self, request: SourceRequest) -> bool:
        """Whether its pages may still be written."""
        return return_key(request.offer.key) in self._open

    def begin(self, request: SourceRequest, now: float) -> OpenSink | None:
        """For a request that was just promised its pages. None: it computes what it lacks."""
        offer, start = request.offer, request.record.kv_committed_len
        missing = offer.start - start
        if not self._wanted(offer, missing, now):
            return None
        key = return_key(offer.key)
        self._open[key] = _Return(request, start, offer.start, now)
        compute_s = self._computing.seconds(missing)
        return OpenSink(
            key=key,
            peer=offer.peer.worker,
            request_id=offer.request_id,
            tokens=offer.tokens[: offer.start],
            start=start,
            pages={Component.FULL: self._pool.pages_of(request.record, start, offer.start)},
            sample=False,
            sampling=offer.sampling,
            deadline_s=min(offer.deadline_s, now + PATIENCE_S + (PATIENCE_S if compute_s is None else compute_s)),
            priority=offer.priority,
        )

    def abort(self, request: SourceRequest, failure: Failure) -> AbortSink:
        """The request is over; its pages are the return's until that has ended."""
        return AbortSink(return_key(request.offer.key), failure)

    def end(self, event: SinkCommitted | SinkFailed, now: float) -> Returned:
        """It has ended, one way or the other, and nobody writes any more."""
        one = self._open.pop(event.key)
        until = one.until if isinstance(event, SinkCommitted) else event.landed_until
        peer, recent = one.request.offer.peer, self._recent(now)
        speed, _ = recent.get(peer, (Speed(), now))
        speed.add(until - one.start, now - one.began_s)
        self._measured = recent | {peer: (speed, now)}
        return Returned(one.request, until)

    def _recent(self, now: float) -> dict[Stamp, tuple[Speed, float]]:
        return {peer: known for peer, known in self._measured.items() if now - known[1] < FORGOTTEN_AFTER_S}

    def _wanted(self, offer: OfferReceived, missing: int, now: float) -> bool:
        match self._mode:
            case "off":
                return False
            case "on":
                return missing > 0
            case "adaptive":
                enough = missing >= LEAST_PAGES * self._pool.page_size
                return enough and is_worth_it(self._computing.seconds(missing), self._return_s(offer, missing, now))

    def _return_s(self, offer: OfferReceived, missing: int, now: float) -> float:
        measured = self._recent(now).get(offer.peer)
        if measured is None:
            nbytes = pages_for_tokens(missing, self._pool.page_size) * self._page_bytes
            return expected_s(missing, nbytes, offer.lane_gbps)
        return_s = measured[0].seconds(missing)
        return math.inf if return_s is None else return_s
