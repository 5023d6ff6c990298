"""How fast the simulator is: `python -m baton.deploy.sim.bench`.

An event is one thing taken from the heap of virtual time: a frame or a region that arrives, a hop between the threads
of a process, a timer, the end of a step. Checks and judgements are no events; they are part of those that cause them.
Times are processor time of this process, so that a busy machine does not count as a slow simulator.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.deploy.planner.traces import TraceRequest, read_trace
from baton.deploy.sim.scale import LargeWorld, made_up_trace
from baton.deploy.sim.settings import random_settings
from baton.deploy.sim.world import Report, World

PROGRESS_S = 1.0


@dataclass(frozen=True, slots=True)
class Speed:
    """Of some worlds."""

    events: int
    requests: int
    virtual_s: float
    cpu_s: float

    def told(self, what: str) -> str:
        return (
            f"{what:28} {self.events:>10,} events  {self.requests:>9,} requests  {self.virtual_s:>8.1f} virtual s"
            f"  {self.cpu_s:>7.1f} s  {self.events / self.cpu_s:>9,.0f} events/s  {self.requests / self.cpu_s:>7,.0f}"
            f" requests/s  {1e6 * self.cpu_s / self.events:>6.1f} us/event"
        )


def of_seeds(first: int, count: int) -> Speed:
    """Random worlds with faults, as the tests run them, with every check."""
    worlds = [World(random_settings(seed), seed) for seed in range(first, first + count)]
    started, reports = time.process_time(), list[Report]()
    for world in worlds:
        world.plan_random()
        reports.append(world.run())
    return _speed(reports, time.process_time() - started)


def of_size(workers: int, requests: int, trace: Sequence[TraceRequest], *, progress: bool = False) -> Speed:
    """A world without faults, from its first request on, with every check."""
    large = LargeWorld(workers, requests, trace)
    large.start()
    schedule, outcomes = large.world.schedule, large.world.clients.outcomes
    before, began_s, started = schedule.events, schedule.now, time.process_time()

    def so_far() -> Speed:
        cpu_s = time.process_time() - started
        return Speed(schedule.events - before, outcomes.total(), schedule.now - began_s, cpu_s)

    if progress:
        large.every(PROGRESS_S, lambda: print(so_far().told(f"{workers} workers, so far"), _memory(), flush=True))
    large.world.run()
    return so_far()


def _memory() -> str:
    return f"  {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB"


def _speed(reports: list[Report], cpu_s: float) -> Speed:
    requests = sum(report.outcomes.total() for report in reports)
    return Speed(sum(one.events for one in reports), requests, sum(one.virtual_s for one in reports), cpu_s)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m baton.deploy.sim.bench", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many random worlds with faults")
    parser.add_argument("--workers", type=int, nargs="*", default=[10, 100], help="sizes of worlds without faults")
    parser.add_argument("--requests", type=int, default=2000, help="in each of those")
    parser.add_argument("--progress", action="store_true", help="tell of large worlds every virtual second")
    parser.add_argument("--trace", type=Path, help="a file that baton plan reads (default: a made-up one)")
    arguments = parser.parse_args()
    if arguments.seeds:
        print(of_seeds(0, arguments.seeds).told(f"{arguments.seeds} seeds with faults"), flush=True)
    trace: Sequence[TraceRequest] = made_up_trace()
    if arguments.trace is not None:
        with arguments.trace.open() as lines:
            trace = read_trace(lines, arguments.trace.name).requests
    for workers in arguments.workers:
        speed = of_size(workers, arguments.requests, trace, progress=arguments.progress)
        print(speed.told(f"{workers} workers"), _memory(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
