"""Hand-offs of scattered pages between two processes on this host: every lane of Baton against memcpy, NIXL and
Mooncake; how cost scales with bytes and pairs; late writes; what bounds each lane.

    python -m benchmarks.bench_transfer [--rounds 7] [--write docs/benchmarks/transfer.md]
    python -m benchmarks.bench_transfer --quick --only local      # seconds: shows that it runs

From the repository root, alone on the machine. `make bench-transfer` also makes the peers' environment.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from baton.deploy.doctor.host import available_memory
from benchmarks.transfer import late, profiles, report, scaling
from benchmarks.transfer.legs import Leg, baton_legs, chosen, peer_legs
from benchmarks.transfer.rounds import FULL, QUICK, measure

PAGE_BYTES = (16 << 10, 64 << 10)
RESIDENT_BYTES = 250 << 20
"""Of a leg's two processes besides their pools, about."""


def check_memory(pool_bytes: int, legs: int) -> None:
    """Swapping would measure the disk. Ends with a message when memory is short."""
    needed = (legs + 1) * 2 * pool_bytes + legs * RESIDENT_BYTES
    free = available_memory()
    if needed > free:
        raise SystemExit(
            f"all legs together need {needed >> 30} GiB, {free >> 30} are free; --only NAME measures fewer of them"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help='"baton", or the legs to run, and nothing but them')
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: shows that it runs")
    parser.add_argument("--write", type=Path, help="the document to write; late-write.md goes beside it")
    arguments = parser.parse_args()
    command = "python -m benchmarks.bench_transfer " + " ".join(sys.argv[1:])
    rounds, sizes = (1, QUICK) if arguments.quick else (arguments.rounds, FULL)
    every: list[Leg] = [*baton_legs(), *peer_legs()]
    legs = {"": every, "baton": every[: len(baton_legs())]}.get(arguments.only) or chosen(every, arguments.only)
    check_memory(sizes.pool_bytes, len(legs))
    started_s = time.monotonic()
    parts = []
    for page_bytes in PAGE_BYTES[: 1 if arguments.quick else None]:
        results = measure(page_bytes, rounds, sizes, legs)
        parts.append((results, report.Tables(results, sizes, legs)))
        show(parts[-1][1].lines(), started_s)
    sections: list[str] = []
    late_results: list[late.Late] = []
    if not arguments.only or arguments.only == "baton":
        sections += scaling.measure(scaling.QUICK if arguments.quick else scaling.FULL)
        show(sections, started_s)
        profile_s = 0.2 if arguments.quick else 3.0
        sections += profiles.measure(baton_legs(), PAGE_BYTES[-1], 64 << 20, profile_s)
        sections += profiles.measure_one_page(baton_legs()[0], PAGE_BYTES[0], profile_s)
        late_results = late.measure(baton_legs(), nixl=not arguments.only)
        sections += ["## Late writes", "", "See late-write.md.", "", *late.table(late_results)]
        show(sections, started_s)
    if arguments.write:
        took_s = time.monotonic() - started_s
        document = report.document(parts, rounds, sizes, took_s, command.strip()) + sections
        arguments.write.write_text("\n".join(document))
        arguments.write.with_name("late-write.md").write_text("\n".join(late.document(late_results, report.machine())))
    failed = [leg.name for leg in legs for results, _ in parts if not leg.is_peer and leg.name in results.out]
    failed += [f"{one.leg} (late write)" for one in late.violations(late_results)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def show(lines: Sequence[str], started_s: float) -> None:
    print(f"\n{time.monotonic() - started_s:.0f} s", *lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
