"""Times requests through a real cluster: what service adds to steps, and to a request.

Owns: that cluster, one prefill and one decode worker, for some seconds. Never: a formula. In service a step is longer
than alone: a worker's I/O thread, gateway, client and Ray share its cores, workers of one machine its memory, and
between two steps the core is asked. A request's overhead is its first token without steps: gateway, frames, client.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory

import numpy as np

from baton.common.config import ClusterConfig, GatewayConfig, JobsConfig, LivenessConfig
from baton.deploy.client import Answer, AsyncClient
from baton.deploy.launch import launch

ALONE = 12
WARM_UP = 3
STREAMS = 4
STREAM_TOKENS = 100
SHORT_WORDS = 48
LONG_WORDS = 400
"""Of the prompts that keep the prefill worker busy beside the streams; at most what fits into one of its steps, with
some more tokens than words."""
TOKENS_PER_WORD = 1.25
WORDS = ("the", "of", "and", "to", "in", "is", "was", "for", "that", "on", "with", "as", "are", "by", "this", "from")
"""Each is a token to most models, which go on in words then: a token is a piece of text that a client sees at once."""
SLOW_IS_NOT_DEAD_S = 20.0


@dataclass(frozen=True, slots=True)
class MeasuredService:
    """Medians. `first_token_s`: of a request alone, without the steps of its prompt. Both workers busy: `prompt_s` is
    the step of a prompt of `prompt_tokens`, `gap_s` that between tokens of `rows` streams that see `keys` keys."""

    first_token_s: float
    prompt_tokens: int
    prompt_s: float
    rows: int
    keys: int
    gap_s: float


def measure_service(config: ClusterConfig) -> MeasuredService:
    """Raises LaunchError. On a Ray of its own, unless this process is connected to one."""
    with TemporaryDirectory() as folder:
        served = replace(
            config,
            cluster=f"baton-calibrate-{os.getpid()}",
            prefill=1,
            decode=1,
            gateway=GatewayConfig(port=0),
            liveness=LivenessConfig(dead_after_s=SLOW_IS_NOT_DEAD_S),
            jobs=JobsConfig(database=f"{folder}/jobs.sqlite"),
        )
        handle = launch(served)
        try:
            words = min(LONG_WORDS, int(config.prefill_worker.chunk_tokens / TOKENS_PER_WORD))
            return asyncio.run(measure_at(handle.gateway_url, words))
        finally:
            handle.shutdown()


async def measure_at(url: str, words: int) -> MeasuredService:
    """Of the cluster whose gateway is there. `words`: of a long prompt."""
    rng = random.Random(1)
    async with AsyncClient(url) as client:
        alone = [await _ask(client, rng, 2) for _ in range(WARM_UP + ALONE)]
        streams = [asyncio.ensure_future(_ask(client, rng, STREAM_TOKENS)) for _ in range(STREAMS)]
        prompts: list[Answer] = []
        while not any(one.done() for one in streams):
            prompts.append(await client.complete(_prompt(rng, words), max_tokens=1, temperature=0))
        streamed = await asyncio.gather(*streams)
    return MeasuredService(
        first_token_s=float(np.median([one.first_s - one.answer.timeline.prefill_s for one in alone[WARM_UP:]])),
        prompt_tokens=int(np.median([one.prompt_tokens for one in prompts])),
        prompt_s=float(np.median([one.timeline.prefill_s for one in prompts])),
        rows=STREAMS,
        keys=sum(one.answer.prompt_tokens + one.answer.completion_tokens // 2 for one in streamed),
        gap_s=float(np.median([one.gap_s for one in streamed])),
    )


def _prompt(rng: random.Random, words: int) -> str:
    """That no cache has."""
    return " ".join(rng.choices(WORDS, k=words))


@dataclass(frozen=True, slots=True)
class _Seen:
    """An answer by its client, and when its text came."""

    answer: Answer
    first_s: float
    last_s: float

    @property
    def gap_s(self) -> float:
        """On average: a piece of text may be of several tokens."""
        return (self.last_s - self.first_s) / max(1, self.answer.completion_tokens - 1)


async def _ask(client: AsyncClient, rng: random.Random, tokens: int) -> _Seen:
    """A short prompt."""
    started, times = time.perf_counter(), list[float]()
    async with client.stream(_prompt(rng, SHORT_WORDS), max_tokens=tokens, temperature=0, ignore_eos=True) as stream:
        async for _ in stream:
            times.append(time.perf_counter() - started)
        return _Seen(stream.answer, times[0], times[-1])
