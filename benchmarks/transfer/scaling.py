"""How the cost of a hand-off grows: with its bytes (it must not, per byte), and with the number of pairs (not at all).

Owns: three measurements and their tables. CPU time is the measure where more processes run than there are cores.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.transfer.children import Child, Move, Pair, baton_ends
from benchmarks.transfer.report import size_name, table
from benchmarks.transfer.simulated import cpu_s_per_handoff

LANES = ("local", "tcp")
PAGE_BYTES = 64 << 10
PAIR_BYTES = 1 << 20
"""What each hand-off moves where pairs are counted."""
PER_PAIR = 4
"""Hand-offs of each pair at once."""


@dataclass(frozen=True)
class Scale:
    handoff_bytes: tuple[int, ...]
    sides: tuple[int, ...]  # n sources and n targets: n × n pairs
    pairs: tuple[int, ...]  # simulated
    handoffs: int  # simulated, of each number of pairs
    rounds: int


FULL = Scale(tuple(mib << 20 for mib in (1, 4, 16, 64, 256, 1024)), (1, 2, 4), (1, 10, 100, 1000), 2000, 5)
QUICK = Scale((1 << 20, 4 << 20), (1, 2), (1, 10), 50, 1)


def measure(scale: Scale) -> list[str]:
    """The section of the document."""
    return ["## Scaling", "", *_by_bytes(scale), *_by_pairs(scale), *_by_simulated_pairs(scale)]


def _by_bytes(scale: Scale) -> list[str]:
    header = [f"one hand-off, {size_name(PAGE_BYTES)} pages", *map(size_name, scale.handoff_bytes)]
    rows = []
    for lane in LANES:
        (source,), (target,) = baton_ends(lane, PAGE_BYTES, max(scale.handoff_bytes))
        pair = Pair(source, target, "target", stop_between_turns=False)
        moves: dict[int, list[Move]] = {}
        try:
            for number in range(-1, scale.rounds):
                for nbytes in scale.handoff_bytes:
                    move = pair.move(nbytes // PAGE_BYTES, 1, first=7919 * (number + 1))
                    moves.setdefault(nbytes, []).extend([move] if number >= 0 else [])
        finally:
            pair.close()
        took = {nbytes: statistics.median(move.took_s for move in moves[nbytes]) for nbytes in moves}
        cpu = {nbytes: statistics.median(move.cpu_s for move in moves[nbytes]) for nbytes in moves}
        rows.append([f"{lane}, ns per KiB", *(f"{1e9 * took[nbytes] / (nbytes >> 10):.0f}" for nbytes in moves)])
        rows.append([f"{lane}, CPU-s per GB", *(f"{1e9 * cpu[nbytes] / nbytes:.2f}" for nbytes in moves)])
    return table(header, rows)


def _by_pairs(scale: Scale) -> list[str]:
    """Processes of their own for every source and every target, all of them busy."""
    pages = PAIR_BYTES // PAGE_BYTES
    header = [
        f"{PER_PAIR} hand-offs of {size_name(PAIR_BYTES)} per pair at once",
        *(f"{side * side} ({2 * side} processes)" for side in scale.sides),
    ]
    rows = []
    for lane in LANES:
        cpu_ms, took_ms = [], []
        for side in scale.sides:
            pool_bytes = max(side * PER_PAIR * PAIR_BYTES, 16 << 20)
            sources, targets = baton_ends(lane, PAGE_BYTES, pool_bytes, sources=side, targets=side)
            try:
                moves = [_all_at_once(sources, targets, pages) for _ in range(scale.rounds + 1)][1:]
            finally:
                for child in (*sources, *targets):
                    child.close()
            handoffs = side * side * PER_PAIR
            cpu_ms.append(1e3 * statistics.median(move.cpu_s for move in moves) / handoffs)
            took_ms.append(1e3 * statistics.median(move.took_s for move in moves) / handoffs)
        rows.append([f"{lane}, CPU-ms per hand-off (both sides)", *(f"{ms:.2f}" for ms in cpu_ms)])
        rows.append([f"{lane}, ms per hand-off, all pairs together", *(f"{ms:.2f}" for ms in took_ms)])
    return table(header, rows)


def _all_at_once(sources: list[Child], targets: list[Child], pages: int) -> Move:
    for source in sources:
        source.ask("begin")
    for target in targets:
        target.send({"op": "move", "pages": pages, "concurrent": PER_PAIR, "first": 0})
    moved = [target.receive() for target in targets]
    served = [source.ask("end") for source in sources]
    took_s = max(one["done"] for one in moved) - min(one["started"] for one in moved)
    return Move(took_s, sum(one["cpu_s"] for one in moved + served))


def _by_simulated_pairs(scale: Scale) -> list[str]:
    """See `simulated.py`: one decode worker and as many prefill workers as pairs, in one process."""
    rows = []
    for name, together in (
        ("one", [1] * len(scale.pairs)),
        ("8", [8] * len(scale.pairs)),
        ("one of each pair", scale.pairs),
    ):
        cost_s = [
            cpu_s_per_handoff(pairs, scale.handoffs, most) for pairs, most in zip(scale.pairs, together, strict=True)
        ]
        rows.append([f"CPU-µs per hand-off, {name} open at a time", *(f"{1e6 * one_s:.0f}" for one_s in cost_s)])
    return table(["simulated pairs", *map(str, scale.pairs)], rows)
