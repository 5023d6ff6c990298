"""From logits to tokens: biases and penalties, grammars, greedy, temperature, min-p, top-k, top-p, and log
probabilities. Pure functions of their arguments, applied in this order, which is vLLM's.

Randomness is counter-based: output number `i` of a request with seed `s` uses `u = uniform(s, i)` and nothing else, and
penalties count the tokens so far, so a request moves to another worker without any sampler state. The token is the
inverse of the cumulative distribution at `u`, in token order. What is kept by top-k and top-p is defined by values
alone (every token at least as likely as the last one kept stays), so ties do not depend on a sort. A row's token
depends on no other row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.common.engine.batch import NO_TOKEN, History
from baton.common.engine.guiding import TokenMask
from baton.common.messages import SamplingParams, TokenLogprob

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_TOP_P_FIRST_LOOK = 256  # candidates sorted before the whole row has to be
_NO_HISTORIES: Mapping[int, History] = {}
_NO_MASKS: Mapping[int, TokenMask | None] = {}
_NEVER = np.float32(-np.inf)
_BLOCK = 256  # the cumulative sum is searched by blocks of this many tokens


def uniform(seed: int, output_index: int) -> float:
    """53 random bits in [0, 1), from the SplitMix64 finalizer applied to the seed, and again with the index added."""
    return (_mix(_mix(seed + _GOLDEN) + (output_index + 1) * _GOLDEN) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    output_indices: Sequence[int],
    histories: Mapping[int, History] = _NO_HISTORIES,
    masks: Mapping[int, TokenMask | None] = _NO_MASKS,
) -> tuple[list[int], list[TokenLogprob | None]]:
    """One token per row of `logits` [rows, vocabulary], and its log probability where `params.logprobs >= 0`: that of
    the model, before any of the parameters. `histories` has the rows whose `params.penalizes`, `masks` those with a
    grammar: what may come next; where that is None, the token is NO_TOKEN."""
    assert logits.shape[0] == len(params) == len(output_indices), (logits.shape, len(params), len(output_indices))
    logits = logits.float()
    tokens = torch.from_numpy(logits.numpy().argmax(axis=-1))  # numpy's is ten times as fast
    changed = _reshaped(logits, params, histories, masks)
    for row, changed_row in changed.items():
        tokens[row] = int(changed_row.numpy().argmax())
    random_rows = [row for row, p in enumerate(params) if p.temperature > 0]
    if random_rows:
        candidates = logits[random_rows]
        for place, row in enumerate(random_rows):
            if row in changed:
                candidates[place] = changed[row]
        tokens[random_rows] = _sample_random(
            candidates, [params[row] for row in random_rows], [output_indices[row] for row in random_rows]
        )
    logprobs = _logprobs(logits, tokens, params)
    chosen: list[int] = tokens.tolist()
    for row, mask in masks.items():
        if mask is None:
            chosen[row] = NO_TOKEN
    return chosen, logprobs


def _reshaped(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    histories: Mapping[int, History],
    masks: Mapping[int, TokenMask | None],
) -> dict[int, torch.Tensor]:
    """The rows that are changed before a token is chosen; the others are not even copied."""
    changed: dict[int, torch.Tensor] = {}
    for row, history in histories.items():
        changed[row] = logits[row].clone()
        _penalize(changed[row].numpy(), params[row], history)
    for row, mask in masks.items():
        if mask is not None:
            kept = changed.get(row, logits[row]).numpy()
            changed[row] = torch.from_numpy(np.where(mask, kept, _NEVER))
    return changed


def _penalize(logits: npt.NDArray[np.float32], params: SamplingParams, history: History) -> None:
    """Changes one row [vocabulary]. The formulas are those that vLLM documents: a positive logit of a token that was
    seen is divided by the repetition penalty, another one multiplied; the OpenAI penalties are subtracted, for every
    time and once."""
    if params.logit_bias:
        biased, biases = zip(*params.logit_bias, strict=True)
        logits[list(biased)] += np.array(biases, dtype=np.float32)
    outputs = np.bincount(history.outputs)
    if params.repetition_penalty != 1:
        seen = np.bincount(history.prompt, minlength=len(outputs))
        seen[: len(outputs)] += outputs
        tokens = seen.nonzero()[0]
        found, penalty = logits[tokens], np.float32(params.repetition_penalty)
        logits[tokens] = np.where(found > 0, found / penalty, found * penalty)
    tokens = outputs.nonzero()[0]
    if params.frequency_penalty:
        logits[tokens] -= np.float32(params.frequency_penalty) * outputs[tokens].astype(np.float32)
    if params.presence_penalty:
        logits[tokens] -= np.float32(params.presence_penalty)


def _sample_random(logits: torch.Tensor, params: list[SamplingParams], indices: list[int]) -> torch.Tensor:
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float32)
    shifted = logits - logits.amax(dim=-1, keepdim=True)  # before dividing: a tiny temperature must not make inf - inf
    weights = torch.exp(shifted / temperatures[:, None])
    for row, p in enumerate(params):
        if p.min_p > 0:  # the likeliest token weighs 1
            weights[row].masked_fill_(weights[row] < p.min_p, 0)
        cut = _cutoff(weights[row], p)
        if cut > 0:
            weights[row].masked_fill_(weights[row] < cut, 0)
    draws = [uniform(p.seed, index) for p, index in zip(params, indices, strict=True)]
    return _inverse_cdf(weights, torch.tensor(draws, dtype=torch.float64))


def _cutoff(weights: torch.Tensor, params: SamplingParams) -> float:
    """The smallest weight that top-k and then top-p keep; 0 when they keep all."""
    vocab = len(weights)
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    if params.top_p >= 1:
        return float(torch.topk(weights, top_k).values[-1]) if top_k < vocab else 0.0
    best = torch.topk(weights, min(top_k, _TOP_P_FIRST_LOOK)).values.double()
    total = best.sum() if len(best) == top_k else _kept_by_top_k(weights, top_k).sum(dtype=torch.float64)
    if len(best) < top_k and best.sum() < params.top_p * total:
        best = torch.topk(weights, top_k).values.double()
    enough = torch.cumsum(best, 0) >= params.top_p * total
    return float(best[int(enough.int().argmax()) if bool(enough.any()) else -1])


def _kept_by_top_k(weights: torch.Tensor, top_k: int) -> torch.Tensor:
    return torch.topk(weights, top_k).values if top_k < len(weights) else weights


def _inverse_cdf(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Per row the first token whose cumulative weight exceeds `draw * total`. Sums are double, block by block."""
    rows, vocab = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK)
    block_ends = torch.cumsum(padded.sum(dim=-1, dtype=torch.float64), dim=-1)
    targets = draws * block_ends[:, -1]
    block = (block_ends > targets[:, None]).int().argmax(dim=-1)
    chosen = padded[torch.arange(rows), block].double()
    before = torch.where(block > 0, block_ends.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inside = before[:, None] + torch.cumsum(chosen, dim=-1)
    exceeds = (inside > targets[:, None]) & (chosen > 0)
    last_positive = _BLOCK - 1 - (chosen.flip(-1) > 0).int().argmax(dim=-1)  # rounding may leave the target at the end
    offset = torch.where(exceeds.any(dim=-1), exceeds.int().argmax(dim=-1), last_positive)
    return block * _BLOCK + offset


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, params: Sequence[SamplingParams]
) -> list[TokenLogprob | None]:
    result: list[TokenLogprob | None] = [None] * len(params)
    wanted = [row for row, p in enumerate(params) if p.logprobs >= 0]
    if not wanted:
        return result
    scores = torch.log_softmax(logits[wanted], dim=-1)
    best = torch.topk(scores, min(max(params[row].logprobs for row in wanted), logits.shape[1]), dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    own = scores.gather(1, tokens[wanted][:, None])[:, 0].tolist()
    for place, row in enumerate(wanted):
        count = params[row].logprobs
        top = tuple(zip(ids[place][:count], values[place][:count], strict=True))
        result[row] = TokenLogprob(logprob=own[place], top=top)
    return result
