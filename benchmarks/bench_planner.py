"""What the planner says against what happens: pieces of public traces through real clusters, and through their model.

    python benchmarks/bench_planner.py [--traces FOLDER] [--seconds 35] [--write docs/PLANNER.md]

Calibrates first. Then 1 prefill + 1 decode worker, and afterwards one worker that does both, each pinned to a core, get
the same requests at the same times as the model, at three rates; TTFT, the gaps between tokens and whole answers are
those of an HTTP client. `--write` puts the table between two marks of the document.

`--traces` holds `azure2023_llm_conv.csv`, `azure2023_llm_code.csv` and `mooncake_conversation_trace.jsonl`; without it
requests of such lengths are made up. Rates are shares of what the model says the cluster can do, so that a slower
machine is no busier.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import ray
from rich.console import Console

from baton.client import AsyncClient
from baton.common import env
from baton.common.config import ClusterConfig, JobsConfig
from baton.common.resolve import Layer
from baton.deploy.launch import launch
from baton.deploy.planner.calibrate import calibrate
from baton.deploy.planner.cluster import Knobs, Split, serve
from baton.deploy.planner.command import told_cost
from baton.deploy.planner.cost import CostModel
from baton.deploy.planner.outcome import F64, Slo
from baton.deploy.planner.traces import Trace, TraceRequest, at_rate, read_trace, with_lengths, within
from baton.deploy.ray_join import LOCAL_NODE_ADDRESS
from baton.deploy.serve import decide

MODEL = "smollm2-135m-instruct"
MOST_TOKENS = 1600
"""Of prompt and answer: longer ones would be most of a replay."""
BEGIN, END = "<!-- bench-planner -->\n", "<!-- /bench-planner -->\n"
SHARES = (50, 90)
PAUSE_S = 2.0
"""Between two replays; what the processors do then, others do."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Requests of a trace from its `first` one on, `scale` times as long, at `loads` of what the cluster can do."""

    name: str
    file: str
    scale: float
    loads: tuple[float, ...]
    first: int = 0


CONVERSATIONS = Piece("Azure conversations", "azure2023_llm_conv.csv", 0.15, (0.3, 0.5, 0.7))
CLUSTERS: dict[Split, tuple[Piece, ...]] = {
    Split(1, 1): (
        CONVERSATIONS,
        Piece("Azure code", "azure2023_llm_code.csv", 0.1, (0.5,)),
        Piece("Mooncake conversations", "mooncake_conversation_trace.jsonl", 1 / 32, (0.5,)),
    ),
    Split(0, 1): (CONVERSATIONS,),
}


@dataclass(frozen=True, slots=True)
class Seen:
    """A request by its client. `gaps_s` are those between pieces of text, which are of one token but for a few."""

    ttft_s: float
    total_s: float
    gaps_s: list[float]
    prefill_s: float  # by the worker


@dataclass(frozen=True, slots=True)
class Row:
    """What was predicted and measured, at SHARES."""

    what: str
    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        return tuple(ours / theirs - 1 for ours, theirs in zip(self.predicted_s, self.measured_s, strict=True))


@dataclass(frozen=True, slots=True)
class Compared:
    """A replay. `prompt_steps`: predicted time of all steps of prompts on prefill workers, over the measured one; None:
    there are no such workers. `others`: cores that were busy while the cluster was idle, before."""

    split: Split
    trace: Trace
    rows: tuple[Row, ...]
    prompt_steps: float | None
    others: float


# --------------------------------------------------------------------------------------------------- requests


def piece_of(piece: Piece, folder: Path | None, most: int) -> Trace:
    if folder is None:
        return made_up(most)
    with (folder / piece.file).open(encoding="utf-8") as lines:
        trace = read_trace(lines, piece.name, 2 * most)
    trace = within(with_lengths(trace, piece.scale), MOST_TOKENS)
    return replace(trace, requests=trace.requests[:most])


def made_up(most: int) -> Trace:
    """Lengths as in conversations."""
    rng = np.random.default_rng(11)
    at_s = np.cumsum(rng.exponential(1.0, most))
    prompts = np.clip(rng.lognormal(5.0, 0.8, most), 16, 800).astype(int).tolist()
    outputs = np.clip(rng.exponential(30, most), 4, 80).astype(int).tolist()
    requests = [
        TraceRequest(float(at - at_s[0]), prompt, output)
        for at, prompt, output in zip(at_s, prompts, outputs, strict=True)
    ]
    return Trace("made up", tuple(requests))


def prompt_of(one: TraceRequest, rng: random.Random) -> list[int]:
    """Equal blocks are equal tokens; the rest is like nothing else."""
    prompt: list[int] = []
    for block in one.blocks:
        same = random.Random(block)
        prompt += [same.randrange(100, 40_000) for _ in range(one.block_tokens)]
    prompt = prompt[: one.prompt_tokens]
    return prompt + [rng.randrange(100, 40_000) for _ in range(one.prompt_tokens - len(prompt))]


async def ask(client: AsyncClient, one: TraceRequest, prompt: list[int], started: float) -> Seen:
    await asyncio.sleep(max(0.0, started + one.arrival_s - time.perf_counter()))
    asked, times = time.perf_counter(), list[float]()
    async with client.stream(prompt, max_tokens=one.output_tokens, temperature=0, ignore_eos=True) as pieces:
        async for _ in pieces:
            times.append(time.perf_counter())
        answer = pieces.answer
    times = times or [time.perf_counter()]
    return Seen(times[0] - asked, times[-1] - asked, np.diff(times).tolist(), answer.timeline.prefill_s)


async def replay(url: str, trace: Trace) -> list[Seen]:
    rng = random.Random(time.time_ns())  # prompts that no cache has
    prompts = [prompt_of(one, rng) for one in trace.requests]
    async with AsyncClient(url, timeout_s=900) as client:
        await ask(client, TraceRequest(0.0, 32, 2), prompt_of(TraceRequest(0.0, 32, 2), rng), 0.0)
        started = time.perf_counter() + 0.2
        tasks = [ask(client, one, prompt, started) for one, prompt in zip(trace.requests, prompts, strict=True)]
        return list(await asyncio.gather(*tasks))


# ------------------------------------------------------------------------------------------------- comparison


def compare(cost: CostModel, knobs: Knobs, split: Split, trace: Trace, seen: list[Seen], others: float) -> Compared:
    outcome = serve(cost, split, Slo(), trace, knobs)
    rows = (
        Row("TTFT", percentiles(outcome.ttft_s), percentiles([one.ttft_s for one in seen])),
        Row(
            "gap",
            tuple(outcome.gaps.percentile(share / 100) for share in SHARES),
            percentiles([gap for one in seen for gap in one.gaps_s]),
        ),
        Row(
            "answer",
            percentiles([one.last_s - one.arrival_s for one in outcome.answers]),
            percentiles([one.total_s for one in seen]),
        ),
    )
    took_s = sum(one.prefill_s for one in seen)
    return Compared(split, trace, rows, outcome.busy_s["prefill"] / took_s if split.prefill else None, others)


def percentiles(seconds: Sequence[float] | F64) -> tuple[float, ...]:
    return tuple(np.percentile(seconds, SHARES).tolist())


def capacity(cost: CostModel, knobs: Knobs, split: Split, trace: Trace) -> float:
    """Requests per second when all of them wait from the beginning, by the model."""
    outcome = serve(cost, split, Slo(), at_rate(trace, 1e6), knobs)
    return len(trace.requests) / max(one.last_s for one in outcome.answers)


def busy_cores(seconds: float) -> float:
    """How many cores all processes of the machine use in the next seconds."""

    def ticks() -> float:
        user, nice, system = Path("/proc/stat").read_text().split()[1:4]
        return float(user) + float(nice) + float(system)

    before = ticks()
    time.sleep(seconds)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds


def measure(cost: CostModel, split: Split, folder: Path | None, seconds: float) -> Iterator[Compared]:
    """All pieces on one cluster."""
    config = configured(split)
    knobs = Knobs.of(config)
    forgotten = TemporaryDirectory()
    handle = launch(replace(config, jobs=JobsConfig(database=f"{forgotten.name}/jobs.sqlite")))
    try:
        for piece in CLUSTERS[split]:
            most = capacity(cost, knobs, split, piece_of(piece, folder, 100))
            for load in piece.loads:
                trace = piece_of(piece, folder, max(8, round(load * most * seconds)))
                trace = at_rate(trace, load * most)
                others = busy_cores(PAUSE_S)
                seen = asyncio.run(replay(handle.gateway_url, trace))
                yield compare(cost, knobs, split, trace, seen, others)
    finally:
        handle.shutdown()
        forgotten.cleanup()


def configured(split: Split) -> ClusterConfig:
    values = {
        "cluster": f"bench-planner-{split.prefill}-{os.getpid()}",
        "prefill": split.prefill,
        "decode": split.decode,
        "model": {"model": MODEL, "max_model_len": 2048},
        "liveness": {"dead_after_s": 20.0},
        "gateway": {"port": 0},
    }
    return decide([Layer("bench_planner", values)], Console(quiet=True))


# ----------------------------------------------------------------------------------------------------- report


def lines_of(compared: Compared) -> list[str]:
    trace = compared.trace
    head = f"| {compared.split} | {trace.name}, {len(trace.requests)} at {trace.rate:.2f}/s |"
    lines = []
    for row in compared.rows:
        cells = [
            f" {ours * 1e3:,.0f} | {theirs * 1e3:,.0f} | {error:+.0%} |"
            for ours, theirs, error in zip(row.predicted_s, row.measured_s, row.errors, strict=True)
        ]
        lines.append(f"{head} {row.what} |{''.join(cells)}")
        head = "| | |"
    if compared.prompt_steps is not None:
        lines.append(f"| | | steps of prompts, all | | | {compared.prompt_steps - 1:+.0%} | | | |")
    return lines


def report(cost: CostModel, found: Sequence[Compared], seconds: float) -> str:
    errors = np.abs([row.errors for one in found for row in one.rows])
    middle, worst = np.median(errors, axis=0).tolist(), errors.max(axis=0).tolist()
    told = ", ".join(
        f"{middle[index]:.0%} at p{share} (worst {worst[index]:.0%})" for index, share in enumerate(SHARES)
    )
    others = max(one.others for one in found)
    return f"""`make bench-planner`, {seconds:.0f} s per replay. A worker has one pinned core: 1P+1D two, colocated one;
client, gateway and Ray share them. Up to {others:.2f} of {os.cpu_count()} cores were busy while the cluster was idle.

```
{told_cost(cost)}
```

**Error, over all rows: {told}.** Milliseconds; `answer` is from asking to the last token.

| workers | requests | | p50 predicted | measured | error | p90 predicted | measured | error |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(line for one in found for line in lines_of(one))}
"""


def around_marks(document: Path) -> tuple[str, str]:
    """What comes before and after the table, with the marks."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{document} has no lines {BEGIN.strip()} and {END.strip()} to write between")
    return before + begin, end + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--seconds", type=float, default=35.0, help="of each replay, about")
    parser.add_argument("--write", type=Path, help="a document with the two marks")
    arguments = parser.parse_args()
    if arguments.traces is not None and not (arguments.traces / CONVERSATIONS.file).is_file():
        raise SystemExit(f"--traces {arguments.traces}: there is no {CONVERSATIONS.file}")
    if arguments.write:
        around_marks(arguments.write)  # rather now than in nine minutes
    cost = calibrate(configured(Split(1, 1)), print)
    print(told_cost(cost), flush=True)
    env.prepare_ray(joins=False)
    # Seats, not cores: workers are pinned, and the clusters come one after the other.
    ray.init(
        address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, _node_ip_address=LOCAL_NODE_ADDRESS
    )
    found: list[Compared] = []
    for split in CLUSTERS:
        for compared in measure(cost, split, arguments.traces, arguments.seconds):
            print("\n".join(lines_of(compared)), flush=True)
            found.append(compared)
    text = report(cost, found, arguments.seconds)
    print(text)
    if arguments.write:
        before, after = around_marks(arguments.write)
        arguments.write.write_text(before + text + after)


if __name__ == "__main__":
    main()
