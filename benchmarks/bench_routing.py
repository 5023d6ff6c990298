"""What routing policies make of traces: `make bench-routing`, or `python -m benchmarks.bench_routing`.

First by the planner's model (docs/PLANNER.md), at the trace's own lengths, on a made-up accelerator; then by the real
cores on virtual time, with lengths made shorter, heartbeats and events that take their time, and several gateways.
Writes the tables of docs/ROUTING.md. Nothing here is a wall-clock time: a busy machine makes it slow, not different.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.common.config import PrefillConfig
from baton.common.engine.fake_runner import StepCost
from baton.common.ids import RequestId
from baton.common.messages import Timeline
from baton.common.routing_config import POLICY_NAMES, RoutingConfig
from baton.deploy.gateway_states import RequestEnded, TokensArrived
from baton.deploy.planner.cluster import Knobs, ModelCluster, Split
from baton.deploy.planner.cost import CostModel, DecodeCost, LaneCost, PrefillCost
from baton.deploy.planner.outcome import Slo
from baton.deploy.planner.trace_files import read_trace_file
from baton.deploy.planner.traces import Trace, at_rate, within
from baton.deploy.sim.clients import ClientRequest
from baton.deploy.sim.scale import LargeWorld, PassingClients, sized

COST = CostModel(
    model="some 8 billion parameters",
    dtype="bfloat16",
    machine="made up",
    threads=1,
    kv_bytes_per_token=131_072,
    pool_tokens=3_000_000,
    overhead_s=0.005,
    prefill=PrefillCost(base_s=0.01, per_token_s=5e-5, per_pair_s=2e-9),
    decode=DecodeCost(base_s=0.01, per_row_s=1e-4, per_key_s=2e-8),
    lane=LaneCost(name="ucx", latency_s=0.001, bytes_per_s=2e10),
)
SPLIT = Split(4, 4)
LOADS = (("mooncake_conversation_trace.jsonl", 3.0), ("mooncake_conversation_trace.jsonl", 4.5))
LOADS += (("mooncake_synthetic_trace.jsonl", 3.0), ("mooncake_synthetic_trace.jsonl", 4.5))
HEAD = "| policy | found in a cache | TTFT mean | p50 | p90 | p99 |\n|---|---|---|---|---|---|"


def row(policy: str, found: float, ttft_s: npt.NDArray[np.float64]) -> str:
    times = (ttft_s.mean(), *np.percentile(ttft_s, [50, 90, 99]))
    return f"| `{policy}` | {found:.1%} | " + " | ".join(f"{one:.3g} s" for one in times) + " |"


def by_the_model(trace: Trace, policies: Sequence[str]) -> Iterator[str]:
    yield HEAD
    for policy in policies:
        knobs = Knobs(prefill=PrefillConfig(chunk_tokens=8192), routing=RoutingConfig(policy=policy))
        cluster = ModelCluster(COST, SPLIT, Slo(), knobs)
        outcome = cluster.serve(trace)
        yield row(policy, 1 - cluster.demand.computed / cluster.demand.prompts, outcome.ttft_s)


class TimingClients(PassingClients):
    """Notes when first tokens came, and where prompts came from."""

    def __init__(self, large: LargeWorld) -> None:
        super().__init__(large.world.settings)
        self._now = lambda: large.world.now
        self._began_s: dict[RequestId, float] = {}
        self.ttft_s: list[float] = []
        self.found = self.prompts = 0

    def add(self, request: ClientRequest) -> None:
        super().add(request)
        self._began_s[request.request_id] = self._now()

    def tokens(self, effect: TokensArrived) -> None:
        if effect.first_index == 0:
            self.ttft_s.append(self._now() - self._began_s.pop(effect.request_id))
        super().tokens(effect)

    def ended(self, effect: RequestEnded) -> None:
        told = effect.timeline or Timeline()
        self.found += told.cached_tokens + told.prefill_cached_tokens
        self.prompts += told.local_tokens + told.cached_tokens + told.transferred_tokens
        super().ended(effect)


def by_the_cores(trace: Trace, workers: int, gateways: int, requests: int, policies: Sequence[str]) -> Iterator[str]:
    yield HEAD
    for policy in policies:
        settings = replace(
            sized(workers),
            gateways=gateways,
            prefill_pages=1600,
            decode_pages=1600,
            step=StepCost(0.002, 0.0001),
            routing=RoutingConfig(policy=policy),
        )
        large = LargeWorld(workers, requests, trace.requests, settings=settings)
        clients = large.world.clients = TimingClients(large)
        clients.planned = requests
        large.start()
        large.world.run()
        yield row(policy, clients.found / clients.prompts, np.array(clients.ttft_s))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_routing", description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="a folder with the traces of Mooncake (FAST'25)")
    parser.add_argument("--requests", type=int, default=3000, help="of each trace, for the model")
    parser.add_argument("--core-requests", type=int, default=1500, help="for the real cores")
    parser.add_argument("--policies", nargs="*", default=list(POLICY_NAMES))
    asked = parser.parse_args()
    for name, rate in LOADS:
        trace = within(read_trace_file(asked.traces / name, asked.requests), COST.pool_tokens)
        print(f"\nPlanner's model, {SPLIT}, {name}, {len(trace.requests)} requests, {rate:g} per second:\n", flush=True)
        for line in by_the_model(at_rate(trace, rate), asked.policies):
            print(line, flush=True)
    for name, gateways in ((LOADS[0][0], 1), (LOADS[0][0], 3)):
        trace = read_trace_file(asked.traces / name, asked.core_requests)
        print(f"\nReal cores, 10 workers, {gateways} gateways, {name}, {asked.core_requests} requests:\n", flush=True)
        for line in by_the_cores(trace, 10, gateways, asked.core_requests, asked.policies):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
