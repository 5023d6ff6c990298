"""Cutting spans into regions: nothing lost, nothing twice, nothing across a page."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.messages import pack_tokens, unpack_tokens
from baton.common.units import pages_for_tokens
from baton.transfer.plan import Span, cut_into_regions, pages_of_span


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
