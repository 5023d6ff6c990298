"""Every trace format is read, and what is not one is named by its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.common.errors import ConfigError
from baton.deploy.planner.traces import at_rate, one_by_one, read_trace, with_lengths, within

MOONCAKE = (
    '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}',
    '{"timestamp": 0, "input_length": 900, "output_length": 0, "hash_ids": [0, 2]}',
    '{"timestamp": 3000, "input_length": 30, "output_length": 7, "hash_ids": [3]}',
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:17:03.9799600,4808,10",
    "2023-11-16 18:17:05.9799600,3180,8",
    "2023-11-16 18:17:04.4799600,110,27",
)
OURS = (
    '{"arrival_s": 1.5, "prompt_tokens": 10, "output_tokens": 2}',
    '{"arrival_s": 2.0, "prompt_tokens": 64, "output_tokens": 3, "blocks": [7, 8], "block_tokens": 32}',
)
TRACES = Path(__file__).resolve().parents[3] / "shared/data/traces"


def test_mooncake() -> None:
    trace = read_trace(MOONCAKE, "trace")
    assert [one.prompt_tokens for one in trace.requests] == [600, 900, 30]
    assert [one.output_tokens for one in trace.requests] == [5, 1, 7], "an answer has a token"
    assert trace.requests[1].blocks == (0, 2)
    assert trace.requests[1].block_tokens == 512
    assert [one.arrival_s for one in trace.requests] == [0.0, 1.5, 3.0], "those of one time are spread over it"


def test_azure() -> None:
    trace = read_trace(AZURE, "trace")
    assert [(one.arrival_s, one.prompt_tokens, one.output_tokens) for one in trace.requests] == [
        (0.0, 4808, 10),
        (pytest.approx(0.5), 110, 27),
        (pytest.approx(2.0), 3180, 8),
    ]


def test_our_own() -> None:
    trace = read_trace(OURS, "trace")
    assert trace.requests[0].arrival_s == 0.0
    assert trace.requests[1].blocks == (7, 8)
    assert trace.rate == pytest.approx(2.0)


def test_only_the_first_are_read() -> None:
    assert len(read_trace([*MOONCAKE, "not JSON at all"], "trace", most=3).requests) == 3


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "is empty"),
        (["a,b,c"], "is of no format that can be read (known: Mooncake"),
        ([MOONCAKE[0], "{"], "trace, line 2"),
        ([MOONCAKE[0], '{"timestamp": 1, "input_length": 3}'], "missing required field"),
        ([MOONCAKE[0], MOONCAKE[0].replace("600", "0")], "trace, line 2: prompt_tokens = 0: must be positive"),
        ([OURS[0], OURS[1].replace("blocks", "blokcs")], "unknown field"),
        ([*AZURE, "yesterday,1,2"], "trace, line 5"),
        ([*AZURE, "2023-11-16 18:17:05,1"], "trace, line 5"),
        ([*AZURE, "2023-11-16 18:17:05,many,1"], "trace, line 5"),
        ([OURS[0]], "needs two requests"),
        ([OURS[0], OURS[0]], "needs two requests"),
    ],
)
def test_what_is_no_trace_is_named(lines: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_trace(lines, "trace")
    assert says in str(refused.value)


def test_scaling() -> None:
    trace = read_trace(MOONCAKE, "trace")
    faster = at_rate(trace, 10.0)
    assert faster.rate == pytest.approx(10.0)
    assert faster.requests[1].arrival_s == pytest.approx(0.1), "bursts stay bursts"
    shorter = with_lengths(trace, 1 / 16).requests[0]
    assert (shorter.prompt_tokens, shorter.block_tokens, shorter.output_tokens) == (38, 32, 1)
    assert one_by_one(trace, 100.0).requests[2].arrival_s == 200.0


def test_who_fits_nowhere_is_left_out_and_counted() -> None:
    trace = within(read_trace(MOONCAKE, "trace"), 700)
    assert [one.prompt_tokens for one in trace.requests] == [600, 30]
    assert trace.left_out == 1
    with pytest.raises(ConfigError, match="--scale-lengths"):
        within(trace, 100)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not in this checkout: shared/data/traces")
@pytest.mark.parametrize(
    ("name", "requests", "prompt"),
    [("azure2023_llm_conv.csv", 19366, 1155), ("mooncake_conversation_trace.jsonl", 12031, 12035)],
)
def test_public_traces_are_read_whole(name: str, requests: int, prompt: int) -> None:
    with (TRACES / name).open() as lines:
        trace = read_trace(lines, name)
    assert len(trace.requests) == requests
    assert round(trace.mean_prompt_tokens) == prompt
