"""What bounds each lane: where the I/O threads of both sides spend their CPU time during large hand-offs.

Owns: runs of their own, for a profile slows what it looks at; and the table made of them.
"""

from __future__ import annotations

import pstats
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.transfer.children import EndFailed, Pair, baton_ends
from benchmarks.transfer.legs import BatonLeg
from benchmarks.transfer.report import size_name, table

BOUNDS = (
    "- `local`: one copy from the peer's pages into ours, by one thread or several; around it, per region, the"
    " announcement, its digest at the source and again at the target, and the acknowledgement.",
    "- `tcp`: the kernel copies every byte twice, out of the source's pages and into the target's, each on one I/O"
    " thread; there is nothing between socket and page.",
    "- `zmq` without keys: those two copies on ZMQ's own threads (not in the table), and two more between pages and"
    " staging memory. With keys ZMQ's threads also encrypt and decrypt every byte, and that is what bounds it.",
    "- `ucx`: two copies between pages and staging memory, one more by UCX (shared memory) or two by the kernel (TCP);"
    " its Python binding wakes a thread of its own several times per region.",
)
"""What each lane does with a byte, whatever the numbers are."""
MOST_NAMED = 6
LEAST_SHARE = 0.03
LEAST_POOL_BYTES = 8 << 20


def measure(legs: list[BatonLeg], page_bytes: int, handoff_bytes: int, seconds: float) -> list[str]:
    """The section of the document: each leg moves hand-offs for about `seconds`."""
    rows = []
    for leg in legs:
        with tempfile.TemporaryDirectory() as folder:
            try:
                wall_s, _ = _run(leg, page_bytes, handoff_bytes, seconds, folder)
            except EndFailed as failure:
                rows.append([leg.name, "", "", str(failure)])
                continue
            for path in sorted(Path(folder).glob("*/*"), reverse=True):
                busy_s, _, shares = _shares(path)
                if busy_s >= LEAST_SHARE * wall_s:
                    rows.append(
                        [leg.name, f"{path.parent.name}, {path.name}", f"{100 * busy_s / wall_s:.0f} %", shares]
                    )
    return [
        "## What bounds each lane",
        "",
        "CPU time of each Python thread by file, profiled (cProfile) during hand-offs of"
        f" {size_name(handoff_bytes)} in pages of {size_name(page_bytes)}, one after the other. A thread that is busy"
        " all the time bounds the lane; where none is, they wait for each other, for a core, or for a library's own"
        " threads. A call into compiled code is counted where it is made.",
        "",
        *BOUNDS,
        "",
        *table(["lane", "thread", "busy", "of that"], rows),
    ]


def measure_one_page(leg: BatonLeg, page_bytes: int, seconds: float) -> list[str]:
    """The same for hand-offs of one page: what they cost each thread, for they are never about bytes."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        _, handoffs = _run(leg, page_bytes, page_bytes, seconds, folder)
        for path in sorted(Path(folder).glob("*/*"), reverse=True):
            busy_s, calls, shares = _shares(path)
            rows.append(
                [
                    f"{path.parent.name}, {path.name}",
                    f"{1e6 * busy_s / handoffs:.0f}",
                    f"{calls / handoffs:.0f}",
                    shares,
                ]
            )
    return [
        "## What bounds one page",
        "",
        f"The same for hand-offs of one page of {size_name(page_bytes)} over `{leg.name}`, one after the other. Nothing"
        " of it is bytes: it is function calls, in one round trip of the mesh and four hops between threads. Each of"
        " the two sides is idle while the other works, so that its code comes out of a cold cache every time.",
        "",
        *table(["thread", "CPU-µs per hand-off, profiled", "calls per hand-off", "of that"], rows),
    ]


def _run(leg: BatonLeg, page_bytes: int, handoff_bytes: int, seconds: float, folder: str) -> tuple[float, int]:
    """Returns how long hand-offs were under way, and how many there were."""
    for side in ("source", "target"):
        (Path(folder) / side).mkdir()
    (source,), (target,) = baton_ends(
        leg.lane,
        page_bytes,
        max(2 * handoff_bytes, LEAST_POOL_BYTES),
        encrypted=leg.encrypted,
        environment=leg.environment,
        profile=folder,
    )
    pair = Pair(source, target, "target", stop_between_turns=False)
    wall_s, handoffs = 0.0, 0
    try:
        while wall_s < seconds:
            handoffs += 1
            wall_s += pair.move(handoff_bytes // page_bytes, 1, first=round(wall_s * 1e6)).took_s
    finally:
        pair.close()
    return wall_s, handoffs


def _shares(path: Path) -> tuple[float, int, str]:
    """CPU seconds of a profiled thread, its calls of functions, and which files most of the time went into."""
    own: Counter[str] = Counter()
    calls = 0
    for place, values in pstats.Stats(str(path)).stats.items():  # type: ignore[attr-defined]
        own[_name(place)] += values[2]
        calls += values[1]
    busy_s = sum(own.values())
    named = [
        f"{100 * seconds / busy_s:.0f} % {name}"
        for name, seconds in own.most_common(MOST_NAMED)
        if seconds >= LEAST_SHARE * busy_s
    ]
    return busy_s, calls, ", ".join(named)


def _name(place: tuple[str, int, str]) -> str:
    """A function of the interpreter itself, or the file of any other."""
    path, _, function = place
    if path == "~":
        return f"`{function.removeprefix('<').removesuffix('>').removeprefix('built-in method ')}`"
    return f"`{Path(path).parent.name}/{Path(path).name}`"
