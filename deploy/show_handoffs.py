"""What a person sees of hand-offs: how fast each pair of workers is, and the lives of the last ones. Only formats."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from baton.common.histogram import quantile_s
from baton.common.units import format_bytes
from baton.deploy.show_parts import account_of, make_table, print_table, short_ms
from baton.deploy.status import GatewayStatus, WorkerView
from baton.transfer.reports import Flow, HandoffTimes


def print_flows(status: GatewayStatus, console: Console) -> None:
    """How fast each pair of workers hands over, and what it had to wait for; nothing where nothing was handed over."""
    table = make_table(
        "Hand-offs, in ms", "from", "to", "lane", ">GB/s", ">p50", ">p99", ">tail50", ">tail99", ">wait", ">again",
        ">stall", ">failed",
    )  # fmt: skip
    for worker in status.workers:
        for flow in account_of(status, worker.worker).flows:
            if flow.direction == "in":
                table.add_row(
                    flow.peer, worker.worker, flow.lane or "-", *_flow_cells(flow, _far_end(status, worker, flow))
                )
    if table.row_count:
        console.print()
        print_table(table, console)
        console.print(
            "[dim]p50, p99: asked for until committed, computing included; tail: after that.\n"
            "wait: for a lane and staging, on average; again: frames, regions sent twice;\n"
            "stall: computed and without credit, in all.[/]"
        )


def _far_end(status: GatewayStatus, worker: WorkerView, flow: Flow) -> Flow:
    """The same pair and lane as the sender counts it."""
    for one in account_of(status, flow.peer).flows:
        if (one.peer, one.lane, one.direction) == (worker.worker, flow.lane, "out"):
            return one
    return Flow(peer=worker.worker, lane=flow.lane, direction="out")


def _flow_cells(flow: Flow, far: Flow) -> list[str]:
    quantiles = [
        quantile_s(one.counts, share, one.longest_s) for one in (flow.handoff, far.tail) for share in (0.5, 0.99)
    ]
    again = flow.resent_frames + far.resent_frames + flow.damaged_regions
    wait_s = flow.queue_s / flow.queued if flow.queued else None
    return [
        f"{flow.recent_gbps or flow.mean_gbps:.2f}",
        *(short_ms(one) for one in (*quantiles, wait_s)),
        str(again),
        short_ms(far.stall_s),
        str(flow.failed),
    ]


_MARKS = {
    "offered": "offer", "accepted": "accept", "first computed": "chunk", "first region": "region",
    "all computed": "computed", "all announced": "sent", "committed": "commit",
}  # fmt: skip
"""The columns of what happened, in its order."""


def print_handoffs(worker: str, handoffs: Sequence[HandoffTimes], console: Console) -> None:
    """The lives of a worker's last hand-offs: a row each, in ms since it began."""
    shown = [mark for mark in _MARKS if any(mark in one.marks for one in handoffs)]
    columns = ("request", "peer", "lane", ">tokens", ">bytes", *(f">{_MARKS[mark]}" for mark in shown))
    table = make_table(f"Hand-offs of {worker}, in ms since they began", *columns, ">over")
    for one in handoffs:
        table.add_row(
            one.request_id[:8],
            one.peer,
            one.lane or "-",
            str(one.tokens),
            format_bytes(one.nbytes),
            *(short_ms(one.marks.get(mark)) for mark in (*shown, "over")),
        )
    print_table(table, console)
    for one in handoffs:
        if one.outcome == "failed":
            console.print(f"{one.request_id[:8]} failed: {one.reason}", markup=False)


def print_handoff(one: HandoffTimes, console: Console) -> None:
    """One of them in full: what happened when, and its first regions."""
    console.print(
        f"[bold]{one.handoff}[/] {one.direction}, request {one.request_id}, peer {one.peer}, lane {one.lane or '-'}: "
        f"{one.tokens} tokens, {format_bytes(one.nbytes)} in {one.region_count} regions; {one.outcome} {one.reason}"
    )
    table = make_table("In ms since it began", "what", ">at", ">took", ">bytes")
    rows = [
        (region.ended_s, (f"region {region.seq} landed", short_ms(region.ended_s),
                          short_ms(region.ended_s - region.begun_s), format_bytes(region.nbytes)))
        for region in one.regions
    ]  # fmt: skip
    rows += [(at_s, (mark, short_ms(at_s), "", "")) for mark, at_s in one.marks.items()]
    for _, row in sorted(rows, key=lambda each: each[0]):
        table.add_row(*row)
    print_table(table, console)
    if one.resent_frames or one.damaged_regions or one.stalls:
        console.print(
            f"{one.resent_frames} frames sent again, {one.damaged_regions} regions asked for twice, "
            f"{one.stalls} waits for credit, {short_ms(one.stall_s)} ms in all"
        )
