"""`baton top`: every owner of a page is seen, rates come from two looks, nothing is wider than it must be."""

from __future__ import annotations

import io

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console

from baton.common.messages import Load, Timeline
from baton.deploy.recent import Quantiles, Recent, SlowRequest
from baton.deploy.status import GatewayStatus, WorkerView
from baton.deploy.top import BAR_CELLS, OWNERS, page_bar, screen
from baton.transfer.reports import Flow, Latencies


def census_of(**pages: int) -> dict[str, int]:
    census = {**dict.fromkeys(OWNERS, 0), **pages}
    return {**census, "total": sum(census.values())}


def look(steps: int, nbytes: int) -> GatewayStatus:
    flow = Flow(
        peer="prefill-0", lane="tcp", direction="in", nbytes=nbytes, failed=2, recent_gbps=1.5,
        handoff=Latencies(counts=(0,) * 10 + (7,) + (0,) * 8, longest_s=0.2),
    )  # fmt: skip
    load = Load(running=3, queued=1, queued_tokens=777, steps=steps, free_pages=25, total_pages=100)
    details = {"decode-0": {"census": census_of(free=20, cached=5, request=74, quarantined=1), "flows": [flow]}}
    recent = Recent(
        span_s=50.0, outcomes={"stop": 90, "length": 10, "overloaded": 4}, prompt_tokens=5000, output_tokens=10000,
        ttft=Quantiles(p50_s=0.12, p90_s=0.4, p99_s=1.5),
        slowest=(
            SlowRequest(
                request_id="abcdef0123456789", ended_s_ago=7.0, total_s=9.8, ttft_s=1.5, prompt_tokens=300,
                completion_tokens=64, timeline=Timeline(queue_s=0.9, decode_worker="decode-0"),
            ),
        ),
    )  # fmt: skip
    return GatewayStatus(
        version="1", model="some-model", max_model_len=8192, ready=True, reason="", requests=Load(running=3),
        workers=[
            WorkerView(worker="decode-0", role="decode", incarnation=2, silent=False, load=load),
            WorkerView(worker="prefill-0", role="prefill", incarnation=1, silent=True, load=Load()),
        ],
        lanes=[], details=msgspec.to_builtins(details), recent=recent,
    )  # fmt: skip


def drawn(before: GatewayStatus, now: GatewayStatus, passed_s: float) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=110).print(screen(before, now, passed_s))
    return out.getvalue().splitlines()


def row(lines: list[str], begins: str) -> list[str]:
    return next(line for line in lines if line.startswith(begins)).split()


def test_a_screen_tells_rates_owners_lanes_and_slow_answers() -> None:
    lines = drawn(look(100, 1 << 20), look(130, 3 << 20), 2.0)
    head = " ".join(lines[0:2])
    assert "2.1 requests/s, 100.0 prompt and 200.0 output tokens/s" in head
    assert "4 overloaded" in head
    assert row(lines, "first token")[-3:] == ["120", "400", "1500"]
    assert row(lines, "decode-0@2")[1:7] == ["ok", "3", "1", "777", "15.0", "75%"]
    assert row(lines, "prefill-0@1")[1] == "silent"
    assert any("quarantined 1" in line and "request 74" in line for line in lines)
    lane = row(lines, "prefill-0 ")
    assert lane[1:3] == ["decode-0", "tcp"]
    assert "1.0 MiB/s" in " ".join(lane)
    assert lane[-1] == "2"
    assert row(lines, "abcdef012345")[1:5] == ["7", "s", "9800", "1500"]


def test_a_restarted_worker_and_a_first_look_have_no_rate() -> None:
    first = look(100, 0)
    assert row(drawn(first, first, 0.0), "decode-0@2")[5] == "75%"
    again = replace(look(5, 0), workers=[replace(first.workers[0], incarnation=3, load=Load(steps=5))])
    assert row(drawn(first, again, 1.0), "decode-0@3")[4] == "0.0"


@given(st.dictionaries(st.sampled_from(list(OWNERS)), st.integers(0, 10_000)))
def test_whatever_holds_a_page_is_in_the_bar(pages: dict[str, int]) -> None:
    census = census_of(**pages)
    bar = page_bar(census)
    if not census["total"]:
        assert bar.plain == ""
        return
    assert len(bar.plain) == BAR_CELLS
    styles = {span.style for span in bar.spans if span.end > span.start}
    assert styles == {OWNERS[name] for name, count in pages.items() if count}
