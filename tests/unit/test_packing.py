"""The fast packing of decode rows gives the same step as the general one, whatever components the model has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from baton.common.engine.batch import Batch, BatchRow, PageTable, pack_batch
from baton.common.engine.packing import DecodeRows, join_batches, pack_decode_rows, take_rows
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import SamplingParams

SWA = Component.SWA
SAMPLING = SamplingParams()


def assert_same(one: Struct, other: Struct) -> None:
    """Of two steps, or two page tables: field by field, dtypes too."""
    assert type(one) is type(other)
    for name in one.__struct_fields__:
        first, second = getattr(one, name), getattr(other, name)
        if isinstance(first, PageTable):
            assert_same(first, second)
            continue
        assert np.array_equal(first, second), name
        if isinstance(first, np.ndarray):
            assert first.dtype == second.dtype, name


def rows_of(lengths: list[int], queries: list[int], layout: KvLayout) -> list[BatchRow]:
    pages = iter(np.random.default_rng(len(lengths)).permutation(20_000) + 1)

    def take(length: int, live_from: int) -> np.ndarray:
        count = -(-length // layout.page_size)
        dead = live_from // layout.page_size
        return np.array([0] * dead + [next(pages) for _ in range(count - dead)], dtype=np.int32)

    rows = []
    for index, (length, query) in enumerate(zip(lengths, queries, strict=True)):
        query = min(query, length)
        live_from = layout.live_from(length - query)
        by_component = {component: take(length, live_from if component is SWA else 0) for component in layout.paged}
        main = by_component[layout.paged[0]] if layout.paged else np.zeros(0, dtype=np.int32)
        rows.append(
            BatchRow(
                key=index,
                input_ids=np.arange(query, dtype=np.int32) + index,
                kv_len=length,
                pages=main,
                sampling=SAMPLING,
                output_index=length % 7,
                swa_pages=by_component[SWA] if len(by_component) > 1 else None,
                state_slot=index + 3 if layout.state else 0,
            )
        )
    return rows


def pack_fast(rows: list[BatchRow], page_size: int, copies: np.ndarray | None = None) -> Batch:
    swa = [row.swa_pages for row in rows if row.swa_pages is not None]
    return pack_decode_rows(
        DecodeRows(
            keys=tuple(row.key for row in rows),
            input_ids=[int(row.input_ids[0]) for row in rows],
            kv_lens=np.array([row.kv_len for row in rows], dtype=np.int32),
            page_ids=np.concatenate([row.pages for row in rows]),
            sampling=tuple(row.sampling for row in rows),
            output_indices=tuple(row.output_index for row in rows),
            swa_page_ids=np.concatenate(swa) if swa else None,
            state_slots=np.array([row.state_slot for row in rows], dtype=np.int32) if rows[0].state_slot else None,
            state_copies=copies,
        ),
        page_size,
    )


lengths_of = st.lists(st.integers(1, 200), min_size=1, max_size=12)
layouts = st.tuples(
    st.sampled_from([1, 4, 16]),
    st.sampled_from(
        [(True, 0, False), (True, 20, False), (False, 20, False), (True, 0, True), (False, 0, True), (True, 20, True)]
    ),
).map(lambda drawn: KvLayout(drawn[0], *drawn[1]))


@given(lengths=lengths_of, layout=layouts)
def test_decode_rows(lengths: list[int], layout: KvLayout) -> None:
    rows = rows_of(lengths, [1] * len(lengths), layout)
    assert_same(pack_fast(rows, layout.page_size), pack_batch(rows, layout.page_size))


@given(lengths=lengths_of, more=lengths_of, layout=layouts, copies=st.sampled_from(["first", "second", "both"]))
def test_decode_rows_joined_with_chunks(lengths: list[int], more: list[int], layout: KvLayout, copies: str) -> None:
    rows = rows_of(lengths + more, [1] * len(lengths) + [9] * len(more), layout)
    first, second = rows[: len(lengths)], rows[len(lengths) :]
    of_first = np.array([[3, 90]], dtype=np.int32) if copies != "second" and layout.state else None
    of_second = np.array([[0, 4], [90, 91]], dtype=np.int32) if copies != "first" and layout.state else None
    page_size = layout.page_size
    joined = join_batches(pack_fast(first, page_size, of_first), pack_batch(second, page_size, of_second))
    given_copies = [part for part in (of_first, of_second) if part is not None]
    all_copies = np.concatenate(given_copies) if given_copies else None
    assert_same(joined, pack_batch(rows, page_size, all_copies))


@given(lengths=lengths_of, queries=lengths_of, layout=layouts, data=st.data())
def test_taken_rows_are_the_step_of_those_rows(
    lengths: list[int], queries: list[int], layout: KvLayout, data: st.DataObject
) -> None:
    count = min(len(lengths), len(queries))
    rows = rows_of(lengths[:count], queries[:count], layout)
    copies = np.array([[0, 3]], dtype=np.int32) if layout.state else None
    chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True))
    taken = take_rows(pack_batch(rows, layout.page_size, copies), np.array(chosen))
    assert_same(taken, pack_batch([rows[index] for index in chosen], layout.page_size))


def test_rows_of_different_models_are_not_packed_together() -> None:
    def row(pages: int, swa: int | None, slot: int) -> BatchRow:
        table = None if swa is None else np.arange(swa, dtype=np.int32)
        return BatchRow(1, np.zeros(1, np.int32), 8, np.ones(pages, np.int32), SAMPLING, 0, table, slot)

    assert pack_batch([row(2, 2, 1)], 4).main.page_ids.tolist() == [1, 1]
    for one, other in (
        (row(2, 2, 0), row(2, None, 0)),
        (row(2, None, 1), row(2, None, 0)),
        (row(0, None, 1), row(2, None, 2)),
        (row(2, 1, 0), row(2, 2, 0)),
    ):
        with pytest.raises(AssertionError):
            pack_batch([one, other], 4)
