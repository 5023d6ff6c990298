"""What the tables of `baton status` and its kin are made of. Only formats."""

from __future__ import annotations

import msgspec
from rich.table import Table

from baton.deploy.status import GatewayStatus, WorkerAccount


def account_of(status: GatewayStatus, worker: str) -> WorkerAccount:
    return msgspec.convert(status.details.get(worker, {}), WorkerAccount)


def short_ms(seconds: float | None) -> str:
    """In at most five characters, up to a minute and a half."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f}" if seconds < 0.1 else f"{seconds * 1000:.0f}"


def make_table(title: str, *columns: str) -> Table:
    """Columns that begin with ">" are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", header_style="dim", no_wrap=True)
    return table
