"""The tables of docs/TESTING.md name what exists, and all of it."""

from __future__ import annotations

import re
from pathlib import Path

from baton.deploy.sim.scenarios import SCENARIOS

ROOT = Path(__file__).parents[2]
FAILURES = 42
"""Rows: what users of other systems have reported. One that goes away needs a reason."""


def rows_of(heading: str) -> dict[str, str]:
    """First and second column of the table under a heading."""
    text = (ROOT / "docs" / "TESTING.md").read_text()
    section = text.split(f"## {heading}")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    return {name: where for name, where in rows if not name.startswith(("-", "failure"))}


def test_every_failure_has_a_scenario_or_a_test_that_exists() -> None:
    rows = rows_of("What has broken elsewhere")
    assert len(rows) == FAILURES
    for failure, where in rows.items():
        named = re.findall(r"`([^`]+)`", where)
        assert named, failure
        for one in named:
            if "::" in one:
                path, test = one.split("::")
                assert f"def {test}(" in (ROOT / path).read_text(), one
            else:
                assert one in SCENARIOS, one


def test_every_scenario_is_in_the_table() -> None:
    named = {one for where in rows_of("What has broken elsewhere").values() for one in re.findall(r"`([^`]+)`", where)}
    assert set(SCENARIOS) <= named
