"""On a slow lane, in virtual time: how long after its last layer a prompt is the receiver's, by groups of layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from baton.common.config import PrefillConfig, TransferConfig
from baton.common.engine.fake_runner import StepCost
from baton.deploy.sim.plan import BASE, FIRST_S, Plan, second_of, worker_of
from baton.deploy.sim.world import World
from baton.prefill.pipelining import SHORT_TAIL_S
from baton.transfer.api import SinkCommitted

PROMPT, LAYERS = 120, 8
BYTES_PER_TOKEN = 32 << 10
TAIL_S = 0.08
"""What the prompt's bytes take on the lane; the chunk takes longer to compute."""
SETTINGS = replace(
    BASE,
    prefill=1,
    decode=1,
    page_size=16,
    prefill_pages=24,
    decode_pages=24,
    layers=LAYERS,
    bytes_per_token=BYTES_PER_TOKEN,
    lane_gbps=128 * BYTES_PER_TOKEN / TAIL_S / 1e9,  # the last page travels whole
    region_pages=8,
    region_s=0.0,
    staging_slots=16,
    transfer=TransferConfig(credit_regions=8),
    step=StepCost(0.1),
)
SLACK_S = 0.01
"""Frames, hops between threads."""


def delays(groups: int | Literal["adaptive"], pull_lane: float) -> list[float]:
    """From the end of the last step to the commit, of two requests, one after the other."""
    plan = Plan(replace(SETTINGS, prefill_config=PrefillConfig(chunk_tokens=128, layer_groups=groups)), 0)
    plan.world.settings = replace(plan.world.settings, pull_lane=pull_lane)
    for number in range(2):
        plan.request(PROMPT, at_s=FIRST_S + 3.0 * number)
    computed: list[float] = []
    committed: list[float] = []

    def step_over(world: World, details: object) -> None:
        if worker_of(details, "prefill") is not None:
            computed.append(world.now)

    def engine_event(world: World, details: object) -> None:
        if isinstance(second_of(details), SinkCommitted):
            committed.append(world.now)

    plan.world.on("step_over", step_over)
    plan.world.on("engine_event", engine_event)
    scenario = plan.ready()
    scenario.reached(scenario.world.run())
    return [end - begin for begin, end in zip(computed, committed, strict=True)]


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_the_tail_behind_the_last_layer_is_that_of_one_group(groups: int) -> None:
    for delay_s in delays(groups, pull_lane=1.0):
        assert TAIL_S / groups <= delay_s <= TAIL_S / groups + SLACK_S


def test_what_pays_off_is_found_out_from_the_first_hand_off() -> None:
    before, after = delays("adaptive", pull_lane=1.0)
    assert TAIL_S <= before <= TAIL_S + SLACK_S, "nobody knows yet how long a step takes"
    assert SHORT_TAIL_S <= after <= TAIL_S / LAYERS + SLACK_S


def test_staged_lanes_gain_as_much() -> None:
    whole, by_layers = (delays(groups, pull_lane=0.0)[0] for groups in (1, 8))
    assert whole >= TAIL_S
    assert by_layers <= TAIL_S / 8 + SLACK_S
