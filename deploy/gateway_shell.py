"""The gateway's shell around `GatewayCore`: prompts in, text out, on one asyncio loop.

Owns: the core, its timer, one queue per running answer, and what is known of the cluster for health and status. Never:
speaks HTTP (`http_app.py`), or decides anything about a request (the core does). Everything here runs on the loop's
thread; `deliver` is the one door for other threads.

An answer's queue is bounded by what the request may produce (`max_tokens`); a client that reads slowly delays nobody.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, cast, final

import msgspec
import numpy as np
from msgspec import structs

from baton.common.clock import Clock
from baton.common.engine.core_api import FromPeer, MembershipView, SendTo
from baton.common.errors import ErrorCode, RequestError
from baton.common.ids import NO_SESSION, RequestId, SessionId, WorkerId
from baton.common.kv.layout import Component
from baton.common.messages import Failure, Heartbeat, Load, Member, SamplingParams, Submit, Timeline, TokenLogprob
from baton.common.prompt_logprobs import PromptLogprobs
from baton.common.trace import ProcessTrace
from baton.common.tracing import NOBODY, SpanSink
from baton.deploy.accounts import CURRENT, Account, failed
from baton.deploy.api_keys import Keys, NoKeys
from baton.deploy.detokenize import AnswerText, Piece
from baton.deploy.gateway_core import GatewayCore
from baton.deploy.gateway_metrics import GatewayMetrics
from baton.deploy.gateway_states import GatewayEffect, RequestEnded, TokensArrived
from baton.deploy.recent import RecentBook, SlowRequest
from baton.deploy.status import ClusterView, GatewayStatus, LaneUse, WorkerView
from baton.deploy.tokenizer import ServedModel
from baton.deploy.tracing import AnswerSpans, answered_attributes, asked_attributes
from baton.transfer.reports import HandoffTimes, WorkerMetrics

DRAINING_RETRY_AFTER_S = 1.0
METRICS_AGE_S = 2.0
FAREWELL_S = 0.5
"""For the errors of answers that shutting down cuts off to reach their clients."""


class Workers(Protocol):
    """The workers' own accounts of themselves, for `/status` and `/kv`; never asked for a request."""

    async def statuses(self) -> Mapping[str, object]:
        """By worker; those that do not answer in time are left out."""

    async def cluster(self) -> ClusterView:
        """What the controller says of it; nothing when it does not answer in time."""

    async def page_owner(self, worker: str, page: int, component: Component | None) -> str:
        """Who holds a page or slot, for people; of the model's first component unless one is named. Raises
        RequestError."""

    async def metrics(self) -> Mapping[str, WorkerMetrics]:
        """What each counts, by worker; those that do not answer in time are left out."""

    async def handoffs(self, worker: str) -> list[HandoffTimes]:
        """A worker's last hand-offs, oldest first, and the open ones. Raises RequestError."""

    async def record(self, seconds: float) -> list[ProcessTrace]:
        """What each does from now on for so long; those that do not answer in time are left out. Raises RequestError
        while somebody else records."""


class UnknownWorkers:
    """For a gateway that runs without Ray: it knows what heartbeats say, and nothing more."""

    async def statuses(self) -> Mapping[str, object]:
        return {}

    async def cluster(self) -> ClusterView:
        return ClusterView()

    async def page_owner(self, worker: str, page: int, component: Component | None) -> str:
        raise RequestError(ErrorCode.INVALID_REQUEST, "this gateway cannot ask its workers", "worker")

    async def metrics(self) -> Mapping[str, WorkerMetrics]:
        return {}

    async def handoffs(self, worker: str) -> list[HandoffTimes]:
        raise RequestError(ErrorCode.INVALID_REQUEST, "this gateway cannot ask its workers", "worker")

    async def record(self, seconds: float) -> list[ProcessTrace]:
        return []


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """More of the answer. `text` may be "" while a character or a possible stop string is incomplete."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: PromptLogprobs | None = None  # with the first one, where they are wanted


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How it ended, well. (A request that ends badly raises RequestError instead.)"""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    ttft_s: float | None
    total_s: float
    placements: int
    timeline: Timeline


AnswerEvent = AnswerDelta | AnswerEnd


@final
class _Running:
    """One answer in the making: the core's effects for it, until they are taken."""

    __slots__ = ("_arrived", "_filled", "spans")

    def __init__(self, spans: AnswerSpans | None) -> None:
        self.spans = spans
        self._arrived: deque[TokensArrived | RequestEnded] = deque()
        self._filled = asyncio.Event()

    def put(self, event: TokensArrived | RequestEnded) -> None:
        self._arrived.append(event)
        self._filled.set()

    async def take(self) -> TokensArrived | RequestEnded:
        """The next event. Tokens that wait are taken together: who reads slowly gets larger pieces, and a burst does
        not keep the loop from the others."""
        while not self._arrived:
            self._filled.clear()
            await self._filled.wait()
        first = self._arrived.popleft()
        if isinstance(first, RequestEnded):
            return first
        more: list[TokensArrived] = []
        while self._arrived and isinstance(self._arrived[0], TokensArrived):
            more.append(cast(TokensArrived, self._arrived.popleft()))
        if not more:
            return first
        tokens = chain(first.tokens, *(event.tokens for event in more))
        logprobs = chain(first.logprobs, *(event.logprobs for event in more))
        return msgspec.structs.replace(first, tokens=tuple(tokens), logprobs=tuple(logprobs))


class Gateway:
    """`answer` for requests; `deliver` for what the cluster says; `post` sends to it."""

    def __init__(
        self,
        core: GatewayCore,
        model: ServedModel,
        post: Callable[[SendTo], None],
        clock: Clock,
        *,
        version: str,
        stuck_after_s: float,
        workers: Workers | None = None,
        spans: SpanSink = NOBODY,
        name: str = "gateway",
        keys: Keys | None = None,
        refused: Callable[[], dict[str, int]] = dict,
    ) -> None:
        """Must be made on the loop that it shall run on. `refused`: what its sockets to the cluster have not heard."""
        self.model = model
        self.keys: Keys = keys or NoKeys()
        self.metrics = GatewayMetrics(model.name)
        self.spans = spans
        self._name = name
        self._refused = refused
        self._core = core
        self._post = post
        self._clock = clock
        self._recent = RecentBook(clock.now())
        self._version = version
        self._stuck_after_s = stuck_after_s
        self.workers: Workers = workers or UnknownWorkers()
        self._loop = asyncio.get_running_loop()
        self._heard: deque[FromPeer | MembershipView] = deque()
        self._called = False  # `_on_heard` is on its way
        self._running: dict[RequestId, _Running] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = float("inf")
        self._members: dict[WorkerId, Member] = {}
        self._loads: dict[WorkerId, Load] = {}
        self._silent: frozenset[WorkerId] = frozenset()
        self._lanes: dict[tuple[str, str, str], LaneUse] = {}
        self._of_workers: Mapping[str, WorkerMetrics] = {}
        self._asked_at_s = float("-inf")
        self._asking_workers = asyncio.Lock()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    # -------------------------------------------------------------------------------------- the cluster

    def deliver(self, event: object) -> None:
        """From any thread: a worker's message or a new view of the cluster."""
        assert isinstance(event, FromPeer | MembershipView), event
        self._heard.append(event)
        if not self._called:  # one call for a burst: each costs a system call
            self._called = True
            self._loop.call_soon_threadsafe(self._on_heard)

    def _on_heard(self) -> None:
        self._called = False  # before the queue is looked at: what comes from now on is called for again
        effects: list[GatewayEffect] = []
        try:
            for _ in range(len(self._heard)):
                effects += self._on_event(self._heard.popleft())
        finally:
            self._dispatch(effects)

    def _on_event(self, event: FromPeer | MembershipView) -> list[GatewayEffect]:
        if isinstance(event, MembershipView):
            self._members = {member.stamp.worker: member for member in event.members}
            self._silent = event.silent
            self._loads = {worker: load for worker, load in self._loads.items() if worker in self._members}
            self._lanes = {pair: use for pair, use in self._lanes.items() if {*pair[:2]} <= self._members.keys()}
        elif isinstance(event.body, Heartbeat):
            self._loads[event.sender.worker] = event.body.load
        return self._core.handle(event, self._clock.now())

    def _on_timer(self) -> None:
        self._timer, self._timer_at_s = None, float("inf")
        self._dispatch(self._core.on_timer(self._clock.now()))

    def _dispatch(self, effects: list[GatewayEffect]) -> None:
        for effect in effects:
            if isinstance(effect, SendTo):
                self._post(self._traced(effect))
            elif (running := self._running.get(effect.request_id)) is not None:
                running.put(effect)
        self._set_timer()

    def _traced(self, effect: SendTo) -> SendTo:
        """The core knows nothing of traces: a worker is told here under which span its own belong."""
        if not isinstance(effect.body, Submit):
            return effect
        running = self._running.get(effect.body.request_id)
        if running is None or running.spans is None:
            return effect
        told = running.spans.placed(effect.body, effect.worker, self._clock.now())
        return structs.replace(effect, body=told)

    def _set_timer(self) -> None:
        """One timer, for the earliest deadline. A deadline that moved away costs one early call, no more."""
        due_s = self._core.next_deadline()
        if due_s is None or due_s >= self._timer_at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_s = due_s
        self._timer = self._loop.call_later(max(0.0, due_s - self._clock.now()), self._on_timer)

    # ------------------------------------------------------------------------------------------ answers

    async def answer(
        self,
        request_id: RequestId,
        prompt: Sequence[int],
        sampling: SamplingParams,
        stops: Sequence[str],
        timeout_s: float,
        *,
        session_id: SessionId = NO_SESSION,
        owner: str = "",
        priority: int = 0,
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Deltas, then one AnswerEnd. Raises RequestError when the request ends without its answer. Closing the
        iterator cancels the request. A turn of a session names it, and who asks."""
        if self._draining:
            reason = "this gateway is shutting down"
            raise RequestError(ErrorCode.DRAINING, reason, retry_after_s=DRAINING_RETRY_AFTER_S)
        account, arrived_s = CURRENT.get(), self._clock.now()
        tenant = self.keys.tenant_of(owner)
        self._running[request_id] = running = _Running(_spans_of(account, request_id, arrived_s))
        self._idle.clear()
        outcome, error_code = "cancelled", str(ErrorCode.CANCELLED)
        end: AnswerEnd | None = None
        try:
            ids = np.asarray(prompt, dtype=np.int32)
            self._dispatch(
                self._core.submit(request_id, ids, sampling, timeout_s, arrived_s, session_id, owner, priority, tenant)
            )
            async with aclosing(self._events(request_id, running, len(prompt), stops, arrived_s)) as events:
                async for event in events:
                    if isinstance(event, AnswerEnd):
                        end, outcome, error_code = event, event.finish_reason, ""
                        self._account(request_id, event, account)
                    yield event
        except RequestError as error:
            outcome = error_code = str(error.code)
            failed(outcome)
            raise
        finally:
            if running.spans is not None:
                self._tell_spans(running.spans, sampling, end, error_code)
            del self._running[request_id]
            self._dispatch(self._core.cancel(request_id, self._clock.now()))  # nothing to do when it has ended
            self.metrics.ended(outcome, tenant.name)
            self._recent.ended(self._clock.now(), outcome)
            if not self._running:
                self._idle.set()

    async def _events(
        self, request_id: RequestId, running: _Running, prompt_tokens: int, stops: Sequence[str], arrived_s: float
    ) -> AsyncGenerator[AnswerEvent, None]:
        text = AnswerText(self.model.tokenizer, stops)
        completion_tokens, ttft_s, last_s, stopped = 0, None, arrived_s, False
        while True:
            event = await running.take()
            now = self._clock.now()
            if isinstance(event, RequestEnded):
                break
            if stopped:
                continue  # the core has not told its end yet; what came in between is behind the stop string
            if ttft_s is None:
                ttft_s = now - arrived_s
                if running.spans is not None:
                    running.spans.first_token(now)
            self.metrics.tokens(len(event.tokens), now - last_s, first=completion_tokens == 0)
            self._recent.tokens(now, len(event.tokens), now - last_s, first=completion_tokens == 0)
            last_s = now
            piece = text.push(event.tokens)
            completion_tokens += piece.tokens_used
            yield _delta(event, piece)
            if piece.stop is not None:
                stopped = True
                self._dispatch(self._core.finish(request_id, now))
        finish_reason = "stop" if stopped else event.finish_reason
        if not stopped:
            if event.failure is not None:
                raise RequestError(event.failure.code, event.failure.reason, None, event.retry_after_s)
            rest = text.finish()
            finish_reason = "stop" if rest.stop is not None else finish_reason
            if rest.text:
                yield AnswerDelta(rest.text, (), ())
        yield AnswerEnd(
            finish_reason=finish_reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            ttft_s=ttft_s,
            total_s=(last_s if stopped else now) - arrived_s,
            placements=event.placements,
            timeline=structs.replace(event.timeline or Timeline(), gateway_s=event.waited_s),
        )

    def _tell_spans(self, answer: AnswerSpans, sampling: SamplingParams, end: AnswerEnd | None, error: str) -> None:
        attributes = asked_attributes(self.model.name, sampling)
        if end is not None:
            attributes |= answered_attributes(
                self.model.name, end.finish_reason, end.prompt_tokens, end.completion_tokens, end.timeline
            )
        for span in answer.ended(self._clock.now(), error, self.model.name, attributes):
            self.spans.tell(span)

    def _account(self, request_id: RequestId, end: AnswerEnd, account: Account | None) -> None:
        timeline = end.timeline
        if account is not None:
            account.answered(
                end.finish_reason,
                end.prompt_tokens,
                end.completion_tokens,
                end.ttft_s,
                end.total_s,
                end.placements,
                timeline,
            )
        self.metrics.finished(timeline, end.total_s)
        self._recent.finished(
            self._clock.now(),
            SlowRequest(
                request_id=request_id,
                total_s=end.total_s,
                ttft_s=end.ttft_s,
                prompt_tokens=end.prompt_tokens,
                completion_tokens=end.completion_tokens,
                timeline=timeline,
            ),
        )
        if timeline.lane:
            pair = (timeline.prefill_worker, timeline.decode_worker, timeline.lane)
            old = self._lanes.get(pair)
            self._lanes[pair] = LaneUse(
                prefill_worker=pair[0],
                decode_worker=pair[1],
                lane=pair[2],
                transfers=(old.transfers if old else 0) + 1,
                nbytes=(old.nbytes if old else 0) + timeline.transfer_bytes,
                seconds=(old.seconds if old else 0.0) + timeline.transfer_s,
            )

    # ----------------------------------------------------------------------------------------- sessions

    def open_session(self, owner: str) -> SessionId:
        """A conversation whose KV stays on its decode worker between turns. Raises RequestError."""
        session_id = SessionId(f"sess-{secrets.token_hex(16)}")
        failure = self._core.open_session(session_id, owner, self._clock.now())
        if failure is not None:
            raise RequestError(failure.code, failure.reason)
        self._set_timer()
        return session_id

    def close_session(self, session_id: SessionId, owner: str) -> None:
        """Raises RequestError when `owner` has no such session."""
        effects = self._core.close_session(session_id, owner)
        if isinstance(effects, Failure):
            raise RequestError(effects.code, effects.reason, "session_id")
        self._dispatch(effects)

    # ------------------------------------------------------------------------------------ health, status

    def readiness(self) -> tuple[bool, str]:
        """(a request that comes now can be placed, why not)."""
        if self._draining:
            return False, "shutting down"
        if not self._decode_workers():
            return False, "no decode worker has registered"
        if all(worker in self._silent for worker in self._decode_workers()):
            return False, "no decode worker answers"
        return True, ""

    def health(self) -> tuple[bool, str]:
        """(a request that comes now can be *finished*, why not): an engine that is stuck in a step answers, too."""
        ready, reason = self.readiness()
        turning = [
            worker
            for worker in self._decode_workers()
            if worker not in self._silent and self._load_of(worker).step_age_s <= self._stuck_after_s
        ]
        return (ready, reason) if not ready or turning else (False, "every decode worker is stuck in a step")

    async def metrics_page(self) -> bytes:
        """Workers are asked at most every METRICS_AGE_S, however many scrape."""
        async with self._asking_workers:
            if self._clock.now() - self._asked_at_s >= METRICS_AGE_S:
                self._of_workers = await self.workers.metrics()
                self._asked_at_s = self._clock.now()
        own = WorkerMetrics(
            trace_spans=self.spans.counts() if self.spans.takes else {},
            refused=self._refused() | {"role": self._core.stale_outputs},
        )
        counted = {**self._of_workers, self._name: own}
        router, waiting = self._core.router, self._core.waiting()
        return self.metrics.page(
            len(self._running), waiting, self._seen(), counted, router.index_counts(), router.policy_failures
        )

    def _decode_workers(self) -> list[WorkerId]:
        return [worker for worker, member in self._members.items() if member.role == "decode"]

    def _load_of(self, worker: WorkerId) -> Load:
        """From its last heartbeat. A gateway that sends none to us is ourselves."""
        member = self._members[worker]
        return self._loads.get(worker, self.load() if member.role == "gateway" else member.load)

    def _seen(self) -> list[WorkerView]:
        return [
            WorkerView(
                worker=worker,
                role=member.role,
                incarnation=member.stamp.incarnation,
                silent=worker in self._silent,
                load=self._load_of(worker),
            )
            for worker, member in sorted(self._members.items())
        ]

    async def status(self) -> GatewayStatus:
        ready, reason = self.readiness()
        cluster = await self.workers.cluster()
        return GatewayStatus(
            version=self._version,
            model=self.model.name,
            max_model_len=self.model.max_model_len,
            ready=ready,
            reason=reason,
            requests=self._core.load(),
            workers=self._seen(),
            lanes=[use for _, use in sorted(self._lanes.items())],
            details=dict(await self.workers.statuses()),
            recent=self._recent.look(self._clock.now()),
            seats=cluster.seats,
            given_up=cluster.given_up,
        )

    @property
    def version(self) -> str:
        return self._version

    def load(self) -> Load:
        """For this gateway's heartbeat. From any thread."""
        return Load(running=len(self._running), draining=self._draining, demand=self._core.demand)

    async def drain(self, timeout_s: float) -> bool:
        """Admits nothing new and waits for what runs. False: some of it did not end in time, and was told so."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            failure = Failure(code=ErrorCode.DRAINING, reason="this gateway shut down before the answer was complete")
            for request_id, running in self._running.items():
                running.put(RequestEnded(request_id, "", failure, None, 0, DRAINING_RETRY_AFTER_S))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), FAREWELL_S)
            return False
        return True


def _spans_of(account: Account | None, request_id: RequestId, arrived_s: float) -> AnswerSpans | None:
    if account is None or not account.beginning.context:
        return None
    return AnswerSpans(account.beginning, request_id, arrived_s)


def _delta(event: TokensArrived, piece: Piece) -> AnswerDelta:
    used = piece.tokens_used
    return AnswerDelta(piece.text, event.tokens[:used], event.logprobs[:used], event.prompt_logprobs)
