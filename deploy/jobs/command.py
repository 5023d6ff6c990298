"""`baton jobs`: its commands, their options and exit codes. Never: does work of its own (`terminal.py`).

A batch that is watched to its end gives 0 when each of its lines was answered, and 1 else; Ctrl-C 130.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from baton.deploy.jobs.client import BatchJob

FAILED = 1

app = typer.Typer(name="jobs", help="Batches of requests, which survive restarts.", no_args_is_help=True)
err = Console(stderr=True, highlight=False)

Url = Annotated[str | None, typer.Option(help="The gateway. Default: $BATON_URL, else http://127.0.0.1:8000.")]
Key = Annotated[str | None, typer.Option("--api-key", help="Whose batches. Default: $BATON_API_KEY.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Watch = Annotated[bool, typer.Option("--watch", help="Show its progress until it has ended.")]
Id = Annotated[str, typer.Argument(help="batch_..., as `submit` told it.")]
File = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSONL, in the format of OpenAI's batches.")]


@app.command()
def submit(
    lines: File,
    endpoint: Annotated[str | None, typer.Option(help="Default: the url of the first line.")] = None,
    window: Annotated[str, typer.Option(help="How long it may take: 30m, 24h, 7d.")] = "24h",
    key: Annotated[str | None, typer.Option(help="Submitting with the same key again gives the same batch.")] = None,
    watch: Watch = False,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Begin a batch. Prints its id."""
    from baton.deploy.jobs import terminal
    from baton.deploy.show import print_json

    with terminal.connect(url, api_key) as client:
        job = client.submit(lines, endpoint=endpoint, window=window, key=key)
        if watch:
            err.print(job.id)
            _watch(job, as_json)
        print_json(job.status()) if as_json else typer.echo(job.id)


@app.command()
def status(
    batch: Annotated[str | None, typer.Argument(help="Without: the newest ones.")] = None,
    watch: Watch = False,
    last: Annotated[int, typer.Option(min=1, max=100, help="How many of the newest ones.")] = 20,
    url: Url = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Show how far batches are."""
    from baton.deploy.jobs import terminal
    from baton.deploy.show import print_json

    if batch is None and watch:
        raise typer.BadParameter("--watch needs the id of a batch")
    with terminal.connect(url, api_key) as client:
        if batch is None:
            found = client.jobs(last)
            print_json(found) if as_json else terminal.print_batches(found, Console(highlight=False))
            return
        job = client.job(batch)
        if watch:
            _watch(job, as_json)
        one = job.status()
        print_json(one) if as_json else typer.echo(terminal.told(one))


@app.command()
def logs(batch: Id, url: Url = None, api_key: Key = None, as_json: AsJson = False) -> None:
    """Show what happened to a batch, and what went wrong with its lines so far (at most a thousand)."""
    from baton.deploy.jobs import terminal
    from baton.deploy.show import print_json

    with terminal.connect(url, api_key) as client:
        job = client.job(batch)
        found, failures = job.status(), job.failures()
    print_json({"batch": found, "failures": failures}) if as_json else terminal.print_logs(found, failures)


@app.command()
def cancel(batch: Id, url: Url = None, api_key: Key = None, as_json: AsJson = False) -> None:
    """End a batch. What was answered is kept."""
    from baton.deploy.jobs import terminal
    from baton.deploy.show import print_json

    with terminal.connect(url, api_key) as client:
        cancelled = client.job(batch).cancel()
    print_json(cancelled) if as_json else typer.echo(terminal.told(cancelled))


@app.command()
def results(
    batch: Id,
    out: Annotated[Path | None, typer.Option(help="A file; without: stdout.")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="The error file instead of the output file.")] = False,
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Fetch what a batch that has ended came to: JSONL, in the order of its input."""
    from baton.deploy.jobs import terminal

    with terminal.connect(url, api_key) as client, terminal.sink(out) as write:
        client.job(batch).write(write, errors=errors)


def _watch(job: BatchJob, as_json: bool) -> None:
    from baton.deploy.jobs import terminal
    from baton.deploy.show import print_json

    ended = terminal.watch(job, err)
    print_json(ended) if as_json else typer.echo(terminal.told(ended))
    raise typer.Exit(0 if terminal.is_whole(ended) else FAILED)
