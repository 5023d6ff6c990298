"""`baton status, top, kv, handoffs, trace`: look at a cluster that runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.common import env
from baton.common.errors import BatonError
from baton.common.kv.layout import Component
from baton.deploy.commands.options import FAILED, AsJson, Url, err


def status(url: Url = None, as_json: AsJson = False) -> None:
    """Show workers, their load, lanes and pages."""
    from baton.deploy import show

    found = show.fetch_status(url or env.cluster_url())
    show.print_json(found) if as_json else show.print_status(found, Console(highlight=False))


def top(
    url: Url = None,
    interval: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One screen, as text, instead of a live one.")] = False,
) -> None:
    """Watch a cluster live. Load, pages by owner, lanes, latencies, the slowest answers; q ends it."""
    from baton.deploy import top as dashboard

    gateway = url or env.cluster_url()
    if once or not sys.stdout.isatty():
        before, now = dashboard.look_once(gateway, interval)
        Console(highlight=False).print(dashboard.screen(before, now, interval))
    else:
        dashboard.run_top(gateway, interval, Console(highlight=False))


def kv(
    url: Url = None,
    as_json: AsJson = False,
    worker: Annotated[str | None, typer.Option(help="With --page: the worker it belongs to.")] = None,
    page: Annotated[int | None, typer.Option(help="Who holds this page, and what became of it before.")] = None,
    component: Annotated[
        Component | None, typer.Option(help="With --page: of which layers. Default: the model's first.")
    ] = None,
) -> None:
    """Show who owns the KV pages of every worker. Exit code 1 when a page is unaccounted for."""
    from baton.deploy import show

    gateway = url or env.cluster_url()
    if (worker is None) != (page is None):
        raise typer.BadParameter("--worker and --page belong together")
    if worker is not None and page is not None:
        typer.echo(show.fetch_page_owner(gateway, worker, page, component))
        return
    if component is not None:
        raise typer.BadParameter("--component needs --worker and --page: without them all are shown")
    found = show.fetch_status(gateway)
    show.print_json(found.details) if as_json else show.print_census(found, Console(highlight=False))
    if not show.all_accounted(found):
        raise typer.Exit(FAILED)


def handoffs(
    worker: Annotated[str, typer.Argument(help="decode-0, say: both ends of a hand-off keep its times.")],
    url: Url = None,
    as_json: AsJson = False,
    request: Annotated[
        str | None, typer.Option(help="Only those of this request: its X-Baton-Request-Id, or how that begins.")
    ] = None,
    last: Annotated[int, typer.Option(min=1, help="How many.")] = 20,
) -> None:
    """Show the last hand-offs of a worker. When what happened in each; with --request, in full."""
    from baton.deploy import show, show_handoffs

    found = show.fetch_handoffs(url or env.cluster_url(), worker)
    chosen = [one for one in found if one.request_id.startswith(request or "")][-last:]
    if request is not None and not chosen:
        raise BatonError(f"{worker} keeps {len(found)} hand-offs, none of a request {request!r}")
    console = Console(highlight=False)
    if as_json:
        show.print_json(chosen)
    elif request is None:
        show_handoffs.print_handoffs(worker, chosen, console)
    else:
        for one in chosen:
            show_handoffs.print_handoff(one, console)


def trace(
    url: Url = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=60.0, help="How long to record.")] = 5.0,
    out: Annotated[Path, typer.Option(help="The file; ui.perfetto.dev opens it.")] = Path("baton-trace.json"),
) -> None:
    """Record what all workers do, for ui.perfetto.dev. Steps, copies, regions on their way, hand-offs."""
    from baton.deploy import show

    recorded = show.fetch_trace(url or env.cluster_url(), seconds)
    try:
        out.write_bytes(recorded)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {out}: {error}") from error
    err.print(f"{out}: {len(recorded)} bytes; open it at https://ui.perfetto.dev", markup=False)
