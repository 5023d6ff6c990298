"""The fast packing of decode rows gives the same step as the general one."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.common.engine.batch import Batch, BatchRow, pack_batch
from baton.common.engine.packing import DecodeRows, join_batches, pack_decode_rows
from baton.common.messages import SamplingParams

SAMPLING = SamplingParams()


def assert_same(one: Batch, other: Batch) -> None:
    for field in dataclasses.fields(Batch):
        first, second = getattr(one, field.name), getattr(other, field.name)
        assert np.array_equal(first, second), field.name
        if isinstance(first, np.ndarray):
            assert first.dtype == second.dtype, field.name


def rows_of(lengths: list[int], queries: list[int], page_size: int) -> list[BatchRow]:
    pages = iter(np.random.default_rng(len(lengths)).permutation(10_000) + 1)
    return [
        BatchRow(
            key=index,
            input_ids=np.arange(min(query, length), dtype=np.int32) + index,
            kv_len=length,
            pages=np.array([next(pages) for _ in range(-(-length // page_size))], dtype=np.int32),
            sampling=SAMPLING,
            output_index=length % 7,
        )
        for index, (length, query) in enumerate(zip(lengths, queries, strict=True))
    ]


def pack_fast(rows: list[BatchRow], page_size: int) -> Batch:
    return pack_decode_rows(
        DecodeRows(
            keys=tuple(row.key for row in rows),
            input_ids=[int(row.input_ids[0]) for row in rows],
            kv_lens=np.array([row.kv_len for row in rows], dtype=np.int32),
            page_ids=np.concatenate([row.pages for row in rows]),
            sampling=tuple(row.sampling for row in rows),
            output_indices=tuple(row.output_index for row in rows),
        ),
        page_size,
    )


lengths_of = st.lists(st.integers(1, 200), min_size=1, max_size=12)


@given(lengths=lengths_of, page_size=st.sampled_from([1, 4, 16]))
def test_decode_rows(lengths: list[int], page_size: int) -> None:
    rows = rows_of(lengths, [1] * len(lengths), page_size)
    assert_same(pack_fast(rows, page_size), pack_batch(rows, page_size))


@given(lengths=lengths_of, more=lengths_of, page_size=st.sampled_from([1, 4, 16]))
def test_decode_rows_joined_with_chunks(lengths: list[int], more: list[int], page_size: int) -> None:
    rows = rows_of(lengths + more, [1] * len(lengths) + [9] * len(more), page_size)
    first, second = rows[: len(lengths)], rows[len(lengths) :]
    joined = join_batches(pack_fast(first, page_size), pack_batch(second, page_size))
    assert_same(joined, pack_batch(rows, page_size))
