"""Cutting spans into regions: nothing lost, nothing twice, nothing across a page."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import pack_tokens, unpack_tokens
from baton.common.units import pages_for_tokens
from baton.transfer.plan import Segment, Span, cut_into_regions, pages_of_span, segments_of


@given(
    page_size=st.sampled_from([1, 4, 16]),
    first_page=st.integers(0, 5),
    tokens=st.integers(1, 200),
    region_pages=st.integers(1, 7),
)
def test_regions_cover_a_span_exactly(page_size: int, first_page: int, tokens: int, region_pages: int) -> None:
    ids = list(range(100, 100 + pages_for_tokens(tokens, page_size)))
    span = Span(first_page * page_size, tokens, pack_tokens(ids))
    regions = cut_into_regions(span, page_size, region_pages)
    assert [page for region in regions for page in unpack_tokens(region.pages).tolist()] == ids
    assert regions[0].first_token == span.first_token
    assert regions[-1].end == span.end
    for region, following in pairwise(regions):
        assert region.end == following.first_token
        assert region.tokens == region_pages * page_size


def test_pages_outside_of_what_is_held_are_an_error() -> None:
    pages = pack_tokens([5, 6])
    assert unpack_tokens(pages_of_span(8, pages, 12, 3, 4)).tolist() == [6]
    for first_token, tokens in ((12, 5), (4, 4), (9, 1)):
        with pytest.raises(AssertionError):
            pages_of_span(8, pages, first_token, tokens, 4)


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
