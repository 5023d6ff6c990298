"""From logits to tokens: biases and penalties, grammars, greedy, temperature, min-p, top-k, top-p, and log
probabilities. Pure functions of their arguments, applied in this order, which is vLLM's.

Randomness is counter-based: output number `i` of a request with seed `s` uses `u = uniform(s, i)` and nothing else, and
penalties count the tokens so far, so a request moves to another worker without any sampler state. The token is the
inverse of the cumulative distribution at `u`, in token order. What is kept by top-k and top-p is defined by values
alone (every token at least as likely as the last one kept stays), so ties do not depend on a sort. A row's token
depends on no other row.

Rows that are not greedy are done one after the other: a row of logits stays in the processor's cache from its maximum
to its draw, where passes over the whole batch would fetch it from memory each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from baton.common.engine.batch import I64, NO_TOKEN, History
from baton.common.engine.guiding import TokenMask
from baton.common.messages import SamplingParams, TokenLogprob

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_TOP_P_FIRST_LOOK = 256  # candidates sorted before the whole row has to be
_GROUPS = 1024  # of tokens, whose maxima bound the best ones from below
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
    rows = logits.numpy()
    scratch = _scratch(rows.shape[1])
    with np.errstate(over="ignore"):  # a tiny temperature
        for row, p in enumerate(params):
            if p.temperature > 0:
                own = rows[row] if row not in changed else changed[row].numpy()
                tokens[row] = _draw(own, p, uniform(p.seed, output_indices[row]), scratch)
        logprobs = [
            _logprob(rows[row], int(tokens[row]), p.logprobs, scratch) if p.logprobs >= 0 else None
            for row, p in enumerate(params)
        ]
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


def _penalize(logits: F32, params: SamplingParams, history: History) -> None:
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


def _scratch(vocab: int) -> F32:
    """Room for a row's weights, in whole blocks; what is behind the vocabulary stays 0."""
    return np.zeros(-(-vocab // _BLOCK) * _BLOCK, dtype=np.float32)


def _draw(logits: F32, params: SamplingParams, draw: float, scratch: F32) -> int:
    """The token of one row [vocabulary] at `draw`, uniform in [0, 1)."""
    top, temperature = logits.max(), np.float32(params.temperature)
    kept = _kept(logits, top, params, scratch)
    if kept is not None:
        return int(kept[_inverse_cdf(np.exp((logits[kept] - top) / temperature), draw)])
    blocks = _weights(logits, top, temperature, scratch).reshape(-1, _BLOCK)
    ends = np.cumsum(blocks.sum(axis=-1, dtype=np.float64))
    target = draw * ends[-1]
    block = min(int(np.searchsorted(ends, target, side="right")), _last_positive(ends))
    before = ends[block - 1] if block else 0.0
    return block * _BLOCK + _inverse_cdf(blocks[block], float(target - before), total=1.0)


def _weights(logits: F32, top: np.float32, temperature: np.float32, scratch: F32) -> F32:
    """exp((logits - top) / temperature), in all of `scratch`. The likeliest token weighs 1."""
    weights = scratch[: len(logits)]
    np.subtract(logits, top, out=weights)  # before dividing: a tiny temperature must not make inf - inf
    np.divide(weights, temperature, out=weights)
    np.exp(weights, out=weights)
    return scratch


def _kept(logits: F32, top: np.float32, params: SamplingParams, scratch: F32) -> I64 | None:
    """The tokens that min-p, top-k and then top-p keep, ascending; None: all of them."""
    vocab, temperature = len(logits), np.float32(params.temperature)
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    floor = top + temperature * np.float32(np.log(params.min_p)) if params.min_p > 0 else _NEVER
    if params.top_p >= 1:
        if top_k == vocab:
            return np.flatnonzero(logits >= floor) if params.min_p > 0 else None
        return np.flatnonzero(logits >= max(floor, _best(logits, top_k)[-1]))
    if top_k < vocab:
        best = _best(logits, top_k)
        best = best[best >= floor]
        weights = np.exp((best - top) / temperature, dtype=np.float64)
        return np.flatnonzero(logits >= _cutoff(best, weights, params.top_p * weights.sum()))
    everything = _weights(logits, top, temperature, scratch)
    total = everything.sum(dtype=np.float64) if params.min_p <= 0 else everything[:vocab][logits >= floor].sum()
    best = _best(logits, _TOP_P_FIRST_LOOK)
    weights = np.exp((best - top) / temperature, dtype=np.float64)
    if weights.sum() < params.top_p * total:
        best = np.sort(logits)[::-1]
        weights = np.exp((best - top) / temperature, dtype=np.float64)
    return np.flatnonzero(logits >= max(floor, _cutoff(best, weights, params.top_p * total)))


def _best(logits: F32, count: int) -> F32:
    """The `count` largest values, descending. As many groups of tokens have a maximum that is no smaller than the
    `count`-th largest of these maxima: nothing below it is among the best."""
    rounds = len(logits) // _GROUPS
    if count < _GROUPS and rounds > 1:
        maxima = logits[: rounds * _GROUPS].reshape(rounds, _GROUPS).max(axis=0)
        logits = logits[logits >= np.partition(maxima, -count)[-count]]
    if count < len(logits):
        logits = np.partition(logits, -count)[-count:]
    return np.sort(logits)[::-1]


def _cutoff(best: F32, weights: F64, enough: float) -> np.float32:
    """The value of the first one, from the likeliest on, with which their weight is `enough`."""
    reached = np.cumsum(weights) >= enough
    place: np.float32 = best[reached.argmax() if reached.any() else -1]
    return place


def _inverse_cdf(weights: F32, draw: float, total: float = 0.0) -> int:
    """The first place whose cumulative weight exceeds `draw` times the total, which is the sum unless given."""
    inside = np.cumsum(weights, dtype=np.float64)
    place = int(np.searchsorted(inside, draw * (total or inside[-1]), side="right"))
    return min(place, _last_positive(inside))


def _last_positive(cumulated: F64) -> int:
    """The last place that weighs anything: rounding may leave a target at the end."""
    return int(np.searchsorted(cumulated, cumulated[-1]))


def _logprob(logits: F32, token: int, count: int, scratch: F32) -> TokenLogprob:
    """Of `token`, and the `count` likeliest ones."""
    top = logits.max()
    log_total = float(top) + float(np.log(_weights(logits, top, np.float32(1), scratch).sum(dtype=np.float64)))
    likeliest: list[tuple[int, float]] = []
    if count:
        ids = np.flatnonzero(logits >= _best(logits, min(count, len(logits)))[-1])
        ids = ids[np.argsort(-logits[ids], kind="stable")][:count]
        likeliest = list(zip(ids.tolist(), (logits[ids] - log_total).tolist(), strict=True))
    return TokenLogprob(logprob=float(logits[token]) - log_total, top=tuple(likeliest))
