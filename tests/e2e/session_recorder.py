"""What a client and the gateway say to each other, written down: as text that is the same whenever it is said again.

Ids, dates and times are replaced by their names. Events of a stream that only go on where the one before ended are one:
how an answer is cut depends on how busy the machine is.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx  # what the `openai` package speaks HTTP with

HEADERS = ("content-type", "retry-after", "x-request-id")
ID = re.compile(r"\b(chatcmpl-|cmpl-|resp_|msg_|fc_|call_|file-|batch_req_|batch_)?[0-9a-f]{24,32}([-_]\d+)?\b")
TIMES = {"created", "created_at", "ttft_s", "total_s", "sequence_number"}
DATES = re.compile(r".*_at$")
GROWING = {"content", "text", "arguments", "delta"}
WIDTH = 120
LISTS = {"content", "tokens", "token_logprobs", "top_logprobs", "text_offset"}


@dataclass
class Exchange:
    """One request and its response, whose body may still be growing."""

    request: httpx.Request
    response: httpx.Response
    body: bytearray = field(default_factory=bytearray)

    def told(self) -> str:
        request, response = self.request, self.response
        asked = f"{request.method} {request.url.raw_path.decode()}"
        headers = [f"{name}: {response.headers[name]}" for name in HEADERS if name in response.headers]
        return "\n".join([asked, *_sent(request), f"-> {response.status_code}", *headers, *self._heard()])

    def _heard(self) -> list[str]:
        if self.response.headers.get("content-type", "").startswith("text/event-stream"):
            return _events(self.body.decode())
        try:
            return [_laid_out(_masked(json.loads(self.body)))]
        except ValueError:
            return [_line(line) for line in self.body.decode().splitlines()]


@dataclass
class Recorder:
    """Everything that went through `sync()` or `asynchronous()`, in the order in which it began."""

    exchanges: list[Exchange] = field(default_factory=list)

    def sync(self) -> httpx.BaseTransport:
        return _Sync(self)

    def asynchronous(self) -> httpx.AsyncBaseTransport:
        return _Async(self)

    def told(self) -> str:
        """Of requests that were repeated until they had another answer, the last one."""
        kept = [
            one
            for one, following in itertools.zip_longest(self.exchanges, self.exchanges[1:])
            if following is None or one.request.method != "GET" or one.request.url != following.request.url
        ]
        return _without_ids("\n\n".join(exchange.told() for exchange in kept) + "\n")

    def began(self, request: httpx.Request, response: httpx.Response) -> Exchange:
        self.exchanges.append(Exchange(request, response))
        return self.exchanges[-1]


class _Sync(httpx.HTTPTransport):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = _SyncBody(response.stream, self._recorder.began(request, response))
        return response


class _SyncBody(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, exchange: Exchange) -> None:
        self._stream, self._exchange = stream, exchange

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._exchange.body += part
            yield part

    def close(self) -> None:
        self._stream.close()


class _Async(httpx.AsyncHTTPTransport):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _AsyncBody(response.stream, self._recorder.began(request, response))
        return response


class _AsyncBody(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, exchange: Exchange) -> None:
        self._stream, self._exchange = stream, exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._exchange.body += part
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


# ------------------------------------------------------------------------------------------------- as text


def _sent(request: httpx.Request) -> list[str]:
    kind = request.headers.get("content-type", "")
    if kind.startswith("multipart/"):
        return [f"({kind.split(';')[0]})"]
    return [_line(request.content.decode())] if request.content else []


def _line(text: str) -> str:
    return json.dumps(_masked(json.loads(text)), ensure_ascii=False)


def _laid_out(value: Any, indent: str = "") -> str:
    """What fits into a line stands in one."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(line) <= WIDTH or not isinstance(value, dict | list):
        return line
    inner = f"{indent} "
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(name)}: {_laid_out(one, inner)}" for name, one in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _laid_out(one, inner) for one in value) + f"\n{indent}]"


def _events(body: str) -> list[str]:
    """A line for each; those that only go on are one."""
    shown: list[tuple[str, Any]] = []
    for event in body.removesuffix("\n\n").split("\n\n"):
        name, _, data = event.rpartition("data: ")
        value = "[DONE]" if data == "[DONE]" else _masked(json.loads(data))
        if shown and shown[-1][0] == name and (joined := _joined(shown[-1][1], value)) is not None:
            shown[-1] = name, joined
        else:
            shown.append((name, value))
    return [f"{name.replace(chr(10), ' | ')}data: {json.dumps(value, ensure_ascii=False)}" for name, value in shown]


def _joined(first: Any, second: Any, name: str = "") -> Any:
    """None: the second does not only go on. What is equal, but for what grows."""
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        parts = {key: _joined(first[key], second[key], key) for key in first}
        grows = all(parts[key] is not None or first[key] is second[key] is None for key in first)
        return parts if grows else None
    if isinstance(first, list) and isinstance(second, list):
        if name in LISTS:
            return first + second
        joined = [_joined(one, other) for one, other in zip(first, second, strict=False)]
        return joined if len(first) == len(second) and None not in joined else None
    if isinstance(first, str) and isinstance(second, str) and name in GROWING:
        return first + second
    return first if first == second else None


def _masked(value: Any, name: str = "") -> Any:
    if (name in TIMES or DATES.fullmatch(name)) and isinstance(value, int | float):
        return f"<{name}>"
    if name == "timeline":
        return " ".join(value)
    if isinstance(value, dict):
        return {key: _masked(one, key) for key, one in value.items()}
    return [_masked(one) for one in value] if isinstance(value, list) else value


def _without_ids(text: str) -> str:
    """Each is replaced by its prefix and a number: the same one by the same."""
    names: dict[str, str] = {}

    def name_of(found: re.Match[str]) -> str:
        prefix, suffix = found[1] or "", found[2] or ""
        core = found[0].removeprefix(prefix).removesuffix(suffix)
        return f"{prefix}<{names.setdefault(core, f'id{len(names)}')}>{suffix}"

    return ID.sub(name_of, text)
