"""What came of a load: rates, latencies, promises kept. Pure: what was sent goes in, numbers and a table come out.

Owns: the definitions below, and how they are told. Never: measures.

| number | of |
|---|---|
| TTFT | a request sent until its first token came |
| ITL | one piece of an answer until the next one, over all answers |
| TPOT | first token until the last, per token behind the first, of each answer |
| E2E | a request sent until its answer was complete |
| goodput | requests per second to which every promise was kept; what failed kept none |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct
from rich.table import Table

from baton.deploy.bench.load import Sent
from baton.deploy.planner.outcome import Answer, Slo, told_s
from baton.deploy.show_parts import make_table

LATE_S = 0.05
"""A client that is later than this is measured itself, and says so."""


class Times(Struct, frozen=True, kw_only=True):
    """In seconds; None: there was nothing."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Point(Struct, frozen=True, kw_only=True):
    """One load on one system. `rate`: requests per second that were asked; None: as many at once as were allowed.
    `kept`: requests to which every promise was kept; None: nothing was promised."""

    system: str
    rate: float | None
    requests: int
    failures: dict[str, int]
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: Times
    itl: Times
    tpot: Times
    e2e: Times
    kept: int | None
    client_late_p99_s: float

    @property
    def answered(self) -> int:
        return self.requests - sum(self.failures.values())

    @property
    def attainment(self) -> float | None:
        """Share of the requests to which every promise was kept."""
        return None if self.kept is None else self.kept / self.requests

    @property
    def goodput(self) -> float | None:
        """Of them, per second."""
        return None if self.kept is None else self.kept / self.duration_s


def point_of(system: str, rate: float | None, sent: Sequence[Sent], slo: Slo | None) -> Point:
    answered = [one for one in sent if not one.failure]
    return Point(
        system=system,
        rate=rate,
        requests=len(sent),
        failures=dict(Counter(one.failure for one in sent if one.failure)),
        duration_s=max(one.ended_s for one in sent) - min(one.sent_s for one in sent),
        prompt_tokens=sum(one.prompt_tokens for one in answered),
        cached_tokens=sum(one.cached_tokens for one in answered),
        output_tokens=sum(one.output_tokens for one in answered),
        ttft=_times(one.ttft_s for one in answered),
        itl=_times(gap_s for one in answered for gap_s in one.gaps_s),
        tpot=_times(one.tpot_s for one in answered if one.tpot_s is not None),
        e2e=_times(one.ended_s - one.sent_s for one in answered),
        kept=None if slo is None else sum(keeps(one, slo) for one in answered),
        client_late_p99_s=float(np.quantile([one.late_s for one in sent], 0.99)),
    )


def keeps(one: Sent, slo: Slo) -> bool:
    """By the same definition as the planner's."""
    stalls = sum(gap_s > slo.itl_s for gap_s in one.gaps_s)
    return Answer(one.sent_s, one.output_tokens, one.pieces_s[0], one.pieces_s[-1], stalls).keeps(slo)


def _times(found: Iterable[float]) -> Times:
    values = np.fromiter(found, dtype=np.float64)
    if not values.size:
        return Times()
    p50, p90, p99 = (float(value) for value in np.quantile(values, (0.5, 0.9, 0.99)))
    return Times(mean=float(values.mean()), p50=p50, p90=p90, p99=p99)


# ---------------------------------------------------------------------------------------------------- told


def table_of(points: Sequence[Point]) -> Table:
    """Times in ms: the median, and the 99th percentile."""
    promised = any(point.kept is not None for point in points)
    columns = [
        "system", ">asked/s", ">done/s", ">out tok/s", ">TTFT", ">p99", ">ITL", ">p99", ">TPOT", ">p99", ">E2E", ">p99",
        *([">kept", ">good/s"] if promised else []), ">failed",
    ]  # fmt: skip
    table = make_table("Medians and 99th percentiles, in ms", *columns)
    for point in points:
        times = [
            _ms(value) for one in (point.ttft, point.itl, point.tpot, point.e2e) for value in (one.p50, one.p99)
        ]  # fmt: skip
        kept = [f"{point.attainment:.0%}", f"{point.goodput:.2f}"] if point.attainment is not None else []
        table.add_row(
            point.system,
            "-" if point.rate is None else f"{point.rate:g}",
            f"{point.answered / point.duration_s:.2f}",
            f"{point.output_tokens / point.duration_s:.0f}",
            *times,
            *kept,
            str(point.requests - point.answered),
        )
    return table


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def remarks(points: Sequence[Point]) -> list[str]:
    """What must be known beside the numbers."""
    said = []
    for point in points:
        where = f"{point.system} at {point.rate:g} requests/s" if point.rate is not None else point.system
        if point.failures:
            told = ", ".join(f"{count} x {failure}" for failure, count in sorted(point.failures.items()))
            said.append(f"{where}: {point.requests - point.answered} failed: {told}")
        if point.client_late_p99_s > LATE_S:
            said.append(
                f"{where}: the client sent late, by {told_s(point.client_late_p99_s)} (p99): it is measured too"
            )
    return said


def best_rate(points: Sequence[Point], target: float) -> float | None:
    """The highest rate at which the promises were kept to `target` of the requests, as they were at all lower ones that
    were tried. None: at none."""
    best = None
    for point in sorted(points, key=lambda one: one.rate or math.inf):
        if point.attainment is None or point.attainment < target:
            break
        best = point.rate
    return best


def verdict(points: Sequence[Point], slo: Slo | None, target: float) -> str:
    """Which of two systems is better for this load, in a line or two."""
    systems = list(dict.fromkeys(point.system for point in points))
    if slo is None:
        lines = []
        for pd, colocated in zip(_of(points, systems[0]), _of(points, systems[1]), strict=True):
            ratios = [
                f"{name} {ours / theirs:.2f}x"
                for name, ours, theirs in (
                    ("TTFT", pd.ttft.p50, colocated.ttft.p50),
                    ("ITL p99", pd.itl.p99, colocated.itl.p99),
                    ("E2E", pd.e2e.p50, colocated.e2e.p50),
                )
                if ours and theirs
            ]
            at = "at once" if pd.rate is None else f"at {pd.rate:g} requests/s"
            lines.append(f"{systems[0]} / {systems[1]} {at}: {', '.join(ratios)}. --slo says which is better.")
        return "\n".join(lines)
    best = {system: best_rate(_of(points, system), target) for system in systems}
    told = ", ".join(
        f"{system} keeps {slo} for {target:.0%} of the requests "
        + (f"up to {rate:g} requests/s" if rate is not None else "at no rate that was tried")
        for system, rate in best.items()
    )
    ours, theirs = (best[system] or 0.0 for system in systems)
    if ours == theirs:
        means = [np.mean([point.attainment for point in _of(points, system)]) for system in systems]
        if abs(means[0] - means[1]) < 0.01:
            return f"No difference that could be measured: {told}."
        better = systems[0] if means[0] > means[1] else systems[1]
        return f"{better} is better, if only beyond these rates: {told}."
    return f"{systems[0] if ours > theirs else systems[1]} is better for this load: {told}."


def _of(points: Sequence[Point], system: str) -> list[Point]:
    return [point for point in points if point.system == system]
