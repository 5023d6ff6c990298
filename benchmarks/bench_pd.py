"""What disaggregation costs and what it buys, on this machine: 1 prefill + 1 decode worker against the same engine
colocated (prefill = 0: the decode worker computes prompts itself), both clusters up at once, requests interleaved.

    python benchmarks/bench_pd.py [--model smollm2-135m-instruct] [--rounds 5] [--write docs/benchmarks/pd.md]

Each worker is pinned to one core, so PD has two cores and the colocated engine has one: that is stated with the
numbers. Idle: time to first token, one request at a time. Under load: the gaps between the pieces of four streams while
long prompts arrive.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import ray

from baton.client import AsyncClient
from baton.common import env
from baton.common.config import ClusterConfig, DecodeConfig, GatewayConfig, KvConfig, LivenessConfig, ModelConfig
from baton.deploy.launch import launch
from baton.deploy.ray_join import LOCAL_NODE_ADDRESS

PROMPT_TOKENS = (64, 256, 1024)
STREAMS = 4
STREAM_TOKENS = 120
LONG_PROMPT_TOKENS = 1024
LONG_PROMPTS_EACH_S = 2.5


@dataclass
class Measured:
    ttft_s: dict[int, list[float]] = field(default_factory=lambda: {length: [] for length in PROMPT_TOKENS})
    itl_s: list[float] = field(default_factory=list)
    loaded_ttft_s: list[float] = field(default_factory=list)


def config(name: str, model: str, prefill: int) -> ClusterConfig:
    return ClusterConfig(
        cluster=f"bench-{name}-{os.getpid()}",
        prefill=prefill,
        decode=1,
        model=ModelConfig(model=model, max_model_len=4096),
        kv=KvConfig(num_pages=1200),
        decode_worker=DecodeConfig(chunk_tokens=256),
        liveness=LivenessConfig(dead_after_s=15.0),
        gateway=GatewayConfig(port=0),
    )


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(tokens)]


async def idle_ttft(client: AsyncClient, rng: random.Random, tokens: int) -> float:
    answer = await client.complete(prompt(rng, tokens), max_tokens=2, temperature=0, ignore_eos=True)
    assert answer.ttft_s is not None
    return answer.ttft_s


async def under_load(client: AsyncClient, rng: random.Random, measured: Measured) -> None:
    """Four streams, and a long prompt every few seconds until they end."""

    async def stream(tokens: list[int]) -> None:
        last_s = None
        async with client.stream(tokens, max_tokens=STREAM_TOKENS, temperature=0, ignore_eos=True) as pieces:
            async for _ in pieces:
                now_s = time.perf_counter()
                if last_s is not None:
                    measured.itl_s.append(now_s - last_s)
                last_s = now_s

    async def long_prompts() -> None:
        for number in itertools.count():
            await asyncio.sleep(LONG_PROMPTS_EACH_S if number else 0.5)
            answer = await client.complete(prompt(rng, LONG_PROMPT_TOKENS), max_tokens=1, temperature=0)
            if answer.ttft_s is not None:
                measured.loaded_ttft_s.append(answer.ttft_s)

    disturbance = asyncio.ensure_future(long_prompts())
    await asyncio.gather(*(stream(prompt(rng, 32)) for _ in range(STREAMS)))
    disturbance.cancel()
    await asyncio.gather(disturbance, return_exceptions=True)


async def measure(urls: dict[str, str], rounds: int) -> dict[str, Measured]:
    rng = random.Random(7)
    found = {name: Measured() for name in urls}
    async with AsyncClient(urls["pd"], timeout_s=600) as pd, AsyncClient(urls["colocated"], timeout_s=600) as colocated:
        clients = {"pd": pd, "colocated": colocated}
        for client in clients.values():
            await idle_ttft(client, rng, 64)  # warm
        for _ in range(rounds):
            for tokens in PROMPT_TOKENS:
                for name, client in clients.items():
                    found[name].ttft_s[tokens].append(await idle_ttft(client, rng, tokens))
        for _ in range(max(1, rounds // 2)):
            for name, client in clients.items():
                await under_load(client, rng, found[name])
    return found


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def report(found: dict[str, Measured], model: str, rounds: int) -> str:
    pd, colocated = found["pd"], found["colocated"]
    lines = [
        "# PD against the same engine colocated",
        "",
        f"`python benchmarks/bench_pd.py --model {model} --rounds {rounds}`; {platform.machine()},"
        f" {os.cpu_count()} cores, float32, one pinned core per worker: PD has two cores, colocated has one.",
        "",
        "| time to first token, idle, ms | PD | colocated | PD / colocated |",
        "|---|---|---|---|",
    ]
    for tokens in PROMPT_TOKENS:
        ours, theirs = (statistics.median(one.ttft_s[tokens]) * 1e3 for one in (pd, colocated))
        lines.append(f"| prompt of {tokens} tokens | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |")
    lines += [
        "",
        f"{STREAMS} streams of {STREAM_TOKENS} tokens while a prompt of {LONG_PROMPT_TOKENS} tokens arrives every"
        f" {LONG_PROMPTS_EACH_S} s:",
        "",
        "| inter-token latency, ms | PD | colocated | PD / colocated |",
        "|---|---|---|---|",
    ]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        ours, theirs = (percentile(one.itl_s, share) * 1e3 for one in (pd, colocated))
        lines.append(f"| {name} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |")
    ours, theirs = (statistics.median(one.loaded_ttft_s) * 1e3 for one in (pd, colocated))
    lines.append(f"| (first token of the long prompts, median) | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    env.prepare_ray()
    # Seats, not cores: both clusters live on one Ray, and only one of them works at a time.
    ray.init(
        address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, _node_ip_address=LOCAL_NODE_ADDRESS
    )
    pd = launch(config("pd", arguments.model, prefill=1), on_progress=print)
    colocated = launch(config("colocated", arguments.model, prefill=0), on_progress=print)
    try:
        urls = {"pd": pd.gateway_url, "colocated": colocated.gateway_url}
        text = report(asyncio.run(measure(urls, arguments.rounds)), arguments.model, arguments.rounds)
    finally:
        colocated.shutdown()
        pd.shutdown()
    print(text)
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
