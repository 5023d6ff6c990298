"""In virtual time: streams of a worker that also computes prompts go on at the promised pace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.common.config import DecodeConfig
from baton.common.engine.fake_runner import StepCost
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, second_of, worker_of
from baton.deploy.sim.settings import random_settings
from baton.deploy.sim.world import World

PAGE, PROMPT, PROMPTS, CHUNK = 4, 120, 2, 64
ALONE_S, TOKEN_S = 0.011, 0.001
SETTINGS = replace(
    BASE,
    prefill=1,
    decode=1,
    page_size=PAGE,
    prefill_pages=128,
    decode_pages=512,
    step=StepCost(ALONE_S - TOKEN_S, TOKEN_S),
)


def step_times(itl_s: float | None) -> list[float]:
    """Of the decode worker, while a stream runs and prompts are computed there."""
    config = DecodeConfig(num_reserved_decode_tokens=4, chunk_tokens=CHUNK, local_prefill_max_tokens=1000, itl_s=itl_s)
    plan = Plan(replace(SETTINGS, decode_config=config), 0)
    plan.request(8, max_tokens=80)
    for _ in range(PROMPTS):
        plan.request(PROMPT, max_tokens=1, at_s=FIRST_S + 0.2)
    times: list[float] = []

    def step_over(world: World, details: object) -> None:
        began_s = second_of(details)
        if worker_of(details, "decode") is not None:
            assert isinstance(began_s, float)
            times.append(world.now - began_s)

    plan.world.on("step_over", step_over)
    scenario = plan.ready()
    scenario.reached(scenario.world.run())
    return times


@pytest.mark.parametrize("itl_s", [None, 0.0])
def test_without_a_promise_a_stream_waits_for_whole_chunks(itl_s: float | None) -> None:
    times = step_times(itl_s)
    assert max(times) == pytest.approx(ALONE_S + CHUNK * TOKEN_S)


@pytest.mark.parametrize("itl_s", [0.02, 0.03, 0.05])
def test_steps_keep_the_promise_and_use_it(itl_s: float) -> None:
    times = step_times(itl_s)
    assert max(times) <= itl_s + 1e-9
    assert max(times) > itl_s - PAGE * TOKEN_S


def test_where_too_much_was_promised_a_step_takes_twice_as_long_as_without_prompts() -> None:
    times = step_times(0.001)
    assert 2 * ALONE_S - PAGE * TOKEN_S < max(times) <= 2 * ALONE_S + 1e-9


def test_some_random_worlds_promise_and_some_do_not() -> None:
    promised = [random_settings(seed).decode_config.itl_s for seed in range(100)]
    assert 20 < sum(one is None for one in promised) < 80
    assert {0.001, 0.035} <= set(promised)
