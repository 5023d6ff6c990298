"""The model of the cluster, against what can be worked out by hand and against walking through every step."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from planner_rig import COST, costing, steady, trace_of

from baton.common.config import AutoscaleConfig, ClusterConfig, DecodeConfig, PrefillConfig
from baton.deploy.planner.caches import BlockCache
from baton.deploy.planner.cluster import Knobs, ModelCluster, Split, serve
from baton.deploy.planner.cost import CostModel, DecodeCost, LaneCost, PrefillCost
from baton.deploy.planner.outcome import Outcome, Slo, parse_slo
from baton.deploy.planner.traces import Trace, TraceRequest, one_by_one

ANY = Slo()
WHOLE_CHUNKS = Knobs(decode=DecodeConfig(itl_s=0.0))


def test_a_request_alone_takes_its_prompt_its_hand_off_and_its_steps() -> None:
    [answer] = serve(COST, Split(1, 1), ANY, trace_of((0.0, 400, 3))).answers
    prefill_s = 0.01 + 400 * 0.0001
    assert answer.ttft_s == pytest.approx(0.001 / 2 + prefill_s + 0.001 / 2)
    landed_s = 0.0005 + prefill_s + 400 * 1000 / 1e9 + 0.0005
    steps_s = 2 * (0.01 + 0.0005) + 1e-7 * (401 + 402)
    assert answer.last_s == pytest.approx(landed_s + steps_s)


def test_a_long_prompt_is_computed_in_chunks_that_travel_while_the_next_is_computed() -> None:
    cost = costing(lane=LaneCost(name="tcp", latency_s=0.0, bytes_per_s=1e7))  # 512 tokens: 51.2 ms; a chunk: 61.2 ms
    [answer] = serve(cost, Split(1, 1), ANY, trace_of((0.0, 1024, 2))).answers
    assert answer.ttft_s == pytest.approx(2 * (0.01 + 512 * 0.0001))
    step_s = 0.01 + 0.0005 + 1e-7 * 1025
    assert answer.last_s == pytest.approx(answer.first_s + 512 * 1000 / 1e7 + step_s), "behind the last chunk only"


def test_colocated_chunks_hold_up_streams() -> None:
    trace = trace_of((0.0, 16, 50), (0.1, 512, 2))
    together = serve(COST, Split(0, 1), parse_slo("itl=30ms"), trace, WHOLE_CHUNKS)
    apart = serve(COST, Split(1, 1), parse_slo("itl=30ms"), trace)
    assert together.answers[0].stalls == 2, "two chunks of 256 tokens, in two of its steps"
    assert apart.answers[0].stalls == 0
    assert together.gaps.percentile(1.0) == pytest.approx(0.01 + 256 * 0.0001 + 0.0005, rel=0.05)


ALL_LOCAL = 10_000
"""`local_prefill_max_tokens` of a decode worker that hands no prompt over."""


@pytest.mark.parametrize("split", [Split(0, 1), Split(1, 1)])
def test_paced_chunks_keep_the_promised_gaps(split: Split) -> None:
    """A whole chunk in a step takes 36 ms and more, a page 12 ms."""
    trace, slo = steady(rate=4.0, requests=80, prompt=700, output=40), parse_slo("itl=25ms")

    def served(itl_s: float) -> Outcome:
        return serve(
            COST, split, slo, trace, Knobs(decode=DecodeConfig(itl_s=itl_s, local_prefill_max_tokens=ALL_LOCAL))
        )

    whole, paced = served(0.0), served(0.025)
    assert whole.gaps.percentile(0.99) > 0.035
    assert paced.gaps.percentile(0.99) <= 0.025 * 1.02, "gaps are counted in buckets as wide as that"
    assert whole.attainment < 0.9
    assert paced.attainment == 1.0
    assert np.median(paced.ttft_s) > np.median(whole.ttft_s), "streams get their time from prompts"


def test_where_too_much_is_promised_prompts_go_on_beside_streams() -> None:
    trace = trace_of((0.0, 16, 400), (0.1, 4800, 2))
    _, late = serve(COST, Split(0, 1), ANY, trace, Knobs(decode=DecodeConfig(itl_s=0.001))).answers
    alone_s, token_s = 0.0105, 0.0001
    beside_s = alone_s + 96 * token_s  # twice as long as alone would be 105 tokens, which is 6 pages of 16
    once_s = (alone_s + 16 * token_s) + alone_s  # a first page to learn from; none, to see again what streams take
    assert late.ttft_s == pytest.approx(4800 / 96 * beside_s + once_s, rel=0.02)


def test_workers_pace_by_default_as_those_that_are_served_do() -> None:
    trace = steady(rate=4.0, requests=40, prompt=700, output=40)
    dear = costing(prefill=PrefillCost(base_s=0.01, per_token_s=0.0005, per_pair_s=0.0))

    def gaps_s(knobs: Knobs | None) -> float:
        return serve(dear, Split(0, 2), ANY, trace, knobs).gaps.percentile(0.99)

    assert gaps_s(WHOLE_CHUNKS) > 0.1
    assert gaps_s(None) <= AutoscaleConfig().itl_s * 1.02
    assert gaps_s(Knobs.of(ClusterConfig(autoscale=AutoscaleConfig(itl_s=0.03)))) <= 0.03 * 1.02
    assert Knobs.of(ClusterConfig(decode_worker=DecodeConfig(itl_s=0.0))).decode.itl_s == 0.0


@pytest.mark.parametrize("number", range(20))
def test_who_comes_during_a_step_is_in_the_next(number: int) -> None:
    """Rounded sums of seconds make no difference."""
    _, answer = serve(COST, Split(0, 1), ANY, trace_of((0.1 / 3, 16, 100), (0.1 + number / 70, 16, 2))).answers
    alone_s, beside_s = 0.0105 + 1e-7 * 116, 0.0105 + 16 * 0.0001 + 1e-7 * 116
    assert answer.ttft_s <= alone_s + beside_s


def test_a_prefix_that_is_cached_is_not_computed_again() -> None:
    blocks = tuple(range(4))
    request = TraceRequest(0.0, 2048, 2, blocks, 512)
    other = TraceRequest(0.0, 2048, 2, (0, 9, 10, 11), 512)
    first, second, third = serve(
        COST, Split(1, 1), ANY, one_by_one(Trace("turns", (request, request, other)), 100.0)
    ).answers
    assert first.ttft_s == pytest.approx(0.001 + 4 * (0.01 + 512 * 0.0001))
    assert second.ttft_s < 0.02, "nothing but its last token"
    assert third.ttft_s == pytest.approx(0.001 + 3 * (0.01 + 512 * 0.0001))


def test_a_full_cache_forgets_the_ends_of_the_prompts_that_were_not_used_for_longest() -> None:
    cache = BlockCache()
    cache.keep((1, 2, 3), 10, 50)
    cache.keep((4, 5), 10, 50)
    cache.keep((1,), 10, 50)
    cache.keep((6,), 10, 50)
    assert cache.cached_tokens((1, 2, 3), 10, 100) == 20
    assert cache.cached_tokens((4, 5), 10, 100) == 20
    assert cache.cached_tokens((4, 5), 10, 20) == 19, "the last token is computed"
    assert cache.cached_tokens((7,), 10, 100) == 0


def test_who_does_not_fit_waits() -> None:
    cost = costing(pool_tokens=1000)
    trace = trace_of((0.0, 500, 200), (0.0, 500, 200))
    first, second = serve(cost, Split(1, 1), ANY, trace).answers
    assert second.first_s > first.last_s
    wide, narrow = (
        serve(COST, Split(0, 1), ANY, trace, Knobs(decode=DecodeConfig(max_running_requests=most))) for most in (2, 1)
    )
    assert wide.answers[1].first_s < wide.answers[0].last_s
    assert narrow.answers[1].first_s > narrow.answers[0].last_s


def test_all_workers_are_used() -> None:
    trace = steady(rate=20.0, requests=200, prompt=900, output=4)
    one, four = (serve(COST, Split(count, count), ANY, trace) for count in (1, 4))
    assert max(four.ttft_s) < max(one.ttft_s) / 4
    assert four.busy_s["prefill"] == pytest.approx(one.busy_s["prefill"], rel=0.3), "the same work"


def test_same_input_same_outcome() -> None:
    trace = steady(rate=30.0, requests=100, prompt=300, output=20)
    first, second = (serve(COST, Split(2, 2), ANY, trace).answers for _ in range(2))
    assert first == second


def naive(cost: CostModel, requests: list[tuple[float, int]], prompt: int, slow_s: float) -> list[tuple[float, int]]:
    """(end, stalls) of requests that arrive at these times and whose prompts take no time: one decode worker, step by
    step. It hears of a request between two steps, and of its KV between the next two."""
    waiting = sorted((at, number, outputs) for number, (at, outputs) in enumerate(requests))
    heard: list[tuple[int, int]] = []
    running: dict[int, list[float]] = {}  # number -> keys, outputs left, last token, stalls
    ends: dict[int, tuple[float, int]] = {}
    now = 0.0
    while waiting or heard or running:
        joining, heard = heard, []
        while waiting and waiting[0][0] <= now:
            heard.append(waiting.pop(0)[1:])
        if not running and not joining:
            joining, heard = heard, []
        for number, outputs in joining:
            running[number] = [prompt + 1, outputs - 1, now, 0]
        if not running:
            now = waiting[0][0]
            continue
        now += cost.decode_step_s(len(running), sum(state[0] for state in running.values()))
        for number, state in list(running.items()):
            state[3] += now - state[2] > slow_s
            state[0], state[1], state[2] = state[0] + 1, state[1] - 1, now
            if not state[1]:
                ends[number] = now, int(state[3])
                del running[number]
    return [ends[number] for number in range(len(requests))]


@pytest.mark.parametrize("seed", range(6))
def test_stretches_of_steps_are_what_the_steps_are(seed: int) -> None:
    rng = random.Random(seed)
    cost = costing(
        prefill=PrefillCost(base_s=1e-9, per_token_s=0.0, per_pair_s=0.0),
        decode=DecodeCost(base_s=0.01, per_row_s=0.001, per_key_s=rng.choice((0.0, 1e-5))),
        lane=LaneCost(name="local", latency_s=0.0, bytes_per_s=1e15),
    )
    requests = [(rng.random() * 5, rng.randint(2, 60)) for _ in range(60)]
    slo = Slo(itl_s=0.0245033)  # as long as no step
    trace = trace_of(*sorted((at, 10, outputs) for at, outputs in requests))
    answers = serve(cost, Split(1, 1), slo, trace).answers
    expected = naive(cost, [(one.arrival_s, one.outputs) for one in answers], 10, slo.itl_s)
    for answer, (end_s, stalls) in zip(answers, expected, strict=True):
        assert answer.last_s == pytest.approx(end_s, abs=1e-6)
        assert answer.stalls == stalls


def test_gaps_are_counted_one_per_token() -> None:
    outcome = serve(COST, Split(2, 2), ANY, steady(rate=50.0, requests=80, prompt=100, output=30))
    shortest, longest = outcome.gaps.percentile(0.0), outcome.gaps.percentile(1.0)
    assert 0.01 < shortest < longest < 0.1
    assert math.isnan(Outcome(ANY).gaps.percentile(0.5))


def test_workers_leave_only_when_they_are_done() -> None:
    cluster = ModelCluster(COST, Split(1, 2), ANY)
    cluster.at(0.05, lambda: setattr(next(iter(cluster.decode.values())), "draining", True))
    outcome = cluster.serve(steady(rate=20.0, requests=40, prompt=100, output=20))
    assert all(one.last_s < math.inf for one in outcome.answers)
    first, second = cluster.decode.values()
    assert first.idle
    assert second.idle
    cluster.remove(first)
    assert list(cluster.decode.values()) == [second]


def test_knobs_are_the_settings_of_the_workers() -> None:
    knobs = Knobs(prefill=PrefillConfig(chunk_tokens=100))
    [answer] = serve(COST, Split(1, 1), ANY, trace_of((0.0, 400, 2)), knobs).answers
    assert answer.ttft_s == pytest.approx(0.001 + 4 * (0.01 + 100 * 0.0001))
