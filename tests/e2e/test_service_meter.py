"""What `baton calibrate` reads from a cluster in service, over HTTP, with a worker whose pace is known."""

from __future__ import annotations

import asyncio

from http_loopback import Loopback, saying, serving

from baton.deploy.planner.service_meter import STREAMS, measure_at

PACE_S = 0.005


def test_gaps_and_overhead_are_those_of_the_cluster() -> None:
    with serving(Loopback(script=saying("x" * 200), pace_s=PACE_S), max_model_len=2048) as served:
        seen = asyncio.run(measure_at(served.url, 100))
    assert seen.gap_s >= PACE_S
    assert seen.prompt_s == 0.01, "as the worker says"
    assert seen.first_token_s + seen.prompt_s > 0
    assert 200 < seen.prompt_tokens < 500, "a hundred words, in bytes"
    assert seen.rows == STREAMS
