"""The tables of docs/benchmarks/transfer.md. Owns their text; measures nothing."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.transfer.legs import Leg, Wire
from benchmarks.transfer.rounds import CONTROL, MEMCPY, MEMCPY_TWO, ZMQ_IPC, ZMQ_TCP, Results, Sizes

BULK_BYTES = 64 << 20
"""The hand-off that ratios and CPU time are given for."""


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor())
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}"


def size_name(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines] + [""]


class Tables:
    """Of one page size."""

    def __init__(self, results: Results, sizes: Sizes, legs: Sequence[Leg]) -> None:
        self._results, self._sizes = results, sizes
        self._legs = [leg for leg in legs if leg.name not in results.out]
        self._page_bytes = results.page_bytes
        self._bulk = (min(BULK_BYTES, max(sizes.handoff_bytes)) // self._page_bytes, 1)

    # --------------------------------------------------------------------------------------------- numbers

    @property
    def bulk_name(self) -> str:
        return size_name(self._bulk[0] * self._page_bytes)

    def gbps(self, name: str, pages: int, concurrent: int) -> float:
        took_s = [move.took_s for move in self._results.moves[name, pages, concurrent]]
        return pages * concurrent * self._page_bytes / statistics.median(took_s) / 1e9

    def cpu_s_per_gb(self, name: str) -> float:
        pages, concurrent = self._bulk
        cpu_s = [move.cpu_s for move in self._results.moves[name, pages, concurrent]]
        return statistics.median(cpu_s) / (pages * concurrent * self._page_bytes) * 1e9

    def one_page_s(self, name: str, concurrent: int, percentile: float) -> float:
        took_s = [move.took_s for move in self._results.moves[name, 1, concurrent]]
        return float(np.percentile(took_s, percentile))

    def round_trip_s(self, name: str, percentile: float) -> float:
        return float(np.percentile(self._results.seconds[name], percentile))

    def _best_peer(self, peer: str, wire: Wire) -> float | None:
        """Its fastest leg on that wire; None when there is none."""
        legs = [leg for leg in self._legs if leg.name.startswith(peer) and leg.wire == wire]
        return max((self.gbps(leg.name, *self._bulk) for leg in legs), default=None)

    # ---------------------------------------------------------------------------------------------- tables

    def lines(self) -> list[str]:
        """The section of this page size."""
        out = [f"- Left out: {name}: {reason}" for name, reason in self._results.out.items()]
        title = [f"## Pages of {size_name(self._page_bytes)}", ""]
        return title + self.ratios() + self.bandwidth() + self.round_trips() + ([*out, ""] if out else [])

    def bandwidth(self) -> list[str]:
        turns = self._sizes.turns(self._page_bytes)
        header = ["GB/s"] + [
            (f"{concurrent} × " if concurrent > 1 else "") + size_name(pages * self._page_bytes)
            for pages, concurrent in turns
        ]
        names = [MEMCPY, MEMCPY_TWO] + [leg.name for leg in self._legs]
        return table(header, [[name] + [f"{self.gbps(name, *turn):.2f}" for turn in turns] for name in names])

    def ratios(self) -> list[str]:
        """At the bulk size: against memcpy, against the best peer on the same wire; and what it costs."""
        bulk, together = self.bulk_name, f"{self._sizes.concurrent} × one page, µs"
        peers = ["× best NIXL", "× Mooncake"]
        header = [bulk, "GB/s", "of memcpy", *peers, "CPU-s per GB", "one page p50 / p99, µs", together]
        copied = self.gbps(MEMCPY, *self._bulk)
        rows = [[MEMCPY, f"{copied:.2f}", "100 %", "", "", f"{self.cpu_s_per_gb(MEMCPY):.2f}", "", ""]]
        for leg in self._legs:
            gbps = self.gbps(leg.name, *self._bulk)
            rows.append(
                [
                    leg.name,
                    f"{gbps:.2f}",
                    f"{100 * gbps / copied:.0f} %",
                    "" if leg.is_peer else self._against("NIXL", leg, gbps),
                    "" if leg.is_peer or leg.wire == "host" else self._against("Mooncake", leg, gbps),
                    f"{self.cpu_s_per_gb(leg.name):.2f}",
                    f"{1e6 * self.one_page_s(leg.name, 1, 50):.0f} / {1e6 * self.one_page_s(leg.name, 1, 99):.0f}",
                    f"{1e6 * self.one_page_s(leg.name, self._sizes.concurrent, 50):.0f}",
                ]
            )
        return table(header, rows)

    def _against(self, peer: str, leg: Leg, gbps: float) -> str:
        best = self._best_peer(peer, leg.wire)
        return f"{gbps / best:.2f}" if best else "–"

    def round_trips(self) -> list[str]:
        names = [name for name in (ZMQ_TCP, ZMQ_IPC, CONTROL) if self._results.seconds.get(name)]
        rows = [
            [name, f"{1e6 * self.round_trip_s(name, 50):.0f}", f"{1e6 * self.round_trip_s(name, 99):.0f}"]
            for name in names
        ]
        return table(["round trip, µs", "p50", "p99"], rows)

    def targets(self) -> list[list[str]]:
        """Rows of the summary: what was asked for, and what this page size reached at the bulk size, by which lane."""
        rows = []

        def row(what: str, lane: str, reached: float, target: float, *, at_most: bool = False) -> None:
            met = reached <= target if at_most else reached >= target
            page = size_name(self._page_bytes)
            asked = f"{'≤' if at_most else '≥'} {target} ×"
            rows.append([what, page, lane, f"{reached:.2f} ×", asked, "met" if met else "**not met**"])

        ours = [leg for leg in self._legs if not leg.is_peer]
        for wire, what in (("host", "same host"), ("tcp", "TCP")):
            best = max(
                (leg for leg in ours if leg.wire == wire),
                key=lambda leg: self.gbps(leg.name, *self._bulk),
                default=None,
            )
            if best is None:
                continue
            gbps = self.gbps(best.name, *self._bulk)
            if wire == "host":
                row("same host, against memcpy", best.name, gbps / self.gbps(MEMCPY, *self._bulk), 0.8)
            for peer, target in (("NIXL", 1.2 if wire == "host" else 2.0), ("Mooncake", 2.0)):
                theirs = self._best_peer(peer, best.wire)
                if theirs is not None:
                    row(f"{what}, against {peer} at its best", best.name, gbps / theirs, target)
        if ours:
            quickest = min(ours, key=lambda leg: self.one_page_s(leg.name, 1, 50))
            round_trips = self.one_page_s(quickest.name, 1, 50) / self.round_trip_s(ZMQ_TCP, 50)
            row("one page, in ZMQ round trips (tcp)", quickest.name, round_trips, 3.0, at_most=True)
        return rows


def document(
    parts: Sequence[tuple[Results, Tables]], rounds: int, sizes: Sizes, took_s: float, command: str
) -> list[str]:
    """The first part of the document: everything that the rounds measured."""
    lines = [
        "# Hand-offs against memcpy, NIXL and Mooncake",
        "",
        "Scattered pages from one process to another on one host. A hand-off of Baton is timed whole, as an engine sees"
        " it: from asking for it until it is told that every page is in place (offer, announcement, transfer, check,"
        " acknowledgement). Of a peer the time runs from asking for the transfer until whoever owns the destination"
        " pages knows that they are filled; its memory is registered and its page descriptors are prepared beforehand."
        f" Medians of {rounds} rounds, all legs alive at once and measured in turns, after a round that warms up and in"
        " which every byte is compared. Ratios count; absolute numbers depend on the machine and on who else is on it.",
        "",
        f"- Machine: {machine()}; load average {os.getloadavg()[0]:.1f} at the end; {took_s / 60:.0f} minutes.",
        f"- Remake: `make bench-transfer` (`{command}`).",
        f"- Pools of {size_name(sizes.pool_bytes)}, of which a hand-off's pages are a random choice; each round takes"
        f" others. {sizes.concurrent} hand-offs at once are of at most {size_name(sizes.most_concurrent_bytes)}: they"
        " fill the pool.",
        "- memcpy: libc's, page by page in a compiled loop, inside one process. CPU-seconds: user and system of all"
        " threads of both processes.",
        "- NIXL: UCX backend. Without its progress thread the end that only serves spins over TCP and for small"
        " transfers, and looks once a millisecond else: whatever is faster. Mooncake: its TCP transport, at most 1,024"
        " pages under way, with more it fails. Processes of the peers are stopped while it is not their turn.",
        "",
        "## Targets",
        "",
        *table(
            ["", "page", "lane", f"reached ({parts[0][1].bulk_name})", "target", ""],
            [row for _, tables in parts for row in tables.targets()],
        ),
    ]
    for _, tables in parts:
        lines += tables.lines()
    return lines
