"""Hand-offs of scattered pages between two processes on this host: every lane of Baton against memcpy, NIXL and
Mooncake; how cost scales with bytes and pairs; late writes; what bounds each lane.

    python -m benchmarks.bench_transfer [--rounds 7] [--write docs/benchmarks/transfer.md]
    python -m benchmarks.bench_transfer --quick --only baton      # seconds: everything runs, no number means anything

From the repository root, alone on the machine. `make bench-transfer` also makes the peers' environment.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.transfer import report
from benchmarks.transfer.legs import Leg, baton_legs, peer_legs
from benchmarks.transfer.rounds import FULL, QUICK, measure

PAGE_BYTES = (16 << 10, 64 << 10)
RESIDENT_BYTES = 400 << 20
"""Of a leg's two processes besides their pools, about."""


def chosen_legs(only: str) -> list[Leg]:
    legs: list[Leg] = list(baton_legs())
    if only != "baton":
        legs += peer_legs()
    return [leg for leg in legs if only in ("", "baton") or only in leg.name]


def check_memory(pool_bytes: int, legs: int) -> None:
    """Swapping would measure the disk. Ends with a message when memory is short."""
    needed = (legs + 1) * 2 * pool_bytes + legs * RESIDENT_BYTES
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) << 10
    if needed > free:
        raise SystemExit(
            f"all legs together need {needed >> 30} GiB, {free >> 30} are free; --only NAME measures fewer of them"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help='"baton", or a part of the names of the legs to run')
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: shows that it runs")
    parser.add_argument("--write", type=Path, help="the document to write")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    sizes = QUICK if arguments.quick else FULL
    legs = chosen_legs(arguments.only)
    check_memory(sizes.pool_bytes, len(legs))
    started_s = time.monotonic()
    parts = []
    for page_bytes in PAGE_BYTES:
        results = measure(page_bytes, rounds, sizes, legs)
        parts.append((results, report.Tables(results, sizes, legs)))
        print(f"\n{page_bytes >> 10} KiB pages, {time.monotonic() - started_s:.0f} s", flush=True)
        print("\n".join(parts[-1][1].ratios() + parts[-1][1].bandwidth() + parts[-1][1].round_trips()), flush=True)
        for name, reason in results.out.items():
            print(f"left out: {name}: {reason}", flush=True)
    command = "python -m benchmarks.bench_transfer " + " ".join(sys.argv[1:])
    lines = report.document(parts, rounds, sizes, time.monotonic() - started_s, command.strip())
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text("\n".join(lines))
    if any(leg.name in results.out for leg in legs if not leg.is_peer for results, _ in parts):
        raise SystemExit("a lane of Baton failed")


if __name__ == "__main__":
    main()
