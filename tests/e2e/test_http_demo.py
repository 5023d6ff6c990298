"""`make demo`, as a person sees it: the real model, real processes, exit code 0; and told to stop before it is done."""

from __future__ import annotations

import signal
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


@pytest.mark.ray
@pytest.mark.parametrize("when", ["starting Ray", "decode-0: starting"])
def test_a_demo_that_is_told_to_stop_before_it_is_ready_says_so_in_a_line(when: str) -> None:
    command = [sys.executable, "-m", "baton.deploy.cli", "demo", "--model", "fake", "--set", "cluster=told-to-stop"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if when in line:
                break
        demo.send_signal(signal.SIGTERM)
        said, told = demo.communicate(timeout=100)
    assert told.splitlines()[-1:] == ["baton: told to stop"], said + told
    assert "SIGTERM" not in said + told
    assert "Traceback" not in said + told
    assert demo.returncode == 143
