"""Sends the requests of a workload to an OpenAI-compatible server, each at its time, and notes when its answer came.

Owns: connections, and the clock that everything is measured on, the client's. Never: judges.

The load is open: a request is sent when it is due, whether or not the ones before are answered. `late_s` is how far
the client itself was behind; where that is not small, the client was what was measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from baton.deploy.bench.workload import Ask
from baton.deploy.client import lines_of
from baton.deploy.client.connection import trust

DATA, DONE = b"data: ", b"data: [DONE]"
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `extra` goes into every request: sampling, and what only some servers know."""

    url: str
    model: str
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0


@dataclass(slots=True)
class Sent:
    """One request and what came of it; times in seconds since the beginning. `pieces_s`: when text came."""

    at_s: float  # when it was due
    sent_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    failure: str = ""  # "": it was answered

    @property
    def late_s(self) -> float:
        return self.sent_s - self.at_s

    @property
    def ttft_s(self) -> float:
        return self.pieces_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.pieces_s, self.pieces_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """The mean time of a token behind the first; None: there is none."""
        if self.output_tokens < 2:
            return None
        return (self.pieces_s[-1] - self.pieces_s[0]) / (self.output_tokens - 1)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None

    @property
    def tells(self) -> bool:
        """A token came: half a character has no text yet. The end alone is none."""
        return bool(self.text) or (self.text is not None and self.finish_reason is None)


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_decoder = msgspec.json.Decoder(_Chunk)


async def first_model(url: str, api_key: str | None) -> str:
    """The name of the first model that is served. Raises httpx.HTTPError, msgspec.DecodeError."""

    async with httpx.AsyncClient(
        base_url=url, headers=_headers(api_key), timeout=CONNECT_TIMEOUT_S, verify=trust()
    ) as http:
        found = await http.get("/v1/models")
        found.raise_for_status()
        return msgspec.json.decode(found.content, type=_Models).data[0].id


async def offer(target: Target, asks: Sequence[Ask], at_once: int | None, told: Callable[[int], None]) -> list[Sent]:
    """All of them, in the order of `asks`. `at_once`: as many as are open at any time, whatever the times say (a closed
    load). `told`: how many have ended."""
    gate = asyncio.Semaphore(at_once or len(asks))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(target.timeout_s, connect=CONNECT_TIMEOUT_S)
    headers, ended = _headers(target.api_key), 0
    async with httpx.AsyncClient(
        base_url=target.url, headers=headers, limits=limits, timeout=timeout, verify=trust()
    ) as http:
        start_s = time.perf_counter()

        async def one(ask: Ask) -> Sent:
            nonlocal ended
            if at_once is None:
                await asyncio.sleep(ask.at_s - (time.perf_counter() - start_s))
            async with gate:
                sent = await _ask(http, target, ask, start_s, due=at_once is None)
            ended += 1
            told(ended)
            return sent

        return list(await asyncio.gather(*(one(ask) for ask in asks)))


async def _ask(http: httpx.AsyncClient, target: Target, ask: Ask, start_s: float, *, due: bool) -> Sent:
    body = {
        "model": target.model,
        "prompt": ask.prompt,
        "max_tokens": ask.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra,
    }
    content = msgspec.json.encode(body)
    sent_s = time.perf_counter() - start_s
    sent = Sent(ask.at_s if due else sent_s, sent_s)
    try:
        headers = {"Content-Type": "application/json"}
        async with http.stream("POST", "/v1/completions", content=content, headers=headers) as response:
            if response.is_error:
                sent.failure = _refusal(response.status_code, await response.aread())
            else:
                await _take(response, sent, start_s)
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        sent.failure = f"{type(error).__name__}: {error}".removesuffix(": ")
    sent.ended_s = time.perf_counter() - start_s
    return sent


async def _take(response: httpx.Response, sent: Sent, start_s: float) -> None:
    whole = False
    async for line in lines_of(response.aiter_bytes()):
        if line == DONE:
            whole = True
        elif line.startswith(DATA):
            chunk = _decoder.decode(line.removeprefix(DATA))
            if chunk.error is not None:
                sent.failure = str(chunk.error.code or chunk.error.type or chunk.error.message)
                return
            if any(choice.tells for choice in chunk.choices):
                sent.pieces_s.append(time.perf_counter() - start_s)
            if chunk.usage is not None:
                details = chunk.usage.prompt_tokens_details
                sent.prompt_tokens, sent.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
                sent.cached_tokens = (details.cached_tokens if details else None) or 0
    if not whole:
        sent.failure = "the stream broke off"
    elif not sent.pieces_s:
        sent.failure = "an empty answer"


def _refusal(status: int, body: bytes) -> str:
    try:
        error = _decoder.decode(body).error
    except msgspec.DecodeError:
        error = None
    return f"HTTP {status}" + (f" {error.code or error.type or ''}".rstrip() if error else "")


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
