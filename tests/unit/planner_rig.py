"""Costs and traces made by hand."""

from __future__ import annotations

from itertools import count

from msgspec import structs

from baton.deploy.planner.cost import CostModel, DecodeCost, LaneCost, PrefillCost
from baton.deploy.planner.traces import Trace, TraceRequest

COST = CostModel(
    model="made up",
    dtype="float32",
    machine="none",
    threads=1,
    kv_bytes_per_token=1000,
    pool_tokens=100_000,
    overhead_s=0.0,
    prefill=PrefillCost(base_s=0.01, per_token_s=0.0001, per_pair_s=0.0),
    decode=DecodeCost(base_s=0.01, per_row_s=0.0005, per_key_s=1e-7),
    lane=LaneCost(name="local", latency_s=0.001, bytes_per_s=1e9),
)


def costing(**changes: object) -> CostModel:
    return structs.replace(COST, **changes)


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    """(arrival, prompt, output)."""
    return Trace("by hand", tuple(TraceRequest(*one) for one in requests))


def steady(rate: float, requests: int, prompt: int, output: int) -> Trace:
    return trace_of(*((number / rate, prompt, output) for number, _ in zip(count(), range(requests), strict=False)))
