"""Tokens of prompts beside streams: the gaps between the streams' tokens stay as promised, and prompts go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest

from baton.common.engine.pacing import REMEASURE_STEPS, STRETCH, ItlPacer

PAGE, MOST = 16, 4096
SETTLED = 40


@dataclass(frozen=True)
class Step:
    tokens: int
    took_s: float


def saturated(
    pacer: ItlPacer, steps: int, took_s: Callable[[int, int], float], running: int = 4, page: int = PAGE
) -> Iterator[Step]:
    """A worker with more prompts than it can compute: `took_s(step, tokens)`."""
    for number in range(steps):
        most = pacer.most_tokens(running)
        tokens = 0 if most == 0 else min(MOST, max(page, most // page * page))
        seconds = took_s(number, tokens)
        pacer.learn(tokens, seconds)
        yield Step(tokens, seconds)


def linear(alone_s: float, token_s: float) -> Callable[[int, int], float]:
    return lambda number, tokens: alone_s + token_s * tokens


@pytest.mark.parametrize("token_s", [1e-6, 2e-5, 1e-4, 5e-4])
@pytest.mark.parametrize("alone_s", [0.002, 0.02, 0.04])
def test_a_step_takes_what_was_promised(alone_s: float, token_s: float) -> None:
    steps = list(saturated(ItlPacer(0.08), 200, linear(alone_s, token_s)))
    assert max(one.took_s for one in steps) <= 0.08 + PAGE * token_s
    with_prompts = [one for one in steps[SETTLED:] if one.tokens]
    assert all(one.took_s > 0.08 - (PAGE + 1) * token_s - 1e-9 or one.tokens == MOST for one in with_prompts)


def test_where_too_much_was_promised_prompts_get_their_share() -> None:
    steps = list(saturated(ItlPacer(0.01), 200, linear(0.07, 1e-3)))
    assert max(one.took_s for one in steps) <= STRETCH * 0.07 + 1e-9
    for_prompts_s = sum(one.took_s - 0.07 for one in steps)
    assert for_prompts_s > 0.4 * sum(one.took_s for one in steps)


def test_prompts_are_left_out_seldom_and_never_twice_in_a_row() -> None:
    steps = list(saturated(ItlPacer(0.05), 500, linear(0.02, 1e-4)))
    without = [number for number, one in enumerate(steps) if not one.tokens]
    assert without[0] == 0
    assert {later - earlier for earlier, later in pairwise(without)} == {REMEASURE_STEPS + 1}


def test_without_streams_there_is_no_limit() -> None:
    assert ItlPacer(0.05).most_tokens(0) >= MOST


def test_a_slower_machine_is_followed() -> None:
    def took_s(number: int, tokens: int) -> float:
        return linear(0.02, 1e-4)(number, tokens) * (1 if number < 100 else 2)

    steps = list(saturated(ItlPacer(0.1), 500, took_s))
    slower = steps[100:]
    assert slower[0].took_s > 0.19, "else this shows nothing"
    assert all(one.took_s <= 0.125 for one in slower[SETTLED:])
    assert all(one.took_s <= 0.105 for one in slower[-100:])


def test_chunks_shrink_as_the_history_grows() -> None:
    history = 0

    def took_s(number: int, tokens: int) -> float:
        nonlocal history
        seconds = 0.02 + 1e-4 * tokens + 1e-7 * tokens * (history + tokens / 2)
        history += tokens
        return seconds

    steps = [one for one in saturated(ItlPacer(0.1), 200, took_s) if one.tokens]
    settled = steps[SETTLED:]
    assert settled[0].tokens > 2 * settled[-1].tokens
    assert all(0.07 <= one.took_s <= 0.125 for one in settled)


def test_a_disturbed_measurement_does_little() -> None:
    """A step of streams alone that was ten times as long is not what streams take from then on."""
    disturbed = REMEASURE_STEPS + 1  # the second step without prompts

    def took_s(number: int, tokens: int) -> float:
        return linear(0.06 * (10 if number == disturbed else 1), 1e-4)(number, tokens)

    steps = list(saturated(ItlPacer(0.05), 4 * disturbed, took_s))
    assert steps[disturbed].tokens == 0
    assert all(one.took_s <= 1.4 * STRETCH * 0.06 for number, one in enumerate(steps) if number != disturbed)


@pytest.mark.parametrize(("disturbed", "times"), [(1, 2.5), (1, 10.0), (2, 10.0), (5, 10.0), (40, 10.0)])
@pytest.mark.parametrize(("alone_s", "token_s"), [(0.02, 1e-4), (0.06, 2e-3)])
def test_first_steps_that_took_too_long_are_forgotten_when_others_take_less(
    alone_s: float, token_s: float, disturbed: int, times: float
) -> None:
    """By another process, say. What they say of streams alone would leave far too much for prompts."""

    def took_s(number: int, tokens: int) -> float:
        return linear(alone_s, token_s)(number, tokens) * (times if number < disturbed else 1)

    steps = list(saturated(ItlPacer(0.05), 200, took_s))
    assert max(one.took_s for one in steps[disturbed:]) <= max(0.05, STRETCH * alone_s) + 1e-9
    assert all(one.tokens or other.tokens for one, other in pairwise(steps)), "prompts go on"
    assert sum(not one.tokens for one in steps) <= 2 + 200 / REMEASURE_STEPS


@pytest.mark.parametrize("page", [1, PAGE])
def test_after_a_first_step_with_prompts_that_took_very_long_prompts_go_on(page: int) -> None:
    """What it says of a token is more than there is room for."""

    def took_s(number: int, tokens: int) -> float:
        return linear(0.02, 1e-4)(number, tokens) + 10.0 * (number == 1)

    steps = list(saturated(ItlPacer(0.05), 4 * REMEASURE_STEPS, took_s, page=page))
    without = [number for number, one in enumerate(steps) if not one.tokens]
    assert all(later - earlier > REMEASURE_STEPS for earlier, later in pairwise(without)), without
    assert steps[-1].tokens > 10 * PAGE, "and it is soon forgotten"


@pytest.mark.parametrize("nonsense_s", [0.0, -1.0, math.nan, math.inf])
def test_times_that_are_none_starve_nobody(nonsense_s: float) -> None:
    steps = list(saturated(ItlPacer(0.05), 100, lambda number, tokens: nonsense_s))
    assert sum(one.tokens > 0 for one in steps) > 90


def test_prompts_that_cost_nothing_are_not_limited() -> None:
    steps = list(saturated(ItlPacer(0.05), 20, linear(0.02, 0.0)))
    assert steps[-1].tokens == MOST
