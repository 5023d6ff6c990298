"""One function frees leftovers; ranges that meet in one page become one before anything is freed."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.common.kv.allocator import PageAllocator
from baton.common.kv.prefix.interface import Span
from baton.common.kv.release import free_leftovers, merged_page_spans

spans = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)).map(lambda s: Span(s[0], s[0] + s[1])), max_size=6)


@given(spans, st.sampled_from([1, 2, 4, 16]))
def test_merged_spans_touch_exactly_the_pages_of_the_tokens(ranges: list[Span], page_size: int) -> None:
    expected = {token // page_size for span in ranges for token in range(span.start, span.end)}
    merged = merged_page_spans(ranges, page_size)
    assert [page for first, end in merged for page in range(first, end)] == sorted(expected)
    assert all(end < following for (_, end), (following, _) in pairwise(merged))


def test_page_freed_twice_at_a_seam() -> None:
    """[16, 21) and [21, 40) both touch the page of token 21: freed on their own, it would go back twice."""
    allocator = PageAllocator(12)
    row = allocator.allocate(10)
    assert row is not None
    freed = free_leftovers(allocator, row, [Span(16, 21), Span(21, 40)], 4)
    assert freed.tolist() == row[4:10].tolist()
    assert allocator.free_pages == 7


def test_nothing_left_over_frees_nothing() -> None:
    allocator = PageAllocator(4)
    assert len(free_leftovers(allocator, np.empty(0, dtype=np.int32), [Span(8, 8), Span(3, 2)], 4)) == 0
    assert allocator.free_pages == 3
