"""What the OpenAI-compatible endpoints answer, as typed values. Pure. (What they accept: `openai_api.py`.)

Owns: the response shapes, the extension `baton` that says where an answer's time went, and the mapping from
`ErrorCode` to HTTP. Never: decides anything about a request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Struct, UnsetType

from baton.common.errors import ErrorCode, RequestError
from baton.common.messages import Timeline
from baton.deploy.stages import stages_of

HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.PROMPT_TOO_LONG: 400,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.ADMIN_ONLY: 403,
    ErrorCode.FOREIGN_SITE: 403,
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.DEADLINE_UNREACHABLE: 429,
    ErrorCode.NO_WORKER: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.CANCELLED: 499,
    ErrorCode.OUT_OF_PAGES: 503,
    ErrorCode.TICKET_REFUSED: 500,
    ErrorCode.TRANSFER_CORRUPT: 500,
    ErrorCode.SESSION_NOT_FOUND: 404,
    ErrorCode.SESSION_BUSY: 409,
    ErrorCode.SESSION_LOST: 410,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.CONFLICT: 409,
    ErrorCode.IDEMPOTENCY_MISMATCH: 422,
    ErrorCode.IDEMPOTENCY_RUNNING: 409,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.STORE_UNAVAILABLE: 503,
    ErrorCode.INTERNAL: 500,
}


PARAM: dict[ErrorCode, str] = {
    ErrorCode.MODEL_NOT_FOUND: "model",
    ErrorCode.SESSION_NOT_FOUND: "session_id",
    ErrorCode.SESSION_BUSY: "session_id",
    ErrorCode.SESSION_LOST: "session_id",
}
"""The field that an error is about, whoever finds it."""


class _Reply(Struct, frozen=True, kw_only=True):
    pass


class ErrorDetail(_Reply, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(_Reply, frozen=True, kw_only=True):
    error: ErrorDetail


class PromptTokensDetails(_Reply, frozen=True, kw_only=True):
    cached_tokens: int


class Usage(_Reply, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class BatonExtension(_Reply, frozen=True, kw_only=True):
    """Where this answer came from and where its time went (`Timeline` is measured by the decode worker)."""

    request_id: str
    ttft_s: float | None  # arrival at the gateway until the first token; None without one
    total_s: float
    placements: int  # decode workers that worked on it
    timeline: Timeline


class LogprobEntry(_Reply, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(LogprobEntry, frozen=True, kw_only=True):
    top_logprobs: list[LogprobEntry]


class ChatLogprobs(_Reply, frozen=True, kw_only=True):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(_Reply, frozen=True, kw_only=True):
    """Of an echoed prompt's first token there are none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(_Reply, frozen=True, kw_only=True):
    """As in vLLM. `rank`: 1 is the likeliest token of all."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobList = list[dict[str, PromptLogprob] | None]
"""By token id, of each prompt token: its own, and the likeliest. The first one has none."""


class MadeFunction(_Reply, frozen=True, kw_only=True):
    name: str
    arguments: str


class MadeCall(_Reply, frozen=True, kw_only=True):
    """Of a tool, by an answer."""

    id: str
    function: MadeFunction
    type: str = "function"


class AnswerMessage(_Reply, frozen=True, kw_only=True):
    """`content` is None where an answer only calls tools."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[MadeCall] | UnsetType = UNSET


class ChatChoice(_Reply, frozen=True, kw_only=True):
    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class FunctionDelta(_Reply, frozen=True, kw_only=True):
    """More of a call: its name once, then its arguments bit by bit."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(_Reply, frozen=True):
    """`id` and `type` come with the name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta = FunctionDelta(arguments="")


class Delta(_Reply, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(_Reply, frozen=True, kw_only=True):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class CompletionChoice(_Reply, frozen=True, kw_only=True):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET


class Completion(_Reply, frozen=True, kw_only=True):
    """Every answer and every streamed chunk of either endpoint; `object` tells which."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatChunkChoice] | list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET  # of a chat; completions have them in their choices
    baton: BatonExtension | list[BatonExtension] | UnsetType = UNSET


class ModelCard(_Reply, frozen=True, kw_only=True):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "baton"


class SessionCard(_Reply, frozen=True, kw_only=True):
    id: str
    object: str = "session"


class ModelList(_Reply, frozen=True, kw_only=True):
    data: list[ModelCard]
    object: str = "list"


def encode(reply: object) -> bytes:
    """JSON of a response struct."""
    return msgspec.json.encode(reply)


def sse_event(reply: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(reply) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as HTTP: status, headers, body."""

    status: int
    headers: dict[str, str]
    reply: ErrorReply


def http_error(error: RequestError) -> HttpError:
    status = HTTP_STATUS[error.code]
    kind = {
        400: "invalid_request_error",
        401: "invalid_request_error",
        403: "permission_error",
        404: "not_found_error",
        409: "conflict_error",
        410: "gone_error",
        413: "invalid_request_error",
        422: "invalid_request_error",
        429: "overloaded_error",
    }
    detail = ErrorDetail(
        message=error.message,
        type=kind.get(status, "server_error"),
        param=error.field or PARAM.get(error.code),
        code=str(error.code),
    )
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return HttpError(status, headers, ErrorReply(error=detail))


def usage_of(prompt_tokens: int, completion_tokens: int, timelines: list[Timeline]) -> Usage:
    """Cached: not computed for this request. Found in a prefix cache, on the decode or on the prefill worker, or in a
    tier."""
    cached = sum(one.cached_tokens + one.restored_tokens + one.prefill_cached_tokens for one in timelines)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


def server_timing(extension: BatonExtension) -> str:
    """A `Server-Timing` header: browsers and proxies show it."""
    timeline = extension.timeline
    parts = [f"{name};dur={seconds * 1000:.1f}" for name, seconds in stages_of(timeline).items()]
    if timeline.lane:  # no setting or client chooses these words: they need no quoting
        parts.append(f'moved;desc="{timeline.transfer_bytes} bytes by {timeline.lane}"')
    if extension.ttft_s is not None:
        parts.append(f"ttft;dur={extension.ttft_s * 1000:.1f}")
    return ", ".join([*parts, f"total;dur={extension.total_s * 1000:.1f}"])
