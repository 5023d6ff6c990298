"""Runs simulated worlds: one seed, many (`--seeds 5000`), or a named scenario. A seed that fails prints the line that
reproduces it; `--trace FILE` writes what happened, and FILE.perfetto.json to look at; `--shrink` finds what it
takes."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from baton.deploy.sim.faults import without
from baton.deploy.sim.recording import Recording
from baton.deploy.sim.scenarios import SCENARIOS
from baton.deploy.sim.settings import random_settings
from baton.deploy.sim.shrinking import shrink
from baton.deploy.sim.world import Report, World, run_seed

ON_SCREEN = "-"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m baton.deploy.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first (or only) seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), help="a named one, instead of a random world")
    parser.add_argument("--without", default="", help="parts to leave out, as --shrink prints them: r3,c0,crash1,loss")
    parser.add_argument("--shrink", action="store_true", help="leave out what the failure of this seed can do without")
    parser.add_argument(
        "--trace",
        nargs="?",
        const=ON_SCREEN,
        metavar="FILE",
        help="print every event; with FILE, write the typed events there, and a picture beside it",
    )
    arguments = parser.parse_args()
    left_out = [part for part in arguments.without.split(",") if part]
    if arguments.shrink:
        return _shrink(arguments.seed, left_out)
    if arguments.trace is not None:
        return _trace(*_one(arguments.seed, arguments.scenario, left_out), arguments.trace)
    return _many(range(arguments.seed, arguments.seed + arguments.seeds), arguments.scenario, left_out)


def reproduce(seed: int, scenario: str | None = None, left_out: list[str] | None = None) -> str:
    """The line that does."""
    parts = ["python -m baton.deploy.sim", f"--seed {seed}"]
    parts += [f"--scenario {scenario}"] if scenario else []
    parts += [f"--without {','.join(left_out)}"] if left_out else []
    return " ".join([*parts, "--trace"])


def _one(seed: int, scenario: str | None, left_out: list[str]) -> tuple[World, Callable[[Report], None]]:
    """A world that keeps its trace, and what is to be looked at when it is at rest."""
    if scenario is not None:
        named = SCENARIOS[scenario](seed)
        named.world.schedule.trace = []
        return named.world, named.reached
    world = World(without(random_settings(seed), left_out), seed, keep_trace=True)
    world.plan_random(left_out)
    return world, lambda report: None


def _many(seeds: range, scenario: str | None, left_out: list[str]) -> int:
    started, events, failed = time.perf_counter(), 0, 0
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        try:
            if scenario is None:
                report = run_seed(seed, left_out=left_out)
            else:
                world, reached = _one(seed, scenario, left_out)
                report = world.run()
                reached(report)
        except Exception as error:  # noqa: BLE001 - the top frame: every kind of failure is a finding
            failed += 1
            print(f"FAILED: {reproduce(seed, scenario, left_out)}   # {type(error).__name__}: {error}"[:600])
            continue
        events += report.events
        outcomes += report.outcomes
    wall_s = time.perf_counter() - started
    print(f"{len(seeds)} seeds, {failed} failed, {events} events, {wall_s:.1f} s, {dict(outcomes)}")
    return 1 if failed else 0


def _trace(world: World, reached: Callable[[Report], None], where: str) -> int:
    recording = Recording(world)
    failed = False
    try:
        report = world.run()
        reached(report)
    except Exception:  # noqa: BLE001 - the top frame
        failed = True
        traceback.print_exc()
    if where == ON_SCREEN:
        print("\n".join(world.schedule.trace or ()))
    else:
        print("wrote {} and {}".format(*recording.write(Path(where))))
    print(f"hash {world.schedule.trace_hash}, {world.schedule.events} events")
    return 1 if failed else 0


def _shrink(seed: int, left_out: list[str]) -> int:
    shrunk = shrink(seed, left_out, print)
    if shrunk is None:
        print(f"seed {seed} does not fail")
        return 0
    print(f"{type(shrunk.error).__name__}: {shrunk.error}"[:600])
    print(f"after {shrunk.tries} tries it takes {', '.join(shrunk.kept) or 'nothing but the seed'}:")
    print(reproduce(seed, None, shrunk.left_out))
    return 1


if __name__ == "__main__":
    sys.exit(main())
