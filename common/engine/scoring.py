"""How likely a model finds the tokens that are there: from logits to packed log probabilities. A pure function.

A row's result depends on no other row, so it is the same however a prompt is cut into chunks.
"""

from __future__ import annotations

import numpy as np
import torch

from baton.common.engine.batch import Scoring
from baton.common.prompt_logprobs import PromptLogprobs

_ROWS = 32
"""So many at a time: what is computed in between is as wide as the vocabulary, too."""


def score(logits: torch.Tensor, scoring: Scoring) -> PromptLogprobs:
    """Of `logits` [n, vocabulary] and the tokens behind them. A token's rank is 1 more than there are likelier ones."""
    assert len(logits) == len(scoring.targets), (len(logits), len(scoring.targets))
    targets = torch.from_numpy(scoring.targets.astype(np.int64))
    top = min(scoring.top, logits.shape[1])
    own, ranks, best = list[torch.Tensor](), list[torch.Tensor](), list[tuple[torch.Tensor, torch.Tensor]]()
    for at in range(0, len(targets), _ROWS):
        scores = torch.log_softmax(logits[at : at + _ROWS].float(), dim=-1)
        chosen = scores.gather(1, targets[at : at + _ROWS, None])
        own.append(chosen[:, 0])
        ranks.append((scores > chosen).sum(dim=-1) + 1)
        values, ids = torch.topk(scores, top, dim=-1)
        best.append((ids, values))
    return PromptLogprobs.of(
        torch.cat(ranks).numpy(),
        torch.cat(own).numpy(),
        torch.cat([ids for ids, _ in best]).numpy(),
        torch.cat([values for _, values in best]).numpy(),
    )
