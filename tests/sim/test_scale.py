"""Large worlds: what `make sim-large` runs at full size, here small; a slow test runs a thousand workers."""

from __future__ import annotations

import pytest

from baton.deploy.planner.traces import TraceRequest
from baton.deploy.sim.scale import LargeWorld, made_up_trace, prompt_of


def test_a_world_of_a_trace_answers_everything_and_keeps_nothing() -> None:
    trace = made_up_trace(40)
    hashes = []
    for _ in range(2):
        large = LargeWorld(10, 60, trace)
        large.start()
        report = large.world.run()
        assert report.outcomes.total() == report.outcomes["length"] == 60
        assert not large.world.clients.requests
        hashes.append(report.trace_hash)
    assert hashes[0] == hashes[1]


def test_prompts_share_what_their_blocks_share_within_one_round() -> None:
    first = TraceRequest(0.0, 200 * 64, 5, (7, 8, 9, *range(100, 130)))
    second = TraceRequest(1.0, 200 * 64, 5, (7, 8, 9))
    one, other = prompt_of(first, 1, 1), prompt_of(second, 1, 2)
    assert len(one) == len(other) == 200
    assert (one[:24] == other[:24]).all()
    assert (one[24:32] != other[24:32]).any()
    assert (prompt_of(first, 2, 1)[:24] != one[:24]).any(), "in the next round the same blocks are others"
    assert (prompt_of(second, 1, 3)[24:] != other[24:]).any(), "what no block tells is the request's own"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_workers_serve() -> None:
    large = LargeWorld(1000, 20_000, made_up_trace())
    large.start()
    report = large.world.run()
    assert report.outcomes["length"] == 20_000
    assert not large.world.clients.requests
