"""The brain of a prefill worker: computes the KV that decode workers ask for and ships it while computing on.

Owns: every accepted offer until its pages are provably nobody else's, and what the next step computes. Parts: `request`
(one offer and its states, with a picture), `shipping` (what is handed over, and when), `returning` (what decode workers
have and give back), `grace` (those whose receiver was lost). Never: talks to a socket, frees a page that a peer may
still read, or holds KV for a request that has nowhere to go beyond `grace_s`.

Invariants:
F1. All pages of a request are promised before its first chunk is computed: a half-computed prompt never waits for pages
    that another half-computed prompt holds.
F2. Pages are given back, or shipped again, after SourceReleased or SourceAborted and not before, and never given back
    while a launched step uses them, or a return may write them.
F3. What is shipped lies in pages that stay where they are: a chunk is offered to the prefix tree (which may replace
    pages by its own) before it is shipped, and what the tree did not take then only after the last chunk. What is
    shipped by layers, while it is computed, the tree is offered when the hand-off has ended.
F4. A request is computed in chunks whose boundaries are page-aligned, except the last. Of a model with recurrent layers
    one of them ends where others can go on: at the last whole page before the last token.
F5. Pages of full attention are shipped while later chunks compute, and those of the last chunk while its later layers
    do, where that pays; what sliding and recurrent layers keep is only known after the last chunk, and shipped then.
F6. What is kept without a receiver delays nobody: its pages go to the first offer that lacks some, and a step computes
    it in what the others leave of its budget.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from baton.common.config import PrefillConfig
from baton.common.deadlines import Deadlines, earliest
from baton.common.engine.batch import Batch, BatchRow, StepResult, pack_batch
from baton.common.engine.chunk_predictor import ChunkPredictor, StepRoom
from baton.common.engine.chunks import ChunkBudget, chunk_row
from baton.common.engine.core_api import Drain, FromPeer, HandOver, MembershipView
from baton.common.engine.kv_feed import KvFeed
from baton.common.engine.policy import ExplainGrammar, foreign_token
from baton.common.errors import ErrorCode
from baton.common.ids import HandoffKey
from baton.common.kv.census import Holding, OwnerClass
from baton.common.kv.pool import KvPool, RefusalReason, Refused
from baton.common.kv.record import ReqKvInfo
from baton.common.messages import Failure, KvEventsWanted, Load
from baton.prefill.grace import KeptRequests, is_receiver_lost, serves
from baton.prefill.pipelining import ONE_GROUP, LayerGroups
from baton.prefill.request import (
    Ended,
    HandingOff,
    Kept,
    Prefilling,
    Queued,
    Returning,
    SourceRequest,
    Stopping,
    owner_class,
)
from baton.prefill.returning import Returns, Speed
from baton.prefill.shipping import Shipping
from baton.transfer.api import (
    AbortSink,
    AbortSource,
    FinishSource,
    OfferReceived,
    OpenSink,
    ShipRegion,
    SinkCommitted,
    SinkFailed,
    SourceAborted,
    SourceReleased,
    SourceStopping,
)

PrefillEffect = ShipRegion | FinishSource | AbortSource | OpenSink | AbortSink


class PrefillCore:
    """`EngineCore` of a prefill worker, for a model of `vocab_size` tokens. With `predictor` chunks are as long as its
    steps should take, else as `chunk_tokens` says."""

    def __init__(
        self,
        pool: KvPool,
        config: PrefillConfig,
        vocab_size: int,
        layer_groups: LayerGroups = ONE_GROUP,
        explain_grammar: ExplainGrammar = lambda grammar: "",
        feed: KvFeed | None = None,
        predictor: ChunkPredictor | None = None,
    ) -> None:
        self.pool = pool
        self._config = config
        self._vocab_size = vocab_size
        self._explain_grammar = explain_grammar
        self._feed = feed
        self._predictor = predictor
        self._room: StepRoom | None = None  # of the launched step, with a predictor
        self._computing = Speed()
        self._requests: dict[HandoffKey, SourceRequest] = {}
        self._queue: list[SourceRequest] = []
        self._prefilling: list[SourceRequest] = []  # in order of arrival
        self._kept = KeptRequests(config.grace_s)
        self._returns = Returns(pool, config.kv_return, self._computing, layer_groups.page_bytes)
        self._launched: dict[int, tuple[SourceRequest, int]] = {}  # row key -> request, KV length after the step
        self._deadlines: Deadlines[HandoffKey] = Deadlines()
        self._out: list[PrefillEffect] = []
        self._shipping = Shipping(pool, layer_groups, self._out.append)
        self._numbers = 0
        self._steps = 0
        self._draining = False
        self._may_fit = False  # something changed since the head of the queue did not fit
        self.stray_messages = 0
        self.computed_tokens = 0

    # ------------------------------------------------------------------------------------------- events

    def handle(self, event: object, now: float) -> list[object]:
        match event:
            case OfferReceived():
                self._on_offer(event, now)
            case SourceReleased(key):
                self._on_released(key)
            case SourceAborted(key, failure):
                self._on_aborted(key, failure, now)
            case SourceStopping(key, failure):
                self._stop(self._requests[key], failure)
            case SinkCommitted() | SinkFailed():
                self._on_returned(event, now)
            case HandOver():
                pass  # whoever asked for these prompts notices, and asks elsewhere
            case Drain():
                self._draining = True
                while (kept := self._kept.take_oldest()) is not None:
                    self._end(kept)
            case MembershipView():  # peers that die are the transfer plane's to notice: it ends their hand-offs here
                if self._feed is not None:
                    self._feed.on_view(event)
            case FromPeer(sender, KvEventsWanted() as wanted) if self._feed is not None:
                self._feed.on_wanted(sender, wanted)
            case FromPeer():
                self.stray_messages += 1  # nobody sends requests to a prefill worker
            case _:
                raise TypeError(f"a prefill core cannot handle {event!r}")
        self._admit(now)
        return self._take_out()

    def on_timer(self, now: float) -> list[object]:
        for key in self._deadlines.pop_due(now):
            request = self._requests[key]
            if not isinstance(request.state, Stopping | Ended):
                self._give_up(request, ErrorCode.DEADLINE_EXCEEDED, "the request's time is over")
        for request in self._kept.take_due(now):
            self._end(request)
        self._admit(now)
        return self._take_out()

    def next_deadline(self) -> float | None:
        if self._out or (self._feed is not None and self._feed.waiting):
            return 0.0
        return earliest(self._deadlines.next_s(), self._kept.next_deadline())

    def _on_offer(self, offer: OfferReceived, now: float) -> None:
        assert offer.key not in self._requests, f"{offer.key} was offered twice"
        kept = self._kept.take(offer.request_id)
        if kept is not None and serves(kept, offer):
            self._adopt(kept, offer)
            return
        if kept is not None:
            self._end(kept)  # asked for something else: what it has of that is in the prefix tree
        self._numbers += 1
        request = SourceRequest(self._numbers, offer, now)
        self._requests[offer.key] = request
        if self._draining:
            self._give_up(request, ErrorCode.DRAINING, "this worker is shutting down")
        elif len(self._queue) >= self._config.max_queued_requests:
            self._give_up(request, ErrorCode.OVERLOADED, f"{len(self._queue)} prompts are waiting here")
        elif foreign := foreign_token(offer.tokens, self._vocab_size):
            self._give_up(request, ErrorCode.INVALID_REQUEST, f"tokens{foreign}")
        elif offer.sample and (wrong := self._explain_grammar(offer.sampling.grammar)):
            self._give_up(request, ErrorCode.INVALID_REQUEST, f"grammar: {wrong}")
        elif request.total > self.pool.longest:
            reason = f"{request.total} tokens never fit this worker's pool"
            self._give_up(request, ErrorCode.PROMPT_TOO_LONG, reason)
        else:
            self._queue.append(request)
            self._deadlines.set(offer.key, offer.deadline_s)
            self._may_fit = True

    def _on_released(self, key: HandoffKey) -> None:
        """The receiver has everything; perhaps we gave up (Stopping) while it was saying so."""
        request = self._requests[key]
        assert isinstance(request.state, HandingOff | Stopping), f"{request!r} was released before it was finished"
        self._forget(request)

    def _on_aborted(self, key: HandoffKey, failure: Failure, now: float) -> None:
        """No reader is left. Where it was the receiver that was lost, another one may come."""
        request = self._requests[key]
        gave_up = request.state.failure if isinstance(request.state, Stopping) else failure
        lost = is_receiver_lost(failure) and is_receiver_lost(gave_up)
        self._stop(request, failure)
        idle = request.kv is not None and not self._returns.holds(request)
        if lost and idle and self._kept.keeps and not self._draining:
            self._keep(request, now)
        else:
            self._forget(request)

    # ---------------------------------------------------------------------------- between two receivers

    def _keep(self, request: SourceRequest, now: float) -> None:
        """Unless the next receiver was faster: then it is served now, or has been already."""
        del self._requests[request.offer.key]
        request.state = Kept()
        same = [one for one in self._requests.values() if one.offer.request_id == request.offer.request_id]
        begun = next((one for one in same if serves(request, one.offer) and one.is_behind(request)), None)
        if begun is not None:
            self._take_off(begun)
            self._end(begun)
            self._adopt(request, begun.offer)
        elif same:
            self._end(request)
        elif (before := self._kept.add(request, now)) is not None:
            self._end(before)

    def _adopt(self, request: SourceRequest, offer: OfferReceived) -> None:
        """It goes on as if nothing had happened."""
        assert isinstance(request.state, Kept), request
        request.offer = offer
        request.queued_s = 0.0
        self._requests[offer.key] = request
        self._deadlines.set(offer.key, offer.deadline_s)
        self._prefill(request)

    # ------------------------------------------------------------------------------------------- endings

    def _give_up(self, request: SourceRequest, code: ErrorCode, reason: str) -> None:
        failure = Failure(code=code, reason=reason)
        self._stop(request, failure)
        self._out.append(AbortSource(request.offer.key, failure))

    def _stop(self, request: SourceRequest, failure: Failure) -> None:
        """Computes nothing more for it. What it owns stays its own."""
        if isinstance(request.state, Returning):
            self._out.append(self._returns.abort(request, failure))
        self._take_off(request)
        request.state = Stopping(failure)
        self._deadlines.drop(request.offer.key)
        self._may_fit = True

    def _take_off(self, request: SourceRequest) -> None:
        match request.state:
            case Queued():
                if request in self._queue:
                    self._queue.remove(request)
            case Prefilling():
                self._prefilling.remove(request)
            case Returning() | HandingOff() | Stopping():
                pass
            case Kept() | Ended():
                raise AssertionError(f"{request!r} has no hand-off to stop")
            case _:
                assert_never(request.state)

    def _forget(self, request: SourceRequest) -> None:
        """The transfer plane has let go. What was computed stays cached."""
        del self._requests[request.offer.key]
        self._deadlines.drop(request.offer.key)
        self._end(request)

    def _end(self, request: SourceRequest) -> None:
        request.state = Ended()
        if request.number not in self._launched and not self._returns.holds(request):
            self._give_back(request)

    def _give_back(self, request: SourceRequest) -> None:
        if request.kv is not None:
            self.pool.release_kv_cache(request, request.offer.tokens)
            self._may_fit = True

    # -------------------------------------------------------------------------------------------- steps

    def _admit(self, now: float) -> None:
        """Promises pages to the head of the queue while the next step has room for more work."""
        while self._queue and self._may_fit and self._uncomputed < self._config.chunk_tokens:
            request = self._queue[0]
            offer = request.offer
            # A request that wants a token computes at least its last position; another may find everything cached.
            # One whose prompt is scored computes all of it.
            most = 0 if request.scored else request.total - 1 if offer.sample else request.total
            promised = self.pool.pre_alloc(request, offer.tokens, request.total, most)
            if isinstance(promised, Refused):
                if (kept := self._kept.take_oldest()) is not None:
                    self._end(kept)
                    continue
                assert promised.reason is not RefusalReason.TOO_LONG, f"{request!r} passed the door"
                self._may_fit = False
                return
            self._queue.pop(0)
            request.cached_tokens = promised.prefix_len
            request.queued_s = now - request.arrived_s
            asked = None if request.scored else self._returns.begin(request, now)
            if asked is not None:
                request.state = Returning()
                self._out.append(asked)
            else:
                self._prefill(request)

    def _prefill(self, request: SourceRequest) -> None:
        """What is there is shipped at once; the rest is computed."""
        request.state = Prefilling(request.offer.start)
        self._prefilling.append(request)
        self._ship(request)

    def _on_returned(self, event: SinkCommitted | SinkFailed, now: float) -> None:
        """What landed is as good as computed, what did not is computed."""
        request, until = self._returns.end(event, now)
        self.pool.commit_incoming(request.record, until)
        match request.state:
            case Returning():
                self.pool.cache_unfinished_req(request, request.offer.tokens)
                self._may_fit = True
                self._prefill(request)
            case Stopping():
                pass
            case Ended():
                self._give_back(request)
            case _:
                raise AssertionError(f"{event} for {request!r}")

    @property
    def _uncomputed(self) -> int:
        return sum(request.total - request.record.kv_committed_len for request in self._prefilling)

    def next_batch(self, now: float) -> Batch | None:
        """One chunk of each request in order of arrival, within the token budget; what is kept comes last."""
        assert not self._launched, "one step at a time"
        if not self._prefilling and not self._kept:
            return None
        rows: list[BatchRow] = []
        self._room = self._predictor.room() if self._predictor is not None else None
        budget = ChunkBudget(self.pool, self._config.chunk_tokens, self._room)
        for request in (*self._prefilling, *(one for one in self._kept if not one.complete)):
            record, total = request.record, request.total
            done = record.kv_committed_len
            end = budget.take(done, total, scored=request.scored)
            if end == done:
                break
            sampling = request.offer.sampling if request.offer.sample and end == total else None
            top = request.offer.sampling.prompt_logprobs if request.scored else -1
            rows.append(chunk_row(self.pool, record, request.number, request.offer.tokens, end, sampling, top))
            self._launched[request.number] = (request, end)
        copies = self.pool.take_state_copies(request.record for request, _ in self._launched.values())
        if not rows:
            return None
        compute_s = self._computing.seconds(sum(len(row.input_ids) for row in rows)) or 0.0
        reports = self._shipping.plan_layers(self._launched.values(), compute_s)
        return pack_batch(rows, self.pool.page_size, copies, reports)

    def on_layers(self, layers: int, now: float) -> list[object]:
        for request, _ in self._launched.values():
            self._shipping.ship_layers(request, layers)
        return self._take_out()

    def on_step(self, result: StepResult, now: float) -> list[object]:
        assert set(result.keys) == self._launched.keys(), "the result of another step"
        launched, self._launched = self._launched, {}
        self._steps += 1
        computed = [end - request.record.kv_committed_len for request, end in launched.values()]
        step_tokens = sum(computed)
        self.computed_tokens += step_tokens
        self._computing.add(step_tokens, result.compute_s)
        if self._predictor is not None and self._room is not None:
            self._predictor.learn(self._room, result.compute_s)
        for key, tokens, token, logprob in zip(result.keys, computed, result.tokens, result.logprobs, strict=True):
            request, end = launched[key]
            self.pool.commit_incoming(request.record, end)
            request.prefill_s += result.compute_s * tokens / step_tokens
            if (scores := result.scores.get(key)) is not None:
                request.scores.append(scores)
            if request.complete:
                request.first_token, request.logprob = token, logprob
            match request.state:
                case Prefilling() as state:
                    if state.sent:
                        self._shipping.ship_all_layers(request)
                    elif state.shipped < request.total:
                        self.pool.cache_unfinished_req(request, request.offer.tokens)
                    self._ship(request)
                case Kept():
                    self.pool.cache_unfinished_req(request, request.offer.tokens)
                case Stopping():
                    pass
                case Ended():
                    self._give_back(request)
                case Queued() | Returning() | HandingOff():
                    raise AssertionError(f"{request!r} was computed")
                case _:
                    assert_never(request.state)
        self._may_fit = True  # what was cached may have freed duplicates, or the checkpoint that it began with
        self._admit(now)
        return self._take_out()

    def _ship(self, request: SourceRequest) -> None:
        """Hands over what is computed; a request that is complete has nothing left to compute."""
        self._shipping.ship(request)
        if isinstance(request.state, HandingOff):
            self._prefilling.remove(request)

    def _take_out(self) -> list[object]:
        out: list[object] = list(self._out)
        self._out.clear()
        if self._feed is not None:
            out += self._feed.take()
        return out

    # ------------------------------------------------------------------------------------------ reporting

    def load(self) -> Load:
        return Load(
            queued=len(self._queue),
            running=len(self._requests) - len(self._queue),
            free_pages=self.pool.available_pages,
            total_pages=self.pool.total_pages,
            queued_tokens=sum(request.total for request in self._queue),
            steps=self._steps,
            tokens_per_s=self._computing.tokens_per_s,
            kv_seq=0 if self._feed is None else self._feed.seq,
            draining=self._draining,
        )

    @property
    def queued(self) -> int:
        """Offers that wait to be admitted."""
        return len(self._queue)

    def holdings(self) -> Iterable[Holding]:
        for request in self._holders():
            if request.kv is not None:
                written = self._returns.holds(request)
                owner = OwnerClass.INCOMING if written else owner_class(request.state)
                yield Holding(owner, request.offer.key, request.kv)

    def records(self) -> list[ReqKvInfo]:
        return [record for request in self._holders() if (record := request.kv) is not None]

    def _holders(self) -> list[SourceRequest]:
        holders = [*self._requests.values(), *self._kept]
        if self._launched:
            holders += [request for request, _ in self._launched.values() if isinstance(request.state, Ended)]
        if self._returns:
            holders += [request for request in self._returns if isinstance(request.state, Ended)]
        return holders

    @property
    def idle(self) -> bool:
        return not (self._requests or self._kept or self._returns or self._launched)
