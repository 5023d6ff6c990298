"""The late-write test, Baton's lanes and NIXL in one run: see `benchmarks/transfer/late.py`.

    python -m benchmarks.late_write [--only baton] [--write docs/benchmarks/late-write.md]

Exit status 1 when a lane of Baton let one foreign page through, or could not be tested.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.transfer import late, report
from benchmarks.transfer.legs import baton_legs, chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help='"baton", or the lanes to run, without NIXL')
    parser.add_argument("--write", type=Path, help="the document to write")
    arguments = parser.parse_args()
    legs = baton_legs() if arguments.only in ("", "baton") else chosen(baton_legs(), arguments.only)
    results = late.measure(legs, nixl=not arguments.only)
    text = "\n".join(late.document(results, report.machine()))
    print(text)
    if arguments.write:
        arguments.write.write_text(text)
    if late.violations(results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
