"""Measures all contenders of a setting case by case, in turns: whatever disturbs the machine disturbs all alike.

Owns: the children while they are measured; all but the one whose turn it is are stopped.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from benchmarks.children import ChildProcess, EndFailed
from benchmarks.engine.cases import Case
from benchmarks.engine.contenders import MACHINE, Contender, Setting
from benchmarks.engine.roofline import Limits

Say = Callable[[str], None]


@dataclass
class Results:
    """Of one setting. `took_s`: medians of each round's steps, by case and contender."""

    setting: Setting
    took_s: dict[tuple[Case, str], list[float]] = field(default_factory=dict)
    overhead_s: dict[tuple[Case, str], list[float]] = field(default_factory=dict)
    part_s: dict[tuple[Case, str], list[dict[str, float]]] = field(default_factory=dict)
    limits: list[Limits] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)
    out: dict[str, str] = field(default_factory=dict)  # contenders that could not be measured, and why
    refused: dict[tuple[Case, str], str] = field(default_factory=dict)

    def median_s(self, case: Case, name: str) -> float | None:
        found = self.took_s.get((case, name))
        return statistics.median(found) if found else None

    def median_part_s(self, case: Case, name: str) -> dict[str, float]:
        """Of one step, or of one prefill; empty where nothing was told."""
        found = self.part_s.get((case, name), [{}])
        return {part: statistics.median(one[part] for one in found) for part in found[0]}

    def machine(self) -> Limits:
        def median(name: str) -> float:
            return statistics.median(getattr(one, name) for one in self.limits)

        read = {mib: statistics.median(one.read[mib] for one in self.limits) for mib in self.limits[0].read}
        names = ("read_small_pages", "copy", "copy_small_pages", "flops")
        return Limits(read, **{name: median(name) for name in names})


def measure(setting: Setting, contenders: Sequence[Contender], rounds: int, say: Say) -> Results:
    results = Results(setting)
    with _started(setting, contenders, results, say) as children:
        for case in setting.cases:
            for turn in range(rounds):
                order = list(children.items())
                for contender, child in order[turn % len(order) :] + order[: turn % len(order)]:
                    if (case, contender.name) not in results.refused and contender.name not in results.out:
                        _turn(setting, case, contender, child, results, machine=turn == 0)
            say(f"  {case.name}: " + _line(results, case, contenders))
    return results


@contextmanager
def _started(
    setting: Setting, contenders: Sequence[Contender], results: Results, say: Say
) -> Iterator[dict[Contender, ChildProcess]]:
    children: dict[Contender, ChildProcess] = {}
    try:
        for contender in contenders:
            if contender.missing:
                results.out[contender.name] = contender.missing
                continue
            children[contender] = child = contender.start(setting)
            try:
                results.about[contender.name] = child.receive()["about"]
                child.stop()
            except EndFailed as failure:
                results.out[contender.name] = str(failure)
            say(f"  {contender.name}: {results.about.get(contender.name) or results.out[contender.name]}")
        yield children
    finally:
        for child in children.values():
            child.close()


def _turn(
    setting: Setting, case: Case, contender: Contender, child: ChildProcess, results: Results, machine: bool
) -> None:
    if contender.name == MACHINE and not machine:  # once a case is often enough
        return
    refusal = contender.refusal(setting, case)
    if refusal:
        results.refused[case, contender.name] = refusal
        return
    child.resume()
    try:
        found = child.ask("measure", case=asdict(case))
        child.stop()
    except EndFailed as failure:
        results.out[contender.name] = str(failure)
        return
    if "refused" in found:
        results.refused[case, contender.name] = found["refused"]
    elif contender.name == MACHINE:
        read = {int(mib): rate for mib, rate in found["read"].items()}
        rates = {name: found[name] for name in ("read_small_pages", "copy", "copy_small_pages", "flops")}
        results.limits.append(Limits(read, **rates))
    else:
        results.took_s.setdefault((case, contender.name), []).append(statistics.median(found["took_s"]))
        if "overhead_s" in found:
            results.overhead_s.setdefault((case, contender.name), []).append(found["overhead_s"])
        if "part_s" in found:
            results.part_s.setdefault((case, contender.name), []).append(found["part_s"])


def _line(results: Results, case: Case, contenders: Sequence[Contender]) -> str:
    names = [contender.name for contender in contenders if contender.name != MACHINE]
    found = {name: results.median_s(case, name) for name in names}
    return ", ".join(f"{name} {took_s * 1e3:.1f} ms" for name, took_s in found.items() if took_s is not None)
