"""Whether an HTTP request is traced, and the spans that its gateway tells of it.

    POST /v1/chat/completions ── chat MODEL ─┬─ queue         no worker had it yet
                                             ├─ first_token   until the first token was here
                                             └─ placement     on one decode worker; the next one where that was lost

One `chat MODEL` per choice. What workers do is under its placement (`decode/request_spans.py`). Owns: the decision, and
ids that are drawn. Never: text of prompts or answers, keys, addresses of clients.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import structs
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.common.messages import SamplingParams, Submit, Timeline
from baton.common.spans import NOT_TRACED, Attribute, TracedSpan, below, make_context, span_below, span_id_of

_PROPAGATOR = TraceContextTextMapPropagator()
for _name in ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # it warns of malformed headers, with what strangers wrote there
_RATIO_BITS = 1 << 64
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/responses": "chat"}
"""Of the paths that are traced."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """`trace_id` is the client's, or the one that was drawn; "" without either. `context` is that of the request's own
    span where that is recorded. `operation` is what OpenTelemetry calls what is asked for."""

    trace_id: str = ""
    context: str = NOT_TRACED
    parent: str = ""
    state: str = ""
    operation: str = ""


def begin_trace(path: str, headers: Mapping[str, str], sample_ratio: float | None) -> Beginning:
    """As W3C says: who sends `traceparent` decides. For others so many requests of all are traced; None: nobody looks
    at traces. A header that is malformed was not sent."""
    operation = _OPERATIONS.get(path)
    if operation is None:
        return Beginning()
    given = get_current_span(_PROPAGATOR.extract(headers)).get_span_context() if "traceparent" in headers else None
    if given is None or not given.is_valid:
        if sample_ratio is None:
            return Beginning()
        trace_id = secrets.token_hex(16)
        if int(trace_id[16:], 16) >= sample_ratio * _RATIO_BITS:  # by the id alone, as OpenTelemetry's sampler does
            return Beginning()
        return Beginning(trace_id, make_context(trace_id, secrets.token_hex(8)), operation=operation)
    trace_id = f"{given.trace_id:032x}"
    if sample_ratio is None or not given.trace_flags.sampled:
        return Beginning(trace_id)
    context = make_context(trace_id, secrets.token_hex(8))
    return Beginning(trace_id, context, f"{given.span_id:016x}", given.trace_state.to_header(), operation)


class AnswerSpans:
    """Of one answer to the request that began so."""

    def __init__(self, request: Beginning, request_id: str, arrived_s: float) -> None:
        self._request = request
        self._request_id = request_id
        self._context = below(request.context, "answer", request_id)
        self._arrived_s = arrived_s
        self._first_token_s: float | None = None
        self._placement: tuple[int, str, float] | None = None  # its number, its worker, since when
        self._spans: list[TracedSpan] = []

    def placed(self, submit: Submit, worker: str, now: float) -> Submit:
        """It goes to a decode worker, perhaps once more: what that is told."""
        if self._placement is None:
            self._add("queue", self._arrived_s, now)
        if self._placement is None or self._placement[0] != submit.placement:
            self._leave(now, "moved")
            self._placement = (submit.placement, worker, now)
        return structs.replace(submit, trace=below(self._context, "placement", str(submit.placement)))

    def first_token(self, now: float) -> None:
        self._first_token_s = now
        self._add("first_token", self._arrived_s, now)

    def _add(self, name: str, begin_s: float, end_s: float) -> None:
        self._spans.append(span_below(self._context, name, begin_s, end_s))

    def _leave(self, now: float, error: str) -> None:
        if self._placement is not None:
            number, worker, since_s = self._placement
            attributes: dict[str, Attribute] = {"baton.placement": number, "baton.peer": worker}
            unique = str(number)
            placement = span_below(
                self._context, "placement", since_s, now, attributes, kind="client", error=error, unique=unique
            )
            self._spans.append(placement)

    def ended(self, now: float, error: str, model: str, attributes: dict[str, Attribute]) -> list[TracedSpan]:
        """All of them."""
        if self._placement is None:
            self._add("queue", self._arrived_s, now)
        self._leave(now, error)
        if self._first_token_s is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = self._first_token_s - self._arrived_s
        whole = TracedSpan(
            context=self._context,
            parent=span_id_of(self._request.context),
            name=f"{self._request.operation} {model}",
            begin_s=self._arrived_s,
            end_s=now,
            attributes=attributes
            | {"gen_ai.operation.name": self._request.operation, "baton.request_id": self._request_id},
            error=error,
        )
        return [structs.replace(span, state=self._request.state) for span in (whole, *self._spans)]


def asked_attributes(model: str, sampling: SamplingParams) -> dict[str, Attribute]:
    """What was wanted, in the words of OpenTelemetry's conventions for generative AI."""
    return {
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }


def answered_attributes(
    model: str, finish_reason: str, prompt_tokens: int, completion_tokens: int, timeline: Timeline
) -> dict[str, Attribute]:
    """What came of it."""
    cached = timeline.cached_tokens + timeline.restored_tokens + timeline.prefill_cached_tokens
    return {
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": (finish_reason,),
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": cached,
        "baton.transfer.bytes": timeline.transfer_bytes,
        "baton.lane": timeline.lane,
    }
