"""See `chaos_soak.py`."""

from __future__ import annotations

import os

import pytest
from chaos_soak import soak

SEED = int(os.environ.get("CHAOS_SEED", "1"))
HANDOFFS = int(os.environ.get("CHAOS_HANDOFFS", "10000"))


def test_a_few_hundred_hand_offs_under_everything_at_once() -> None:
    summary = soak(SEED, committed=100, limit_s=60.0, disturb_every_s=0.4, sinks=("decode-local", "decode-tcp"))
    assert summary.did["kill"] + summary.did["stop"] + summary.did["cut"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_thousands_of_hand_offs_under_everything_at_once() -> None:
    summary = soak(SEED, committed=HANDOFFS, limit_s=900.0, disturb_every_s=0.8)
    for blow in ("kill", "stop", "cut", "frames dropped", "frames duplicated", "bytes flipped"):
        assert summary.did[blow], f"no {blow}: {summary.did}"
