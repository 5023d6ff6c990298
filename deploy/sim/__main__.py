"""`python -m baton.deploy.sim` is `baton sim`."""

from __future__ import annotations

import sys

from baton.deploy.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command(["sim", *sys.argv[1:]]))
