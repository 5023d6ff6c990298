"""What is asked of a system over HTTP, the same bytes of each: OpenAI's streams of completions.

Owns: the requests and their times. Never: which system answers (`Target` says how it is asked).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from baton.deploy.planner.traces import TraceRequest

PROMPT_TOKENS = (64, 256, 1024)
STREAMS, STREAM_TOKENS, SHORT_TOKENS = 4, 120, 32
LONG_TOKENS = 1024
TTFT_SLO_S, ITL_SLO_S = 2.0, 0.1
"""A request counts as good when its first token came in time and the mean of its gaps is no longer."""
TIMEOUT_S = 300.0


class Target(Protocol):
    name: str

    def chunks(self, client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
        """The data of each event of the answer."""
        ...


@dataclass
class Served:
    """One answer."""

    ttft_s: float
    gaps_s: list[float]

    @property
    def good(self) -> bool:
        mean_s = sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else 0.0
        return self.ttft_s <= TTFT_SLO_S and mean_s <= ITL_SLO_S


@dataclass
class Measured:
    """Of one system, over all rounds."""

    idle_ttft_s: dict[int, list[float]] = field(default_factory=lambda: {length: [] for length in PROMPT_TOKENS})
    quiet_gaps_s: list[float] = field(default_factory=list)  # four streams alone
    loaded_gaps_s: list[float] = field(default_factory=list)  # and while prompts are computed all the time
    prompts_per_s: list[float] = field(default_factory=list)
    trace: list[Served] = field(default_factory=list)
    goodput: list[float] = field(default_factory=list)


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(tokens)]


async def serve(client: httpx.AsyncClient, target: Target, tokens: Sequence[int], outputs: int) -> Served:
    body = {
        "prompt": list(tokens), "max_tokens": outputs, "temperature": 0, "ignore_eos": True, "stream": True
    }  # fmt: skip
    started_s = last_s = time.perf_counter()
    ttft_s, gaps_s = None, []
    async for data in target.chunks(client, body):
        if data == "[DONE]" or not json.loads(data)["choices"]:
            continue
        now_s = time.perf_counter()
        if ttft_s is None:
            ttft_s = now_s - started_s
        else:
            gaps_s.append(now_s - last_s)
        last_s = now_s
    if ttft_s is None:
        raise RuntimeError(f"{target.name} answered without a token")
    return Served(ttft_s, gaps_s)


async def idle(client: httpx.AsyncClient, target: Target, rng: random.Random, measured: Measured) -> None:
    """One request at a time."""
    for tokens in PROMPT_TOKENS:
        served = await serve(client, target, prompt(rng, tokens), 2)
        measured.idle_ttft_s[tokens].append(served.ttft_s)


async def isolation(client: httpx.AsyncClient, target: Target, rng: random.Random, measured: Measured) -> None:
    """Streams alone, then streams while one long prompt after the other is computed, always two of them at a time."""

    async def streams(into: list[float]) -> None:
        asked = [serve(client, target, prompt(rng, SHORT_TOKENS), STREAM_TOKENS) for _ in range(STREAMS)]
        for served in await asyncio.gather(*asked):
            into.extend(served.gaps_s)

    computed = 0

    async def prompts() -> None:
        nonlocal computed
        while True:
            await serve(client, target, prompt(rng, LONG_TOKENS), 1)
            computed += 1

    await streams(measured.quiet_gaps_s)
    disturbances = [asyncio.ensure_future(prompts()) for _ in range(2)]
    started_s = time.perf_counter()
    await streams(measured.loaded_gaps_s)
    measured.prompts_per_s.append(computed / (time.perf_counter() - started_s))
    for one in disturbances:
        one.cancel()
    await asyncio.gather(*disturbances, return_exceptions=True)


async def replay(
    client: httpx.AsyncClient, target: Target, requests: Sequence[TraceRequest], salt: int, measured: Measured
) -> None:
    """A trace at its own pace. `salt`: no round finds the prompts of another in a cache."""
    started_s = time.perf_counter()

    async def one(request: TraceRequest) -> Served:
        await asyncio.sleep(max(0.0, request.arrival_s - (time.perf_counter() - started_s)))
        return await serve(client, target, trace_prompt(request, salt), request.output_tokens)

    served = await asyncio.gather(*(one(request) for request in requests))
    measured.trace += served
    measured.goodput.append(sum(one.good for one in served) / (time.perf_counter() - started_s))


def trace_prompt(request: TraceRequest, salt: int) -> list[int]:
    """Equal ids, equal blocks of tokens; what no id names is the request's own."""
    tokens: list[int] = []
    for block in request.blocks:
        tokens += prompt(random.Random(f"{salt}-{block}"), request.block_tokens)
    own = prompt(random.Random(f"{salt}-{request.arrival_s}"), max(0, request.prompt_tokens - len(tokens)))
    return (tokens + own)[: request.prompt_tokens]
