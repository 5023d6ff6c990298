"""Packs a step that is mostly decode rows, in time that depends on their number only through array operations.

Owns no state. `batch.pack_batch` handles any row; this is the same for many rows of one query token each, without an
object per row, the joining of both kinds, and the taking apart of a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from msgspec import Struct

from baton.common.engine.batch import I32, I64, Batch, History, PageTable
from baton.common.messages import SamplingParams


class DecodeRows(Struct, frozen=True):
    """B rows of one query token each, all of which want a token. The optional fields are those of `Batch`."""

    keys: tuple[int, ...]
    input_ids: list[int]
    kv_lens: I32  # [B] after the step
    page_ids: I32  # the main component's pages of [0, kv_len) of each row, one row after the other; [0] without any
    sampling: tuple[SamplingParams | None, ...]
    output_indices: tuple[int, ...]
    swa_page_ids: I32 | None = None  # as page_ids; 0 where a page is dead
    state_slots: I32 | None = None  # [B]
    state_copies: I32 | None = None  # [n, 2]
    histories: Mapping[int, History] = msgspec.field(default_factory=dict)


def pack_decode_rows(rows: DecodeRows, page_size: int) -> Batch:
    """Asserts that there are exactly as many pages as the lengths need."""
    count = len(rows.keys)
    positions = rows.kv_lens.astype(np.int64) - 1
    page_offsets = np.zeros(count + 1, dtype=np.int32)
    if len(rows.page_ids):
        np.add.accumulate((rows.kv_lens + (page_size - 1)) // page_size, out=page_offsets[1:])
        slots = _last_slots(rows.page_ids, page_offsets, positions, page_size)
    else:
        slots = np.zeros(count, dtype=np.int64)
    swa = None
    if rows.swa_page_ids is not None:
        swa_slots = _last_slots(rows.swa_page_ids, page_offsets, positions, page_size)
        swa = PageTable(swa_slots, page_offsets, rows.swa_page_ids)
    return Batch(
        keys=rows.keys,
        input_ids=np.array(rows.input_ids, dtype=np.int64),
        positions=positions,
        slots=slots,
        q_offsets=np.arange(count + 1, dtype=np.int32),
        kv_lens=rows.kv_lens,
        page_offsets=page_offsets,
        page_ids=rows.page_ids,
        sampling=rows.sampling,
        output_indices=rows.output_indices,
        page_size=page_size,
        swa=swa,
        state_slots=rows.state_slots,
        state_copies=rows.state_copies,
        histories=rows.histories,
    )


def _last_slots(page_ids: I32, page_offsets: I32, positions: I64, page_size: int) -> I64:
    """Where the one token of each row is written."""
    assert page_offsets[-1] == len(page_ids), (int(page_offsets[-1]), len(page_ids))
    slots: I64 = page_ids[page_offsets[1:] - 1].astype(np.int64) * page_size + positions % page_size
    return slots


def join_batches(first: Batch, second: Batch) -> Batch:
    """The rows of both, `first` before `second`; both of one model."""
    assert first.page_size == second.page_size
    swa = None
    if first.swa is not None or second.swa is not None:
        assert first.swa is not None, "either all rows have a sliding window or none"
        assert second.swa is not None, "either all rows have a sliding window or none"
        swa = PageTable(
            np.concatenate((first.swa.slots, second.swa.slots)),
            _join_offsets(first.swa.page_offsets, second.swa.page_offsets),
            np.concatenate((first.swa.page_ids, second.swa.page_ids)),
        )
    assert (first.state_slots is None) == (second.state_slots is None), "either all rows have a state or none"
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
        swa=swa,
        state_slots=_join(first.state_slots, second.state_slots),
        state_copies=_join(first.state_copies, second.state_copies),
        histories={**first.histories, **second.histories},
        scorings={**first.scorings, **second.scorings},
    )


def _join_offsets(first: I32, second: I32) -> I32:
    return np.concatenate((first, second[1:] + first[-1]))


def _join(first: I32 | None, second: I32 | None) -> I32 | None:
    if first is None or second is None:
        return second if first is None else first
    return np.concatenate((first, second))


def take_rows(batch: Batch, rows: I64) -> Batch:
    """The step of these rows alone, in this order; without the copies of states, which belong to the whole step."""
    swa = None
    if batch.swa is not None:
        swa = PageTable(*_take_tables(batch.swa, batch.q_offsets, rows))
    slots, page_offsets, page_ids = _take_tables(batch.main, batch.q_offsets, rows)
    tokens, q_offsets = _take(batch.q_offsets, rows)
    return Batch(
        keys=tuple(batch.keys[row] for row in rows),
        input_ids=batch.input_ids[tokens],
        positions=batch.positions[tokens],
        slots=slots,
        q_offsets=q_offsets,
        kv_lens=batch.kv_lens[rows],
        page_offsets=page_offsets,
        page_ids=page_ids,
        sampling=tuple(batch.sampling[row] for row in rows),
        output_indices=tuple(batch.output_indices[row] for row in rows),
        page_size=batch.page_size,
        swa=swa,
        state_slots=None if batch.state_slots is None else batch.state_slots[rows],
        histories=batch.histories,
        scorings=batch.scorings,
    )


def _take_tables(table: PageTable, q_offsets: I32, rows: I64) -> tuple[I64, I32, I32]:
    tokens, _ = _take(q_offsets, rows)
    pages, page_offsets = _take(table.page_offsets, rows)
    return table.slots[tokens], page_offsets, table.page_ids[pages]


def _take(offsets: I32, rows: I64) -> tuple[I64, I32]:
    """Where the elements of these rows lie, one row after the other, and the rows' offsets among them."""
    counts = np.diff(offsets)[rows].astype(np.int64)
    new_offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=new_offsets[1:])
    at: I64 = np.arange(new_offsets[-1]) + np.repeat(offsets[rows] - new_offsets[:-1], counts)
    return at, new_offsets
