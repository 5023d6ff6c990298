"""One outcome per request: the brain of a gateway. Pure; the shell (HTTP, detokenizer, sockets) is elsewhere.

Owns: every admitted request until its one outcome, the output tokens received so far, and which decode worker has it.
Never: touches text, sockets or clocks; never chooses a KV page, or whose turn it is (`admission.py`). Placements that
were given up are cleaned up by `gateway_releases.py`.

Invariants:
G1. Every admitted request gets exactly one `RequestEnded`, at the latest at its deadline.
G2. The tokens told by `TokensArrived` are gapless and never change: a gap is asked for again (Resume), an overlap is
    skipped, and a new placement continues after them (Submit.outputs).
G3. One placement is current per request. Everything from another one is answered so that its worker lets go of it
    (FinishAck for a last Output, CancelRequest for any other), and has no effect on the client.
G4. Nothing is created by a worker's message. Tables are bounded by `max_inflight_requests` and by the deadlines of
    what was admitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np
import numpy.typing as npt
import xxhash

from baton.common.config import DecodeConfig, GatewayConfig, LivenessConfig, TransferConfig
from baton.common.deadlines import Deadlines, earliest
from baton.common.engine.core_api import FromPeer, MembershipView
from baton.common.errors import ErrorCode
from baton.common.ids import NO_SESSION, RequestId, SessionId, Stamp, WorkerId
from baton.common.messages import (
    CloseSession,
    Demand,
    Failure,
    FinishAck,
    Heartbeat,
    KvEvents,
    KvSnapshot,
    Load,
    Member,
    Output,
    Resume,
    SamplingParams,
    Submit,
    Submitted,
    pack_tokens,
    unpack_tokens,
)
from baton.common.routing_config import RoutingConfig
from baton.deploy.admission import Admission, Refused
from baton.deploy.admission_queue import EVERYBODY, Tenant
from baton.deploy.demand import DemandMeter
from baton.deploy.gateway_releases import Releases
from baton.deploy.gateway_states import (
    GatewayEffect,
    Placing,
    RequestEnded,
    State,
    Streaming,
    TokensArrived,
    Waiting,
    to_worker,
)
from baton.deploy.routing.router import Placement, Router
from baton.deploy.session_book import Session, SessionBook

MAX_PLACEMENTS = 16
"""Tries per request. Each costs a dead, draining or full worker; a request that uses them up is failed, not kept."""

_RETRIED = frozenset({ErrorCode.OVERLOADED, ErrorCode.DRAINING, ErrorCode.CANCELLED, ErrorCode.INTERNAL})
"""Failures of a placement that another worker may not have. A `cancelled` that we did not ask for is one: the worker
took us for dead."""

_LASTING = frozenset({ErrorCode.OVERLOADED, ErrorCode.INTERNAL})
"""Refusals that waiting does not help against. A draining worker is replaced: its successor may take the request."""

_DEFAULT_DECODE = DecodeConfig()
_DEFAULT_ROUTING = RoutingConfig()
_RETRY_AFTER_S = 1.0
_QUIET_RESENDS = 8
"""A placement that says nothing for this many re-send intervals is asked whether it is still there."""


@dataclass(slots=True)
class _Request:
    request_id: RequestId
    prompt: npt.NDArray[np.int32]
    sampling: SamplingParams
    deadline_s: float
    state: State
    priority: int
    tenant: Tenant
    arrived_s: float
    waited_s: float = 0.0  # for its turn
    placement: int = 0
    outputs: list[int] = field(default_factory=list)
    session: Session | None = None
    refused_by: set[Stamp] = field(default_factory=set)
    last_refusal: Failure | None = None
    prefill: Placement | None = None  # who was chosen to compute its prompt, until the first token is here
    decode: Placement | None = None  # where it is
    group: str | None = None  # of the worker that began the answer: others would not go on with it in the same way
    names: tuple[int, ...] | None = None  # of the pages of its prompt, while it is placed and computed


class GatewayCore:
    """`submit`/`cancel`/`finish` from clients, `handle`/`on_timer` from the cluster; all return effects."""

    def __init__(
        self,
        gateway: GatewayConfig,
        transfer: TransferConfig,
        liveness: LivenessConfig,
        max_context_len: int,
        thinking_token_id: int = -1,
        routing: RoutingConfig = _DEFAULT_ROUTING,
        page_size: int = 16,
        decode: DecodeConfig = _DEFAULT_DECODE,
    ) -> None:
        """Raises ConfigError when there is no such routing policy."""
        self._thinking_token_id = thinking_token_id
        self._max_context_len = max_context_len
        self._resend_s = transfer.resend_after_s
        self._worker_wait_s = 4 * liveness.dead_after_s  # a killed worker is noticed and replaced within this
        self._requests: dict[RequestId, _Request] = {}
        self._releases = Releases(transfer.resend_after_s)
        self._deadlines: Deadlines[RequestId] = Deadlines()  # the request's end
        self._timers: Deadlines[RequestId] = Deadlines()  # re-sends and waits, by state
        self._members: dict[WorkerId, Member] = {}
        self.router = Router(routing, page_size, transfer.resend_after_s)
        self._admission = Admission(gateway, decode.max_running_requests)
        self._sessions = SessionBook(gateway.max_sessions, gateway.session_ttl_s)
        self._demand = DemandMeter()
        self.stale_outputs = 0

    # ------------------------------------------------------------------------------------- from clients

    def submit(
        self,
        request_id: RequestId,
        prompt: npt.NDArray[np.int32],
        sampling: SamplingParams,
        timeout_s: float,
        now: float,
        session_id: SessionId = NO_SESSION,
        owner: str = "",
        priority: int = 0,
        tenant: Tenant = EVERYBODY,
    ) -> list[GatewayEffect]:
        """Admits a request, or ends it at once with the reason. The seed must be chosen already: it is the state that
        makes a sampled answer continue identically elsewhere. A turn of a session names it, and who asks; `tenant`:
        whose share of the cluster it takes."""
        assert request_id not in self._requests, f"{request_id} is used twice"
        out: list[GatewayEffect] = []
        priority = max(priority, tenant.top_priority)
        refusal = self._refusal(prompt)
        session = None
        if refusal is None and session_id:
            begun = self._sessions.begin_turn(session_id, owner, request_id)
            refusal, session = (begun, None) if isinstance(begun, Failure) else (None, begun)
        if refusal is not None:
            retry_after_s = _RETRY_AFTER_S if refusal.code is ErrorCode.SESSION_BUSY else None
            return [RequestEnded(request_id, "", refusal, None, 0, retry_after_s)]
        refused = self._admission.refusal(tenant, priority, timeout_s, now)
        refused = refused or self._make_room(tenant, len(prompt), now, out)
        if refused is not None:
            if session is not None:
                self._sessions.end_turn(session, None, now)
            return [RequestEnded(request_id, "", refused.failure, None, 0, refused.retry_after_s)]
        state = Waiting(now + self._worker_wait_s)
        request = _Request(request_id, prompt, sampling, now + timeout_s, state, priority, tenant, now, session=session)
        self._requests[request_id] = request
        self._deadlines.set(request_id, request.deadline_s)
        self._timers.set(request_id, state.give_up_s)
        self._demand.asked(len(prompt))
        self._admission.enter(request_id, tenant, priority, len(prompt), now)
        self._let_in(now, out)
        return out

    def _make_room(self, tenant: Tenant, tokens: int, now: float, out: list[GatewayEffect]) -> Refused | None:
        """Where as many wait as may, somebody gives way to one whose key has less there; or nobody does."""
        leaving = self._admission.give_way(tenant, tokens, len(self._requests))
        if leaving is None:
            return self._admission.full(tenant, len(self._requests))
        for request_id in leaving:
            victim = self._requests[request_id]
            said = self._admission.full(victim.tenant, len(self._requests))
            ended = RequestEnded(request_id, "", said.failure, None, victim.placement, said.retry_after_s)
            self._end(victim, ended, now, out)
        return None

    def cancel(self, request_id: RequestId, now: float) -> list[GatewayEffect]:
        """The client is gone or does not want it any more. Ends it at once; fine when it has ended already."""
        request = self._requests.get(request_id)
        out: list[GatewayEffect] = []
        if request is not None:
            self._fail(request, Failure(code=ErrorCode.CANCELLED, reason="cancelled by the client"), now, out)
            self._let_in(now, out)
        elif (finished := self._releases.cancel(request_id)) is not None:
            out.append(finished)
        return out

    def finish(self, request_id: RequestId, now: float) -> list[GatewayEffect]:
        """A stop string was found in the text: the answer is complete here, whatever the worker still produces. Its end
        waits for the worker's account of where the time went, at most one re-send interval."""
        request = self._requests.get(request_id)
        out: list[GatewayEffect] = []
        if request is not None:
            ended = RequestEnded(request_id, "stop", None, None, request.placement + 1, waited_s=request.waited_s)
            self._demand.answered(len(request.prompt), len(request.outputs), None)
            self._release_current(request, now, out, answered=True)
            self._leave(request)
            self._forget(request, now, out, answered_by=_worker_of(request))
            if isinstance(request.state, Waiting):
                out.append(ended)
            else:
                self._releases.finish(ended)
            self._let_in(now, out)
        return out

    # ------------------------------------------------------------------------------------------ sessions

    def open_session(self, session_id: SessionId, owner: str, now: float) -> Failure | None:
        """A conversation whose KV shall stay on its decode worker between turns. Or why there cannot be one more."""
        return self._sessions.open(session_id, owner, now)

    def close_session(self, session_id: SessionId, owner: str) -> list[GatewayEffect] | Failure:
        """A turn that is under way is answered; its KV is not kept."""
        session = self._sessions.find(session_id, owner)
        if isinstance(session, Failure):
            return session
        self._sessions.close(session)
        out: list[GatewayEffect] = []
        self._close_slot(session, session.worker, out)
        return out

    def _close_slot(self, session: Session, worker: Stamp | None, out: list[GatewayEffect]) -> None:
        if worker is not None and (member := self._members.get(worker.worker)) is not None and member.stamp == worker:
            out.append(to_worker(worker, CloseSession(session_id=session.session_id)))

    # ----------------------------------------------------------------------------------- from the cluster

    def handle(self, event: FromPeer | MembershipView, now: float) -> list[GatewayEffect]:
        """A worker's message or a new view of the cluster."""
        out: list[GatewayEffect] = []
        if isinstance(event, MembershipView):
            self._on_view(event, now, out)
            self._let_in(now, out)
            return out
        match event.body:
            case Heartbeat(load=load):
                out += self.router.heard(event.sender, load, now)
                self._admission.heard(event.sender, load, now)
            case KvEvents() | KvSnapshot():
                self.router.on_kv(event.sender, event.body, now)
            case Submitted():
                self._on_submitted(event.sender, event.body, now, out)
            case Output():
                self._on_output(event.sender, event.body, now, out)
            case _:
                self.stale_outputs += 1  # not for a gateway: counted, never acted on
        self._let_in(now, out)
        return out

    def on_timer(self, now: float) -> list[GatewayEffect]:
        """Everything that is due."""
        out: list[GatewayEffect] = []
        for request_id in self._deadlines.pop_due(now):
            self._fail(
                self._requests[request_id],
                Failure(code=ErrorCode.DEADLINE_EXCEEDED, reason="no complete answer within the request's time"),
                now,
                out,
            )
        for request_id in self._timers.pop_due(now):
            self._on_request_timer(self._requests[request_id], now, out)
        self._releases.on_timer(now, out)
        for session in self._sessions.pop_expired(now):
            self._close_slot(session, session.worker, out)
        self._let_in(now, out)
        return out

    def next_deadline(self) -> float | None:
        """When `on_timer` has something to do."""
        return earliest(
            self._deadlines.next_s(),
            self._timers.next_s(),
            self._releases.next_s(),
            self._sessions.next_deadline(),
        )

    def load(self) -> Load:
        """For this gateway's own heartbeat and metrics."""
        waiting = sum(isinstance(request.state, Waiting) for request in self._requests.values())
        return Load(queued=waiting, running=len(self._requests) - waiting, demand=self._demand.total)

    def waiting(self) -> Mapping[str, tuple[int, int]]:
        """(requests, tokens of their prompts) that wait for their turn, by API key."""
        return self._admission.lengths()

    @property
    def demand(self) -> Demand:
        """Since it began. From any thread."""
        return self._demand.total

    @property
    def idle(self) -> bool:
        """Every request has ended and every worker has let go of what was its."""
        return self.router.idle and self._releases.idle and not self._requests

    # ---------------------------------------------------------------------------------------- placement

    def _refusal(self, prompt: npt.NDArray[np.int32]) -> Failure | None:
        if len(prompt) == 0:
            return Failure(code=ErrorCode.INVALID_REQUEST, reason="the prompt is empty")
        if len(prompt) >= self._max_context_len:
            reason = f"the prompt has {len(prompt)} tokens; the model takes at most {self._max_context_len - 1}"
            return Failure(code=ErrorCode.PROMPT_TOO_LONG, reason=reason)
        return None

    def _let_in(self, now: float, out: list[GatewayEffect]) -> None:
        """Whose turn it is, as long as there is room."""
        while (request_id := self._admission.next_in(len(self._requests), now)) is not None:
            request = self._requests[request_id]
            request.state = Waiting(now + self._worker_wait_s)
            request.waited_s = now - request.arrived_s
            self._place(request, now, out)
        self._admission.rest(now)

    def _place(self, request: _Request, now: float, out: list[GatewayEffect]) -> None:
        """Sends a waiting request to the best decode worker, if there is one."""
        assert isinstance(request.state, Waiting)
        request.decode = self._decode_placement(request)
        if request.decode is None:
            refusal = request.last_refusal
            if refusal is not None and refusal.code in _LASTING and len(self.router.seats("decode")):
                self._fail(request, refusal, now, out)  # everyone who is there has refused it
            else:
                self._timers.set(request.request_id, request.state.give_up_s)
            return
        request.state = Placing(request.decode.stamp)
        self._send_submit(request, request.decode.stamp, now, out)

    def _decode_placement(self, request: _Request) -> Placement | None:
        """With whoever has the KV of the conversation so far, else by the policy."""
        stamp = request.session.worker if request.session is not None else None
        if stamp is not None and stamp in self.router.seats("decode") and stamp not in request.refused_by:
            alike = request.group in (None, self.router.group_of(stamp))
            if alike:
                return self.router.put(Placement(stamp, len(request.prompt)))
        names, group = self._names(request), request.group
        return self.router.place("decode", request.prompt, _draw(request), request.refused_by, names, group=group)

    def _names(self, request: _Request) -> tuple[int, ...]:
        """Of its prompt's pages: made once for both workers, and kept no longer than the prompt is computed."""
        if request.names is None:
            request.names = self.router.names_of(request.prompt)
        return request.names

    def _choose_prefill(self, request: _Request) -> Stamp | None:
        """Once per placement, unless who was chosen has left. The decode worker may do otherwise: this gateway's count
        is of what it has asked for."""
        if request.prefill is None or request.prefill.stamp not in self.router.seats("prefill"):
            if request.prefill is not None:
                self._prompt_over(request)
            group = None if request.decode is None else self.router.group_of(request.decode.stamp)
            names = self._names(request)
            request.prefill = self.router.place("prefill", request.prompt, _draw(request), names=names, group=group)
        return None if request.prefill is None else request.prefill.stamp

    def _prompt_over(self, request: _Request) -> None:
        """Its prompt is computed, or given up."""
        if request.prefill is not None:
            self.router.leave(request.prefill)
            request.prefill = None
        request.names = None

    def _send_submit(self, request: _Request, stamp: Stamp, now: float, out: list[GatewayEffect]) -> None:
        prefill = self._choose_prefill(request)
        submit = Submit(
            request_id=request.request_id,
            placement=request.placement,
            prompt=pack_tokens(request.prompt),
            outputs=pack_tokens(request.outputs),
            sampling=request.sampling,
            ttl_s=max(0.0, request.deadline_s - now),
            priority=request.priority,
            prefill_worker=None if prefill is None else prefill.worker,
            session_id=request.session.session_id if request.session is not None else NO_SESSION,
            session_turn=request.session.turns if request.session is not None else 0,
            thinking_token_id=self._thinking_token_id,
        )
        out.append(to_worker(stamp, submit))
        self._timers.set(request.request_id, now + self._resend_s)

    def _replace(self, request: _Request, now: float, out: list[GatewayEffect]) -> None:
        """The current placement is over: continue on another worker from what has been received."""
        self._leave(request)
        request.placement += 1
        request.state = Waiting(now + self._worker_wait_s)
        if request.placement >= MAX_PLACEMENTS:
            reason = f"{MAX_PLACEMENTS} decode workers were tried"
            self._fail(request, Failure(code=ErrorCode.NO_WORKER, reason=reason), now, out)
        else:
            self._place(request, now, out)

    def _leave(self, request: _Request) -> None:
        self._prompt_over(request)
        if request.decode is not None:
            self.router.leave(request.decode)
            request.decode = None

    # ------------------------------------------------------------------------------------------- events

    def _on_view(self, view: MembershipView, now: float, out: list[GatewayEffect]) -> None:
        self._members = {member.stamp.worker: member for member in view.members}
        alive = {member.stamp for member in view.members}
        self.router.on_view(view)
        self._admission.on_view(view, now)
        self._releases.keep(alive, out)
        for request in list(self._requests.values()):
            match request.state:
                case Placing(worker) | Streaming(worker):
                    if worker not in alive:
                        self._replace(request, now, out)
                    elif worker.worker in view.silent:
                        self._release_current(request, now, out)
                        self._replace(request, now, out)
                case Waiting():
                    if request.request_id not in self._admission:
                        self._place(request, now, out)
                case _:
                    assert_never(request.state)

    def _on_submitted(self, sender: Stamp, message: Submitted, now: float, out: list[GatewayEffect]) -> None:
        request = self._requests.get(message.request_id)
        if request is None or not _is_current(request, sender, message.placement):
            self._releases.let_go(sender, (message.request_id, message.placement), None, out)
            return
        request.state = Streaming(sender, now)
        self._timers.set(request.request_id, now + _QUIET_RESENDS * self._resend_s)

    def _on_output(self, sender: Stamp, message: Output, now: float, out: list[GatewayEffect]) -> None:
        last = bool(message.finish_reason) or message.failure is not None
        request = self._requests.get(message.request_id)
        if request is None or not _is_current(request, sender, message.placement):
            self.stale_outputs += 1
            self._releases.let_go(sender, (message.request_id, message.placement), message if last else None, out)
            return
        request.state = Streaming(sender, now)
        self._timers.set(request.request_id, now + _QUIET_RESENDS * self._resend_s)
        known = len(request.outputs)
        if message.first_index > known:
            resume = Resume(request_id=request.request_id, placement=request.placement, next_index=known)
            out.append(to_worker(sender, resume))
            return
        tokens = unpack_tokens(message.tokens)[known - message.first_index :].tolist()
        if tokens:
            self._prompt_over(request)
            request.outputs.extend(tokens)
            request.group = self.router.group_of(sender) if known == 0 else request.group
            self._demand.said += len(tokens)
            self._admission.said(request.tenant, len(tokens), now)
            logprobs = message.logprobs[known - message.first_index :]
            scores = message.prompt_logprobs if known == 0 else None
            out.append(TokensArrived(request.request_id, known, tuple(tokens), logprobs, scores))
        if last:
            out.append(to_worker(sender, FinishAck(request_id=request.request_id, placement=request.placement)))
            self._on_last(request, sender, message, now, out)

    def _on_last(self, request: _Request, sender: Stamp, message: Output, now: float, out: list[GatewayEffect]) -> None:
        failure = message.failure
        if failure is not None and failure.code in _RETRIED:
            if failure.code is not ErrorCode.CANCELLED:
                request.refused_by.add(sender)
                request.last_refusal = failure
            self._replace(request, now, out)
            return
        self._leave(request)
        ended = RequestEnded(
            request.request_id,
            message.finish_reason,
            failure,
            message.timeline,
            request.placement + 1,
            waited_s=request.waited_s,
        )
        self._end(request, ended, now, out, answered_by=sender if failure is None else None)

    # ------------------------------------------------------------------------------------------- timers

    def _on_request_timer(self, request: _Request, now: float, out: list[GatewayEffect]) -> None:
        match request.state:
            case Waiting(give_up_s):
                if request.request_id in self._admission:
                    since_s = self._admission.nobody_since_s
                    give_up_s = (
                        now + self._worker_wait_s if since_s is None else max(give_up_s, since_s + self._worker_wait_s)
                    )
                if now < give_up_s:
                    self._timers.set(request.request_id, give_up_s)  # there is somebody, or was until lately
                    return
                whom = "no decode worker" if request.group is None else "no decode worker of the version that began it"
                failure = Failure(code=ErrorCode.NO_WORKER, reason=f"{whom} is there to take the request")
                self._fail(request, failure, now, out)
            case Placing(worker):
                self._send_submit(request, worker, now, out)
            case Streaming(worker):
                next_index = len(request.outputs)
                out.append(
                    to_worker(
                        worker,
                        Resume(request_id=request.request_id, placement=request.placement, next_index=next_index),
                    )
                )
                self._timers.set(request.request_id, now + _QUIET_RESENDS * self._resend_s)
            case _:
                assert_never(request.state)

    # -------------------------------------------------------------------------------------------- endings

    def _release_current(
        self, request: _Request, now: float, out: list[GatewayEffect], *, answered: bool = False
    ) -> None:
        """Tells the current worker to let go, again and again until it has."""
        if isinstance(request.state, Placing | Streaming):
            key, worker = (request.request_id, request.placement), request.state.worker
            self._releases.give_up(key, worker, request.deadline_s, now, out, answered=answered)

    def _fail(self, request: _Request, failure: Failure, now: float, out: list[GatewayEffect]) -> None:
        self._release_current(request, now, out)
        self._leave(request)
        retry_after_s = _RETRY_AFTER_S if failure.code in (ErrorCode.OVERLOADED, ErrorCode.NO_WORKER) else None
        ended = RequestEnded(request.request_id, "", failure, None, request.placement + 1, retry_after_s)
        self._end(request, ended, now, out)

    def _end(
        self,
        request: _Request,
        ended: RequestEnded,
        now: float,
        out: list[GatewayEffect],
        *,
        answered_by: Stamp | None = None,
    ) -> None:
        self._forget(request, now, out, answered_by)
        if ended.finish_reason:
            self._demand.answered(len(request.prompt), len(request.outputs), ended.timeline)
        out.append(ended)

    def _forget(self, request: _Request, now: float, out: list[GatewayEffect], answered_by: Stamp | None) -> None:
        del self._requests[request.request_id]
        self._admission.left(request.request_id)
        session = request.session
        if session is not None:
            old = self._sessions.end_turn(session, answered_by, now)
            self._close_slot(session, old, out)
            if not self._sessions.is_open(session):
                self._close_slot(session, session.worker, out)
        self._deadlines.drop(request.request_id)
        self._timers.drop(request.request_id)


def _worker_of(request: _Request) -> Stamp | None:
    return None if isinstance(request.state, Waiting) else request.state.worker


def _draw(request: _Request) -> int:
    """Another number for each request and placement; the same one in every run."""
    return xxhash.xxh3_64_intdigest(request.request_id.encode(), request.placement)


def _is_current(request: _Request, sender: Stamp, placement: int) -> bool:
    state = request.state
    return not isinstance(state, Waiting) and state.worker == sender and request.placement == placement
