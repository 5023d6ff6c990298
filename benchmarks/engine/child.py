"""The child's half of the benchmark: one engine in a process of its own, asked case by case.

Owns: pinning, and which steps are timed. Runs in the peers' environments: nothing but the standard library.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from benchmarks.engine.cases import ENOUGH_S, STEPS, Case
from benchmarks.transfer.control import Control, Message

Step = Callable[[], object]


class Engine(Protocol):
    """`about`: what a reader should know of it, once it is loaded. `extra`: what else it found in the last case."""

    about: str

    @property
    def extra(self) -> Mapping[str, Any]: ...

    def prepare(self, case: Case) -> Step:
        """Everything that is not measured. Returns what is: one decode step for all rows, or a whole prefill."""
        ...

    def drop(self) -> None:
        """Frees what `prepare` took."""
        ...


def measure(engine: Engine, case: Case) -> list[float]:
    """Seconds of each step. The first step of a decode is not counted: caches are cold, and teams of threads asleep."""
    step = engine.prepare(case)
    try:
        if case.kind == "decode":
            step()
        took_s: list[float] = []
        while not took_s or (case.kind == "decode" and len(took_s) < STEPS and sum(took_s) < ENOUGH_S):
            started = time.perf_counter()
            step()
            took_s.append(time.perf_counter() - started)
        return took_s
    finally:
        engine.drop()


def main(load: Callable[[Mapping[str, Any]], Engine]) -> None:
    """Serves until the parent hangs up. `load` gets the specification: model, dtype, cores, cases, and what else the
    contender has."""
    control = Control()
    os.sched_setaffinity(0, control.spec["cores"])
    engine = load(control.spec)
    control.send({"about": engine.about})

    def run(message: Message) -> Message:
        try:
            took_s = measure(engine, Case(**message["case"]))
        except (MemoryError, RuntimeError, ValueError) as error:  # this case is beyond it; others may not be
            return {"refused": f"{type(error).__name__}: {error}"[:300]}
        return {"took_s": took_s, **engine.extra}

    control.serve({"measure": run})
