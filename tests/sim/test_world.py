"""Seeded worlds: the real cores under faults. A failing seed prints the line that replays it."""

from __future__ import annotations

import pytest

from baton.common.kv.layout import Component
from baton.deploy.sim.scenarios import SCENARIOS, run_scenario
from baton.deploy.sim.settings import random_settings
from baton.deploy.sim.world import run_seed

SEEDS = 1000
BATCH = 25


def run_or_name(seed: int) -> None:
    try:
        run_seed(seed)
    except Exception as error:  # noqa: BLE001 - any failure is a finding
        pytest.fail(f"baton sim --seed {seed} --trace   # {type(error).__name__}: {error}")


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_random_worlds(first: int) -> None:
    for seed in range(first, first + BATCH):
        run_or_name(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100_000, 105_000, 100))
def test_many_random_worlds(first: int) -> None:
    for seed in range(first, first + 100):
        run_or_name(seed)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    for seed in range(3):
        run_scenario(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_on_many_seeds(name: str) -> None:
    for seed in range(3, 60):
        run_scenario(name, seed)


@pytest.mark.parametrize("seed", [3, 14, 27])
def test_same_seed_same_trace(seed: int) -> None:
    first, second = run_seed(seed, keep_trace=True), run_seed(seed, keep_trace=True)
    assert first.trace == second.trace
    assert first.trace_hash == second.trace_hash
    assert first.outcomes == second.outcomes


def test_different_seeds_differ() -> None:
    assert run_seed(1).trace_hash != run_seed(2).trace_hash


def test_seeds_cover_what_they_should() -> None:
    settings = [random_settings(seed) for seed in range(SEEDS)]
    assert {one.page_size for one in settings} == {1, 4, 16}
    assert {one.layout.components for one in settings} == {
        (Component.FULL,),
        (Component.SWA,),
        (Component.FULL, Component.SWA),
        (Component.FULL, Component.STATE),
        (Component.FULL, Component.SWA, Component.STATE),
    }
    assert {one.tiers.write for one in settings if one.tiers.named} == {"through", "back"}
    assert {one.prefill for one in settings} == {0, 1, 2}
    assert any(one.crashes == one.pauses == one.partitions == one.cancels == 0 for one in settings)
    assert sum(one.crashes for one in settings) > SEEDS / 2
    assert sum(one.links.loss > 0 for one in settings) > SEEDS / 4
    for fault in ("clogs", "storms", "controller_crashes", "half_open", "clock_offset_s", "clock_drift", "direct_lane"):
        assert sum(getattr(one, fault) > 0 for one in settings) > SEEDS / 20, fault
    assert sum(one.successor_pages < 1 for one in settings) > SEEDS / 20
    assert any(one.conversations and one.decode_config.max_sessions for one in settings)
