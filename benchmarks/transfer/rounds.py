"""Bandwidth and latency: all legs alive at once, measured in turns, one turn each per round.

Owns: what was measured (`Results`). A leg that moves wrong bytes, or ends, is out with its reason; the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.transfer.baselines import Memcpy, ZmqRoundTrip
from benchmarks.transfer.children import EndFailed, Move, Pair
from benchmarks.transfer.legs import BatonLeg, Leg

MEMCPY, MEMCPY_TWO = "memcpy, one thread", "memcpy, two threads"
ZMQ_TCP, ZMQ_IPC, CONTROL = "ZMQ round trip, tcp", "ZMQ round trip, ipc", "Baton's control round trip"


@dataclass(frozen=True)
class Sizes:
    """What a round moves. `pool_bytes` is the size of every pool: the largest turn fills it. `concurrent` hand-offs are
    of one page up to `most_concurrent_bytes` each."""

    handoff_bytes: tuple[int, ...]
    concurrent: int
    most_concurrent_bytes: int
    pool_bytes: int
    one_page_tries: int

    def turns(self, page_bytes: int) -> list[tuple[int, int]]:
        """(pages, concurrent) of each hand-off size, one page left out."""
        alone = [(nbytes // page_bytes, 1) for nbytes in self.handoff_bytes]
        together = [
            (nbytes // page_bytes, self.concurrent)
            for nbytes in self.handoff_bytes
            if nbytes <= self.most_concurrent_bytes
        ]
        return [turn for turn in alone + together if turn[0] > 0]


FULL = Sizes(tuple(mib << 20 for mib in (1, 16, 64, 256)), 8, 64 << 20, 512 << 20, 40)
QUICK = Sizes((1 << 20, 4 << 20), 8, 1 << 20, 16 << 20, 5)


@dataclass
class Results:
    """Of one page size. `moves`: by (leg, pages, concurrent); `seconds`: round trips by name."""

    page_bytes: int
    moves: dict[tuple[str, int, int], list[Move]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    out: dict[str, str] = field(default_factory=dict)  # leg -> why

    def note(self, leg: str, pages: int, concurrent: int, move: Move) -> None:
        self.moves.setdefault((leg, pages, concurrent), []).append(move)


def measure(page_bytes: int, rounds: int, sizes: Sizes, legs: Sequence[Leg]) -> Results:
    results = Results(page_bytes)
    pairs: dict[Leg, Pair] = {}
    memcpy = Memcpy(page_bytes, sizes.pool_bytes)
    zmq = {ZMQ_TCP: ZmqRoundTrip("tcp://127.0.0.1:*"), ZMQ_IPC: ZmqRoundTrip("ipc://*")}
    try:
        for leg in legs:
            try:
                pairs[leg] = leg.start(page_bytes, sizes.pool_bytes)
                pairs[leg].end_turn()
            except EndFailed as failure:
                results.out[leg.name] = str(failure)
        for number in range(-1, rounds):  # round -1 warms up, and checks every byte
            _copy_turn(memcpy, results, sizes, number)
            for name, round_trip in zmq.items():
                took_s = [round_trip.once() for _ in range(sizes.one_page_tries)]
                results.seconds.setdefault(name, []).extend(took_s if number >= 0 else ())
            order = list(pairs)
            turn = (number + 1) % max(1, len(order))
            for leg in order[turn:] + order[:turn]:
                try:
                    _turn(leg, pairs[leg], results, sizes, number)
                except EndFailed as failure:
                    results.out[leg.name] = str(failure)
                    pairs.pop(leg).close()
    finally:
        for pair in pairs.values():
            pair.close()
        for round_trip in zmq.values():
            round_trip.close()
    return results


def _copy_turn(memcpy: Memcpy, results: Results, sizes: Sizes, number: int) -> None:
    page_bytes = results.page_bytes
    first = _first(sizes, page_bytes, number)
    if number < 0:
        wrong = memcpy.check(sizes.pool_bytes // page_bytes // 2)
        assert not wrong, wrong
    for pages, concurrent in sizes.turns(page_bytes):
        for name, threads in ((MEMCPY, 1), (MEMCPY_TWO, 2)):
            move = memcpy.move(pages * concurrent, first, threads)
            if number >= 0:
                results.note(name, pages, concurrent, move)


def _turn(leg: Leg, pair: Pair, results: Results, sizes: Sizes, number: int) -> None:
    page_bytes = results.page_bytes
    first = _first(sizes, page_bytes, number)
    pair.begin_turn()
    turns = sizes.turns(page_bytes)
    if number < 0:
        wrong = pair.check(*max(turns, key=lambda turn: turn[0] * turn[1]))
        if wrong:
            raise EndFailed(wrong)
    for pages, concurrent in turns:
        move = pair.move(pages, concurrent, first)
        if number >= 0:
            results.note(leg.name, pages, concurrent, move)
    for attempt in range(sizes.one_page_tries):
        for concurrent in (1, sizes.concurrent):
            move = pair.move(1, concurrent, first + attempt)
            if number >= 0:
                results.note(leg.name, 1, concurrent, move)
        if isinstance(leg, BatonLeg) and leg.encrypted:
            pong = pair.target.ask("ping")
            if number >= 0:
                results.seconds.setdefault(CONTROL, []).append(pong["done"] - pong["started"])
    pair.end_turn()


def _first(sizes: Sizes, page_bytes: int, number: int) -> int:
    """Each round moves other pages, so that no leg finds its own in the cache."""
    return (number + 1) * 7919 % (sizes.pool_bytes // page_bytes)
