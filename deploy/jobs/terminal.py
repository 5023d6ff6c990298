"""What a person sees of batches in the terminal.

Owns: wording, tables, the progress bar, the file that results go to. Never: asks the cluster but through the client.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from baton.deploy.client import Client, Job
from baton.deploy.jobs.shapes import BatchObject
from baton.deploy.show_parts import make_table, print_table

INTERRUPTED = 130
PATIENCE_S = 5.0
RATE_OVER_S = 10.0
"""Tokens/s are those of about so long."""


def connect(url: str | None) -> Client:
    """With the key of $BATON_API_KEY: what is among a command's arguments is seen by everybody on the machine."""
    return Client(url, patience_s=PATIENCE_S)


@contextlib.contextmanager
def sink(out: Path | None) -> Iterator[Callable[[bytes], object]]:
    """Whole, or not there."""
    if out is None:
        yield sys.stdout.buffer.write
        return
    part = out.with_name(f"{out.name}.part")
    try:
        with part.open("wb") as file:
            yield file.write
        part.replace(out)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {out}: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def watch(job: Job, err: Console) -> BatchObject:
    """Its end. Ctrl-C ends the watching, and not the batch."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(),
    )  # fmt: skip
    rate = Rate()
    with Progress(*columns, console=err) as bar:
        task = bar.add_task("waiting", total=None, rate="")

        def show(status: BatchObject) -> None:
            counts = status.request_counts
            bar.update(
                task,
                description=status.status + (f", {counts.failed} failed" if counts.failed else ""),
                total=counts.total or None,
                completed=counts.completed + counts.failed,
                rate=f"{rate.after(status.usage.output_tokens, time.monotonic()):,.0f} tokens/s",
            )

        try:
            for status in job.progress():
                show(status)
            return status
        except KeyboardInterrupt:
            bar.stop()
            err.print(f"it goes on; `baton jobs status {job.id} --watch` shows it again")
            raise typer.Exit(INTERRUPTED) from None


class Rate:
    """Of a count that grows."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def after(self, count: int, now_s: float) -> float:
        """Per second, of late."""
        self._seen.append((now_s, count))
        while len(self._seen) > 2 and self._seen[1][0] < now_s - RATE_OVER_S:
            self._seen.pop(0)
        then_s, then = self._seen[0]
        return (count - then) / (now_s - then_s) if now_s > then_s else 0.0


def is_whole(ended: BatchObject) -> bool:
    """Every line of it was answered."""
    return ended.status == "completed" and not ended.request_counts.failed


def told(batch: BatchObject) -> str:
    counts = batch.request_counts
    text = f"{batch.id} {batch.status}: {counts.completed} of {counts.total} lines answered, {counts.failed} failed, "
    return f"{text}{batch.usage.output_tokens} tokens"


def _events(batch: BatchObject) -> list[tuple[int, str]]:
    counts = batch.request_counts
    happened = {
        "submitted": batch.created_at,
        f"begun: {counts.total} lines to {batch.endpoint}": batch.in_progress_at,
        f"completed: {counts.completed} answered, {counts.failed} failed": batch.completed_at,
        "failed: its file cannot be a batch": batch.failed_at,
        f"expired: its {batch.completion_window} were over": batch.expired_at,
        "cancelled": batch.cancelled_at,
    }
    return [(at, what) for what, at in happened.items() if at is not None]


def _reason(line: dict[str, Any]) -> str:
    if line["response"] is None:
        return f"{line['error']['code']}: {line['error']['message']}"
    error = line["response"]["body"]["error"]
    return f"HTTP {line['response']['status_code']}: {error['message']}"


def print_batches(batches: list[BatchObject], console: Console) -> None:
    table = make_table("Batches", "batch", "status", ">answered", ">failed", ">lines", ">tokens", "submitted")
    for batch in batches:
        counts = batch.request_counts
        at = f"{datetime.fromtimestamp(batch.created_at):%Y-%m-%d %H:%M:%S}"
        numbers = (counts.completed, counts.failed, counts.total, batch.usage.output_tokens)
        table.add_row(batch.id, batch.status, *map(str, numbers), at)
    print_table(table, console)


def print_logs(batch: BatchObject, failures: list[dict[str, Any]]) -> None:
    for at, what in sorted(_events(batch), key=itemgetter(0)):  # in one second: in the order in which it goes
        typer.echo(f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}  {what}")
    for fault in batch.errors.data if batch.errors else ():
        typer.echo(f"{'file' if fault.line is None else f'line {fault.line}'}: {fault.code}: {fault.message}")
    for line in failures:
        typer.echo(f"{line['custom_id']}: {_reason(line)}")
