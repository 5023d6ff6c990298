"""KV that a prefill worker asks back, to go on from where this worker's own ends: lent out of a request that waits.

The request is Incoming: this worker has [0, start) of it and has offered for the rest. Who computes the rest may lack a
part of [0, start) and opens a hand-off for that with the roles turned round (`transfer.api.return_key`). It is
answered at once, out of the very request's pages, and needs nothing that this worker would have to wait for.

Owns: which returns are under way, and the ends of hand-offs that wait for theirs. Never: frees a page. A hand-off has
not ended for the core before its return has (SourceReleased, SourceAborted): so long the record stays Incoming, and
neither the tree nor a session nor anybody else gets at pages that are being read.
"""

from __future__ import annotations

import numpy as np

from baton.common.errors import ErrorCode
from baton.common.ids import HandoffKey
from baton.common.kv.layout import Component
from baton.common.kv.pool import KvPool
from baton.common.messages import Failure
from baton.decode.request import DecodeRequest, Incoming
from baton.transfer.api import (
    AbortSource,
    FinishSource,
    OfferReceived,
    PrefillResult,
    ShipRegion,
    SinkCommitted,
    SinkFailed,
    SourceCommand,
    return_key,
)

SinkEnd = SinkCommitted | SinkFailed


class Returns:
    """By the return's key: how its hand-off ended meanwhile, if it did."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._open: dict[HandoffKey, SinkEnd | None] = {}

    def answer(self, offer: OfferReceived, request: DecodeRequest | None, start: int) -> list[SourceCommand]:
        """`request` waits for the hand-off that this is the return of, from token `start` on; None: nobody does."""
        self._open[offer.key] = None
        if request is None or not self._can_lend(offer, request, start):
            failure = Failure(code=ErrorCode.CANCELLED, reason="nothing to return of this hand-off")
            return [AbortSource(offer.key, failure)]
        until, tokens = len(offer.tokens), len(offer.tokens) - offer.start
        pages = self._pool.pages_to_send(request.record, Component.FULL, offer.start, until)
        nothing = PrefillResult(first_token=-1, logprob=None, prefill_s=0.0, cached_tokens=tokens)
        return [ShipRegion(offer.key, offer.start, tokens, pages), FinishSource(offer.key, nothing)]

    def _can_lend(self, offer: OfferReceived, request: DecodeRequest, start: int) -> bool:
        waits = request.state == Incoming(return_key(offer.key))
        asked = self._pool.layout.only_full and not offer.sample and len(offer.tokens) <= start
        return waits and asked and np.array_equal(offer.tokens, request.fill_tokens[: len(offer.tokens)])

    def defer(self, event: SinkEnd) -> bool:
        """A hand-off has ended. True: its return has not, and `end` will say so."""
        key = return_key(event.key)
        if key not in self._open:
            return False
        self._open[key] = event
        return True

    def end(self, key: HandoffKey) -> SinkEnd | None:
        """Nobody reads any more. Returns what waited for that."""
        return self._open.pop(key)
