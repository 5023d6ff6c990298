"""What `baton sim` does: runs worlds, replays one, makes a failing one small.

Owns: what is printed about worlds. Never: what happens in them. A seed that fails prints the line that reproduces it.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from baton.common.errors import ConfigError
from baton.deploy.sim.faults import without
from baton.deploy.sim.recording import Recording
from baton.deploy.sim.scenarios import SCENARIOS
from baton.deploy.sim.settings import random_settings
from baton.deploy.sim.shrinking import shrink
from baton.deploy.sim.world import Report, World, run_seed

Say = Callable[[str], None]
SEEDS_AT_ONCE = 20  # of one process, between two words from it
SEEDS_PER_WORD = 1000  # to who waits


class Which(NamedTuple):
    """A kind of world: a named scenario or a random one, without some of its parts."""

    scenario: str | None
    left_out: tuple[str, ...]

    def check(self) -> None:
        """Raises ConfigError when there is no such scenario."""
        if self.scenario is not None and self.scenario not in SCENARIOS:
            near = [name for name in SCENARIOS if self.scenario in name]
            hint = f"did you mean {', '.join(near)}?" if near else "--list names them"
            raise ConfigError("scenario", self.scenario, "there is no such one", hint)


class Ran(NamedTuple):
    """Some seeds: `failures` are the lines that say so."""

    events: int
    outcomes: Counter[str]
    failures: list[str]


def reproduce(seed: int, which: Which) -> str:
    """The line that does."""
    parts = ["baton sim", f"--seed {seed}"]
    parts += [f"--scenario {which.scenario}"] if which.scenario else []
    parts += [f"--without {','.join(which.left_out)}"] if which.left_out else []
    return " ".join([*parts, "--trace"])


def list_scenarios(say: Say) -> None:
    """Every scenario with the first sentence of what it is about."""
    for name, scenario in sorted(SCENARIOS.items()):
        about = " ".join((scenario.__doc__ or "").split())
        say(f"{name}\n    {about}")


def run_many(seeds: range, which: Which, jobs: int, say: Say) -> bool:
    """Whether all of them were right. Where it is interrupted it says how far it came."""
    started = time.perf_counter()
    batches = [range(first, min(first + SEEDS_AT_ONCE, seeds.stop)) for first in seeds[::SEEDS_AT_ONCE]]
    done, events, outcomes, failed = 0, 0, Counter[str](), 0
    try:
        for batch, ran in zip(batches, _side_by_side(batches, which, jobs), strict=True):
            for line in ran.failures:
                say(line)
            done, events, failed = done + len(batch), events + ran.events, failed + len(ran.failures)
            outcomes += ran.outcomes
            if done % SEEDS_PER_WORD == 0 and done < len(seeds):
                say(f"{done} of {len(seeds)} seeds, {failed} failed")
    finally:
        wall_s = time.perf_counter() - started
        say(f"{done} seeds, {failed} failed, {events} events, {wall_s:.1f} s; {_told(outcomes)}")
    return not failed


def trace(seed: int, which: Which, where: Path | None, say: Say) -> bool:
    """Replays one world, and tells all that happens in it: line by line, or as a file and a picture."""
    world, reached = _one(seed, which)
    recording = Recording(world)
    failed = False
    try:
        reached(world.run())
    except Exception:  # noqa: BLE001 - the top frame: every kind of failure is a finding
        failed = True
        say(traceback.format_exc())
    if where is None:
        for line in world.schedule.trace or ():
            say(line)
    else:
        say("wrote {} and {}".format(*recording.write(where)))
    say(f"hash {world.schedule.trace_hash}, {world.schedule.events} events")
    return not failed


def make_small(seed: int, which: Which, say: Say) -> bool:
    """Whether the seed does not fail; where it does, what of it the failure takes."""
    shrunk = shrink(seed, list(which.left_out), say)
    if shrunk is None:
        say(f"seed {seed} does not fail")
        return True
    say(f"{type(shrunk.error).__name__}: {shrunk.error}"[:600])
    say(f"after {shrunk.tries} tries it takes {', '.join(shrunk.kept) or 'nothing but the seed'}:")
    say(reproduce(seed, which._replace(left_out=tuple(shrunk.left_out))))
    return False


def _side_by_side(batches: list[range], which: Which, jobs: int) -> Iterable[Ran]:
    if jobs == 1:
        yield from (_run(which, batch) for batch in batches)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(functools.partial(_run, which), batches)


def _run(which: Which, seeds: range) -> Ran:
    ran = Ran(0, Counter(), [])
    for seed in seeds:
        try:
            report = _report(seed, which)
        except Exception as error:  # noqa: BLE001 - the top frame: every kind of failure is a finding
            ran.failures.append(f"FAILED: {reproduce(seed, which)}   # {type(error).__name__}: {error}"[:600])
            continue
        ran = Ran(ran.events + report.events, ran.outcomes + report.outcomes, ran.failures)
    return ran


def _report(seed: int, which: Which) -> Report:
    if which.scenario is None:
        return run_seed(seed, left_out=which.left_out)
    world, reached = _one(seed, which)
    report = world.run()
    reached(report)
    return report


def _one(seed: int, which: Which) -> tuple[World, Callable[[Report], None]]:
    """A world that keeps its trace, and what is to be looked at when it is at rest."""
    if which.scenario is not None:
        named = SCENARIOS[which.scenario](seed)
        named.world.schedule.trace = []
        return named.world, named.reached
    world = World(without(random_settings(seed), which.left_out), seed, keep_trace=True)
    world.plan_random(which.left_out)
    return world, lambda report: None


def _told(outcomes: Counter[str]) -> str:
    return "requests: " + ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
