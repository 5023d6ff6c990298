"""What an examination says to people and to programs. Never: a verdict of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.common.units import format_bytes
from baton.deploy.doctor.findings import WORST_FIRST, Finding, Severity, worst
from baton.deploy.doctor.shapes import ClockReport, Found, Host, PairReport

SCHEMA = 1
COLOURS = {Severity.OK: "green", Severity.WARN: "yellow", Severity.FAIL: "red"}
MOST_PLACES = 4
"""That are named, of those for whom one finding is the same."""
MOST_VALUES = 8
MOST_COLUMNS = 8


class Report(Struct, frozen=True):
    """`--json`. Within one `schema` fields are added, and keep their meaning."""

    schema: int
    verdict: Severity
    findings: list[Finding]
    hosts: tuple[Host, ...] = ()
    clocks: tuple[ClockReport, ...] = ()
    pairs: tuple[PairReport, ...] = ()
    pairs_possible: int = 0
    moved_bytes: int = 0
    took_s: float = 0.0


def report_of(findings: list[Finding], found: Found) -> Report:
    return Report(
        SCHEMA,
        worst(findings),
        findings,
        found.hosts,
        found.clocks,
        found.pairs,
        found.pairs_possible,
        found.moved_bytes,
        found.took_s,
    )


def print_finding(one: Finding, console: Console) -> None:
    _print_alike([one], console)


def print_found(found: Found, findings: Iterable[Finding], console: Console) -> None:
    """The matrix, then what is well, then what is wrong: the same of several places once. What the matrix says of lanes
    that are well is not said again."""
    findings = list(findings)
    if found.pairs:
        _print_matrix(found, findings, console)
    alike: dict[tuple[str, str, str, Severity], list[Finding]] = {}
    for one in findings:
        if not (one.what == "lane" and one.severity is Severity.OK):
            alike.setdefault((one.what, one.way_out, one.expected, one.severity), []).append(one)
    for severity in reversed(WORST_FIRST):  # the worst last: it is what is on the screen at the end
        for group in alike.values():
            if group[0].severity is severity:
                _print_alike(group, console)
    counts = {severity: sum(one.severity is severity for one in findings) for severity in WORST_FIRST}
    told = ", ".join(f"[{COLOURS[severity]}]{count} {severity}[/]" for severity, count in counts.items())
    console.print(
        f"\n{told}; hosts: {len(found.hosts)}, {len(found.pairs)} of {found.pairs_possible} directed pairs, "
        f"{format_bytes(found.moved_bytes)} moved, {found.took_s:.1f} s"
    )


def _print_alike(group: Sequence[Finding], console: Console) -> None:
    """What differs in where it is, and perhaps in what was found there."""
    one = group[0]
    values: dict[str, list[str]] = {}
    for finding in group:
        values.setdefault(finding.value, []).extend([finding.where] if finding.where else [])
    expected = f"  (expected: {escape(one.expected)})" if one.expected else ""
    told = [f"{_places(places)}{escape(value)}" for value, places in values.items()]
    first = f"[{COLOURS[one.severity]}]{one.severity:>6}[/]  {escape(one.what)}"
    if len(told) == 1:
        console.print(f"{first}: {told[0]}{expected}", soft_wrap=True)
    else:
        console.print(f"{first}{expected}", soft_wrap=True)
        for line in (*told[:MOST_VALUES], *([f"and {len(told) - MOST_VALUES} more"] * (len(told) > MOST_VALUES))):
            console.print(f"          {line}", soft_wrap=True)
    if one.way_out:
        console.print(f"        [bold]{escape(one.way_out)}[/]", soft_wrap=True)


def _print_matrix(found: Found, findings: Sequence[Finding], console: Console) -> None:
    """From the rows to the columns: the lane that hand-offs would take, GB/s and the latency of one page. Of many, a
    list."""
    verdicts = {
        where: worst(one for one in findings if one.where == where) for where in {one.where for one in findings}
    }
    reports = {(pair.source, pair.receiver): pair for pair in found.pairs}
    probes = [probe for host in found.hosts for probe in host.probes]
    if len(probes) > MOST_COLUMNS:
        table = Table("from", "to", "lane, GB/s, latency", title="Hand-offs", title_justify="left")
        for (source, receiver), pair in reports.items():
            table.add_row(source, receiver, _cell(pair, verdicts.get(f"{source} -> {receiver}", Severity.OK)))
    else:
        table = Table("from \\ to", *probes, title="Hand-offs: lane, GB/s, latency of a page", title_justify="left")
        for source in probes:
            cells = []
            for receiver in probes:
                found_pair = reports.get((source, receiver))
                severity = verdicts.get(f"{source} -> {receiver}", Severity.OK)
                cells.append(_cell(found_pair, severity) if found_pair is not None else "·")
            table.add_row(source, *cells)
    console.print(table)


def _cell(pair: PairReport, severity: Severity) -> str:
    lane = next((one for one in pair.lanes if one.lane == pair.chosen), None)
    told = f"{lane.lane} {lane.gbps:.2f} {lane.latency_us:.0f} µs" if lane is not None else "nothing"
    return f"[{COLOURS[severity]}]{told}{'' if severity is Severity.OK else f' {severity.upper()}'}[/]"


def _places(places: Sequence[str]) -> str:
    if not places:
        return ""
    named = ", ".join(map(escape, places[:MOST_PLACES]))
    more = f" and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else ""
    return f"{named}{more}: "
