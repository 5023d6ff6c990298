"""`make gpu-check` where there is no GPU: it says so, and its script goes through all of it in miniature."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton_rig import HAS_TRITON, WITHOUT

from benchmarks.gpu.rig import Line
from benchmarks.gpu_check import NO_GPU, main

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu-check")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == NO_GPU == 3
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "nothing to check" in said


def in_miniature(*before: str) -> subprocess.CompletedProcess[str]:
    program = "\n".join((*before, "from benchmarks.gpu_check import main", "raise SystemExit(main(['--interpret']))"))
    environment = os.environ | {"PYTHONPATH": f"{ROOT / '.src'}:{ROOT}", "TRITON_INTERPRET": "1"}
    return subprocess.run(
        [sys.executable, "-c", f"{program}\n"], env=environment, capture_output=True, text=True, timeout=230, cwd=ROOT
    )


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason=WITHOUT)
def test_all_of_it_in_miniature() -> None:
    ran = in_miniature()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for section in ("device", "parity", "graphs", "bandwidth", "prefill", "decode", "hand-off"):
        assert f"\n{section}" in f"\n{ran.stdout}", section
    assert "19 lines, 0 wrong" in ran.stdout


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason=WITHOUT)
def test_what_is_wrong_is_said_and_told_by_the_exit_code() -> None:
    """Scores of another scale, and a section that raises; the others go on."""
    ran = in_miniature(
        "from baton.common.engine.gpu import triton_attention",
        "from benchmarks.gpu import speed",
        "right = triton_attention.decode_attention",
        "triton_attention.decode_attention = lambda query, *rest: right(2 * query, *rest)",
        "speed.bandwidth = lambda bench: 1 // 0",
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "parity     WRONG triton, float32" in ran.stdout
    assert "bandwidth  WRONG does not come to its end: ZeroDivisionError" in ran.stdout
    assert "hand-off   ok" in ran.stdout


def test_a_number_without_a_comparison_is_not_wrong() -> None:
    assert Line("decode", "8 rows", "100 tokens/s").ok is None
