"""What a person sees of a cluster: workers, lanes, pages, and where a request's time went. Only formats."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import msgspec
from rich.console import Console

from baton.common.kv.layout import Component
from baton.common.units import format_bytes
from baton.deploy.client import Answer, Client
from baton.deploy.show_handoffs import print_flows
from baton.deploy.show_parts import account_of, make_table, print_table
from baton.deploy.status import GatewayStatus, WorkerAccount
from baton.transfer.reports import HandoffTimes

PAGE_CLASSES = ("free", "cached", "cached_locked", "request", "session", "incoming", "outgoing", "quarantined")
_SHORT = {"cached_locked": "locked", "incoming": "in", "outgoing": "out"}
LEVELS = ("host", "disk", "external")
LEVEL_COUNTERS = ("used_bytes", "capacity_bytes", "hits", "misses", "written", "damaged", "failed_writes")
"""In pages, but the first two: the columns of the tiers' table, as a worker counts them."""


def fetch_status(url: str) -> GatewayStatus:
    """Raises ClusterUnreachable."""
    with Client(url, timeout_s=15.0) as client:
        return client.status()


def fetch_page_owner(url: str, worker: str, page: int, component: str | None) -> str:
    """Raises ClusterUnreachable, RequestError."""
    with Client(url, timeout_s=15.0) as client:
        return client.page_owner(worker, page, component)


def fetch_handoffs(url: str, worker: str) -> list[HandoffTimes]:
    """Raises ClusterUnreachable, RequestError."""
    with Client(url, timeout_s=15.0) as client:
        return client.handoffs(worker)


def fetch_trace(url: str, seconds: float) -> bytes:
    """Raises ClusterUnreachable, RequestError."""
    with Client(url, timeout_s=seconds + 30.0, retries=0) as client:
        return client.trace(seconds)


def print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def print_status(status: GatewayStatus, console: Console) -> None:
    ready = "ready" if status.ready else f"[red]not ready: {status.reason}[/]"
    console.print(
        f"[bold]{status.model}[/], at most {status.max_model_len} tokens; baton {status.version}; {ready}; "
        f"{status.requests.running} running, {status.requests.queued} waiting\n",
        soft_wrap=True,
    )
    # Overhead: of a step on average, outside of the model.
    load_columns = (">running", ">queued", ">steps", ">overhead", ">available", ">pages", ">cpu")
    table = make_table("Workers", "worker", "role", "state", *load_columns)
    for worker in status.workers:
        load = worker.load
        state = "[red]silent[/]" if worker.silent else "draining" if load.draining else "ok"
        pages = (str(load.free_pages), str(load.total_pages)) if load.total_pages else ("", "")
        table.add_row(
            f"{worker.worker}@{worker.incarnation}",
            worker.role,
            state,
            *(str(count) for count in (load.running, load.queued, load.steps)),
            f"{1e3 * load.step_overhead_s / load.steps:.2f} ms" if load.steps else "",
            *pages,
            ",".join(map(str, account_of(status, worker.worker).cores)),
        )
    print_table(table, console)
    _print_seats(status, console)
    if status.lanes:
        console.print()
        print_lanes(status, console)
    if status.details:
        print_flows(status, console)
        console.print()
        print_census(status, console)


def _print_seats(status: GatewayStatus, console: Console) -> None:
    """Where an upgrade was given up, somebody is missing, or processes differ: who cannot work with whom, and why."""
    if status.given_up:
        console.print()
        console.print(status.given_up, markup=False)
    versions = {(seat.revision, seat.group or None, seat.release) for seat in status.seats if seat.group}
    if len(versions) < 2 and all(seat.state == "live" for seat in status.seats):
        return
    console.print()
    table = make_table("Seats", "worker", "role", "state", ">revision", "release", "group", "why")
    for seat in status.seats:
        differs = ", ".join(f"{name}: {values}" for name, values in seat.differs.items())
        why = differs or (seat.detail if seat.state != "live" else "")
        name = f"{seat.worker}@{seat.incarnation}"
        table.add_row(name, seat.role, seat.state, str(seat.revision), seat.release, seat.group, why)
    print_table(table, console)


def print_lanes(status: GatewayStatus, console: Console) -> None:
    """The lane of each pair of workers, and what it has carried."""
    table = make_table("Lanes", "from", "to", "lane", ">hand-offs", ">bytes", "other lanes, GB/s")
    for use in status.lanes:
        others = [
            f"{lane.lane} {f'{lane.gbps:.2f}' if lane.gbps and not lane.reason else lane.status}"
            + (f" ({lane.reason})" if lane.reason else "")
            for lane in account_of(status, use.decode_worker).lanes
            if lane.peer == use.prefill_worker and lane.lane != use.lane
        ]
        table.add_row(
            use.prefill_worker,
            use.decode_worker,
            use.lane,
            str(use.transfers),
            format_bytes(use.nbytes),
            ", ".join(others),
        )
    print_table(table, console)


def print_census(status: GatewayStatus, console: Console) -> None:
    """Who owns the pages of every worker that has some; a line for each component, unless all layers attend to
    everything."""
    table = make_table("Pages", "worker", *(f">{_SHORT.get(name, name)}" for name in PAGE_CLASSES), ">total", "")
    for worker in status.workers:
        account = account_of(status, worker.worker)
        censuses = _censuses(account)
        if list(censuses) == [Component.FULL]:
            censuses = {worker.worker: account.census}
        elif censuses:
            table.add_row(worker.worker)
            censuses = {f"  {name}": census for name, census in censuses.items()}
        for name, census in censuses.items():
            lost = unaccounted(census)
            verdict = f"[red]{lost} LOST[/]" if lost else "idle" if is_idle(census) else "in use"
            table.add_row(name, *(str(census[one]) for one in PAGE_CLASSES), str(census["total"]), verdict)
    print_table(table, console)
    _print_tiers(status, console)
    if all_idle(status):
        console.print("[green]Every page of every worker is free or cached.[/]")


def _print_tiers(status: GatewayStatus, console: Console) -> None:
    """What lies below the pools, where there is anything."""
    table = make_table(
        "Tiers", "worker", "level", ">used", ">of", ">read", ">missed", ">written", ">damaged", ">failed"
    )
    for worker in status.workers:
        counters = account_of(status, worker.worker).counters
        for level in LEVELS:
            if f"tiers.{level}.{LEVEL_COUNTERS[0]}" in counters:
                used, capacity, *counts = (counters[f"tiers.{level}.{name}"] for name in LEVEL_COUNTERS)
                table.add_row(worker.worker, level, format_bytes(used), format_bytes(capacity), *map(str, counts))
    if table.row_count:
        print_table(table, console)


def is_idle(census: dict[str, int]) -> bool:
    """Nothing is held by a request, a session, a hand-off or a quarantine."""
    return census["free"] + census["cached"] == census["total"]


def unaccounted(census: dict[str, int]) -> int:
    return census["total"] - sum(census[name] for name in PAGE_CLASSES)


def all_accounted(status: GatewayStatus) -> bool:
    accounts = [account_of(status, worker.worker) for worker in status.workers]
    return not any(unaccounted(census) for account in accounts for census in _censuses(account).values())


def all_idle(status: GatewayStatus) -> bool:
    """Every worker that has pages told of them, and all are free or cached."""
    accounts = [account_of(status, worker.worker) for worker in status.workers if worker.role in ("prefill", "decode")]
    return bool(accounts) and all(
        account.census and all(is_idle(census) for census in _censuses(account).values()) for account in accounts
    )


def _censuses(account: WorkerAccount) -> dict[str, dict[str, int]]:
    """Of every component that it tells of."""
    return {account.component: account.census, **account.components} if account.census else {}


def print_timings(answers: Sequence[tuple[str, Answer]], console: Console) -> None:
    """Per request, where its time went and what was moved for it. `answers`: (name, answer)."""
    times = make_table(
        "Where the time went, in ms", "request", ">queue", ">reserve", ">prefill", ">transfer", ">scatter", ">decode",
        ">first", ">total", ">out", ">tok/s",
    )  # fmt: skip
    moves = make_table(
        "What was moved, in tokens", "request", ">prompt", ">here", ">cached", ">moved", ">found", ">bytes", "lane",
        "from", "to",
    )  # fmt: skip
    for name, answer in answers:
        time = answer.timeline
        spans = (time.queue_s, time.reserve_wait_s, time.prefill_s, time.transfer_s, time.scatter_s, time.decode_s)
        rate = answer.completion_tokens / time.decode_s if time.decode_s else 0.0
        times.add_row(
            name,
            *(f"{span * 1000:.1f}" for span in (*spans, answer.ttft_s or 0.0, answer.total_s)),
            str(answer.completion_tokens),
            f"{rate:.0f}",
        )
        moves.add_row(
            name,
            str(answer.prompt_tokens),
            str(time.local_tokens),
            str(time.cached_tokens + time.restored_tokens),
            str(time.transferred_tokens),
            str(time.prefill_cached_tokens),
            format_bytes(time.transfer_bytes),
            time.lane or "-",
            time.prefill_worker or "-",
            time.decode_worker,
        )
    print_table(times, console)
    console.print(
        "[dim]Chunks travel while later ones are computed: prefill and transfer overlap.\n"
        "first: until the first token; out: tokens of the answer.[/]\n"
    )
    print_table(moves, console)
    console.print(
        "[dim]prompt = here + cached + moved. here: computed by the decode worker;\n"
        "cached: it had them, or a tier below its pool.\n"
        "found: those of the moved ones that the prefill worker had cached.[/]"
    )


class Wrapped:
    """Streamed text, broken between words where the line ends. `write` may hold back an unfinished word."""

    def __init__(self, write: Callable[[str], None], width: int) -> None:
        self._write = write
        self._width = width
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        for char in text:
            if char.isspace():
                self._end_word()
                self._space(char)
            else:
                self._word += char
                if len(self._word) >= self._width:  # no word: let the terminal break it
                    self._end_word()

    def finish(self) -> None:
        self._end_word()

    def _end_word(self) -> None:
        if self._column and self._column + len(self._word) > self._width:
            self._write("\n")
            self._column = 0
        self._write(self._word)
        self._column += len(self._word)
        self._word = ""

    def _space(self, char: str) -> None:
        if char == "\n":
            self._column = 0
        elif self._column < self._width:
            self._column += 1
        else:
            return  # the next word begins a new line
        self._write(char)


def timing_line(answer: Answer) -> str:
    """The same for one request, in a line."""
    time = answer.timeline
    parts = [
        f"{answer.prompt_tokens} prompt tokens ({answer.cached_tokens} cached)",
        f"first token {_ms(answer.ttft_s or 0.0)}",
        f"queue {_ms(time.gateway_s + time.queue_s)}",
    ]
    if time.lane:
        moved = f"{format_bytes(time.transfer_bytes)} over {time.lane}"
        parts.append(f"hand-off with its prefill {_ms(time.handoff_s)}: {moved}")
    parts.append(f"prefill {_ms(time.prefill_s)}")
    parts.append(f"decode {_ms(time.decode_s)} for {answer.completion_tokens} tokens")
    if answer.placements > 1:
        parts.append(f"{answer.placements} decode workers")
    parts.append(f"request {answer.request_id}")
    return " · ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
