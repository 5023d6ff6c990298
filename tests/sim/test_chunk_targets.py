"""In virtual time: steps end when they should, by a profile that a worker makes at its start; or that broke."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.common.config import DecodeConfig, PrefillConfig
from baton.common.engine.fake_runner import StepCost
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, second_of, worker_of
from baton.deploy.sim.settings import random_settings
from baton.deploy.sim.world import World

PROMPT = 120
TARGET_S = 0.03
SETTINGS = replace(
    BASE,
    prefill=1,
    decode=1,
    page_size=4,
    prefill_pages=64,
    decode_pages=64,
    step=StepCost(0.01, 0.001),
    decode_config=DecodeConfig(num_reserved_decode_tokens=4),
)


def step_times(target_s: float, profile_steps: int = 1 << 20) -> list[float]:
    """Of the prefill worker."""
    config = PrefillConfig(chunk_tokens=64, chunk_target_s=target_s, layer_groups=1)
    plan = Plan(replace(SETTINGS, prefill_config=config, profile_steps=profile_steps), 0)
    plan.request(PROMPT, at_s=FIRST_S)
    times: list[float] = []

    def step_over(world: World, details: object) -> None:
        began_s = second_of(details)
        if worker_of(details, "prefill") is not None:
            assert isinstance(began_s, float)
            times.append(world.now - began_s)

    plan.world.on("step_over", step_over)
    scenario = plan.ready()
    scenario.reached(scenario.world.run())
    return times


def test_steps_end_in_time() -> None:
    assert max(step_times(0.0)) == pytest.approx(0.074)
    times = step_times(TARGET_S)
    assert max(times) <= TARGET_S + 1e-9
    assert times[0] >= TARGET_S - 0.004 - 1e-9, "and use it, to a page"


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_a_profile_that_breaks_changes_nothing_else(steps: int) -> None:
    assert step_times(TARGET_S, steps) == step_times(0.0)


def test_some_random_worlds_have_targets_and_in_some_the_profile_breaks() -> None:
    drawn = [random_settings(seed) for seed in range(200)]
    aimed = [one for one in drawn if one.prefill_config.chunk_target_s or one.decode_config.chunk_target_s]
    assert 30 < len(aimed) < 100
    assert any(one.profile_steps < 10 for one in aimed)
    assert any(one.profile_steps > 10 for one in aimed)
