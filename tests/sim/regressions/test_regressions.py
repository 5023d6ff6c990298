"""Worlds that failed once, first: each file here is a seed (or a scenario and its seed), what can be left out of it,
and why it failed. `baton sim --seed n --shrink` prints what belongs into one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton.deploy.sim.command import Which, reproduce
from baton.deploy.sim.scenarios import run_scenario
from baton.deploy.sim.world import run_seed


class Regression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seed: int
    why: str
    scenario: str | None = None
    without: list[str] = []


FILES = sorted(Path(__file__).parent.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_failed_once(path: Path) -> None:
    one = msgspec.json.decode(path.read_bytes(), type=Regression)
    assert one.why, "says why it failed"
    try:
        if one.scenario is None:
            run_seed(one.seed, left_out=one.without)
        else:
            run_scenario(one.scenario, one.seed)
    except Exception as error:  # noqa: BLE001 - any failure is a finding
        pytest.fail(
            f"{reproduce(one.seed, Which(one.scenario, tuple(one.without)))}   # {type(error).__name__}: {error}"
        )
