"""The brain of a decode worker: owns each request from Submit to its acknowledged last message.

Owns: every request and its KV record, and what each event means for it. Decides with `door` (who is turned away),
`filling` (where missing KV comes from), `answers` (how an answer grows and ends) and `retract` (who gives way). They
share `parts`: `waiting` (the queue), `steps` (what computes), `handoffs`, `restoring`, `storing` and `caching` (tree
and tiers), `sessions`, `peers`, `outbox` (what gateways are told). Never: talks to a socket, writes a page, or frees
one that a hand-off, a tier or the running step may touch.

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

import numpy as np

from baton.common.config import DecodeConfig, TiersConfig, TransferConfig
from baton.common.deadlines import earliest
from baton.common.engine.batch import Batch, StepResult
from baton.common.engine.chunk_predictor import ChunkPredictor
from baton.common.engine.core_api import Drain, FromPeer, HandOver, MembershipView
from baton.common.engine.kv_feed import KvFeed
from baton.common.engine.policy import ExplainGrammar
from baton.common.errors import ErrorCode
from baton.common.ids import SessionId, Stamp
from baton.common.kv.census import Holding, OwnerClass
from baton.common.kv.pool import KvPool, PreAllocated, RefusalReason
from baton.common.kv.record import ReqKvInfo
from baton.common.kv.tiers.api import PagesRestored, PagesStored
from baton.common.kv.tiers.keys import PageKeys
from baton.common.messages import (
    CancelRequest,
    CloseSession,
    Failure,
    FinishAck,
    KvEventsWanted,
    Load,
    Resume,
    Submit,
)
from baton.decode.admission import ActiveRequest
from baton.decode.answers import LEAVING, Answers
from baton.decode.door import Door
from baton.decode.filling import Filling
from baton.decode.outbox import NOT_HERE
from baton.decode.parts import Parts
from baton.decode.request import (
    DecodeRequest,
    Incoming,
    Leaving,
    Prefilling,
    Restoring,
    State,
    Stopping,
    Storing,
    new_request,
)
from baton.decode.retract import Retraction
from baton.decode.returning import Returns
from baton.decode.steps import RUNNING
from baton.transfer.api import (
    FirstTokenReady,
    OfferReceived,
    SinkCommitted,
    SinkFailed,
    SourceAborted,
    SourceReleased,
    SourceStopping,
    return_key,
)

_NO_TIERS = TiersConfig()


class DecodeCore:
    """`EngineCore` of a decode worker. `max_context_len` bounds prompt + outputs, whose tokens are below `vocab_size`.
    With `page_keys` there are tiers below the pool, in which pages have these names. `predictor`: see `Steps`."""

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
        explain_grammar: ExplainGrammar = lambda grammar: "",
        feed: KvFeed | None = None,
        predictor: ChunkPredictor | None = None,
    ) -> None:
        assert max_context_len <= pool.max_context_len, (max_context_len, pool.max_context_len)
        self.pool = pool
        parts = self._parts = Parts(stamp, pool, config, transfer, tiers, page_keys, predictor)
        self._answers = Answers(parts, max_context_len)
        self._filling = Filling(parts, self._answers, transfer.handoff_ttl_s)
        self._retraction = Retraction(parts, self._answers)
        self._door = Door(config, parts.sessions, pool.longest, max_context_len, vocab_size, explain_grammar)
        self._returns = Returns(pool)
        self._feed = feed
        self._max_context_len = max_context_len
        self._numbers = 0
        self._steps = 0
        self._draining = False
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
                        self._parts.sessions.close(SessionId(body.session_id))
                    case Resume():
                        self._on_resume(sender, body)
                    case KvEventsWanted() if self._feed is not None:
                        self._feed.on_wanted(sender, body)
                    case FinishAck():
                        self._on_finish_ack(sender, body, now)
                    case _:
                        self.stray_messages += 1
            case FirstTokenReady():
                self._filling.on_first_token(event, now)
            case SinkCommitted() | SinkFailed():
                if not self._returns.defer(event):
                    self._filling.on_handed_off(event, now)
            case OfferReceived():
                self._parts.commands += self._returns.answer(event, *self._parts.handoffs.find(return_key(event.key)))
            case SourceReleased(key) | SourceAborted(key):
                if (ended := self._returns.end(key)) is not None:
                    self._filling.on_handed_off(ended, now)
            case SourceStopping():
                pass  # the pages stay where they are in any case, until the proof has come
            case PagesRestored():
                self._filling.on_restored(event, now)
            case PagesStored():
                self._retraction.on_stored(event, now)
            case MembershipView():
                self._on_view(event, now)
            case Drain():
                self._draining = True
                self._parts.sessions.drain()
            case HandOver():
                for request in [one for one in self._parts.requests.values() if one.final is None]:
                    self._answers.fail(request, ErrorCode.DRAINING, "this worker leaves: go on elsewhere", now)
            case _:
                raise TypeError(f"a decode core cannot handle {event!r}")
        self._admit(now)
        return self._take_out()

    def on_timer(self, now: float) -> list[object]:
        parts = self._parts
        for key in parts.deadlines.pop_due(now):
            reason = "no complete answer within the request's time"
            self._answers.fail(parts.requests[key], ErrorCode.DEADLINE_EXCEEDED, reason, now)
        parts.outbox.on_timer(now)
        parts.sessions.expire(now)
        parts.commands += [*parts.restores.cut_short(now), *parts.stores.cut_short(now)]
        self._admit(now)
        return self._take_out()

    def next_deadline(self) -> float | None:
        parts = self._parts
        if parts.outbox.waiting or parts.commands or (self._feed is not None and self._feed.waiting):
            return 0.0
        return earliest(
            parts.deadlines.next_s(),
            parts.outbox.next_deadline(),
            parts.sessions.next_deadline(),
            parts.restores.next_deadline(),
            parts.stores.next_deadline(),
        )

    def _take_out(self) -> list[object]:
        out: list[object] = [*self._parts.commands, *self._parts.outbox.take(), *self._parts.told]
        self._parts.commands.clear()
        self._parts.told.clear()
        if self._feed is not None:
            out += self._feed.take()
        return out

    # ------------------------------------------------------------------------------------ from gateways

    def _on_submit(self, sender: Stamp, message: Submit, now: float) -> None:
        parts, key = self._parts, (message.request_id, message.placement)
        known = parts.requests.get(key)
        if known is not None:
            if known.gateway == sender:
                parts.outbox.submitted(known)
            else:
                self.stray_messages += 1  # nobody speaks for another gateway's requests
            return
        if parts.peers.is_gone(sender):
            return  # its last words
        refusal = NOT_HERE if parts.outbox.is_buried(sender, key, now) else self._refusal(message)
        if refusal is not None:
            parts.outbox.refuse(sender, key, refusal)
            return
        older_ones = [one for one in parts.requests.values() if one.key[0] == key[0] and one.gateway == sender]
        for older in [one for one in older_ones if one.final is None]:
            self._answers.fail(older, ErrorCode.CANCELLED, "a later placement has come", now)
        self._numbers += 1
        request = new_request(self._numbers, sender, message, self._max_context_len, now)
        parts.requests[key] = request
        parts.deadlines.set(key, request.deadline_s)
        parts.outbox.submitted(request)
        # Complete: its earlier worker died between the last token and saying so.
        if not self._answers.finish_if_complete(request, now, len(request.outputs)):
            parts.waiting.add(request)

    def _refusal(self, message: Submit) -> Failure | None:
        if self._draining:
            return Failure(code=ErrorCode.DRAINING, reason="this worker is shutting down")
        return self._door.refusal(message, len(self._parts.waiting))

    def _on_cancel(self, sender: Stamp, message: CancelRequest, now: float) -> None:
        key = (message.request_id, message.placement)
        request = self._parts.requests.get(key)
        if request is None:
            self._parts.outbox.bury(sender, key, now)
            self._parts.outbox.refuse(sender, key, NOT_HERE)
        elif request.gateway != sender:
            self.stray_messages += 1
        else:
            if request.final is None:
                request.answered = message.answered
                self._answers.fail(request, ErrorCode.CANCELLED, "cancelled by the gateway", now)
            else:
                self._parts.outbox.resume(request, len(request.outputs))

    def _on_resume(self, sender: Stamp, message: Resume) -> None:
        request = self._parts.requests.get((message.request_id, message.placement))
        if request is None:
            self._parts.outbox.refuse(sender, (message.request_id, message.placement), NOT_HERE)
        elif request.gateway != sender:
            self.stray_messages += 1
        else:
            self._parts.outbox.resume(request, message.next_index)

    def _on_finish_ack(self, sender: Stamp, message: FinishAck, now: float) -> None:
        key = (message.request_id, message.placement)
        request = self._parts.requests.get(key)
        if request is None or request.gateway == sender:
            self._parts.outbox.acknowledge(key, now)
        else:
            self.stray_messages += 1

    def _on_view(self, view: MembershipView, now: float) -> None:
        if self._feed is not None:
            self._feed.on_view(view)
        if not self._parts.peers.update(view):
            return
        for request in list(self._parts.requests.values()):
            gone = self._parts.peers.is_gone(request.gateway)
            if request.final is None and (gone or self._parts.peers.is_silent(request.gateway)):
                self._answers.fail(request, ErrorCode.CANCELLED, "the gateway was lost", now)
            if gone:
                self._parts.outbox.acknowledge(request.key, now)  # nobody is left to do it

    # ---------------------------------------------------------------------------------------- admission

    def _admit(self, now: float) -> None:
        """Promises pages to waiting requests for as long as they fit, and starts filling them. Nobody is let in before
        one who is on his way out."""
        while not self.pages_coming_back and (verdict := self._parts.waiting.admit(self.active())) is not None:
            request, allocation = verdict
            if isinstance(allocation, PreAllocated):
                self._filling.start(request, now)
            elif allocation.reason is RefusalReason.TOO_LONG:
                self._answers.fail(request, ErrorCode.OUT_OF_PAGES, "prompt and answer outgrew this worker's pool", now)
            elif allocation.reason is not RefusalReason.NO_ROW and self._retraction.give_up_session(now):
                pass  # who waits goes before who may come back: he is asked again
            else:
                request.times.refused(now)

    def active(self) -> Iterable[ActiveRequest]:
        """Those who own pages, as admission counts them."""
        for request in self._parts.requests.values():
            if request.kv is not None:
                ends = isinstance(request.state, Storing | Stopping | Leaving)
                total = request.kv.kv_allocated_len if ends else request.total_len
                yield ActiveRequest(request.kv, total, request.state is RUNNING)

    # -------------------------------------------------------------------------------------------- steps

    def next_batch(self, now: float) -> Batch | None:
        self._parts.starved = False
        return self._parts.steps.plan(lambda request, refused: self._retraction.make_room(request, refused, now), now)

    def on_layers(self, layers: int, now: float) -> list[object]:
        raise AssertionError("a decode worker's steps ask for no reports")

    def on_step(self, result: StepResult, now: float) -> list[object]:
        rows, chunks = self._parts.steps.collect(result.compute_s)
        assert len(result.keys) == len(rows) + len(chunks), "the result of another step"
        self._steps += 1
        packed = np.array(result.tokens, dtype="<i4").tobytes()
        keep_answer, append = self._parts.caching.keep_answer, self._answers.append
        for index, request in enumerate(rows):
            if request.state is RUNNING:
                keep_answer(request)
                append(request, result.tokens[index], result.logprobs[index], now, packed[4 * index : 4 * index + 4])
            else:
                self._answers.done(request, now)
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
            if request.state is LEAVING:
                self._answers.done(request, now)
                continue
            request.times.prefill_s += per_token_s * computed[index]
            request.count_tokens(end - computed[index], end, "local_tokens")
            if (scores := result.scores.get(request.number)) is not None:
                request.scores.append(scores)
            assert isinstance(request.state, Prefilling), request.state
            self._parts.caching.keep_checkpoint(request, end)
            if end < request.state.until:
                continue
            self._parts.steps.remove(request)
            request.times.computed(now)
            if end < request.fill_len:
                self._filling.fill(request, now)
            else:
                self._answers.run(request, now, result.tokens[first + index], result.logprobs[first + index])

    # ------------------------------------------------------------------------------------------ reporting

    def load(self) -> Load:
        parts = self._parts
        in_transfer = len(parts.handoffs) + len(parts.restores) + parts.stores.retracted
        return Load(
            queued=len(parts.waiting),
            running=len(parts.steps.running) + len(parts.steps.prefilling) + in_transfer,
            free_pages=self.pool.available_pages,
            total_pages=self.pool.total_pages,
            queued_tokens=sum(request.fill_len for request in parts.waiting),
            steps=self._steps,
            kv_seq=0 if self._feed is None else self._feed.seq,
            draining=self._draining,
        )

    @property
    def queued(self) -> int:
        """Requests that wait to be admitted."""
        return len(self._parts.waiting)

    @property
    def pages_coming_back(self) -> bool:
        """Somebody is on his way out, and will give his pages back when a tier has them: nobody is let in before."""
        return self._parts.stores.awaited

    @property
    def restored_tokens(self) -> int:
        """What tiers gave back."""
        return self._filling.restored_tokens

    @property
    def retractions(self) -> int:
        return self._retraction.retractions

    def holdings(self) -> Iterable[Holding]:
        for request in self._parts.requests.values():
            if request.kv is not None:
                yield Holding(_owner_class(request.state), request.name, request.kv)
        yield from self._parts.sessions.holdings()

    def records(self) -> list[ReqKvInfo]:
        records = [record for request in self._parts.requests.values() if (record := request.kv) is not None]
        return [*records, *self._parts.sessions.records()]

    @property
    def idle(self) -> bool:
        """Every request has had its outcome, and every gateway knows."""
        return not self._parts.requests


def _owner_class(state: State) -> OwnerClass:
    return OwnerClass.INCOMING if isinstance(state, Restoring | Incoming | Stopping) else OwnerClass.REQUEST
