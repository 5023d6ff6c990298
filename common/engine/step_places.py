"""What of a step somebody wants to know: after which of its tokens logits are needed, and what is made of these. The
same for every runner.

Owns nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from baton.common.engine.batch import I64, Batch, History
from baton.common.engine.guiding import Guides, MaskedRow, TokenMask
from baton.common.engine.sampling import sample
from baton.common.engine.scoring import score
from baton.common.messages import SamplingParams, TokenLogprob
from baton.common.prompt_logprobs import PromptLogprobs


def sampled_rows(batch: Batch) -> tuple[int, ...]:
    return tuple(row for row, params in enumerate(batch.sampling) if params is not None)


def params_of(batch: Batch, rows: Sequence[int]) -> list[SamplingParams]:
    """Of sampled rows."""
    found = [params for row in rows if (params := batch.sampling[row]) is not None]
    assert len(found) == len(rows), rows
    return found


def last_tokens(batch: Batch, rows: tuple[int, ...]) -> I64:
    """Of these rows, as places among the step's tokens."""
    last: I64 = batch.q_offsets[1:][list(rows)].astype(np.int64) - 1
    return last


def asked_tokens(batch: Batch, sampled: tuple[int, ...]) -> I64:
    """After which logits are needed, as places among the step's tokens: the last of the sampled rows, then those before
    what is to be scored."""
    firsts = [(int(batch.q_offsets[row]), len(batch.scorings[batch.keys[row]].targets)) for row in _scored_rows(batch)]
    return np.concatenate((last_tokens(batch, sampled), *(np.arange(first, first + n) for first, n in firsts)))


def scores_of(batch: Batch, logits: torch.Tensor) -> dict[int, PromptLogprobs]:
    """By key of a row; from the logits behind those of the sampled rows."""
    scores, at = dict[int, PromptLogprobs](), 0
    for row in _scored_rows(batch):
        scoring = batch.scorings[batch.keys[row]]
        scores[batch.keys[row]] = score(logits[at : at + len(scoring.targets)].cpu(), scoring)
        at += len(scoring.targets)
    return scores


def choose_tokens(
    guides: Guides, batch: Batch, rows: Sequence[int], logits: torch.Tensor
) -> Iterator[tuple[int, int, TokenLogprob | None]]:
    """(row, token, log probability) of these sampled rows. `logits` [rows, vocabulary], on the host."""
    params = params_of(batch, rows)
    histories = _histories_of(batch, rows)
    penalized = {place: history for place, history in histories.items() if params[place].penalizes}
    masks = _masks_of(guides, batch, rows, histories)
    with torch.inference_mode():
        chosen = sample(logits, params, [batch.output_indices[row] for row in rows], penalized, masks)
    return zip(rows, *chosen, strict=True)


def _scored_rows(batch: Batch) -> list[int]:
    """The rows that have something to score."""
    if not batch.scorings:
        return []
    found = [(row, batch.scorings.get(key)) for row, key in enumerate(batch.keys)]
    return [row for row, scoring in found if scoring is not None and len(scoring.targets)]


def _histories_of(batch: Batch, rows: Sequence[int]) -> dict[int, History]:
    """By place among `rows`."""
    if not batch.histories:
        return {}
    keys = [batch.keys[row] for row in rows]
    return {place: batch.histories[key] for place, key in enumerate(keys) if key in batch.histories}


def _masks_of(
    guides: Guides, batch: Batch, rows: Sequence[int], histories: Mapping[int, History]
) -> dict[int, TokenMask | None]:
    """Of the guided ones among `rows`, by place among them; `histories` likewise."""
    places, asked = list[int](), list[MaskedRow]()
    for place, history in histories.items():
        sampling = batch.sampling[rows[place]]
        if sampling is not None and sampling.grammar is not None:
            places.append(place)
            asked.append((batch.keys[rows[place]], sampling.grammar, history.outputs))
    return dict(zip(places, guides.masks(asked), strict=True))
