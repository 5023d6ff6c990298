"""`baton plan`: files in, a verdict, a picture or JSON out. The shell around `search`.

Owns: what is read and written, and how a plan is told. Never: a number of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from baton.common.config import ClusterConfig
from baton.common.engine.chunk_predictor import pairs_of
from baton.common.errors import ConfigError
from baton.deploy.charts import check_kind
from baton.deploy.planner.cluster import Knobs
from baton.deploy.planner.cost import CostModel, decode_cost, encode_cost
from baton.deploy.planner.outcome import parse_slo, told_s
from baton.deploy.planner.picture import write_picture
from baton.deploy.planner.search import MARGIN, Load, Option, Plan, Search, plan_for_rate, plan_for_workers
from baton.deploy.planner.trace_files import read_trace_file
from baton.deploy.planner.traces import Trace, with_lengths, within


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What `baton plan` was told."""

    trace: Path
    slo: str
    cost: Path
    target: float = 0.9
    workers: int | None = None
    rate: float | None = None  # None: the trace's own
    requests: int = 2000
    scale_lengths: float = 1.0


def read_cost(path: Path, setting: str = "--cost") -> CostModel:
    """`setting` is what named the file. Raises ConfigError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            setting, str(path), f"cannot be read: {error.strerror}", "make one: baton calibrate"
        ) from error
    return decode_cost(data, str(path))


def write_cost(cost: CostModel, path: Path) -> None:
    try:
        path.write_bytes(encode_cost(cost))
    except OSError as error:
        raise ConfigError(
            "--out", str(path), f"cannot be written: {error.strerror}", "--out baton-cost.json"
        ) from error


def told_cost(cost: CostModel) -> str:
    """What was measured, and how far the formulas are from it."""
    prefill_s, decode_s = cost.prefill_step_s(512, pairs_of(0, 512)), cost.decode_step_s(1, 512)
    many_s, lane = cost.decode_step_s(32, 32 * 512), cost.lane
    lines = [
        f"{cost.model} in {cost.dtype} on {cost.machine}, {cost.threads} thread(s) per worker",
        f"prefill of 512 tokens: {told_s(prefill_s)} ({512 / prefill_s:.0f} tokens/s)",
        f"decode at 512 tokens of context: {told_s(decode_s)} alone, {told_s(many_s)} for 32 requests",
        f"hand-off over {lane.name}: {told_s(lane.latency_s)} and {lane.bytes_per_s / 1e9:.2f} GB/s",
        f"gateway, frames and client: {told_s(cost.overhead_s)} per request",
    ]
    if cost.service is not None:
        prefill, decode = cost.service.prefill, cost.service.decode
        lines.append(f"in a busy cluster: prefill {prefill:.2f}, decode {decode:.2f} times as long as alone (included)")
    if cost.fits is not None:
        fits = {name: getattr(cost.fits, name) for name in ("prefill", "decode", "mixed", "lane")}
        told = ", ".join(f"{name} {fit.mean:.0%} (worst {fit.worst:.0%})" for name, fit in fits.items())
        lines.append(f"error of the formulas, on average: {told}")
    return "\n".join(lines)


def load_trace(asked: Asked, most_tokens: int) -> Trace:
    trace = read_trace_file(asked.trace, asked.requests)
    if asked.scale_lengths != 1.0:
        trace = with_lengths(trace, asked.scale_lengths)
    return within(trace, most_tokens)


def make_plan(asked: Asked, config: ClusterConfig, told: Callable[[str], None]) -> Plan:
    """Raises ConfigError."""
    for name, value in (("--target", asked.target), ("--scale-lengths", asked.scale_lengths), ("--rate", asked.rate)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(name, value, "must be positive and finite")
    if asked.workers is not None and asked.rate is not None:
        reason = "of so many workers the best rate is looked for; of a rate the fewest workers"
        raise ConfigError("--rate", asked.rate, reason, "one of --workers and --rate")
    if asked.target > 1:
        raise ConfigError("--target", asked.target, "is a share of the requests", "--target 0.9")
    cost, slo = read_cost(asked.cost), parse_slo(asked.slo)
    longest = config.model.max_model_len or cost.pool_tokens
    trace = load_trace(asked, min(cost.pool_tokens, longest))
    search = Search(cost, trace, slo, asked.target, Knobs.of(config), told)
    if asked.workers is not None:
        return plan_for_workers(search, trace, slo, asked.target, asked.workers)
    return plan_for_rate(search, trace, slo, asked.target, asked.rate or trace.rate)


def verdict(plan: Plan) -> str:
    """In a few lines, the answer first."""
    best, colocated = plan.best, plan.colocated
    promise = f"{plan.slo} for {plan.target:.0%} of the requests"
    lines = [_answer(plan), "", f"Promised: {promise}."]
    lines += [f"{_told(option)}" for option in (best, colocated, *plan.others)]
    if not plan.disaggregate and (best.goodput or 0.0) > (colocated.goodput or 0.0):
        lines.append(f"A split is worth it from {MARGIN - 1:.0%} more on: the model is not more exact.")
    trace = plan.trace
    lines.append(
        f"Trace {trace.name}: {len(trace.requests)} requests, {trace.mean_prompt_tokens:.0f} prompt and"
        f" {trace.mean_output_tokens:.0f} output tokens on average, {trace.rate:.3g} requests/s as recorded"
        + (f"; {trace.left_out} left out, which no worker could hold." if trace.left_out else ".")
    )
    if plan.short:
        lines.append("The trace is over in less than a minute at these rates: more of it (--requests) would tell more.")
    return "\n".join(lines)


def _answer(plan: Plan) -> str:
    best, colocated = plan.best.split, plan.colocated.split
    rate = f", for {plan.wanted_rate:.3g} requests/s" if plan.wanted_rate is not None else ""
    if plan.disaggregate:
        return f"{best}: {best.prefill} prefill and {best.decode} decode workers{rate}"
    if plan.colocated.goodput:
        return f"Do not disaggregate: {colocated} workers{rate}"
    return f"Neither: {colocated.workers} workers, split or not, do not even keep it for one request at a time"


def _told(option: Option) -> str:
    load = option.at_goodput
    if not option.goodput:
        return f"- {option.split}: {'less' if option.goodput is None else 'at no rate'} ({_missed(load)})."
    busy = f"prefill {load.prefill_busy:.0%}, decode {load.decode_busy:.0%} busy" if option.split.prefill else ""
    times = f"TTFT p50 {told_s(load.ttft_p50_s)}, p99 {told_s(load.ttft_p99_s)}; gaps p99 {told_s(load.itl_p99_s)}"
    return f"- {option.split}: up to {option.goodput:.3g} requests/s. There: {times}" + (f"; {busy}." if busy else ".")


def _missed(load: Load) -> str:
    at = f"at {load.rate:.3g} requests/s" if load.rate else "one request at a time"
    return f"{at}, {load.missed_ttft:.0%} miss ttft and {load.missed_itl:.0%} their gaps"


def as_json(plan: Plan) -> bytes:
    """For programs."""

    def option(one: Option) -> dict[str, object]:
        return {
            "prefill": one.split.prefill,
            "decode": one.split.decode,
            "goodput": one.goodput,
            "at_goodput": one.at_goodput,
            "curve": one.curve,
        }

    chosen = plan.chosen.split
    return msgspec.json.format(
        msgspec.json.encode(
            {
                "disaggregate": plan.disaggregate,
                "prefill": chosen.prefill,
                "decode": chosen.decode,
                "slo": plan.slo,
                "target": plan.target,
                "rate": plan.wanted_rate,
                "requests": len(plan.trace.requests),
                "left_out": plan.trace.left_out,
                "best": option(plan.best),
                "colocated": option(plan.colocated),
                "others": [option(one) for one in plan.others],
            }
        ),
        indent=2,
    )


def run_plan(asked: Asked, config: ClusterConfig, out: Path | None, json: bool, told: Callable[[str], None]) -> str:
    """What goes to stdout."""
    if out is not None:
        check_kind(out)
    plan = make_plan(asked, config, told)
    said = verdict(plan)
    if out is not None:
        write_picture(plan, said, out)
        told(f"{out} written")
    return as_json(plan).decode() if json else said
