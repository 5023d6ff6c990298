"""What of a request's KV is handed to the transfer plane, and when: whole pages after each chunk; the end of a prompt,
where that pays, by layers while it is being computed; windows, states and the first token behind all of it.

Owns nothing: what was shipped is in the request's state. Never: computes, caches, or gives a page back (`core.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from msgspec import structs

from baton.common.kv.layout import Component
from baton.common.kv.pool import KvPool
from baton.common.prompt_logprobs import join_chunks
from baton.common.units import pages_for_tokens
from baton.prefill.pipelining import LayerGroups
from baton.prefill.request import HandingOff, Prefilling, SourceRequest
from baton.transfer.api import FinishSource, PrefillResult, ShipRegion
from baton.transfer.plan import segments_of


class Shipping:
    """`ship` takes what goes to the transfer plane."""

    def __init__(
        self, pool: KvPool, layer_groups: LayerGroups, ship: Callable[[ShipRegion | FinishSource], None]
    ) -> None:
        self._pool = pool
        self._layer_groups = layer_groups
        self._ship = ship

    def plan_layers(self, launched: Iterable[tuple[SourceRequest, int]], compute_s: float) -> tuple[int, ...]:
        """Decides what is shipped by layers of a step that takes about so long (0.0: not known). Returns how many must
        be computed when a part of something can go."""
        reports: set[int] = set()
        for request, end in launched:
            if end == request.total and isinstance(request.state, Prefilling):
                shipped, groups = request.state.shipped, self._layer_groups
                pages = pages_for_tokens(end - shipped, self._pool.page_size)
                parts = groups.choose(pages, request.offer.lane_gbps, compute_s)
                if parts > 1:
                    request.state = Prefilling(shipped, parts)
                    reports.update(groups.layers_until(part, parts) for part in range(parts))
        return tuple(sorted(reports))

    def ship_layers(self, request: SourceRequest, layers: int) -> None:
        """The parts of all that was not shipped which are complete with so many layers; of one that was planned so."""
        state, total = request.state, request.total
        if not isinstance(state, Prefilling) or state.parts == 1:
            return
        sent = state.sent
        pages = self._pool.pages_of(request.record, state.shipped, total)
        while sent < state.parts and self._layer_groups.layers_until(sent, state.parts) <= layers:
            whole = ShipRegion(request.offer.key, state.shipped, total - state.shipped, pages)
            self._ship(structs.replace(whole, part=sent, parts=state.parts))
            sent += 1
        request.state = Prefilling(total) if sent == state.parts else replace(state, sent=sent)

    def ship_all_layers(self, request: SourceRequest) -> None:
        """The step is over."""
        self.ship_layers(request, self._layer_groups.layers)

    def ship(self, request: SourceRequest) -> None:
        """Hands over what is computed and was not handed over yet; the rest follows with later chunks. A request that
        is complete is HandingOff afterwards."""
        assert isinstance(request.state, Prefilling)
        pool, total, key = self._pool, request.total, request.offer.key
        shipped, end = request.state.shipped, total if request.complete else pool.settled_until(request.record)
        if pool.layout.full and end > shipped:
            pages = pool.pages_to_send(request.record, Component.FULL, shipped, end)
            self._ship(ShipRegion(key, shipped, end - shipped, pages))
            request.state = Prefilling(end)
        if request.complete:
            self._ship_the_rest(request)
            # Of the tokens asked for: what lies before `start` is the receiver's own, and counted there.
            found = max(0, request.cached_tokens - request.offer.start)
            token, logprob = (request.first_token, request.logprob) if request.offer.sample else (-1, None)
            scores = join_chunks(request.scores) if request.scored else None
            result = PrefillResult(token, logprob, request.prefill_s, found, scores)
            self._ship(FinishSource(key, result, request.queued_s))
            request.state = HandingOff()

    def _ship_the_rest(self, request: SourceRequest) -> None:
        """What is not kept token by token: the live window, and the state."""
        start, total = request.offer.start, request.total
        for segment in segments_of(self._pool.layout, start, total):
            if segment.component is not Component.FULL:
                pages = self._pool.pages_to_send(request.record, segment.component, start, total)
                first, tokens = segment.first_token, total - segment.first_token
                self._ship(ShipRegion(request.offer.key, first, tokens, pages, segment.component))
