"""The transfer benchmark runs, and a leg that moves wrong bytes is no leg."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("lane", ["tcp", pytest.param("local", marks=pytest.mark.slow)])
def test_the_benchmark_measures_a_lane_and_checks_its_bytes(lane: str) -> None:
    out = run("benchmarks.bench_transfer", "--quick", "--only", lane)
    assert f"\n| {lane} | " in out
    assert "memcpy, two threads" in out
    assert "Left out" not in out


@pytest.mark.slow
def test_every_part_of_it_runs_on_every_lane(tmp_path: Path) -> None:
    run("benchmarks.bench_transfer", "--quick", "--only", "baton", "--write", str(tmp_path / "transfer.md"))
    text = (tmp_path / "transfer.md").read_text()
    assert all(title in text for title in ("## Targets", "## Scaling", "## What bounds each lane", "## Late writes"))
    assert "**0** of" in (tmp_path / "late-write.md").read_text()


@pytest.mark.slow
def test_a_late_write_of_a_whole_io_thread_reaches_no_page() -> None:
    out = run("benchmarks.late_write", "--only", "tcp")
    assert out.count("**0** of") == 2, out
