"""Sampling is a function of (logits, parameters, output index): right in distribution, equal wherever it runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.engine.batch import NO_TOKEN, NO_TOKENS, History
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


def documented(logits: list[float], p: SamplingParams, prompt: list[int], outputs: list[int]) -> list[float]:
    """The logits that are chosen from, token by token, as vLLM and OpenAI document it. In float32, as there."""
    f32 = np.float32
    changed = [f32(value) for value in logits]
    for token, bias in p.logit_bias:
        changed[token] += f32(bias)
    for token in {*prompt, *outputs}:
        penalty = f32(p.repetition_penalty)
        changed[token] = changed[token] / penalty if changed[token] > 0 else changed[token] * penalty
    for token in set(outputs):
        changed[token] -= f32(p.frequency_penalty) * f32(outputs.count(token))
        changed[token] -= f32(p.presence_penalty)
    return [float(value) for value in changed]


def kept_tokens(logits: list[float], p: SamplingParams) -> dict[int, float]:
    """Token to probability of those that may be drawn: min-p, then top-k, then top-p of what is left."""
    weights = {token: math.exp((value - max(logits)) / p.temperature) for token, value in enumerate(logits)}
    kept = {token: weight for token, weight in weights.items() if weight >= p.min_p}
    if p.top_k:
        least = sorted(kept.values(), reverse=True)[: p.top_k][-1]
        kept = {token: weight for token, weight in kept.items() if weight >= least}
    ranked, wanted = sorted(kept.values(), reverse=True), p.top_p * sum(kept.values())
    count = next(n for n in range(1, len(ranked) + 1) if sum(ranked[:n]) >= wanted * (1 - 1e-12))
    kept = {token: weight for token, weight in kept.items() if weight >= ranked[count - 1]}
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


biases = st.dictionaries(st.integers(0, 39), st.floats(-5, 5, width=32), max_size=4).map(lambda d: tuple(d.items()))
shaping = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.3]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    top_k=st.sampled_from([0, 5]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.8]),
    frequency_penalty=st.sampled_from([-1.5, 0.0, 0.6]),
    presence_penalty=st.sampled_from([-0.8, 0.0, 2.0]),
    logit_bias=biases,
    seed=st.integers(0, 1 << 62),
)


@settings(max_examples=150, deadline=None)
@given(
    params=shaping,
    prompt=st.lists(st.integers(0, 39), max_size=12),
    outputs=st.lists(st.integers(0, 39), max_size=12),
    noise=st.integers(0, 1 << 30),
)
def test_penalties_biases_and_min_p_are_as_documented(
    params: SamplingParams, prompt: list[int], outputs: list[int], noise: int
) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(noise)) * 3
    index = len(outputs)
    history = {1: History(np.array(prompt, np.int32), np.array(outputs, np.int32))} if params.penalizes else {}
    neighbours = [SamplingParams(), params, SamplingParams(temperature=1, min_p=0.3)]
    (before, token, _), _ = sample(logits.expand(3, -1), neighbours, [0, index, 0], history)
    changed = documented(logits.tolist(), params, prompt, outputs)
    assert before == int(logits.argmax())  # the neighbours' rows are their own
    if params.temperature == 0:
        assert token == int(np.argmax(changed))
        return
    kept = kept_tokens(changed, params)
    assert token in kept
    below = sum(probability for other, probability in kept.items() if other < token)
    assert below - 1e-5 <= uniform(params.seed, index) <= below + kept[token] + 1e-5


def test_penalties_leave_the_reported_log_probabilities_alone() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    params = SamplingParams(presence_penalty=2.0, logprobs=1)
    (token,), (score,) = sample(logits, [params], [1], {0: History(NO_TOKENS, np.array([2], np.int32))})
    assert token == 1
    assert score is not None
    assert score.top[0][0] == 2
    assert logits.tolist() == [[1.0, 2.0, 3.0]]


@settings(max_examples=150, deadline=None)
@given(
    params=shaping,
    outputs=st.lists(st.integers(0, 39), max_size=12),
    may_come=st.sets(st.integers(0, 39), min_size=1),
    noise=st.integers(0, 1 << 30),
)
def test_under_a_mask_a_token_is_chosen_as_if_there_were_no_others(
    params: SamplingParams, outputs: list[int], may_come: set[int], noise: int
) -> None:
    """That a bias of -100 or a penalty says no to a token that must come changes nothing."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(noise)) * 3
    history = {1: History(NO_TOKENS, np.array(outputs, np.int32))} if params.penalizes else {}
    mask = np.isin(np.arange(40), sorted(may_come))
    neighbours = [SamplingParams(), params, SamplingParams()]
    (before, token, after), _ = sample(logits.expand(3, -1), neighbours, [0, len(outputs), 0], history, {1: mask})
    assert before == after == int(logits.argmax())
    assert token in may_come
    changed = np.array(documented(logits.tolist(), params, [], outputs))
    changed[~mask] = -np.inf
    if params.temperature == 0:
        assert token == int(np.argmax(changed))
        return
    kept = {one: probability for one, probability in kept_tokens(changed.tolist(), params).items() if mask[one]}
    below = sum(probability for other, probability in kept.items() if other < token)
    assert below - 1e-5 <= uniform(params.seed, len(outputs)) <= below + kept[token] + 1e-5


def test_a_mask_leaves_the_reported_log_probabilities_alone_and_where_there_is_none_no_token_is_chosen() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]] * 2)
    params = SamplingParams(logprobs=1)
    masks = {0: np.array([True, False, False]), 1: None}
    tokens, (score, _) = sample(logits, [params] * 2, [0, 0], {}, masks)
    assert tokens == [0, NO_TOKEN]
    assert score is not None
    assert score.top[0][0] == 2
    assert score.logprob == pytest.approx(float(torch.log_softmax(logits[0], 0)[0]))
    assert logits.tolist() == [[1.0, 2.0, 3.0]] * 2
