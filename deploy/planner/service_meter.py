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
ALONE_TOKENS = 64
WARM_UP = 3
STREAMS = 4
STREAM_PROMPT_TOKENS = 64
STREAM_TOKENS = 100
BESIDE_TOKENS = 512
"""Of the prompts that keep the prefill worker busy beside the streams; at most what its step takes."""
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
            return asyncio.run(measure_at(handle.gateway_url, min(BESIDE_TOKENS, config.prefill_worker.chunk_tokens)))
        finally:
            handle.shutdown()


async def measure_at(url: str, prompt_tokens: int) -> MeasuredService:
    """Of the cluster whose gateway is there."""
    rng = random.Random(1)
    async with AsyncClient(url) as client:
        alone = [await _first_token_s(client, rng) for _ in range(WARM_UP + ALONE)]
        streams = [asyncio.ensure_future(_stream(client, rng)) for _ in range(STREAMS)]
        prompts: list[Answer] = []
        while not any(one.done() for one in streams):
            prompts.append(await client.complete(_prompt(rng, prompt_tokens), max_tokens=1, temperature=0))
        gaps_s = [gap for times in await asyncio.gather(*streams) for gap in np.diff(times).tolist()]
    return MeasuredService(
        first_token_s=float(np.median(alone[WARM_UP:])),
        prompt_tokens=prompt_tokens,
        prompt_s=float(np.median([one.timeline.prefill_s for one in prompts])),
        rows=STREAMS,
        keys=STREAMS * (STREAM_PROMPT_TOKENS + STREAM_TOKENS // 2),
        gap_s=float(np.median(gaps_s)),
    )


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    """That no cache has. Ids that any vocabulary has."""
    return [rng.randrange(1, 256) for _ in range(tokens)]


async def _first_token_s(client: AsyncClient, rng: random.Random) -> float:
    started, first_s = time.perf_counter(), 0.0
    async with client.stream(_prompt(rng, ALONE_TOKENS), max_tokens=2, temperature=0, ignore_eos=True) as stream:
        async for _ in stream:
            first_s = first_s or time.perf_counter() - started
        timeline = stream.answer.timeline
    return first_s - timeline.prefill_s


async def _stream(client: AsyncClient, rng: random.Random) -> list[float]:
    """When its tokens came."""
    times: list[float] = []
    prompt = _prompt(rng, STREAM_PROMPT_TOKENS)
    async with client.stream(prompt, max_tokens=STREAM_TOKENS, temperature=0, ignore_eos=True) as stream:
        async for _ in stream:
            times.append(time.perf_counter())
    return times
