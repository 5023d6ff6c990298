"""Sampling is a function of (logits, parameters, output index): right in distribution, equal wherever it runs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.engine.sampling import sample, uniform
from baton.common.messages import SamplingParams


def tokens_of(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    """`count` draws from one row of logits, at output indices 0, 1, ..."""
    drawn, _ = sample(logits.expand(count, -1), [params] * count, list(range(count)))
    return drawn


def test_the_random_numbers_are_pinned() -> None:
    """Two versions of Baton in one cluster continue each other's answers: these values must never change."""
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform((1 << 63) - 1, 1 << 20)] == [
        0.6524484863740322,
        0.7012121095215252,
        0.36818951565166946,
        0.32491307998290764,
    ]


def test_the_random_numbers_are_uniform() -> None:
    draws = [uniform(seed, index) for seed in range(100) for index in range(100)]
    assert all(0 <= u < 1 for u in draws)
    assert abs(sum(draws) / len(draws) - 0.5) < 0.01
    for bucket in range(10):
        assert abs(sum(bucket <= 10 * u < bucket + 1 for u in draws) - 1000) < 150
    assert len(set(draws)) == len(draws)


def test_greedy_takes_the_best_and_ignores_the_seed() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 4.0, -1.0]])
    tokens, logprobs = sample(logits, [SamplingParams(seed=1), SamplingParams(seed=2)], [0, 9])
    assert tokens == [1, 0]
    assert logprobs == [None, None]


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 6 tokens, each of 5 temperatures; 20.5 is the 0.1 % point of 5 degrees of freedom."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.5])
    for temperature in (0.3, 0.7, 1.0, 1.5, 10.0):
        expected = torch.softmax(logits / temperature, dim=-1) * 4000
        drawn = torch.bincount(
            torch.tensor(tokens_of(logits, SamplingParams(temperature=temperature, seed=11), 4000)), minlength=6
        )
        assert float(((drawn - expected) ** 2 / expected).sum()) < 20.5, temperature


def test_top_k_and_top_p_keep_the_smallest_sets() -> None:
    logits = torch.log(torch.tensor([0.05, 0.4, 0.25, 0.2, 0.1]))
    cases = [
        (SamplingParams(temperature=1, top_k=1), {1}),
        (SamplingParams(temperature=1, top_k=3), {1, 2, 3}),
        (SamplingParams(temperature=1, top_p=0.39), {1}),
        (SamplingParams(temperature=1, top_p=0.6), {1, 2}),
        (SamplingParams(temperature=1, top_p=0.9), {1, 2, 3, 4}),
        (SamplingParams(temperature=1, top_k=3, top_p=0.5), {1, 2}),  # 0.4 of 0.85 is less than half of it
        (SamplingParams(temperature=1, top_k=99), {0, 1, 2, 3, 4}),
    ]
    for params, kept in cases:
        assert set(tokens_of(logits, params, 600)) == kept, params


def test_equally_likely_tokens_are_kept_together() -> None:
    drawn = tokens_of(torch.zeros(8), SamplingParams(temperature=1, top_k=2), 400)
    assert set(drawn) == set(range(8))


def test_top_p_of_a_flat_large_vocabulary_looks_beyond_the_first_candidates() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5000) * 0.01
    drawn = tokens_of(logits, SamplingParams(temperature=1, top_p=0.5), 500)
    kept = set(torch.topk(logits, 2600).indices.tolist())
    assert set(drawn) <= kept
    assert len(set(drawn)) > 400


def test_extreme_temperatures_do_not_break() -> None:
    logits = torch.tensor([1e4, -1e4, 9.9e3, float("-inf")])
    assert set(tokens_of(logits, SamplingParams(temperature=1e-6), 50)) == {0}
    assert 3 not in tokens_of(logits, SamplingParams(temperature=100), 200)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, (1 << 63) - 1),
    index=st.integers(0, 1 << 20),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.05, 1),
    vocab=st.integers(2, 700),
    row=st.integers(0, 4),
)
def test_a_row_is_independent_of_its_batch(
    seed: int, index: int, temperature: float, top_k: int, top_p: float, vocab: int, row: int
) -> None:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(seed % 1000)) * 4
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, logprobs=1)
    alone, alone_scores = sample(logits[row : row + 1], [params], [index])
    others = [SamplingParams(temperature=0.5 * i, top_p=0.8, seed=i) for i in range(5)]
    others[row] = params
    batched, scores = sample(logits, others, [index if i == row else 3 for i in range(5)])
    assert batched[row] == alone[0]
    assert scores[row] == alone_scores[0]


def test_log_probabilities_are_of_the_unmodified_distribution() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    params = [
        SamplingParams(temperature=0.01, logprobs=2),
        SamplingParams(logprobs=0),
        SamplingParams(logprobs=-1),
    ]
    _, (first, second, third) = sample(logits, params, [0, 0, 0])
    total = math.log(sum(math.exp(x) for x in (1, 2, 3)))
    assert first is not None
    assert first.logprob == pytest.approx(3 - total, abs=1e-6)
    assert [token for token, _ in first.top] == [2, 1]
    assert first.top[1][1] == pytest.approx(2 - total, abs=1e-6)
    assert second is not None
    assert second.top == ()
    assert third is None
