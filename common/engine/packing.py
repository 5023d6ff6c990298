"""Packs a step that is mostly decode rows, in time that depends on their number only through array operations.

Owns no state. `batch.pack_batch` handles any row; this is the same for many rows of one query token each, without an
object per row, and the joining of both kinds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.common.engine.batch import I32, Batch
from baton.common.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """B rows of one query token each, all of which want a token."""

    keys: tuple[int, ...]
    input_ids: list[int]
    kv_lens: I32  # [B] after the step
    page_ids: I32  # the pages of [0, kv_len) of each row, one row after the other
    sampling: tuple[SamplingParams | None, ...]
    output_indices: tuple[int, ...]


def pack_decode_rows(rows: DecodeRows, page_size: int) -> Batch:
    """Asserts that there are exactly as many pages as the lengths need."""
    count = len(rows.keys)
    page_counts = (rows.kv_lens + (page_size - 1)) // page_size
    page_offsets = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(page_counts, out=page_offsets[1:])
    assert page_offsets[-1] == len(rows.page_ids), (int(page_offsets[-1]), len(rows.page_ids))
    positions = rows.kv_lens.astype(np.int64) - 1
    last_pages = rows.page_ids[page_offsets[1:] - 1].astype(np.int64)
    return Batch(
        keys=rows.keys,
        input_ids=np.array(rows.input_ids, dtype=np.int64),
        positions=positions,
        slots=last_pages * page_size + positions % page_size,
        q_offsets=np.arange(count + 1, dtype=np.int32),
        kv_lens=rows.kv_lens,
        page_offsets=page_offsets,
        page_ids=rows.page_ids,
        sampling=rows.sampling,
        output_indices=rows.output_indices,
        page_size=page_size,
    )


def join_batches(first: Batch, second: Batch) -> Batch:
    """The rows of both, `first` before `second`."""
    assert first.page_size == second.page_size
    return Batch(
        keys=first.keys + second.keys,
        input_ids=np.concatenate((first.input_ids, second.input_ids)),
        positions=np.concatenate((first.positions, second.positions)),
        slots=np.concatenate((first.slots, second.slots)),
        q_offsets=_join_offsets(first.q_offsets, second.q_offsets),
        kv_lens=np.concatenate((first.kv_lens, second.kv_lens)),
        page_offsets=_join_offsets(first.page_offsets, second.page_offsets),
        page_ids=np.concatenate((first.page_ids, second.page_ids)),
        sampling=first.sampling + second.sampling,
        output_indices=first.output_indices + second.output_indices,
        page_size=first.page_size,
    )


def _join_offsets(first: I32, second: I32) -> I32:
    return np.concatenate((first, second[1:] + first[-1]))
