"""Clients of the simulated cluster, and the judge of their answers.

Owns every request's prompt, what arrived for it, and its outcome. Judges: exactly one outcome each; a complete answer
equals `fake_answer` token for token, an incomplete one is a prefix of it; an error is typed and its cause happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baton.common.engine.fake_answer import fake_prompt_logprobs
from baton.common.engine.fake_runner import FakeAnswer, fake_answer
from baton.common.errors import ErrorCode
from baton.common.ids import NO_SESSION, RequestId, SessionId, Stamp
from baton.common.kv.layout import KvLayout
from baton.common.messages import SamplingParams, Submit, Timeline, TokenLogprob, unpack_tokens
from baton.common.prompt_logprobs import PromptLogprobs
from baton.common.units import pages_for_tokens
from baton.deploy.admission_queue import EVERYBODY, Tenant
from baton.deploy.gateway_states import RequestEnded, TokensArrived
from baton.deploy.sim.settings import WorldSettings

if TYPE_CHECKING:
    from baton.deploy.sim.process import GatewayProcess

CONNECTION_LOST = "connection lost"
AMPLE_S = 50.0
"""A request with this much time outlives every fault of a world."""
ROUND_TRIP_DELAYS = 4  # a region is read, said, written and acknowledged


@dataclass(slots=True, eq=False)
class ClientRequest:
    """One request as its client sees it."""

    request_id: RequestId
    prompt: npt.NDArray[np.int32]
    sampling: SamplingParams
    stop_after: int | None  # a stop string "appears" after this many tokens
    session_id: SessionId = NO_SESSION
    begins_session: bool = False
    priority: int = 0
    tenant: Tenant = EVERYBODY
    then: Callable[[ClientRequest], None] | None = None  # called with its outcome
    gateway: GatewayProcess | None = None
    cancelled: bool = False
    stopped: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    placements: dict[tuple[Stamp, int], int] = field(default_factory=dict)  # -> the epoch of whom it was given to
    begun_with: str = ""  # the layout of the worker that its first token came from
    outcome: str = ""  # "stop" | "length" | an ErrorCode | CONNECTION_LOST
    ended: RequestEnded | None = None

    @property
    def known(self) -> npt.NDArray[np.int32]:
        """What was asked and what has come."""
        return np.concatenate((self.prompt, np.array(self.tokens, dtype=np.int32)))


class Clients:
    """All requests of a world."""

    def __init__(self) -> None:
        self.requests: dict[RequestId, ClientRequest] = {}
        self.outcomes: Counter[str] = Counter()
        self.planned = 0
        self._newly_over: list[ClientRequest] = []

    def add(self, request: ClientRequest) -> None:
        self.requests[request.request_id] = request

    def tokens(self, effect: TokensArrived) -> None:
        request = self.requests[effect.request_id]
        assert not request.outcome, f"{request.request_id}: tokens after {request.outcome}"
        assert effect.first_index == len(request.tokens), f"{request.request_id}: a gap or an overlap"
        request.tokens.extend(effect.tokens)
        request.logprobs.extend(effect.logprobs)
        request.prompt_logprobs = request.prompt_logprobs or effect.prompt_logprobs
        if request.stop_after is not None and len(request.tokens) >= request.stop_after and not request.stopped:
            request.stopped = True
            gateway = request.gateway
            assert gateway is not None
            gateway.after(0.0, gateway.finish, "stop string", request.request_id)

    def begun(self, request_id: RequestId, layout: str) -> None:
        """The first token came from a worker with this layout."""
        self.requests[request_id].begun_with = layout

    def placed(self, gateway: Stamp, epoch: int, message: Submit, layout: str) -> None:
        """A gateway submits it to a process: each placement to one, with all that its client has by then, and what has
        begun to one that is like who began it, where that is known: one that is gone by now tells nothing."""
        request = self.requests[message.request_id]
        known = unpack_tokens(message.outputs).tolist()
        assert known == request.tokens, f"{request.request_id} is to go on behind {known}, not {request.tokens}"
        alike = not known or layout == request.begun_with or "" in (layout, request.begun_with)
        assert alike, f"{request.request_id}, begun with {request.begun_with}, goes on with {layout}"
        whom = request.placements.setdefault((gateway, message.placement), epoch)
        assert whom == epoch, f"placement {message.placement} of {request.request_id} is in two hands"

    def ended(self, effect: RequestEnded) -> None:
        request = self.requests[effect.request_id]
        assert not request.outcome, f"{request.request_id}: {effect} after {request.outcome}"
        assert bool(effect.finish_reason) != (effect.failure is not None), effect
        request.ended = effect
        self.over(request, effect.finish_reason if effect.failure is None else effect.failure.code.value)

    def gateway_died(self, gateway: GatewayProcess) -> None:
        for request in list(self.requests.values()):
            if request.gateway is gateway and not request.outcome:
                self.over(request, CONNECTION_LOST)

    def over(self, request: ClientRequest, outcome: str) -> None:
        """The one outcome of a request."""
        request.outcome = outcome
        self.outcomes[outcome] += 1
        self._newly_over.append(request)
        if request.then is not None:
            request.then(request)

    def newly_over(self) -> list[ClientRequest]:
        """Since this was asked last."""
        over, self._newly_over = self._newly_over, []
        return over

    @property
    def all_ended(self) -> bool:
        return self.outcomes.total() == self.planned

    def judge(self, settings: WorldSettings, *, faulty: bool) -> None:
        """Raises AssertionError for the first answer that a correct system cannot give."""
        for request in self.requests.values():
            judge(request, settings, faulty=faulty)


def judge(request: ClientRequest, settings: WorldSettings, *, faulty: bool) -> None:
    """Raises AssertionError unless a correct system can give this answer."""
    expected = fake_answer(request.prompt, request.sampling, settings.max_context_len, layout=settings.layout)
    _judge_tokens(request, expected, settings.layout)
    if request.outcome in ("stop", "length"):
        _judge_complete(request, expected)
    else:
        cause = _cause_of(request, settings, faulty)
        assert cause, f"{request.request_id} ended with {request.ended} for no reason"


def _judge_tokens(request: ClientRequest, expected: FakeAnswer, layout: KvLayout) -> None:
    got = tuple(request.tokens)
    assert got == expected.tokens[: len(got)], f"{request.request_id}: got {got}, expected {expected.tokens}"
    if request.sampling.logprobs >= 0:
        logprobs = expected.logprobs[: len(got)]
        assert tuple(request.logprobs) == logprobs, f"{request.request_id}: wrong logprobs {request.logprobs}"
    if got and request.sampling.scores_prompt:
        scores = fake_prompt_logprobs(request.prompt, request.sampling.prompt_logprobs, layout)
        assert request.prompt_logprobs == (scores or None), f"{request.request_id}: wrong logprobs of its prompt"


def _judge_complete(request: ClientRequest, expected: FakeAnswer) -> None:
    if request.stopped and len(request.tokens) < len(expected.tokens):
        assert request.outcome == "stop"
        return
    assert tuple(request.tokens) == expected.tokens, f"{request.request_id}: {request.tokens} is not {expected.tokens}"
    if not request.stopped:
        assert request.outcome == expected.finish_reason, f"{request.request_id}: {request.outcome}"
        timeline = request.ended.timeline if request.ended is not None else None
        assert timeline is not None, f"{request.request_id} has no timeline"
        _judge_timeline(request, timeline)


def _judge_timeline(request: ClientRequest, timeline: Timeline) -> None:
    """Every token of the prompt came from somewhere, once; what a hand-off brought, by a lane."""
    told = f"{request.request_id}: {timeline}"
    if timeline.decode_s > 0:
        kept = timeline.cached_tokens, timeline.restored_tokens
        parts = (timeline.local_tokens, *kept, timeline.transferred_tokens)
        assert sum(parts) == len(request.prompt), f"{request.request_id}: {parts} of {len(request.prompt)} tokens"
    assert 0 <= timeline.prefill_cached_tokens <= timeline.transferred_tokens, told
    brought = bool(timeline.transferred_tokens)
    assert not brought or (timeline.lane and timeline.transfer_bytes and timeline.attempts), told
    spans = timeline.queue_s, timeline.handoff_s, timeline.prefill_s, timeline.transfer_s, timeline.decode_s
    assert min(spans) >= 0, told


def _cause_of(request: ClientRequest, settings: WorldSettings, faulty: bool) -> bool:
    """Did what this error says happen?"""
    longest = len(request.prompt) + request.sampling.max_tokens - 1
    match request.outcome:
        case ErrorCode.CANCELLED.value:
            return request.cancelled
        case ErrorCode.OUT_OF_PAGES.value:
            return pages_for_tokens(longest, settings.page_size) > settings.least_decode_pages
        case ErrorCode.PROMPT_TOO_LONG.value:
            too_long = pages_for_tokens(len(request.prompt), settings.page_size) > settings.least_decode_pages
            return too_long or len(request.prompt) >= settings.max_context_len
        case ErrorCode.OVERLOADED.value:
            asked = settings.requests + settings.conversations
            return asked > min(settings.decode_config.max_queued_requests, settings.max_inflight_requests)
        case ErrorCode.RATE_LIMITED.value:
            return (request.tenant.requests_per_minute, request.tenant.tokens_per_minute) != (None, None)
        case ErrorCode.NO_WORKER.value:
            return faulty
        case ErrorCode.SESSION_NOT_FOUND.value:
            may_be_gone = faulty or settings.session_ttl_s < AMPLE_S
            return may_be_gone and request.session_id != NO_SESSION and not request.begins_session
        case ErrorCode.SESSION_LOST.value:
            return settings.decode_config.lost_session == "fail" and request.session_id != NO_SESSION
        case ErrorCode.DEADLINE_EXCEEDED.value | ErrorCode.DEADLINE_UNREACHABLE.value:
            return settings.request_timeout_s < AMPLE_S or _pages_take_long(request, settings)
        case _:
            return request.outcome == CONNECTION_LOST and faulty


def _pages_take_long(request: ClientRequest, settings: WorldSettings) -> bool:
    """When all requests are like this one, and come from one worker in regions of a page."""
    pages = (settings.requests + settings.conversations) * pages_for_tokens(len(request.prompt), settings.page_size)
    round_trips = pages / settings.transfer.credit_regions
    return round_trips * ROUND_TRIP_DELAYS * settings.links.delay_s > settings.request_timeout_s
