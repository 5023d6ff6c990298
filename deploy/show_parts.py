"""What the tables of `baton status` and its kin are made of. Only formats."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from baton.deploy.status import GatewayStatus, WorkerAccount

UNBOUNDED_COLUMNS = 1000


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


def print_table(table: Table, console: Console) -> None:
    """As wide as it needs to be: where that is wider than the terminal its lines are broken, but no number is cut."""
    unbounded = console.options.update(max_width=UNBOUNDED_COLUMNS)
    table.width = Measurement.get(console, unbounded, table).maximum
    console.print(table, crop=False)
