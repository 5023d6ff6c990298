"""Where a request's missing KV comes from: a tier below the pool, a prefill worker, or this worker's own steps.

Owns: the count of what tiers gave back. Never: admits a request (its pages are promised when it comes here), or moves
pages itself. What has landed is kept and the rest comes from elsewhere, until all is there and the request runs.
"""

from __future__ import annotations

from baton.common.errors import ErrorCode
from baton.common.kv.tiers.api import PagesRestored
from baton.common.prompt_logprobs import PromptLogprobs
from baton.common.units import page_ceil
from baton.decode.answers import Answers
from baton.decode.parts import Parts
from baton.decode.request import DecodeRequest, Incoming, Prefilling, Queued, Restoring, Stopping
from baton.transfer.api import FirstTokenReady, SinkCommitted, SinkFailed

LOCAL_SHARE = 16
"""Of what is known of a prompt, so much may be missing and is computed where it is known."""


class Filling:
    """`handoff_ttl_s`: most time one hand-off may take."""

    def __init__(self, parts: Parts, answers: Answers, handoff_ttl_s: float) -> None:
        self._parts = parts
        self._answers = answers
        self._handoff_ttl_s = handoff_ttl_s
        self.restored_tokens = 0

    def start(self, request: DecodeRequest, now: float) -> None:
        """It was admitted just now. The tiers are asked first."""
        parts = self._parts
        assert isinstance(request.state, Queued), request.state
        request.times.admitted(request.state.since_s, now)
        request.times.begin_count()
        request.count_tokens(0, request.record.kv_committed_len, "cached_tokens")
        if request.scored:  # all of its prompt is computed, whatever an earlier stay had of it
            request.scores.clear()
        request.handoff = parts.handoffs.new_id()
        request.attempt = 0
        request.tried.clear()
        request.tried_again.clear()
        restore = parts.restores.begin(request, now)
        if restore is None:
            self.fill(request, now)
            return
        request.state = Restoring(restore.job)
        request.times.restoring_since_s = now
        parts.commands.append(restore)

    def fill(self, request: DecodeRequest, now: float) -> None:
        """Gets the KV that is still missing: from nobody, from here, or from a prefill worker not tried yet."""
        parts, pool = self._parts, self._parts.pool
        known = request.record.kv_committed_len
        missing = request.fill_len - known
        peer = parts.peers.prefill_for(request) if missing > self._most_here(known) else None
        if missing == 0:
            self._answers.run(request, now)
        elif peer is None:
            self._prefill_here(request, request.fill_len, now)
        elif known % pool.page_size:
            # Hand-offs move whole pages: the rest of a page that is known in part is computed, not sent once more.
            self._prefill_here(request, min(request.fill_len, page_ceil(known, pool.page_size)), now)
        else:
            deadline_s = min(request.deadline_s, now + self._handoff_ttl_s)
            request.times.asked(now)
            parts.commands.append(parts.handoffs.open(request, peer, pool, deadline_s))

    def _most_here(self, known: int) -> int:
        """So many missing tokens are computed here. Of a prompt that is known but for its end no more than one step
        would take is not worth a hand-off: a prefill worker that has forgotten it would compute all of it again."""
        config = self._parts.config
        return max(config.local_prefill_max_tokens, min(known // LOCAL_SHARE, config.chunk_tokens))

    def _prefill_here(self, request: DecodeRequest, until: int, now: float) -> None:
        request.state = Prefilling(until)
        request.times.computes(now)
        self._parts.steps.prefilling.append(request)

    # -------------------------------------------------------------------------------------------- tiers

    def on_restored(self, event: PagesRestored, now: float) -> None:
        """What landed is as good as computed; the rest comes from elsewhere."""
        parts = self._parts
        landed = parts.restores.end(event)
        request, start, until = landed.request, landed.start, landed.until
        parts.stores.found(landed)
        request.count_tokens(start, until, "restored_tokens")
        parts.pool.commit_incoming(request.record, until)
        self.restored_tokens += until - start
        request.times.restored(now)
        match request.state:
            case Restoring():
                self.fill(request, now)
            case Stopping():
                self._answers.done(request, now)
            case _:
                raise AssertionError(f"{event} for {request.key} in {request.state}")

    # --------------------------------------------------------------------------------------- hand-offs

    def on_first_token(self, event: FirstTokenReady, now: float) -> None:
        """The client gets it before all KV is there. One that ends the answer waits for the pages: they are kept."""
        request, _ = self._parts.handoffs.find(event.key)
        assert request is not None, f"{event} of a hand-off that has ended"
        ends = event.first_token in request.stop_ids or request.limit == 1
        if isinstance(request.state, Incoming) and request.wants_first_token and not ends:
            _take_scores(request, event.prompt_logprobs)
            self._answers.append(request, event.first_token, event.logprob, now)

    def on_handed_off(self, event: SinkCommitted | SinkFailed, now: float) -> None:
        if isinstance(event, SinkCommitted):
            self._on_committed(event, now)
        else:
            self._on_failed(event, now)

    def _on_committed(self, event: SinkCommitted, now: float) -> None:
        request, start = self._parts.handoffs.close(event.key)
        request.times.handed_over(now)
        request.count_tokens(start, start + event.result.cached_tokens, "prefill_cached_tokens")
        request.count_transfer(event, start, request.fill_len)
        self._parts.pool.commit_incoming(request.record, request.fill_len)
        match request.state:
            case Incoming():
                times = request.times
                times.transfer_s += event.transfer_s
                times.scatter_s += event.scatter_s
                times.prefill_s += event.result.prefill_s
                _take_scores(request, event.result.prompt_logprobs)
                self._answers.run(request, now, event.result.first_token, event.result.logprob, event.landed_s)
            case Stopping():
                self._answers.done(request, now)
            case _:
                raise AssertionError(f"{event} for {request.key} in {request.state}")

    def _on_failed(self, event: SinkFailed, now: float) -> None:
        """What landed is kept where it is of use; the rest comes by another lane, from somebody who was not tried yet,
        in the end from here."""
        pool = self._parts.pool
        request, start = self._parts.handoffs.close(event.key)
        request.times.handed_over(now)
        if event.failure.code is ErrorCode.INTERNAL and not event.peer_lost:
            request.try_again(event.peer)
        if pool.lands_in_part:
            self._keep_what_landed(request, event, start)
        else:
            request.count_transfer(event, start, start)
            pool.abandon_incoming(request.record)
            request.recount_cached(request.record.kv_committed_len)
        match request.state:
            case Incoming():
                self.fill(request, now)
            case Stopping():
                self._answers.done(request, now)
            case _:
                raise AssertionError(f"{event} for {request.key} in {request.state}")

    def _keep_what_landed(self, request: DecodeRequest, event: SinkFailed, start: int) -> None:
        # All may have landed without the first output: then the last position is computed once more, for its logits.
        landed = max(min(event.landed_until, request.max_prefix), request.record.kv_committed_len)
        request.count_transfer(event, start, landed)
        self._parts.pool.commit_incoming(request.record, landed)


def _take_scores(request: DecodeRequest, scores: PromptLogprobs | None) -> None:
    """They come with the first token, which may come twice."""
    if scores is not None and request.wants_first_token:
        request.scores = [scores]
