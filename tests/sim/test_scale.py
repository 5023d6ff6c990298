"""Large worlds: what `make sim-large` runs at full size, here small; a slow test runs a thousand workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.deploy.sim.scale import LargeWorld, made_up_trace, prompt_of, read_trace


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
    first, second = (line for line in made_up_trace(2))
    one, other = prompt_of(first, 1), prompt_of(first, 2)
    assert len(one) == len(other) == first.prompt_tokens // 64
    assert (one != other).any()
    assert (prompt_of(first, 1) == one).all()
    shared = [a == b for a, b in zip(first.blocks, second.blocks, strict=False)]
    assert not any(shared), "these two begin with different blocks"


def test_a_trace_of_mooncake_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]}))
    (line,) = read_trace(path)
    assert (line.at_s, line.prompt_tokens, line.output_tokens, line.blocks) == (3.0, 700, 5, (0, 9))
    assert len(prompt_of(line, 1)) == 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_workers_serve() -> None:
    large = LargeWorld(1000, 20_000, made_up_trace())
    large.start()
    report = large.world.run()
    assert report.outcomes["length"] == 20_000
    assert not large.world.clients.requests
