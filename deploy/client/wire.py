"""What is said to a gateway and what it says, between JSON and the client's values. Pure.

Owns: the shapes of requests, chunks, whole answers, the lines of jobs, and errors. Never: a connection.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Any

import httpx
import msgspec

from baton.common.errors import BatonError, ErrorCode, RequestError
from baton.common.messages import Timeline
from baton.deploy.client.values import (
    Answer,
    ClusterUnreachable,
    Message,
    Outcome,
    Params,
    Prompt,
    ToolCall,
    is_conversation,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_LINE_ERRORS = {"batch_cancelled": ErrorCode.CANCELLED, "batch_expired": ErrorCode.DEADLINE_EXCEEDED}


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, int]


class _Extension(msgspec.Struct):
    request_id: str
    ttft_s: float | None
    total_s: float
    placements: int
    timeline: Timeline


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class _Call(msgspec.Struct):
    """Whole, or more of the one at `index`."""

    function: _Function
    id: str = ""
    index: int | None = None


class _Content(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] = []


class _Choice(msgspec.Struct):
    """Of either endpoint, whole (`message`) or a piece (`delta`)."""

    text: str = ""
    delta: _Content | None = None
    message: _Content | None = None
    finish_reason: str | None = None

    @property
    def part(self) -> _Content:
        return self.delta or self.message or _Content(self.text)


class _ErrorBody(msgspec.Struct):
    message: str
    code: str
    param: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    baton: _Extension | list[_Extension] | None = None
    error: _ErrorBody | None = None


class _LineResponse(msgspec.Struct):
    body: msgspec.Raw


class _Line(msgspec.Struct):
    response: _LineResponse | None
    error: _ErrorBody | None


_chunks = msgspec.json.Decoder(_Chunk)
_lines = msgspec.json.Decoder(_Line)


class Collector:
    """Turns the chunks of one answer into its text and, at the end, an Answer."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """The answer begins again, over another connection."""
        self._parts: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._finish_reason = ""
        self._usage: _Usage | None = None
        self._extension: _Extension | None = None

    def feed(self, data: bytes) -> str:
        """The text in this chunk. Raises RequestError when the server says that the request failed."""
        return self._take(_chunks.decode(data))

    def _take(self, chunk: _Chunk) -> str:
        if chunk.error is not None:
            raise _request_error(chunk.error, None)
        self._usage = chunk.usage or self._usage
        found = chunk.baton[0] if isinstance(chunk.baton, list) else chunk.baton
        self._extension = found or self._extension
        text = "".join(choice.part.content or "" for choice in chunk.choices)
        for choice in chunk.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
            for place, call in enumerate(choice.part.tool_calls):
                self._add(place if call.index is None else call.index, call)
        self._parts.append(text)
        return text

    def _add(self, index: int, more: _Call) -> None:
        known = self._calls.setdefault(index, _Call(_Function()))
        known.id += more.id
        known.function.name += more.function.name
        known.function.arguments += more.function.arguments

    def whole(self, chunk: _Chunk) -> Answer:
        """Of an answer that came in one piece: of its first choice."""
        self._take(msgspec.structs.replace(chunk, choices=chunk.choices[:1]))
        return self.answer()

    @property
    def complete(self) -> bool:
        return self._usage is not None and self._extension is not None

    def answer(self) -> Answer:
        usage, extension = self._usage, self._extension
        if usage is None or extension is None:
            raise ClusterUnreachable("the stream ended before the answer was complete")
        return Answer(
            text="".join(self._parts),
            finish_reason=self._finish_reason,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.prompt_tokens_details.get("cached_tokens", 0),
            request_id=extension.request_id,
            ttft_s=extension.ttft_s,
            total_s=extension.total_s,
            placements=extension.placements,
            timeline=extension.timeline,
            tool_calls=tuple(
                ToolCall(call.id, call.function.name, call.function.arguments)
                for _, call in sorted(self._calls.items())
            ),
        )


def conversation(messages: str | Sequence[Message]) -> Sequence[Message]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def request_of(prompt: Prompt, model: str, params: Params) -> tuple[str, dict[str, Any]]:
    """(endpoint, body)."""
    body: dict[str, Any] = {"model": model, **params}
    if is_conversation(prompt):
        return CHAT, {**body, "messages": list(prompt)}
    return COMPLETIONS, {**body, "prompt": prompt if isinstance(prompt, str) else list(prompt)}


def lines_for(prompts: Sequence[Prompt], model: str, params: Params) -> list[dict[str, Any]]:
    """Of a batch; their custom ids are the prompts' places. Raises RequestError."""
    requests = [request_of(prompt, model, params) for prompt in prompts]
    if not requests:
        raise RequestError(ErrorCode.INVALID_REQUEST, "there is no prompt", "prompts")
    if any(path != requests[0][0] for path, _ in requests):
        reason = "the prompts of one job are all conversations, or all texts or token ids"
        raise RequestError(ErrorCode.INVALID_REQUEST, reason, "prompts")
    return [
        {"custom_id": str(place), "method": "POST", "url": path, "body": body}
        for place, (path, body) in enumerate(requests)
    ]


def outcome_of(line: bytes) -> Outcome:
    """What a line of an output or error file says. Raises BatonError when that is no completion."""
    found = _lines.decode(line)
    if found.error is not None:
        code = _LINE_ERRORS.get(found.error.code, ErrorCode.INTERNAL)
        return RequestError(code, found.error.message)
    assert found.response is not None, "one of the two is there"
    try:
        body = _chunks.decode(found.response.body)
    except msgspec.ValidationError:  # of /v1/responses, which have other numbers
        body = _Chunk()
    if body.error is not None:
        return _request_error(body.error, None)
    if not body.choices:
        raise BatonError("this line is no completion: `Job.output()` gives it as it is")
    return Collector().whole(body)


async def lines_of(parts: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Lines of a stream. Only line feeds end one: httpx, which splits text, would also cut at the separators that
    Unicode has, and JSON may hold those as they are."""
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r")


def response_error(response: httpx.Response) -> RequestError:
    """What an answer that is an error says."""
    retry_after = response.headers.get("Retry-After", "")
    retry_after_s = float(retry_after) if retry_after.isdecimal() else None
    try:
        body = _chunks.decode(response.content).error
    except msgspec.DecodeError:
        body = None
    if body is None:  # not one of ours: a proxy in between
        return RequestError(ErrorCode.INTERNAL, f"HTTP {response.status_code} from {response.url}")
    return _request_error(body, retry_after_s)


def _request_error(body: _ErrorBody, retry_after_s: float | None) -> RequestError:
    known = body.code in set(ErrorCode)
    return RequestError(
        ErrorCode(body.code) if known else ErrorCode.INVALID_REQUEST, body.message, body.param, retry_after_s
    )
