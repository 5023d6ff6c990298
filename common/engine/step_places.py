"""Where in a step those tokens are whose logits somebody wants, and what their choice depends on.

Owns nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from baton.common.engine.batch import I64, Batch, History
from baton.common.engine.guiding import Guides, MaskedRow, TokenMask


def last_tokens(batch: Batch, rows: tuple[int, ...]) -> I64:
    """Of these rows, as places among the step's tokens."""
    last: I64 = batch.q_offsets[1:][list(rows)].astype(np.int64) - 1
    return last


def scored_rows(batch: Batch) -> list[int]:
    """The rows that have something to score."""
    if not batch.scorings:
        return []
    found = [(row, batch.scorings.get(key)) for row, key in enumerate(batch.keys)]
    return [row for row, scoring in found if scoring is not None and len(scoring.targets)]


def scored_tokens(batch: Batch, row: int) -> I64:
    """Of one of them, as places among the step's tokens."""
    first = int(batch.q_offsets[row])
    return np.arange(first, first + len(batch.scorings[batch.keys[row]].targets))


def histories_of(batch: Batch, rows: tuple[int, ...]) -> dict[int, History]:
    """By place among `rows`."""
    if not batch.histories:
        return {}
    keys = [batch.keys[row] for row in rows]
    return {place: batch.histories[key] for place, key in enumerate(keys) if key in batch.histories}


def masks_of(
    guides: Guides, batch: Batch, rows: tuple[int, ...], histories: Mapping[int, History]
) -> dict[int, TokenMask | None]:
    """Of the guided ones among `rows`, by place among them; `histories` likewise."""
    places, asked = list[int](), list[MaskedRow]()
    for place, history in histories.items():
        sampling = batch.sampling[rows[place]]
        if sampling is not None and sampling.grammar is not None:
            places.append(place)
            asked.append((batch.keys[rows[place]], sampling.grammar, history.outputs))
    return dict(zip(places, guides.masks(asked), strict=True))
