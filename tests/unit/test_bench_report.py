"""`baton bench`: what is asked, and what is made of the answers. Pure."""

from __future__ import annotations

import pytest

from baton.common.errors import ConfigError
from baton.deploy.bench.load import Sent
from baton.deploy.bench.report import Point, best_rate, point_of, remarks, verdict
from baton.deploy.bench.workload import FIRST_ID, LAST_ID, asks_of, parse_lengths, parse_rates, same_lengths
from baton.deploy.planner.outcome import parse_slo
from baton.deploy.planner.traces import Trace, TraceRequest, at_rate


def answered(at_s: float, *pieces_s: float, late_s: float = 0.0) -> Sent:
    return Sent(
        at_s, at_s + late_s, [at_s + one for one in pieces_s], at_s + pieces_s[-1], prompt_tokens=10, cached_tokens=4,
        output_tokens=len(pieces_s),
    )  # fmt: skip


def test_prompts_have_their_lengths_share_their_blocks_and_depend_on_the_seed() -> None:
    requests = (
        TraceRequest(0.0, 25, 3, (1, 2, 3), 10),
        TraceRequest(1.0, 27, 3, (1, 2, 4), 10),
        TraceRequest(2.0, 12, 3),
    )
    first, second, third = asks_of(Trace("t", requests), "7")
    assert [len(one.prompt) for one in (first, second, third)] == [25, 27, 12]
    assert first.prompt[:20] == second.prompt[:20]
    assert first.prompt[20:] != second.prompt[20:25]
    assert all(FIRST_ID <= token <= LAST_ID for one in (first, second, third) for token in one.prompt)
    assert asks_of(Trace("t", requests), "7") == [first, second, third]
    assert asks_of(Trace("t", requests), "8")[0].prompt[:10] != first.prompt[:10]


def test_arrivals_come_at_the_rate_that_is_asked() -> None:
    trace = at_rate(same_lengths(5, 6, 400, 1), 8.0)
    assert trace.rate == pytest.approx(8.0)
    gaps = [
        after.arrival_s - before.arrival_s for before, after in zip(trace.requests, trace.requests[1:], strict=False)
    ]
    assert min(gaps) < 0.02 < 0.4 < max(gaps)  # at random, not evenly


@pytest.mark.parametrize("text", ["512", "512:", ":3", "0:3", "a:b", "5:-1"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--lengths"):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["", "1,,2", "x", "0", "-1", "inf", "nan"])
def test_rates_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--rates"):
        parse_rates(text)


def test_latencies_rates_and_promises() -> None:
    slo = parse_slo("ttft=200ms,itl=150ms")
    sent = [
        answered(0.0, 0.1, 0.2, 0.3),
        answered(1.0, 0.3, 0.4, 0.5),  # late with its first token
        answered(2.0, 0.1, 0.5, 0.9),  # two gaps too long; one is forgiven
        answered(3.0, 0.1, 0.5, 0.6),
        Sent(4.0, 4.0, ended_s=4.1, failure="HTTP 429 overloaded"),
    ]
    point = point_of("x", 1.0, sent, slo)
    assert (point.requests, point.answered, point.kept) == (5, 4, 2)
    assert point.failures == {"HTTP 429 overloaded": 1}
    assert point.ttft.p50 == pytest.approx(0.1)
    assert point.ttft.mean == pytest.approx(0.15)
    assert point.itl.p50 == pytest.approx(0.1)
    assert point.tpot.p50 == pytest.approx((0.1 + 0.25) / 2)
    assert point.duration_s == pytest.approx(4.1)
    assert point.goodput == pytest.approx(2 / 4.1)
    assert point.attainment == 0.4
    assert (point.prompt_tokens, point.cached_tokens, point.output_tokens) == (40, 16, 12)
    assert remarks([point]) == ["x at 1 requests/s: 1 failed: 1 x HTTP 429 overloaded"]


def test_without_promises_nothing_is_said_to_be_kept() -> None:
    point = point_of("x", None, [answered(0.0, 0.1)], None)
    assert (point.kept, point.attainment, point.goodput) == (None, None, None)
    assert point.tpot.p50 is None


def test_a_client_that_was_late_says_so() -> None:
    point = point_of("x", 2.0, [answered(0.0, 0.1, late_s=0.3)], None)
    assert "sent late, by 300 ms" in remarks([point])[0]


def points(system: str, attained: dict[float, int]) -> list[Point]:
    slo = parse_slo("ttft=200ms")
    return [
        point_of(system, rate, [answered(0.0, 0.1) if one < kept else answered(0.0, 0.9) for one in range(10)], slo)
        for rate, kept in attained.items()
    ]


def test_the_better_system_is_the_one_that_keeps_its_promises_at_a_higher_rate() -> None:
    slo = parse_slo("ttft=200ms")
    pd, colocated = points("pd", {1.0: 10, 2.0: 9, 4.0: 5}), points("colocated", {1.0: 10, 2.0: 8, 4.0: 10})
    assert best_rate(pd, 0.9) == 2.0
    assert best_rate(colocated, 0.9) == 1.0  # what is kept beyond a rate at which it was not does not count
    assert verdict([*pd, *colocated], slo, 0.9).startswith("pd is better for this load")
    assert verdict([*colocated, *pd], slo, 0.9).startswith("pd is better for this load")
    assert verdict([*pd, *points("colocated", {1.0: 10, 2.0: 9, 4.0: 5})], slo, 0.9).startswith("No difference")
    assert "at no rate that was tried" in verdict([*pd, *points("colocated", {1.0: 1, 2.0: 0, 4.0: 0})], slo, 0.9)
    assert "TTFT 1.00x" in verdict([*pd, *colocated], None, 0.9)
