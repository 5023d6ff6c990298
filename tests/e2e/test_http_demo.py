"""`make demo`, as a person sees it: the real model, real processes, exit code 0."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.ray
@pytest.mark.model
def test_the_demo_answers_through_hand_offs_and_leaves_nothing_behind() -> None:
    command = [sys.executable, "-m", "baton.deploy.cli", "demo", "--max-tokens", "32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "Traceback" not in said + done.stderr
    for part in (
        "1 prefill, 2 decode",
        "decode-1: ready",
        "The capital of France is Paris.",
        "Where the time went",
        "What was moved",
        "prefill-0 decode-",
        "Every page of every worker is free or cached.",
        "shutting down",
    ):
        assert part in said, said
