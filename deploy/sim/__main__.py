"""`python -m baton.deploy.sim --seed 17 --trace`, or `--seeds 1000` (from `--seed` on) for many."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from baton.deploy.sim.settings import random_settings
from baton.deploy.sim.world import World, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m baton.deploy.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first (or only) seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run")
    parser.add_argument("--trace", action="store_true", help="print every event")
    arguments = parser.parse_args()
    if arguments.trace:
        return _trace(arguments.seed)
    started, events, failed = time.perf_counter(), 0, 0
    outcomes: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        try:
            report = run_seed(seed)
        except Exception as error:  # noqa: BLE001 - the top frame: every kind of failure is a finding
            failed += 1
            print(f"FAILED: python -m baton.deploy.sim --seed {seed} --trace   # {type(error).__name__}: {error}"[:400])
            continue
        events += report.events
        outcomes += report.outcomes
    wall_s = time.perf_counter() - started
    print(f"{arguments.seeds} seeds, {failed} failed, {events} events, {wall_s:.1f} s, {dict(outcomes)}")
    return 1 if failed else 0


def _trace(seed: int) -> int:
    world = World(random_settings(seed), seed, keep_trace=True)
    world.plan_random()
    try:
        report = world.run()
    except Exception:  # noqa: BLE001 - the top frame
        print("\n".join(world.schedule.trace or ()))
        traceback.print_exc()
        return 1
    print("\n".join(report.trace))
    print(f"hash {report.trace_hash}, {report.events} events, {dict(report.outcomes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
