"""The last minute of a gateway, against all that ever happened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.messages import Timeline
from baton.deploy.recent import SLOWEST, SPAN_S, SPANS, RecentBook, SlowRequest

WINDOW_S = SPAN_S * SPANS


def request(name: str, total_s: float) -> SlowRequest:
    return SlowRequest(
        request_id=name, total_s=total_s, ttft_s=0.1, prompt_tokens=3, completion_tokens=2, timeline=Timeline()
    )


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.001, 50.0)), max_size=60))
def test_only_the_last_minute_counts(gaps: list[tuple[float, float]]) -> None:
    book, now, all_of_them = RecentBook(100.0), 100.0, []
    for number, (gap_s, total_s) in enumerate(gaps):
        now += gap_s
        book.tokens(now, 2, 0.05, first=True)
        book.ended(now, "stop")
        book.finished(now, request(f"r{number}", total_s))
        all_of_them.append((now, total_s, f"r{number}"))
    seen = book.look(now)
    first_s = (now // SPAN_S - SPANS + 1) * SPAN_S
    inside = [one for one in all_of_them if one[0] >= first_s]
    assert WINDOW_S - SPAN_S <= seen.span_s <= WINDOW_S or seen.span_s == now - 100.0
    assert seen.outcomes.get("stop", 0) == len(inside)
    assert seen.output_tokens == 2 * len(inside)
    assert seen.prompt_tokens == 3 * len(inside)
    longest = sorted(inside, key=lambda one: one[1], reverse=True)[:SLOWEST]
    assert sorted(one.total_s for one in seen.slowest) == sorted(one[1] for one in longest)
    assert [one.total_s for one in seen.slowest] == sorted((one.total_s for one in seen.slowest), reverse=True)
    by_name = {name: at_s for at_s, _, name in inside}
    assert all(one.ended_s_ago == now - by_name[one.request_id] for one in seen.slowest)


def test_latencies_are_told_apart_and_forgotten() -> None:
    book = RecentBook(0.0)
    book.tokens(1.0, 1, 0.2, first=True)
    for _ in range(10):
        book.tokens(1.0, 1, 0.02, first=False)
    seen = book.look(2.0)
    assert seen.span_s == 2.0
    assert seen.ttft.p50_s == pytest.approx(0.175, abs=0.03)
    assert 0.01 < (seen.itl.p99_s or 0.0) <= 0.025
    assert seen.total.p50_s is None
    later = book.look(1.0 + WINDOW_S + SPAN_S)
    assert (later.ttft.p50_s, later.output_tokens) == (None, 0)
