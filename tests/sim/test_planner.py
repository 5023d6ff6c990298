"""The planner's model of a cluster against the real cores on virtual time: same trace, same costs, same times.

What the model leaves out makes the difference: frames and hops between threads, pages, the router's late loads. Prompts
are long and steps slow here, so that it stays small; where a rule of a core changes, it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from baton.common.config import DecodeConfig, PrefillConfig
from baton.common.ids import RequestId
from baton.common.messages import SamplingParams
from baton.deploy.gateway_states import TokensArrived
from baton.deploy.planner.cluster import Knobs, Split, serve
from baton.deploy.planner.cost import CostModel, DecodeCost, LaneCost, MeasuredStep, PrefillCost
from baton.deploy.planner.outcome import Answer, Outcome, Slo
from baton.deploy.planner.traces import Trace, TraceRequest
from baton.deploy.sim.clients import ClientRequest, Clients
from baton.deploy.sim.settings import LinkFaults, WorldSettings
from baton.deploy.sim.world import World

BYTES_PER_TOKEN = 16
COST = CostModel(
    model="fake",
    dtype="none",
    machine="none",
    threads=1,
    kv_bytes_per_token=BYTES_PER_TOKEN,
    pool_tokens=8192,
    overhead_s=0.0,
    prefill=PrefillCost(base_s=0.02, per_token_s=0.0005, per_pair_s=1e-7),
    decode=DecodeCost(base_s=0.02, per_row_s=0.001, per_key_s=2e-6),
    lane=LaneCost(name="local", latency_s=0.0, bytes_per_s=16e3 * 20),  # 20,000 tokens per second
)
PREFILL = PrefillConfig(chunk_tokens=256, kv_return="off", layer_groups=1)
DECODE = DecodeConfig(chunk_tokens=128, num_reserved_decode_tokens=64, itl_s=0.0)
KNOBS = Knobs(PREFILL, DECODE)
FIRST_S = 2.0
BLOCK = 64


class TimingClients(Clients):
    """Notes when what arrived."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now
        self.answers: dict[RequestId, Answer] = {}

    def tokens(self, effect: TokensArrived) -> None:
        super().tokens(effect)
        answer, now = self.answers[effect.request_id], self._now()
        answer.first_s = min(answer.first_s, now)
        answer.last_s = now


def real(split: Split, trace: Trace, knobs: Knobs, seed: int) -> list[Answer]:
    """By the real cores."""
    pages = COST.pool_tokens // knobs.kv.page_size
    settings = WorldSettings(
        prefill=split.prefill,
        decode=split.decode,
        page_size=knobs.kv.page_size,
        prefill_pages=pages,
        decode_pages=pages,
        rows=64,
        max_context_len=2048,
        bytes_per_token=BYTES_PER_TOKEN,
        staging_slots=64,
        region_pages=64,
        region_s=0.0,
        pull_lane=1.0,
        lane_gbps=COST.lane.bytes_per_s / 1e9,
        thread_hop_s=1e-5,
        links=LinkFaults(delay_s=1e-5),
        step=MeasuredStep(COST),
        prefill_config=knobs.prefill,
        decode_config=knobs.decode,
        routing=knobs.routing,
        request_timeout_s=1e4,
    )
    world = World(settings, seed)
    clients = world.clients = TimingClients(lambda: world.now)
    clients.planned = len(trace.requests)
    for number, one in enumerate(trace.requests):
        prompt = np.random.default_rng([seed, number]).integers(0, 258, one.prompt_tokens).astype(np.int32)
        for place, block in enumerate(one.blocks):
            same = np.random.default_rng([seed, 7, block]).integers(0, 258, BLOCK)
            prompt[place * BLOCK : (place + 1) * BLOCK] = same[: max(0, one.prompt_tokens - place * BLOCK)]
        sampling = SamplingParams(temperature=0.7, seed=number, max_tokens=one.output_tokens)
        request = ClientRequest(RequestId(f"r{number}"), prompt, sampling, None)
        clients.answers[request.request_id] = Answer(FIRST_S + one.arrival_s, one.output_tokens)
        world.schedule.at(FIRST_S + one.arrival_s, world.submit, request)
    world.calm_s = FIRST_S + trace.requests[-1].arrival_s
    world.run()
    return list(clients.answers.values())


def conversations(requests: int, rate: float, seed: int, shared: bool) -> Trace:
    """Of lengths as people have them; some with a beginning that others have too."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / rate, requests))
    prompts = np.clip(rng.lognormal(5.0, 0.9, requests), 16, 1200).astype(int)
    outputs = np.clip(rng.exponential(25, requests), 2, 120).astype(int)
    made = []
    for number, (at, prompt, output) in enumerate(zip(at_s, prompts, outputs, strict=True)):
        family = int(rng.integers(0, 4)) * 1000
        count = int(prompt) // BLOCK // 2 if shared else 0
        blocks = (*range(family, family + count), 100_000 + 100 * number) if shared else ()
        made.append(TraceRequest(float(at), int(prompt), int(output), blocks, BLOCK))
    return Trace("conversations", tuple(made))


CASES = {
    "apart, idle": (Split(1, 1), 0.5, False),
    "apart, busy": (Split(1, 1), 4.0, False),
    "apart, shared prefixes": (Split(1, 1), 4.0, True),
    "together, idle": (Split(0, 1), 0.5, False),
    "together, busy": (Split(0, 1), 2.0, False),
    "together, shared prefixes": (Split(0, 1), 2.0, True),
}
SEVERAL = {
    "apart": (Split(2, 2), 8.0, False),
    "apart, shared prefixes": (Split(2, 2), 8.0, True),
    "together": (Split(0, 2), 4.0, False),
    "together, shared prefixes": (Split(0, 2), 4.0, True),
}
"""Who goes where is a matter of hashes: of many requests the times agree, not of each."""


def off(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / theirs


def told(model: Outcome, cores: list[Answer]) -> str:
    def of(answers: list[Answer]) -> str:
        ttft, tpot = [one.ttft_s for one in answers], [one.tpot_s for one in answers]
        at = np.percentile(ttft, [50, 90]).round(3), np.percentile(tpot, [50, 90]).round(4)
        return f"ttft {at[0]} tpot {at[1]}"

    return f"model {of(model.answers)}; cores {of(cores)}"


def compared(
    case: tuple[Split, float, bool], requests: int, ttft_off: float, tpot_off: float, knobs: Knobs = KNOBS
) -> None:
    split, rate, shared = case
    trace = conversations(requests, rate, seed=5, shared=shared)
    model, cores = serve(COST, split, Slo(), trace, knobs), real(split, trace, knobs, seed=1)
    for share in (50, 90):
        ttft = [np.percentile([one.ttft_s for one in answers], share) for answers in (model.answers, cores)]
        tpot = [np.percentile([one.tpot_s for one in answers], share) for answers in (model.answers, cores)]
        assert off(*ttft) < ttft_off, told(model, cores)
        assert off(*tpot) < tpot_off, told(model, cores)


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_as_fast_as_the_real_cores(name: str) -> None:
    compared(CASES[name], 60, ttft_off=0.05, tpot_off=0.03)


@pytest.mark.parametrize("itl_s", [0.01, 0.05])
@pytest.mark.parametrize("name", ["together, busy", "together, shared prefixes"])
def test_chunks_are_paced_as_by_the_real_cores(name: str, itl_s: float) -> None:
    """A promise that cannot be kept, and one that is kept by chunks that are shorter than without."""
    knobs = Knobs(PREFILL, replace(DECODE, itl_s=itl_s))
    compared(CASES[name], 60, ttft_off=0.02, tpot_off=0.02, knobs=knobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_several_workers_are_as_fast_as_the_real_cores(name: str) -> None:
    compared(SEVERAL[name], 300, ttft_off=0.15, tpot_off=0.07)


def test_the_comparison_notices_other_costs() -> None:
    trace = conversations(30, 4.0, seed=5, shared=False)
    dearer = structs.replace(COST, decode=structs.replace(COST.decode, per_row_s=0.002))
    model, cores = serve(dearer, Split(1, 1), Slo(), trace, KNOBS), real(Split(1, 1), trace, KNOBS, seed=1)
    assert off(float(np.median(model.tpot_s)), float(np.median([one.tpot_s for one in cores]))) > 0.05
