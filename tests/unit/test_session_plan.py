"""What a hand-off moves, and cutting it into regions: nothing lost, nothing twice, nothing across a page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import pack_tokens, unpack_tokens
from baton.transfer.plan import (
    STATE_PIECE_BYTES,
    Segment,
    Span,
    cut_into_regions,
    find_segment,
    pieces_of_state,
    segments_of,
    span_of_tokens,
    unit_ids,
)


@given(first_unit=st.integers(0, 5), units=st.integers(1, 60), region_units=st.integers(1, 7))
def test_regions_cover_a_span_exactly(first_unit: int, units: int, region_units: int) -> None:
    ids = list(range(100, 100 + units))
    regions = cut_into_regions(Span(Component.SWA, first_unit, pack_tokens(ids)), region_units)
    assert [page for region in regions for page in unpack_tokens(region.pages).tolist()] == ids
    assert {region.component for region in regions} == {Component.SWA}
    assert [region.first_unit for region in regions] == list(range(first_unit, first_unit + units, region_units))
    assert all(region.units == region_units for region in regions[:-1])
    assert regions[-1].units <= region_units


PAGED = Segment(Component.SWA, 8, 18, 3)
STATE = Segment(Component.STATE, 8, 18, 2)


@pytest.mark.parametrize(
    ("segment", "first", "tokens", "count", "first_unit"),
    [(PAGED, 8, 10, 3, 0), (PAGED, 12, 4, 1, 1), (PAGED, 16, 2, 1, 2), (STATE, 8, 10, 2, 0)],
)
def test_tokens_become_units(segment: Segment, first: int, tokens: int, count: int, first_unit: int) -> None:
    pages = pack_tokens(list(range(1, 1 + count)))
    assert span_of_tokens(segment, first, tokens, pages, 4) == Span(segment.component, first_unit, pages)


@pytest.mark.parametrize(
    ("segment", "first", "tokens", "count", "reason"),
    [
        (PAGED, 4, 4, 1, "is not in"),
        (PAGED, 16, 4, 1, "is not in"),
        (PAGED, 8, 0, 0, "is not in"),
        (PAGED, 9, 3, 1, "begins inside"),
        (PAGED, 8, 6, 2, "ends inside"),
        (PAGED, 8, 8, 1, "1 ids for 2 units"),
        (STATE, 8, 4, 2, "a part of"),
        (STATE, 8, 10, 1, "1 ids for 2 units"),
    ],
)
def test_tokens_that_are_no_whole_units_are_an_error(
    segment: Segment, first: int, tokens: int, count: int, reason: str
) -> None:
    with pytest.raises(AssertionError, match=reason):
        span_of_tokens(segment, first, tokens, pack_tokens(list(range(1, 1 + count))), 4)


@pytest.mark.parametrize("slot_bytes", [1, 64, STATE_PIECE_BYTES, STATE_PIECE_BYTES + 8, 40_000, 1_000_003, 19_660_800])
def test_a_state_is_cut_into_equal_pieces_of_whole_words(slot_bytes: int) -> None:
    pieces = pieces_of_state(slot_bytes)
    piece, rest = divmod(slot_bytes, pieces)
    assert rest == 0
    assert piece <= STATE_PIECE_BYTES
    assert piece % 8 == 0 or slot_bytes % 8
    assert pieces == 1 or slot_bytes > STATE_PIECE_BYTES


def test_ids_of_units() -> None:
    pages = np.array([1, 5], dtype=np.int32)
    assert unpack_tokens(unit_ids(Component.STATE, pages, 3)).tolist() == [3, 4, 5, 15, 16, 17]
    for component, pieces in ((Component.FULL, 3), (Component.SWA, 3), (Component.STATE, 1)):
        assert unpack_tokens(unit_ids(component, pages, pieces)).tolist() == [1, 5]
    with pytest.raises(AssertionError, match="null page"):
        unit_ids(Component.FULL, np.array([3, 0], dtype=np.int32), 1)


def test_units_are_numbered_through_the_segments() -> None:
    segments = segments_of(KvLayout(4, window=5, state=True), 0, 18, state_pieces=6)
    assert [find_segment(segments, component) for component in Component] == [0, 1, 2]
    assert find_segment(segments[:1], Component.STATE) is None


@pytest.mark.parametrize(
    ("layout", "start", "total", "expected"),
    [
        (KvLayout(4), 0, 10, [("full", 0, 10, 3)]),
        (KvLayout(4), 8, 10, [("full", 8, 10, 1)]),
        (KvLayout(4), 8, 8, []),
        (KvLayout(4, window=5), 0, 18, [("full", 0, 18, 5), ("swa", 12, 18, 2)]),
        (KvLayout(4, window=5), 16, 18, [("full", 16, 18, 1), ("swa", 16, 18, 1)]),  # the rest of the window is there
        (KvLayout(4, window=1), 0, 8, [("full", 0, 8, 2)]),  # the next query sees nothing but itself
        (KvLayout(1, full=False, window=3), 0, 9, [("swa", 7, 9, 2)]),
        (KvLayout(4, state=True), 4, 10, [("full", 4, 10, 2), ("state", 4, 10, 1)]),
        (KvLayout(4, full=False, state=True), 0, 10, [("state", 0, 10, 1)]),
        (KvLayout(4, full=False, state=True), 8, 8, []),
        (KvLayout(1, window=2, state=True), 0, 3, [("full", 0, 3, 3), ("swa", 2, 3, 1), ("state", 0, 3, 1)]),
    ],
)
def test_what_a_hand_off_moves(
    layout: KvLayout, start: int, total: int, expected: list[tuple[str, int, int, int]]
) -> None:
    assert segments_of(layout, start, total) == tuple(Segment(Component(name), *rest) for name, *rest in expected)
