"""On what a process listens, as the kernel tells it, and what docs/OPERATIONS.md says that it listens on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

DOCUMENT = Path(__file__).parents[2] / "docs" / "OPERATIONS.md"


class Listener(NamedTuple):
    host: str
    port: int


class Documented(NamedTuple):
    """A row of the table."""

    socket: str
    port: str
    host: str


def listeners_of(pid: int) -> set[Listener]:
    found = psutil.Process(pid).net_connections("tcp")
    return {Listener(*one.laddr) for one in found if one.status == psutil.CONN_LISTEN}


def documented_for(role: str) -> list[Documented]:
    """What a process of this role opens with everything turned on."""
    text = DOCUMENT.read_text().partition("## Ports")[2].partition("## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    # The first table is of Baton's own processes: it has seven columns.
    return [Documented(*row[1:4]) for row in rows if len(row) == 7 and role in row[0].split(", ")]
