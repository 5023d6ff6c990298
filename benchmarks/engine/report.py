"""The tables of docs/benchmarks/engine.md. Owns their text; measures nothing."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.engine.cases import Case
from benchmarks.engine.contenders import MACHINE
from benchmarks.engine.roofline import Roof, Shape
from benchmarks.engine.rounds import Results
from benchmarks.transfer.report import machine, table

INTRODUCTION = """# Engine speed

Decode: one step for all rows, from scheduling to the greedy token, at so much context per row. Prefill: from prompts to
their first tokens. Every engine is a process of its own on the same weights and token ids, pinned to the same cores,
and measured in turns while all others are stopped; a number is the median over rounds of the median step of a round.
In brackets: the part of the roofline that is reached. The roofline of a decode step is all weights and all visible KV
once over the bandwidth that a compiled loop reads with here (of a block as large as those bytes), or all products at
the measured GEMM peak (torch's, in the table's type or in float32, what is faster here), whichever takes longer; of a
prompt, its products at that peak. The same for each part of a step, as if it were alone: what is far from its own limit
holds the step. Rooflines are of weights in the table's type, also beside int8 ones.
"""


def document(every: Sequence[Results], rounds: int, took_s: float, command: str) -> list[str]:
    lines = INTRODUCTION.splitlines()
    lines += [
        "",
        f"- Machine: {machine()}; load average {os.getloadavg()[0]:.1f} at the end.",
        f"- {rounds} rounds, {took_s / 60:.0f} minutes. Remake: `{command}`",
    ]
    seen = {(name, about) for results in every for name, about in results.about.items() if name != MACHINE}
    lines += [f"- {name}: {about}." for name, about in sorted(seen)]
    lines += ["", *limits_table(every)]
    for results in every:
        lines += setting_section(results)
    return lines


def limits_table(every: Sequence[Results]) -> list[str]:
    """Bandwidths in GB/s, products in GFLOP/s."""
    header: list[str] = []
    rows = []
    for results in every:
        if not results.limits:
            continue
        found = results.machine()
        header = ["limits, medians", "cores", *(f"read {mib} MiB, GB/s" for mib in sorted(found.read))]
        header += ["read 1 GiB in small pages", "copy", "copy in small pages", "GEMM, GFLOP/s"]
        bandwidths = [found.read[mib] for mib in sorted(found.read)]
        bandwidths += [found.read_small_pages, found.copy, found.copy_small_pages]
        rates = [f"{rate / 1e9:.1f}" for rate in bandwidths]
        rows.append([results.setting.dtype, str(len(results.setting.cores)), *rates, f"{found.flops / 1e9:.0f}"])
    return table(header, rows)


def setting_section(results: Results) -> list[str]:
    setting = results.setting
    names = [name for name in results.about if name != MACHINE and any(name == who for _, who in results.took_s)]
    cores = "one pinned core" if len(setting.cores) == 1 else f"{len(setting.cores)} cores"
    lines = [f"## {setting.title}, {setting.dtype}, {cores}", ""]
    shape, limits = Shape(setting.model, setting.dtype), results.machine()
    roofs = {case: shape.roof(case, limits) for case in setting.cases}
    for kind, unit in (("decode", "decode, ms/step"), ("prefill", "prefill, tokens/s")):
        cases = [case for case in setting.cases if case.kind == kind]
        header = [unit, "roofline", *names, "Baton / best peer"]
        rows = [_row(results, case, roofs[case], names) for case in cases]
        lines += table(header, rows) if rows else []
    lines += _parts(results, shape)
    lines += _overheads(results)
    reasons = sorted({f"{name}: {why}" for name, why in results.out.items()})
    reasons += sorted({f"{name}, {case.name}: {why}" for (case, name), why in results.refused.items()})
    return [*lines, *[f"- Left out: {reason}." for reason in reasons], ""]


def _row(results: Results, case: Case, roof: Roof, names: Sequence[str]) -> list[str]:
    found = {name: took_s for name in names if (took_s := results.median_s(case, name)) is not None}
    cells = [
        f"{_shown(case, found[name])} ({100 * roof.least_s / found[name]:.0f} %)" if name in found else ""
        for name in names
    ]
    ours = [took_s for name, took_s in found.items() if name.startswith("Baton")]
    theirs = [took_s for name, took_s in found.items() if not name.startswith("Baton")]
    ratio = f"{min(theirs) / min(ours):.2f}x" if ours and theirs else ""
    size = case.name.removeprefix("decode, ").removeprefix("prefill ")
    return [size, f"{_shown(case, roof.least_s)} ({roof.bound})", *cells, ratio]


def _shown(case: Case, took_s: float) -> str:
    return f"{took_s * 1e3:.1f}" if case.kind == "decode" else f"{case.rows * case.tokens / took_s:,.0f}"


def _parts(results: Results, shape: Shape) -> list[str]:
    """What holds a step, a table for each engine that tells: of each part its milliseconds, and which part of its own
    limit that is."""
    limits, lines = results.machine(), list[str]()
    for name in dict.fromkeys(name for _, name in results.part_s):
        found = {case: took_s for case in results.setting.cases if (took_s := results.median_part_s(case, name))}
        if not found:
            continue
        header = [f"{name}: where the time goes, ms", *next(iter(found.values()))]
        rows = [[case.name, *_shares(took_s, shape.part_roofs(case, limits))] for case, took_s in found.items()]
        lines += table(header, rows)
    return lines


def _shares(took_s: Mapping[str, float], least_s: Mapping[str, float]) -> list[str]:
    return [
        f"{1e3 * took_s[part]:.1f}" + (f" ({100 * least_s[part] / took_s[part]:.0f} %)" if part in least_s else "")
        for part in took_s
    ]


def _overheads(results: Results) -> list[str]:
    """What Baton's steps spend outside of the model: one line, by rows."""
    found: dict[int, list[float]] = {}
    for (case, _), seconds in results.overhead_s.items():
        if case.kind == "decode":
            found.setdefault(case.rows, []).extend(seconds)
    if not found:
        return []
    shown = ", ".join(f"{1e6 * statistics.median(found[rows]):.0f} µs for {rows}" for rows in sorted(found))
    return [f"Of Baton's decode steps outside of the runner (planning, telling): {shown} rows.", ""]
