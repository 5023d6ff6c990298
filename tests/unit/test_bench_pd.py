"""The benchmark of disaggregation against a system that is made up: what is asked, and what the table says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from baton.deploy.planner.traces import TraceRequest
from benchmarks import bench_pd
from benchmarks.pd import load


class Echo:
    """Answers as many chunks as were asked for, in no time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bodies: list[dict[str, Any]] = []
        self.turns = 0

    async def chunks(self, client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
        self.bodies.append(body)
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(0)
            yield json.dumps({"choices": [{"text": "x"}]})
        yield json.dumps({"choices": [], "usage": {}})
        yield "[DONE]"

    def resume(self) -> None:
        self.turns += 1

    def pause(self) -> None:
        self.turns -= 1


class Mute(Echo):
    async def chunks(self, client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
        yield "[DONE]"


def test_every_system_is_asked_the_same_in_turns() -> None:
    systems = [Echo("ours"), Echo("theirs")]
    requests = [TraceRequest(0.0, 40, 3, (1, 2), 16), TraceRequest(0.01, 24, 5)]
    found = asyncio.run(bench_pd.measure([*systems, Mute("mute")], 1, requests, out := {}))  # type: ignore[arg-type]
    assert [system.turns for system in systems] == [0, 0]
    ours = found["ours"]
    assert [len(times) for times in ours.idle_ttft_s.values()] == [1, 1, 1], "the warm-up does not count"
    assert len(ours.quiet_gaps_s) == load.STREAMS * (load.STREAM_TOKENS - 1)
    assert sorted(len(served.gaps_s) for served in ours.trace) == [2, 4]
    in_trace = [[one for one in system.bodies if one["max_tokens"] in (3, 5)] for system in systems]
    assert in_trace[0] == in_trace[1]
    assert list(out) == ["mute"], "who fails is left out, and the others go on"
    text = bench_pd.report(found, "about", out)
    assert "| ours | theirs |" in text
    assert "- Left out: mute: RuntimeError: mute answered without a token" in text
    assert "trace: goodput" in text


def test_equal_ids_are_equal_tokens_and_no_round_meets_another() -> None:
    request = TraceRequest(1.0, 40, 1, (7, 8), 16)
    tokens = load.trace_prompt(request, 1)
    assert len(tokens) == 40
    assert load.trace_prompt(TraceRequest(2.0, 32, 1, (7, 9), 16), 1)[:16] == tokens[:16]
    assert load.trace_prompt(request, 2)[:16] != tokens[:16]


def test_good_is_who_was_in_time() -> None:
    assert load.Served(load.TTFT_SLO_S, [load.ITL_SLO_S]).good
    assert not load.Served(load.TTFT_SLO_S + 0.1, []).good
    assert not load.Served(0.1, [2 * load.ITL_SLO_S]).good
