"""From logits to tokens on a device: what `engine/sampling.py` says, for rows that nothing reshapes, in one pass.

The random numbers are the same, and so are the rules: a token is the inverse of the cumulative distribution at the
request's own draw, in token order; ties go to the first token; what is kept is defined by values. Sums are done in
another order than on the host: a draw within a rounding of a boundary may fall on its other side.
Owns nothing. Penalties, biases, grammars and log probabilities are the host's (`needs_host`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.common.engine.sampling import uniform
from baton.common.messages import SamplingParams


def needs_host(params: SamplingParams) -> bool:
    """Whether a row's token has to be chosen by the host."""
    return params.reshapes or params.logprobs >= 0


def host_arguments(params: Sequence[SamplingParams], output_indices: Sequence[int]) -> list[list[float]]:
    """What `sample_on_device` takes as `rows`, one row after the other; none where all are greedy."""
    if all(one.temperature <= 0 for one in params):
        return []
    return [
        [one.temperature, float(one.top_k), one.top_p, one.min_p, uniform(one.seed, index)]
        for one, index in zip(params, output_indices, strict=True)
    ]


def sample_on_device(logits: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """int64 [rows] of `logits` [rows, vocabulary]. `rows` float64 [rows, 5] as `host_arguments` has them, on the same
    device; None: all greedy."""
    logits = logits.float()
    top = logits.amax(-1, keepdim=True)
    vocabulary = logits.shape[1]
    places = torch.arange(vocabulary, device=logits.device)
    greedy = torch.where(logits == top, places, vocabulary - 1).amin(-1)
    if rows is None:
        return greedy
    temperature, top_k, top_p, min_p, draws = rows.unbind(1)
    scale = torch.where(temperature > 0, temperature, 1.0).float()[:, None]
    floor = _floor(logits, top, scale, top_k, top_p.clamp(max=1.0), min_p.float()[:, None])
    weights = torch.where(logits >= floor, ((logits - top) / scale).exp(), 0.0)
    inside = weights.double().cumsum(-1)
    total = inside[:, -1:]
    drawn = torch.searchsorted(inside, draws[:, None] * total, right=True)
    last = torch.searchsorted(inside, total.contiguous())
    return torch.where(temperature > 0, torch.minimum(drawn, last)[:, 0], greedy)


def _floor(
    logits: torch.Tensor,
    top: torch.Tensor,
    scale: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """The smallest logit [rows, 1] that min-p, top-k and then top-p keep."""
    vocabulary = logits.shape[1]
    floor = torch.where(min_p > 0, top + scale * min_p.log(), float("-inf"))
    best = logits.sort(-1, descending=True).values
    count = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary).long()[:, None]
    floor = torch.maximum(floor, best.gather(1, count - 1))
    kept = (best >= floor) & (torch.arange(vocabulary, device=logits.device) < count)
    weights = torch.where(kept, ((best - top) / scale).double().exp(), 0.0)
    enough = top_p[:, None] * weights.sum(-1, keepdim=True)
    reached = torch.searchsorted(weights.cumsum(-1), enough).clamp(max=vocabulary - 1)
    cut = torch.where(top_p[:, None] < 1, best.gather(1, reached), float("-inf"))
    return torch.maximum(floor, cut)
