"""The autoscaling policy against every static split, on the planner's model and public traces.

    python -m benchmarks.bench_autoscale --traces ../shared/data/traces [--only day]

Six workers of an imagined accelerator (`COST`): what it can do says little, only which split a mix of requests wants.
Prints a line of docs/AUTOSCALING.md per trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from baton.common.config import DecodeConfig, PrefillConfig
from baton.deploy.autoscale import Policy
from baton.deploy.planner.cluster import Knobs, Split, serve
from baton.deploy.planner.cost import CostModel, DecodeCost, LaneCost, PrefillCost
from baton.deploy.planner.outcome import Slo
from baton.deploy.planner.scaling import ScaledCluster
from baton.deploy.planner.traces import Trace, at_rate, read_trace, within

WORKERS = 6
RESTART_S = 10.0
COST = CostModel(
    model="imagined",
    dtype="bfloat16",
    machine="none",
    threads=1,
    kv_bytes_per_token=131072,
    pool_tokens=300_000,
    overhead_s=0.0,
    prefill=PrefillCost(base_s=0.005, per_token_s=0.00005, per_pair_s=1e-9),
    decode=DecodeCost(base_s=0.012, per_row_s=0.0002, per_key_s=1e-7),
    lane=LaneCost(name="imagined", latency_s=0.001, bytes_per_s=10e9),
)
KNOBS = Knobs(PrefillConfig(chunk_tokens=2048), DecodeConfig(max_running_requests=256, chunk_tokens=512))
SHORT, LONG = Slo(ttft_s=4.0, itl_s=0.04), Slo(ttft_s=8.0, itl_s=0.04)
FILES = {
    "conv": "azure2023_llm_conv.csv",
    "code": "azure2023_llm_code.csv",
    "chat": "mooncake_conversation_trace.jsonl",
    "agent": "mooncake_synthetic_trace.jsonl",
}
Phase = tuple[str, float, float]
"""A trace, at how many requests per second, for how many seconds."""
MIXES: dict[str, tuple[Slo, tuple[Phase, ...]]] = {
    "conv": (SHORT, (("conv", 22, 600),)),
    "code": (SHORT, (("code", 6, 900),)),
    "chat": (LONG, (("chat", 1.6, 1200),)),
    "agent": (LONG, (("agent", 1.6, 1200),)),
    "code, conv, code": (SHORT, (("code", 9, 500), ("conv", 22, 400), ("code", 9, 400))),
    "conv, code, conv": (SHORT, (("conv", 22, 400), ("code", 9, 500), ("conv", 22, 400))),
    "code, conv, code, longer": (SHORT, (("code", 9, 900), ("conv", 22, 850), ("code", 9, 900))),
    "chat, conv, chat": (LONG, (("chat", 1.6, 700), ("conv", 22, 300), ("chat", 1.6, 700))),
}


def made_of(phases: tuple[Phase, ...], read: Callable[[str], Trace]) -> Trace:
    """One after the other; each begins with its trace."""
    requests, begin_s = [], 0.0
    for name, rate, seconds in phases:
        trace = at_rate(read(name), rate)
        requests += [
            replace(one, arrival_s=begin_s + one.arrival_s) for one in trace.requests if one.arrival_s < seconds
        ]
        begin_s += seconds
    return Trace("mix", tuple(requests))


def line_of(name: str, slo: Slo, trace: Trace) -> str:
    splits = [Split(prefill, WORKERS - prefill) for prefill in range(1, WORKERS)]
    static = {split: serve(COST, split, slo, trace, KNOBS).attainment for split in splits}
    best = max(splits, key=lambda split: static[split])
    policy = Policy(
        cost=COST,
        slo=slo,
        workers=WORKERS,
        most_rows=KNOBS.decode.max_running_requests,
        chunk_tokens=KNOBS.prefill.chunk_tokens,
        restart_s=RESTART_S,
    )
    told = []
    for begin in (best, Split(WORKERS // 2, WORKERS // 2)):
        scaled = ScaledCluster(policy, begin, KNOBS)
        told += [f"{scaled.serve(trace).attainment:.3f}", str(len(scaled.flips))]
    others = ", ".join(f"{split} {kept:.3f}" for split, kept in static.items())
    return f"| {name} | {len(trace.requests)} | {best}: {static[best]:.3f} | {' | '.join(told)} | {others} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--only", choices=MIXES)
    arguments = parser.parse_args()

    def read(name: str) -> Trace:
        with (arguments.traces / FILES[name]).open(encoding="utf-8") as lines:
            return within(read_trace(lines, FILES[name]), COST.pool_tokens)

    for name, (slo, phases) in MIXES.items():
        if arguments.only in (None, name):
            print(line_of(name, slo, made_of(phases, read)), flush=True)


if __name__ == "__main__":
    main()
