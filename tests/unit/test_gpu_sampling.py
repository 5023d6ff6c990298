"""Sampling on a device against the host's."""

from __future__ import annotations

import pytest
import torch

from baton.common.engine.gpu.sampling import host_arguments, needs_host, sample_on_device
from baton.common.engine.sampling import sample
from baton.common.messages import SamplingParams

KINDS = {
    "greedy": SamplingParams(),
    "plain": SamplingParams(temperature=0.7, seed=3),
    "hot": SamplingParams(temperature=2.0, seed=4),
    "tiny temperature": SamplingParams(temperature=1e-6, seed=4),
    "top-k": SamplingParams(temperature=1.0, top_k=5, seed=5),
    "top-p": SamplingParams(temperature=1.0, top_p=0.5, seed=6),
    "all": SamplingParams(temperature=1.3, top_k=50, top_p=0.8, min_p=0.01, seed=7),
    "few": SamplingParams(temperature=2.0, top_k=8, top_p=0.6, seed=9),
    "min-p": SamplingParams(temperature=1.0, min_p=0.2, seed=8),
}


@pytest.mark.parametrize("vocabulary", [7, 300, 5000])
def test_the_device_draws_what_the_host_draws(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    params = list(KINDS.values()) * 25
    logits, indices = 4 * torch.randn(len(params), vocabulary), list(range(len(params)))
    expected, _ = sample(logits, params, indices)
    arguments = torch.tensor(host_arguments(params, indices), dtype=torch.float64)
    assert sample_on_device(logits, arguments).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_ties_are_settled_alike(kind: str) -> None:
    """As they come in bfloat16: several tokens have the largest logit, and the one that is the last to be kept."""
    logits = torch.randint(-3, 4, (64, 50), generator=torch.Generator().manual_seed(1)).bfloat16()
    params, indices = [KINDS[kind]] * 64, list(range(64))
    expected, _ = sample(logits, params, indices)
    arguments = host_arguments(params, indices)
    rows = torch.tensor(arguments, dtype=torch.float64) if arguments else None
    assert sample_on_device(logits, rows).tolist() == expected


def test_a_draw_of_nothing_takes_the_first_token_that_weighs_something() -> None:
    logits = torch.tensor([[-9.0, 1.0, 1.0, 0.0]])
    assert sample_on_device(logits, torch.tensor([[1.0, 0, 1.0, 0.5, 0.0]], dtype=torch.float64)).tolist() == [1]


def test_what_the_host_has_to_choose() -> None:
    assert not any(needs_host(params) for params in KINDS.values())
    assert needs_host(SamplingParams(logprobs=0))
    assert needs_host(SamplingParams(logit_bias=((3, 1.0),)))
