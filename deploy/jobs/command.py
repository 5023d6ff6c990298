"""`baton jobs`, and `baton submit`: options and exit codes. Never: does work of its own (`terminal.py`).

A batch that is waited for to its end gives 0 when each of its lines was answered, and 1 else; Ctrl-C 130.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from baton.deploy.client import Job

FAILED = 1

app = typer.Typer(name="jobs", help="Batches of requests, which survive restarts.", no_args_is_help=True)
err = Console(stderr=True, highlight=False)

Url = Annotated[str | None, typer.Option(help="The gateway. Default: $BATON_URL, else http://127.0.0.1:8000.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Watch = Annotated[bool, typer.Option("--wait", "--watch", help="Show its progress until it has ended.")]
Id = Annotated[str, typer.Argument(help="batch_..., as `submit` told it.")]
What = Annotated[
    str,
    typer.Argument(
        metavar="FILE|-|PROMPT",
        help="A file, or - for stdin: JSONL in the format of OpenAI's batches, or a prompt a line. Or one prompt.",
    ),
]


@app.command()
def submit(
    what: What,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompts instead of answering them as chats.")
    ] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Of prompts: most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of prompts: 0 is always the likeliest token.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of prompts: same seed, same answers.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Of JSONL. Default: the url of the first line.")] = None,
    window: Annotated[str, typer.Option(help="How long it may take: 30m, 24h, 7d.")] = "24h",
    key: Annotated[str | None, typer.Option(help="Submitting with the same key again gives the same batch.")] = None,
    watch: Watch = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Submit work that outlives this command, and restarts of the cluster. Prints its id for `baton jobs`; with --wait,
    the answer to a single prompt, or how the job ended. (`baton submit` and `baton jobs submit` are the same; `baton
    run` answers one prompt at once, and drops it when it is interrupted.)"""
    from baton.deploy import ask
    from baton.deploy.jobs import terminal
    from baton.deploy.jobs.given import given
    from baton.deploy.show import print_json

    work = given(what, raw=raw)
    params = ask.params(max_tokens=max_tokens, temperature=temperature, seed=seed)
    if isinstance(work, bytes) and (params or raw):
        raise typer.BadParameter("--raw, --max-tokens, --temperature and --seed are of prompts: JSONL has its own")
    if not isinstance(work, bytes) and endpoint is not None:
        raise typer.BadParameter("--endpoint is of JSONL")
    with terminal.connect(url) as client:
        if isinstance(work, bytes):
            job = client.submit_lines(work, endpoint=endpoint, window=window, key=key)
        else:
            job = client.submit(work, window=window, key=key, **params)
        if watch:
            err.print(job.id)
            _watch(job, as_json, with_answer=not isinstance(work, bytes) and len(work) == 1)
        print_json(job.status()) if as_json else typer.echo(job.id)


@app.command()
def status(
    batch: Annotated[str | None, typer.Argument(help="Without: the newest ones.")] = None,
    watch: Watch = False,
    last: Annotated[int, typer.Option(min=1, max=100, help="How many of the newest ones.")] = 20,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show how far batches are."""
    from baton.deploy.jobs import terminal
    from baton.deploy.show import print_json

    if batch is None and watch:
        raise typer.BadParameter("--watch needs the id of a batch")
    with terminal.connect(url) as client:
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
def logs(batch: Id, url: Url = None, as_json: AsJson = False) -> None:
    """Show what happened to a batch, and what went wrong with its lines so far (at most a thousand)."""
    from baton.deploy.jobs import terminal
    from baton.deploy.show import print_json

    with terminal.connect(url) as client:
        job = client.job(batch)
        found, failures = job.status(), job.failures()
    print_json({"batch": found, "failures": failures}) if as_json else terminal.print_logs(found, failures)


@app.command()
def cancel(batch: Id, url: Url = None, as_json: AsJson = False) -> None:
    """End a batch. What was answered is kept."""
    from baton.deploy.jobs import terminal
    from baton.deploy.show import print_json

    with terminal.connect(url) as client:
        cancelled = client.job(batch).cancel()
    print_json(cancelled) if as_json else typer.echo(terminal.told(cancelled))


@app.command()
def results(
    batch: Id,
    out: Annotated[Path | None, typer.Option(help="A file; without: stdout.")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="The error file instead of the output file.")] = False,
    url: Url = None,
) -> None:
    """Fetch what a batch that has ended came to: JSONL, in the order of its input."""
    from baton.deploy.jobs import terminal

    with terminal.connect(url) as client, terminal.sink(out) as write:
        for part in client.job(batch).content(errors=errors):
            write(part)


def _watch(job: Job, as_json: bool, *, with_answer: bool = False) -> None:
    from baton.deploy.jobs import terminal
    from baton.deploy.show import print_json

    ended = terminal.watch(job, err)
    if as_json:
        print_json(ended)
    else:
        typer.echo(job.result().text if with_answer and terminal.is_whole(ended) else terminal.told(ended))
    if terminal.is_whole(ended):
        raise typer.Exit
    err.print(f"`baton jobs logs {job.id}` says why", markup=False)
    raise typer.Exit(FAILED)
