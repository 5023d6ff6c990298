"""What a doctor says: findings, and what they come to. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct


class Severity(StrEnum):
    OK = "ok"
    WARN = "warn"  # it works, and could work better
    FAIL = "fail"


WORST_FIRST = (Severity.FAIL, Severity.WARN, Severity.OK)


class Finding(Struct, frozen=True):
    """`value` is what was found; `way_out` and `expected` are "" where nothing is wrong. `where`: a host, or a pair
    "source -> receiver"; "": this machine, or all of the cluster."""

    what: str
    severity: Severity
    value: str
    way_out: str = ""
    expected: str = ""
    where: str = ""


def nothing_failed(findings: Iterable[Finding]) -> bool:
    return worst(findings) is not Severity.FAIL


def worst(findings: Iterable[Finding]) -> Severity:
    """Of nothing: ok."""
    there = {one.severity for one in findings}
    return next((severity for severity in WORST_FIRST if severity in there), Severity.OK)
