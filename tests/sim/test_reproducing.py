"""A failing seed can be reproduced, looked at, and made small."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton.decode.outbox import Outbox
from baton.deploy.cli import run_command
from baton.deploy.sim.recording import Recording
from baton.deploy.sim.scenarios import SCENARIOS
from baton.deploy.sim.settings import random_settings
from baton.deploy.sim.shrinking import how_it_fails, parts_of
from baton.deploy.sim.world import World, run_seed

SEED = 14


def test_a_recorded_world_is_the_same_world(tmp_path: Path) -> None:
    world = World(random_settings(SEED), SEED, keep_trace=True)
    recording = Recording(world)
    world.plan_random()
    assert world.run().trace_hash == run_seed(SEED).trace_hash
    log, picture = recording.write(tmp_path / "world.jsonl")
    lines = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    assert [line["at_s"] for line in lines] == sorted(line["at_s"] for line in lines)
    kinds = {line["kind"] for line in lines}
    assert {"event", "sent", "command", "engine_event", "landing_ended", "step_over", "outcome"} <= kinds
    offers = [line for line in lines if line["kind"] == "sent" and line["what"] == "Offer"]
    assert offers
    assert all("/" in line["key"] for line in offers)
    drawn = msgspec.json.decode(picture.read_bytes())["traceEvents"]
    assert {"step", "hand-offs"} <= {event["name"] for event in drawn}


def test_what_is_left_out_does_not_happen_and_moves_nothing_that_was_planned() -> None:
    parts = parts_of(SEED)
    requests = [part for part in parts if part.startswith("r") and part[1:].isdigit()]
    world = World(random_settings(SEED), SEED)
    assert requests[0] in world.plan_random(requests[:1])[0]
    world.run()
    assert requests[0] not in world.clients.requests
    assert requests[1] in world.clients.requests
    whole = World(random_settings(SEED), SEED)
    whole.plan_random()
    whole.run()
    kept, there = (one.clients.requests[requests[1]] for one in (world, whole))
    assert kept.prompt.tolist() == there.prompt.tolist()


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last message of a request is not repeated."""
    monkeypatch.setattr(Outbox, "on_timer", lambda self, now: self._resends.pop_due(now) and None)


def failing_seed(most_parts: int = 1000) -> int:
    small = (seed for seed in range(60) if len(parts_of(seed)) <= most_parts)
    return next(seed for seed in small if how_it_fails(seed, []) is not None)


@pytest.mark.usefixtures("deaf")
def test_a_failing_seed_prints_the_line_that_reproduces_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["sim", "--seed", str(failing_seed())]) == 1
    line = next(one for one in capsys.readouterr().out.splitlines() if one.startswith("FAILED: "))
    command = line.removeprefix("FAILED: baton ").split("   # ")[0]
    assert run_command(command.split()) == 1
    assert "Traceback" in capsys.readouterr().out


@pytest.mark.usefixtures("deaf")
def test_a_failure_is_shrunk_to_what_it_takes_and_printed_as_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    seed = failing_seed(most_parts=24)  # it is run some thirty times
    assert run_command(["sim", "--shrink", "--seed", str(seed)]) == 1
    command = capsys.readouterr().out.splitlines()[-1]
    left_out = command.partition(" --without ")[2].split()[0].split(",")
    assert len(parts_of(seed)) / 2 < len(left_out) < len(parts_of(seed))
    assert type(how_it_fails(seed, left_out)) is type(how_it_fails(seed, []))
    assert run_command(command.removeprefix("baton ").split()) == 1


def test_a_scenario_is_run_by_its_name_in_processes_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["sim", "--scenario", "half_open", "--seed", "1", "--seeds", "22", "--jobs", "2"]) == 0
    assert "22 seeds, 0 failed" in capsys.readouterr().out


def test_an_unknown_scenario_is_refused_with_what_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["sim", "--scenario", "mid_write"]) == 2
    assert "abort_mid_write" in capsys.readouterr().err


def test_every_scenario_is_listed_with_what_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["sim", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == sorted(SCENARIOS)
    assert all(len(about.split()) > 4 for about in lines[1::2])
