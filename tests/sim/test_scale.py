"""Large worlds: what `make sim-large` runs at full size, here small; a slow test runs a thousand workers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from baton.common.ids import RequestId, WorkerId
from baton.common.messages import Offer, SamplingParams
from baton.deploy.planner.traces import TraceRequest
from baton.deploy.sim.clients import ClientRequest
from baton.deploy.sim.scale import FIRST_S, LargeWorld, made_up_trace, prompt_of, sized
from baton.deploy.sim.world import World

GREEDY = SamplingParams(max_tokens=2)


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


def test_a_burst_of_prompts_that_begin_alike_is_spread_over_prefill_workers() -> None:
    """All of them between two heartbeats, which tell the gateway of none."""
    world = World(sized(10), 5)
    offered: Counter[WorkerId] = Counter()

    def sent(world: World, details: object) -> None:
        assert isinstance(details, tuple)
        _, worker, body = details
        if isinstance(body, Offer):
            offered[worker] += 1

    world.on("sent", sent)
    world.schedule.run_until(FIRST_S)
    world.clients.planned = 40
    for number in range(40):
        prompt = np.array([7] * 100 + [number] * 100, dtype=np.int32)
        request = ClientRequest(RequestId(f"b{number}"), prompt, GREEDY, None)
        world.schedule.at(FIRST_S + 0.001 * number, world.submit, request)
    report = world.run()
    assert report.outcomes["length"] == 40
    assert len(offered) == 4
    assert max(offered.values()) <= 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_workers_serve() -> None:
    large = LargeWorld(1000, 20_000, made_up_trace())
    large.start()
    report = large.world.run()
    assert report.outcomes["length"] == 20_000
    assert not large.world.clients.requests
