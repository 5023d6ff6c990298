"""`baton top`: a cluster as it works, redrawn every moment.

Owns: what the screen shows, from two looks at a gateway's status, one moment apart. Never: asks a worker itself, or
changes anything.
"""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from baton.common.errors import BatonError
from baton.common.histogram import quantile_s
from baton.common.units import format_bytes
from baton.deploy.client import Client
from baton.deploy.recent import Quantiles, Recent, SlowRequest
from baton.deploy.show_parts import account_of, make_table, short_ms
from baton.deploy.status import GatewayStatus, WorkerView

OWNERS = {
    "free": "grey35", "cached": "blue", "cached_locked": "cyan", "request": "green", "session": "magenta",
    "incoming": "yellow", "outgoing": "dark_orange", "quarantined": "red",
}  # fmt: skip
"""Of pages, with the colour that each has in the bars."""

BAR_CELLS = 24
SLOW_ROWS = 5


def run_top(url: str, interval_s: float, console: Console) -> None:
    """Until q or Ctrl-C. Raises ClusterUnreachable when nobody answers at first; later it says so and goes on."""
    with Client(url, timeout_s=10.0, retries=0) as client:
        before, at_s = client.status(), time.monotonic()
        with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
            live.update(screen(before, before, 0.0), refresh=True)
            with contextlib.suppress(KeyboardInterrupt):
                while pressed(interval_s) not in ("q", "Q", "\x04"):
                    try:
                        now = client.status()
                    except BatonError as error:
                        live.update(Text(str(error), style="red"), refresh=True)
                        continue
                    taken_s = time.monotonic()
                    live.update(screen(before, now, taken_s - at_s), refresh=True)
                    before, at_s = now, taken_s


def look_once(url: str, interval_s: float) -> tuple[GatewayStatus, GatewayStatus]:
    """Two looks, one interval apart: what a screen is made of. Raises ClusterUnreachable."""
    with Client(url, timeout_s=10.0) as client:
        before = client.status()
        time.sleep(interval_s)
        return before, client.status()


def screen(before: GatewayStatus, now: GatewayStatus, passed_s: float) -> RenderableType:
    """`passed_s`: between the two; 0.0: they are one."""
    parts: list[RenderableType] = [_head(now), Text(), _latencies(now.recent), Text(), _workers(before, now, passed_s)]
    parts += [_legend(now)] if now.details else []
    for table in (_lanes(before, now, passed_s), _slowest(now.recent)):
        if table.row_count:
            parts += [Text(), table]
    return Group(*parts)


def _head(now: GatewayStatus) -> Text:
    state = "[green]ready[/]" if now.ready else f"[red]not ready: {escape(now.reason)}[/]"
    recent = now.recent
    ended = sum(recent.outcomes.values())
    bad = {name: count for name, count in recent.outcomes.items() if name not in ("stop", "length")}
    line = (
        f"[bold]{escape(now.model)}[/]  {state}  {now.requests.running} running, {now.requests.queued} waiting   "
        f"[dim]last {recent.span_s:.0f} s:[/] {_rate(ended, recent)} requests/s, "
        f"{_rate(recent.prompt_tokens, recent)} prompt and {_rate(recent.output_tokens, recent)} output tokens/s"
    )
    if bad:
        line += "   [yellow]" + ", ".join(f"{count} {escape(name)}" for name, count in sorted(bad.items())) + "[/]"
    return Text.from_markup(line)


def _rate(count: int, recent: Recent) -> str:
    return f"{count / recent.span_s:.1f}" if recent.span_s else "-"


def _latencies(recent: Recent) -> Table:
    table = make_table("Latencies, in ms", "", ">p50", ">p90", ">p99")
    rows: tuple[tuple[str, Quantiles], ...] = (
        ("first token", recent.ttft), ("between tokens", recent.itl), ("whole answer", recent.total),
    )  # fmt: skip
    for name, found in rows:
        table.add_row(name, short_ms(found.p50_s), short_ms(found.p90_s), short_ms(found.p99_s))
    return table


def _workers(before: GatewayStatus, now: GatewayStatus, passed_s: float) -> Table:
    table = make_table("Workers", "worker", "state", ">running", ">queued", ">tokens", ">steps/s", ">pages", "")
    steps = {(one.worker, one.incarnation): one.load.steps for one in before.workers}
    for worker in now.workers:
        load = worker.load
        made = load.steps - steps.get((worker.worker, worker.incarnation), load.steps)
        rate = f"{made / passed_s:.1f}" if passed_s and worker.role in ("prefill", "decode") else ""
        used = f"{1 - load.free_pages / load.total_pages:.0%}" if load.total_pages else ""
        table.add_row(
            f"{worker.worker}@{worker.incarnation}",
            _state(worker),
            str(load.running),
            str(load.queued),
            str(load.queued_tokens) if load.total_pages else "",
            rate,
            used,
            page_bar(account_of(now, worker.worker).census),
        )
    return table


def _state(worker: WorkerView) -> Text:
    if worker.silent:
        return Text("silent", style="red")
    if worker.load.draining:
        return Text("draining", style="yellow")
    if worker.load.step_age_s > 1.0:
        return Text(f"step for {worker.load.step_age_s:.0f} s", style="yellow")
    return Text("ok", style="green")


def page_bar(census: dict[str, int]) -> Text:
    """A cell for each share of the pool; whatever holds a page has one."""
    bar, total = Text(), census.get("total", 0)
    if not total:
        return bar
    cells = {name: -(-census[name] * BAR_CELLS // total) for name in OWNERS}
    while sum(cells.values()) > BAR_CELLS:  # rounded up, all of them: the largest have most to give
        cells[max(cells, key=lambda name: cells[name])] -= 1
    for name in reversed(OWNERS):
        bar.append("█" * cells[name], style=OWNERS[name])
    return bar


def _legend(now: GatewayStatus) -> Text:
    """The owners that have pages, in their colours, with how many in all."""
    pages = dict.fromkeys(OWNERS, 0)
    for worker in now.workers:
        for name, count in account_of(now, worker.worker).census.items():
            if name in pages:
                pages[name] += count
    legend = Text("pages: ", style="dim")
    for name in reversed(OWNERS):
        if pages[name]:
            legend.append("█ ", style=OWNERS[name]).append(f"{name.replace('_', ' ')} {pages[name]}  ", style="dim")
    return legend


def _lanes(before: GatewayStatus, now: GatewayStatus, passed_s: float) -> Table:
    table = make_table(
        "Lanes", "from", "to", "lane", ">now", ">GB/s", ">hand-offs", ">bytes", ">p50", ">p99", ">failed"
    )
    moved = {
        (worker.worker, flow.peer, flow.lane): flow.nbytes
        for worker in before.workers
        for flow in account_of(before, worker.worker).flows
        if flow.direction == "in"
    }
    for worker in now.workers:
        for flow in account_of(now, worker.worker).flows:
            if flow.direction != "in":
                continue
            since = flow.nbytes - moved.get((worker.worker, flow.peer, flow.lane), flow.nbytes)
            p50_s, p99_s = (quantile_s(flow.handoff.counts, share, flow.handoff.longest_s) for share in (0.5, 0.99))
            table.add_row(
                flow.peer,
                worker.worker,
                flow.lane or "-",
                f"{format_bytes(max(0, int(since / passed_s)))}/s" if passed_s else "",
                f"{flow.recent_gbps or flow.mean_gbps:.2f}",
                str(flow.handoff.count),
                format_bytes(flow.nbytes),
                short_ms(p50_s),
                short_ms(p99_s),
                Text(str(flow.failed), style="yellow" if flow.failed else ""),
            )
    return table


def _slowest(recent: Recent) -> Table:
    table = make_table(
        "Slowest answers, in ms", "request", ">ago", ">total", ">first", ">queue", ">prefill", ">transfer", ">decode",
        ">prompt", ">out", "decoded by",
    )  # fmt: skip
    for one in recent.slowest[:SLOW_ROWS]:
        table.add_row(*_slow_cells(one))
    return table


def _slow_cells(one: SlowRequest) -> tuple[str, ...]:
    time_of = one.timeline
    return (
        one.request_id[:12],
        f"{one.ended_s_ago:.0f} s",
        short_ms(one.total_s),
        *(short_ms(span) for span in (one.ttft_s, time_of.queue_s, time_of.prefill_s, time_of.transfer_s)),
        short_ms(time_of.decode_s),
        str(one.prompt_tokens),
        str(one.completion_tokens),
        time_of.decode_worker,
    )


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """What waits for a key that long: "" when none was pressed. Without a keyboard it only waits."""
    keyboard = [sys.stdin.fileno()] if sys.stdin.isatty() else []

    def pressed(wait_s: float) -> str:
        return sys.stdin.read(1) if select.select(keyboard, [], [], wait_s)[0] else ""

    usual = [(descriptor, termios.tcgetattr(descriptor)) for descriptor in keyboard]
    try:
        for descriptor in keyboard:
            tty.setcbreak(descriptor)
        yield pressed
    finally:
        for descriptor, attributes in usual:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, attributes)
