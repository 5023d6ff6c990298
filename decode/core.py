"""The brain of a decode worker: owns each request from Submit to its acknowledged last message.

Owns: every request and its KV record, and the decision where missing KV comes from (a tier below the pool, a
prefill worker, or here). Parts: `waiting` (the queue), `steps` (what computes), `handoffs`, `returning`, `restoring`
and `storing` (the tiers), `peers`, `outbox` (what gateways are told). Never: talks to a socket, writes a page, or
frees one that a hand-off, a tier or the running step may touch.

Invariants:
D1. Each accepted Submit gets exactly one last Output, at the latest at its deadline; it is repeated until acknowledged.
D2. A record is in one of four hands: the request's, its hand-off's (Incoming), the tiers' (Restoring, Storing), or the
    running step's (Leaving). It is released only when it is back in the request's; over before that, it is Stopping. A
    hand-off has not ended before its return (`returning`) has.
D3. Admission promises all pages that a request needs to start, before anything is transferred or computed for it.
D4. A step that does not fit pushes back the request that is cheapest to bring back, one at a time, while one goes on.
D5. Every output token follows from (prompt, earlier outputs, sampling) alone, so a retracted or migrated request
    continues as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

import numpy as np

from baton.common.config import DecodeConfig, TiersConfig, TransferConfig
from baton.common.deadlines import Deadlines
from baton.common.engine.batch import Batch, StepResult
from baton.common.engine.core_api import Drain, FromPeer, MembershipView
from baton.common.engine.policy import finish_reason
from baton.common.errors import ErrorCode
from baton.common.ids import SessionId, Stamp
from baton.common.kv.census import Holding, OwnerClass
from baton.common.kv.pool import KvPool, PreAllocated, RefusalReason, Refused
from baton.common.kv.prefix.interface import I32
from baton.common.kv.record import ReqKvInfo
from baton.common.kv.tiers.api import PagesRestored, PagesStored, StorePages, TierCommand
from baton.common.kv.tiers.keys import PageKeys
from baton.common.messages import (
    CancelRequest,
    CloseSession,
    Failure,
    FinishAck,
    Load,
    Output,
    Resume,
    Submit,
    TokenLogprob,
    pack_tokens,
)
from baton.common.units import page_ceil
from baton.decode.admission import ActiveRequest
from baton.decode.door import Door
from baton.decode.handoffs import Handoffs
from baton.decode.outbox import NOT_HERE, Outbox
from baton.decode.peers import Peers
from baton.decode.request import (
    DecodeRequest,
    Done,
    Incoming,
    Leaving,
    Prefilling,
    Queued,
    RequestKey,
    Restoring,
    Running,
    State,
    Stopping,
    Storing,
    new_request,
)
from baton.decode.restoring import Restores
from baton.decode.retract import choose_victim
from baton.decode.returning import Returns
from baton.decode.sessions import Sessions
from baton.decode.steps import RUNNING, Steps
from baton.decode.storing import Stores
from baton.decode.waiting import WaitingRequests
from baton.transfer.api import (
    AbortSink,
    FirstTokenReady,
    OfferReceived,
    SinkCommand,
    SinkCommitted,
    SinkFailed,
    SourceAborted,
    SourceCommand,
    SourceReleased,
    SourceStopping,
    return_key,
)

_NO_TIERS = TiersConfig()
LOCAL_SHARE = 16
"""Of what is known of a prompt, so much may be missing and is computed where it is known."""
_LEAVING = Leaving()
_STOPPING = Stopping()


class DecodeCore:
    """`EngineCore` of a decode worker. `max_context_len` bounds prompt + outputs, whose tokens are below `vocab_size`.
    With `page_keys` there are tiers below the pool, in which pages have these names."""

    def __init__(
        self,
        stamp: Stamp,
        pool: KvPool,
        config: DecodeConfig,
        transfer: TransferConfig,
        max_context_len: int,
        vocab_size: int,
        tiers: TiersConfig = _NO_TIERS,
        page_keys: PageKeys | None = None,
    ) -> None:
        assert max_context_len <= pool.max_context_len, (max_context_len, pool.max_context_len)
        self.pool = pool
        self._stamp = stamp
        self._config = config
        self._transfer = transfer
        self._max_context_len = max_context_len
        self._outbox = Outbox(transfer, config.max_queued_requests, self._on_final_over)
        self._sessions = Sessions(pool, config.max_sessions, config.session_ttl_s, self._keep_below)
        self._door = Door(config, self._sessions, pool.longest, max_context_len, vocab_size)
        self._waiting = WaitingRequests(pool, config, self._sessions)
        self._handoffs = Handoffs(stamp.epoch)
        self._returns = Returns(pool)
        self._restores = Restores(pool, page_keys, tiers)
        self._stores = Stores(pool, page_keys, tiers)
        self._peers = Peers()
        self._compute = Steps(pool, config.chunk_tokens)
        self._requests: dict[RequestKey, DecodeRequest] = {}
        self._deadlines: Deadlines[RequestKey] = Deadlines()
        self._commands: list[SinkCommand | SourceCommand | TierCommand] = []
        self._numbers = 0
        self._steps = 0
        self._draining = False
        self._starved = False  # the last plan left out a request that lacks pages
        self.retractions = 0
        self.restored_tokens = 0
        self.stray_messages = 0

    # ------------------------------------------------------------------------------------------- events

    def handle(self, event: object, now: float) -> list[object]:
        match event:
            case FromPeer(sender, body):
                match body:
                    case Submit():
                        self._on_submit(sender, body, now)
                    case CancelRequest():
                        self._on_cancel(sender, body, now)
                    case CloseSession():
                        self._sessions.close(SessionId(body.session_id))
                        self._waiting.stir()
                    case Resume():
                        self._on_resume(sender, body)
                    case FinishAck():
                        self._outbox.acknowledge((body.request_id, body.placement), now)
                    case _:
                        self.stray_messages += 1
            case FirstTokenReady():
                self._on_first_token(event, now)
            case SinkCommitted() | SinkFailed():
                if not self._returns.defer(event):
                    self._on_handed_off(event, now)
            case OfferReceived():
                self._commands += self._returns.answer(event, *self._handoffs.find(return_key(event.key)))
            case SourceReleased(key) | SourceAborted(key):
                if (ended := self._returns.end(key)) is not None:
                    self._on_handed_off(ended, now)
            case SourceStopping():
                pass  # the pages stay where they are in any case, until the proof has come
            case PagesRestored():
                self._on_restored(event, now)
            case PagesStored():
                self._on_stored(event, now)
            case MembershipView():
                self._on_view(event, now)
            case Drain():
                self._draining = True
                while self._sessions.release_oldest():
                    pass
            case _:
                raise TypeError(f"a decode core cannot handle {event!r}")
        self._admit(now)
        return self._take_out()

    def on_timer(self, now: float) -> list[object]:
        for key in self._deadlines.pop_due(now):
            reason = "no complete answer within the request's time"
            self._fail(self._requests[key], ErrorCode.DEADLINE_EXCEEDED, reason, now)
        self._outbox.on_timer(now)
        self._sessions.expire(now)
        self._commands += [*self._restores.cut_short(now), *self._stores.cut_short(now)]
        self._admit(now)
        return self._take_out()

    def next_deadline(self) -> float | None:
        if self._outbox.waiting or self._commands:
            return 0.0
        parts = (self._outbox, self._sessions, self._restores, self._stores)
        due = (self._deadlines.next_s(), *(part.next_deadline() for part in parts))
        return min((at_s for at_s in due if at_s is not None), default=None)

    def _take_out(self) -> list[object]:
        commands, self._commands = self._commands, []
        return [*commands, *self._outbox.take()]

    # ------------------------------------------------------------------------------------ from gateways

    def _on_submit(self, sender: Stamp, message: Submit, now: float) -> None:
        key = (message.request_id, message.placement)
        known = self._requests.get(key)
        if known is not None:
            if known.gateway == sender:
                self._outbox.submitted(known)
            return
        if self._peers.is_gone(sender):
            return  # its last words
        refusal = NOT_HERE if self._outbox.is_buried(key, now) else self._refusal(message)
        if refusal is not None:
            self._outbox.refuse(sender, key, refusal)
            return
        for older in [one for one in self._requests.values() if one.key[0] == key[0] and one.final is None]:
            self._fail(older, ErrorCode.CANCELLED, "a later placement has come", now)
        self._numbers += 1
        request = new_request(self._numbers, sender, message, self._max_context_len, now)
        self._requests[key] = request
        self._deadlines.set(key, request.deadline_s)
        self._outbox.submitted(request)
        reason = self._finish_reason(request)
        if reason:
            self._finish(request, reason, now)  # its earlier worker died between the last token and saying so
        else:
            self._waiting.add(request)

    def _refusal(self, message: Submit) -> Failure | None:
        if self._draining:
            return Failure(code=ErrorCode.DRAINING, reason="this worker is shutting down")
        return self._door.refusal(message, len(self._waiting))

    def _on_cancel(self, sender: Stamp, message: CancelRequest, now: float) -> None:
        key = (message.request_id, message.placement)
        request = self._requests.get(key)
        if request is None:
            self._outbox.bury(key, now)
            self._outbox.refuse(sender, key, NOT_HERE)
        elif request.gateway == sender:
            if request.final is None:
                request.answered = message.answered
                self._fail(request, ErrorCode.CANCELLED, "cancelled by the gateway", now)
            else:
                self._outbox.resume(request, len(request.outputs))

    def _on_resume(self, sender: Stamp, message: Resume) -> None:
        request = self._requests.get((message.request_id, message.placement))
        if request is None:
            self._outbox.refuse(sender, (message.request_id, message.placement), NOT_HERE)
        elif request.gateway == sender:
            self._outbox.resume(request, message.next_index)

    def _on_view(self, view: MembershipView, now: float) -> None:
        if not self._peers.update(view):
            return
        for request in list(self._requests.values()):
            gone = self._peers.is_gone(request.gateway)
            if request.final is None and (gone or self._peers.is_silent(request.gateway)):
                self._fail(request, ErrorCode.CANCELLED, "the gateway was lost", now)
            if gone:
                self._outbox.acknowledge(request.key, now)  # nobody is left to do it

    # ------------------------------------------------------------------------------------------ outcomes

    def _finish_reason(self, request: DecodeRequest) -> str:
        last = request.outputs[-1] if request.outputs else -1
        return finish_reason(len(request.outputs), last, request.sampling, len(request.prompt), self._max_context_len)

    def _finish(self, request: DecodeRequest, reason: str, now: float, first_index: int | None = None) -> None:
        """The answer is complete; its KV stays, with the session or in the cache."""
        request.answered = True
        self._conclude(request, reason, None, now, first_index)

    def _fail(self, request: DecodeRequest, code: ErrorCode, reason: str, now: float) -> None:
        self._conclude(request, "", Failure(code=code, reason=reason), now, None)

    def _conclude(
        self, request: DecodeRequest, reason: str, failure: Failure | None, now: float, first_index: int | None
    ) -> None:
        """Decides the one outcome, tells it, and lets go of the KV as soon as nobody else uses it."""
        assert request.final is None, f"{request.key} has an outcome already"
        self._deadlines.drop(request.key)
        final = Output(
            request_id=request.key[0],
            placement=request.key[1],
            first_index=0,
            finish_reason=reason,
            failure=failure,
            timeline=request.times.timeline(now, self._stamp.worker),
        )
        first = len(request.outputs) if first_index is None else first_index
        self._let_go(request, failure, now)
        self._outbox.finish(request, final, first, now)

    def _let_go(self, request: DecodeRequest, failure: Failure | None, now: float) -> None:
        match request.state:
            case Queued():
                self._waiting.discard(request)
                self._done(request, now)
            case Incoming(key):
                assert failure is not None
                self._commands.append(AbortSink(key, failure))
                request.state = _STOPPING
            case Restoring(job):
                self._commands.append(self._restores.abort(job))
                request.state = _STOPPING
            case Storing():
                request.state = _STOPPING
            case Prefilling() | Running():
                self._compute.remove(request)
                if self._compute.uses(request):
                    request.state = _LEAVING
                else:
                    self._done(request, now)
            case Stopping() | Leaving() | Done():
                raise AssertionError(f"{request.key} has let go already: {request.state}")
            case _:
                assert_never(request.state)

    def _done(self, request: DecodeRequest, now: float) -> None:
        """Nobody else uses its pages: they stay with the session; else what is valid goes to the tree and the rest is
        freed."""
        if request.kv is not None:
            if request.session_id and request.answered and not self._draining:
                self._sessions.keep(request, now)
            else:
                effective_len, tokens = request.effective_kv_committed_len, request.known_tokens
                self.pool.release_kv_cache(request, tokens, effective_len=effective_len)
                self._keep_below(tokens[:effective_len])
            self._waiting.stir()
        request.state = Done()
        self._drop_if_over(request)

    def _on_final_over(self, request: DecodeRequest) -> None:
        request.final_over = True
        self._drop_if_over(request)

    def _drop_if_over(self, request: DecodeRequest) -> None:
        if request.final_over and isinstance(request.state, Done):
            del self._requests[request.key]

    # ---------------------------------------------------------------------------------------- admission

    def _admit(self, now: float) -> None:
        """Promises pages to waiting requests for as long as they fit, and starts filling them. Nobody is let in before
        one who is on his way out."""
        while not self._stores.awaited and (verdict := self._waiting.admit(self._active())) is not None:
            request, allocation = verdict
            if isinstance(allocation, PreAllocated):
                self._start(request, now)
            elif allocation.reason is RefusalReason.TOO_LONG:
                self._fail(request, ErrorCode.OUT_OF_PAGES, "prompt and answer outgrew this worker's pool", now)
            elif allocation.reason is not RefusalReason.NO_ROW and self._give_up_session(now):
                self._waiting.stir()  # who waits goes before who may come back
            else:
                request.times.refused(now)

    def _active(self) -> Iterable[ActiveRequest]:
        for request in self._requests.values():
            if request.kv is not None:
                ends = isinstance(request.state, Storing | Stopping | Leaving)
                total = request.kv.kv_allocated_len if ends else request.total_len
                yield ActiveRequest(request.kv, total, request.state is RUNNING)

    def _start(self, request: DecodeRequest, now: float) -> None:
        assert isinstance(request.state, Queued), request.state
        request.times.admitted(request.state.since_s, now)
        request.times.begin_count()
        request.count_tokens(0, request.record.kv_committed_len, "cached_tokens")
        request.handoff = self._handoffs.new_id()
        request.attempt = 0
        request.tried.clear()
        request.tried_again.clear()
        restore = self._restores.begin(request, now)
        if restore is None:
            self._fill(request, now)
            return
        request.state = Restoring(restore.job)
        request.times.restoring_since_s = now
        self._commands.append(restore)

    # ----------------------------------------------------------------------------- where the KV comes from

    def _on_restored(self, event: PagesRestored, now: float) -> None:
        """What landed is as good as computed; the rest comes from elsewhere."""
        landed = self._restores.end(event)
        request, start, until = landed.request, landed.start, landed.until
        self._stores.found(landed)
        request.count_tokens(start, until, "restored_tokens")
        self.pool.commit_incoming(request.record, until)
        self.restored_tokens += until - start
        request.times.restored(now)
        match request.state:
            case Restoring():
                self._fill(request, now)
            case Stopping():
                self._done(request, now)
            case _:
                raise AssertionError(f"{event} for {request.key} in {request.state}")

    def _keep_below(self, tokens: I32) -> None:
        """Tokens were offered to the prefix cache: the tiers may want what it has of them."""
        self._commands += self._stores.cached(tokens, self._lacking)

    @property
    def _lacking(self) -> bool:
        """Whether somebody waits for pages."""
        return self._starved or len(self._waiting) > 0

    def _give_up_session(self, now: float) -> bool:
        """The one that was idle longest, for somebody who lacks pages. They are copied to a tier first (if there is
        one), and waited for, before the next session is given up. False: there is none."""
        before = len(self._commands)
        released = self._sessions.release_oldest()
        self._stores.await_these([one for one in self._commands[before:] if isinstance(one, StorePages)], now)
        return released

    def _on_stored(self, event: PagesStored, now: float) -> None:
        request = self._stores.end(event)
        self._commands += self._stores.go_on(event, self._lacking)
        self._waiting.stir()
        if request is None:
            return
        match request.state:
            case Storing():
                self._push_back(request, now)
            case Stopping():
                self._give_back(request)
                self._done(request, now)
            case _:
                raise AssertionError(f"{event} for {request.key} in {request.state}")

    def _fill(self, request: DecodeRequest, now: float) -> None:
        """Gets the KV that is still missing: from nobody, from here, or from a prefill worker not tried yet."""
        known = request.record.kv_committed_len
        missing = request.fill_len - known
        peer = self._peers.prefill_for(request) if missing > self._most_here(known) else None
        if missing == 0:
            self._run(request, now)
        elif peer is None:
            self._prefill_here(request, request.fill_len)
        elif known % self.pool.page_size:
            # Hand-offs move whole pages: the rest of a page that is known in part is computed, not sent once more.
            self._prefill_here(request, min(request.fill_len, page_ceil(known, self.pool.page_size)))
        else:
            deadline_s = min(request.deadline_s, now + self._transfer.handoff_ttl_s)
            request.times.asked(now)
            self._commands.append(self._handoffs.open(request, peer, self.pool, deadline_s))

    def _most_here(self, known: int) -> int:
        """So many missing tokens are computed here. Of a prompt that is known but for its end no more than one step
        would take is not worth a hand-off: a prefill worker that has forgotten it would compute all of it again."""
        return max(self._config.local_prefill_max_tokens, min(known // LOCAL_SHARE, self._config.chunk_tokens))

    def _prefill_here(self, request: DecodeRequest, until: int) -> None:
        request.state = Prefilling(until)
        self._compute.prefilling.append(request)

    def _on_first_token(self, event: FirstTokenReady, now: float) -> None:
        """The client gets it before all KV is there. One that ends the answer waits for the pages: they are kept."""
        request, _ = self._handoffs.find(event.key)
        assert request is not None, f"{event} of a hand-off that has ended"
        ends = event.first_token in request.stop_ids or request.limit == 1
        if isinstance(request.state, Incoming) and request.wants_first_token and not ends:
            self._append(request, event.first_token, event.logprob, now)

    def _on_handed_off(self, event: SinkCommitted | SinkFailed, now: float) -> None:
        if isinstance(event, SinkCommitted):
            self._on_committed(event, now)
        else:
            self._on_sink_failed(event, now)

    def _on_committed(self, event: SinkCommitted, now: float) -> None:
        request, start = self._handoffs.close(event.key)
        request.times.handed_over(now)
        request.count_tokens(start, start + event.result.cached_tokens, "prefill_cached_tokens")
        request.count_transfer(event, start, request.fill_len)
        self.pool.commit_incoming(request.record, request.fill_len)
        match request.state:
            case Incoming():
                times = request.times
                times.transfer_s += event.transfer_s
                times.scatter_s += event.scatter_s
                times.prefill_s += event.result.prefill_s
                self._run(request, now, event.result.first_token, event.result.logprob)
            case Stopping():
                self._done(request, now)
            case _:
                raise AssertionError(f"{event} for {request.key} in {request.state}")

    def _on_sink_failed(self, event: SinkFailed, now: float) -> None:
        """What landed is kept where it is of use; the rest comes by another lane, from somebody who was not tried yet,
        in the end from here."""
        request, start = self._handoffs.close(event.key)
        request.times.handed_over(now)
        if event.failure.code is ErrorCode.INTERNAL and not event.peer_lost:
            request.try_again(event.peer)
        if self.pool.lands_in_part:
            self._keep_what_landed(request, event, start)
        else:
            request.count_transfer(event, start, start)
            self.pool.abandon_incoming(request.record)
            request.recount_cached(request.record.kv_committed_len)
        match request.state:
            case Incoming():
                self._fill(request, now)
            case Stopping():
                self._done(request, now)
            case _:
                raise AssertionError(f"{event} for {request.key} in {request.state}")

    def _keep_what_landed(self, request: DecodeRequest, event: SinkFailed, start: int) -> None:
        # All may have landed without the first output: then the last position is computed once more, for its logits.
        most = request.fill_len - 1 if request.wants_first_token else request.fill_len
        landed = max(min(event.landed_until, most), request.record.kv_committed_len)
        request.count_transfer(event, start, landed)
        self.pool.commit_incoming(request.record, landed)

    def _run(
        self, request: DecodeRequest, now: float, first_token: int = -1, logprob: TokenLogprob | None = None
    ) -> None:
        """All KV is there. The prompt is shared with others from here on."""
        if request.session_protected_len is None:  # a later turn keeps what the first one shared
            effective_len = request.effective_kv_committed_len
            self.pool.cache_finished_req(request, request.fill_tokens, kv_len_to_handle=effective_len)
            self._keep_below(request.fill_tokens[:effective_len])
        request.state = RUNNING
        request.times.runs(now)
        self._compute.running.append(request)
        if request.wants_first_token:
            assert first_token >= 0, f"{request.key} was filled without its first token"
            self._append(request, first_token, logprob, now)

    # -------------------------------------------------------------------------------------------- steps

    def next_batch(self, now: float) -> Batch | None:
        self._starved = False
        return self._compute.plan(lambda request, refused: self._make_room(request, refused, now))

    def _make_room(self, request: DecodeRequest, refused: Refused, now: float) -> bool:
        """Retracts somebody, perhaps `request` itself. False when that frees nothing yet, or nobody can be: then it
        waits for a store or a hand-off to end, or fails when there is nothing to wait for."""
        no_pages = refused.reason is RefusalReason.NO_PAGES
        self._starved |= no_pages
        if no_pages and self._stores.awaited:
            return False
        if no_pages and self._give_up_session(now):
            return not self._stores.awaited
        victim = choose_victim([*self._compute.running, *self._compute.prefilling])
        if victim is not None and no_pages:
            return self._retract(victim, now)
        others = any(one.kv is not None and one is not request for one in self._requests.values())
        if not no_pages or not (others or len(self._stores)):
            self._fail(request, ErrorCode.OUT_OF_PAGES, "prompt and answer outgrew this worker's pool", now)
        return False

    def _retract(self, request: DecodeRequest, now: float) -> bool:
        """Its pages are given back, at once or when they were copied to a tier (False)."""
        self._compute.remove(request)
        self.retractions += 1
        request.times.retracted(now)
        backup = self._stores.retract(request, now)
        if backup is None:
            self._push_back(request, now)
            return True
        request.state = Storing()
        self._commands.append(backup)
        return False

    def _push_back(self, request: DecodeRequest, now: float) -> None:
        """It comes again as a request whose outputs are known."""
        self._give_back(request)
        request.state = Queued(now)
        self._waiting.put_back(request)

    def _give_back(self, request: DecodeRequest) -> None:
        """Of a retracted request. Nothing is cached: its newest position may have been planned and not computed."""
        self.pool.release_kv_cache(request, request.known_tokens, is_insert=False)
        request.session_protected_len = None

    def on_layers(self, layers: int, now: float) -> list[object]:
        raise AssertionError("a decode worker's steps ask for no reports")

    def on_step(self, result: StepResult, now: float) -> list[object]:
        rows, chunks = self._compute.collect()
        assert len(result.keys) == len(rows) + len(chunks), "the result of another step"
        self._steps += 1
        packed = np.array(result.tokens, dtype="<i4").tobytes()
        for index, request in enumerate(rows):
            if request.state is RUNNING:
                self._keep_answer(request)
                self._append(
                    request, result.tokens[index], result.logprobs[index], now, packed[4 * index : 4 * index + 4]
                )
            else:
                self._done(request, now)
        if chunks:
            self._on_chunks(chunks, result, len(rows), now)
        self._admit(now)
        return self._take_out()

    def _on_chunks(self, chunks: list[tuple[DecodeRequest, int]], result: StepResult, first: int, now: float) -> None:
        computed = [end - request.record.kv_committed_len for request, end in chunks]
        per_token_s = result.compute_s / (first + sum(computed))
        for index, (request, end) in enumerate(chunks):
            # Also of a request that is over: a recurrent state is that of `end` now, and of nothing before it.
            self.pool.commit_incoming(request.record, end)
            if request.state is _LEAVING:
                self._done(request, now)
                continue
            request.times.prefill_s += per_token_s * computed[index]
            request.count_tokens(end - computed[index], end, "local_tokens")
            assert isinstance(request.state, Prefilling), request.state
            self._keep_checkpoint(request, end)
            if end < request.state.until:
                continue
            self._compute.remove(request)
            if end < request.fill_len:
                self._fill(request, now)
            else:
                self._run(request, now, result.tokens[first + index], result.logprobs[first + index])

    def _keep_checkpoint(self, request: DecodeRequest, length: int) -> None:
        """A recurrent state is only that of one length: what others may go on from is kept when it comes by."""
        shared = request.session_protected_len is None and length <= len(request.prompt)
        if shared and length < request.fill_len and length == self.pool.checkpoint_at(request.fill_len):
            self.pool.cache_finished_req(request, request.fill_tokens, kv_len_to_handle=length)

    def _keep_answer(self, request: DecodeRequest) -> None:
        """Of a recurrent model the answer can be found later only up to where a state was kept. A conversation needs
        none: it has its own."""
        length = request.record.kv_committed_len
        wanted = self.pool.wants_checkpoint(length) and not request.session_id
        if wanted and request.effective_kv_committed_len == length:
            self.pool.cache_finished_req(request, request.known_tokens, kv_len_to_handle=length)

    def _append(
        self, request: DecodeRequest, token: int, logprob: TokenLogprob | None, now: float, packed: bytes | None = None
    ) -> None:
        """One more output token: tell the gateway, or finish."""
        request.outputs.append(token)
        if logprob is not None:
            request.logprobs.append(logprob)
        if token in request.stop_ids or len(request.outputs) >= request.limit:
            self._finish(request, self._finish_reason(request), now, len(request.outputs) - 1)
        else:
            self._outbox.token(request, pack_tokens((token,)) if packed is None else packed)

    # ------------------------------------------------------------------------------------------ reporting

    def load(self) -> Load:
        in_transfer = len(self._handoffs) + len(self._restores) + self._stores.retracted
        return Load(
            queued=len(self._waiting),
            running=len(self._compute.running) + len(self._compute.prefilling) + in_transfer,
            free_pages=self.pool.available_pages,
            total_pages=self.pool.total_pages,
            queued_tokens=sum(request.fill_len for request in self._waiting),
            steps=self._steps,
            draining=self._draining,
        )

    def holdings(self) -> Iterable[Holding]:
        for request in self._requests.values():
            if request.kv is not None:
                yield Holding(_owner_class(request.state), f"{request.key[0]}#{request.key[1]}", request.kv)
        yield from self._sessions.holdings()

    def records(self) -> list[ReqKvInfo]:
        records = [record for request in self._requests.values() if (record := request.kv) is not None]
        return [*records, *self._sessions.records()]

    @property
    def idle(self) -> bool:
        """Every request has had its outcome, and every gateway knows."""
        return not self._requests


def _owner_class(state: State) -> OwnerClass:
    return OwnerClass.INCOMING if isinstance(state, Restoring | Incoming | Stopping) else OwnerClass.REQUEST
