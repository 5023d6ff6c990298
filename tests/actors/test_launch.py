"""A launched cluster as a whole: what is left of it when its launcher is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baton.common import env
from baton.common.clock import MonotonicClock

pytestmark = pytest.mark.ray

LAUNCHER = """
import sys
from test_controller import STUBS, stub_config
from baton.deploy.launch import launch
handle = launch(stub_config("orphan"), class_paths=STUBS, ray_temp_dir=sys.argv[1])
print(handle.plan.run_dir, flush=True)
sys.stdin.read()
"""
WAIT_S = 30.0
RAYS_OWN_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""They notice that their raylet is gone, and go, after half a minute or so."""


def descendants(pid: int) -> set[int]:
    """Of a process, itself included, from /proc: Ray's processes and the actors among them."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {pid}
    while grown := {child for child, parent in parents.items() if parent in found} - found:
        found |= grown
    return found


def test_nothing_outlives_a_killed_launcher() -> None:
    env.prepare_ray(joins=False)
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix="bt", dir="/tmp", ignore_cleanup_errors=True) as folder:
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(here)},
        )
        with launcher:
            assert launcher.stdout is not None
            run_dir = Path(launcher.stdout.readline().strip())
            actors = {int(record.read_text().split()[0]) for record in run_dir.iterdir()}
            everyone = descendants(launcher.pid)
            assert len(actors) == 4
            assert actors < everyone
            launcher.send_signal(signal.SIGKILL)
        clock = MonotonicClock()
        deadline_s = clock.now() + WAIT_S
        while left := [name for name in map(running_name, everyone) if name and not name.startswith(RAYS_OWN_AGENTS)]:
            assert clock.now() < deadline_s, left


def running_name(pid: int) -> str:
    """ "" for a process that is gone, or whose zombie nobody has collected yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return "" if state == "Z" else Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
