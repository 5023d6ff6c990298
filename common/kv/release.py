"""The one place where pages of a record are given back. Owns no state.

A record's leftovers are token spans of its row (duplicates, an unaligned tail, over-allocation). Two spans may meet
inside one page; freeing them one by one would free that page twice. So spans become page spans, and page spans that
touch or overlap become one, before anything is freed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from baton.common.kv.allocator import PageAllocator
from baton.common.kv.prefix.interface import I32, Span
from baton.common.units import pages_for_tokens, whole_pages


def merged_page_spans(spans: Iterable[Span], page_size: int) -> list[tuple[int, int]]:
    """Page indices [first, end) that the token spans touch: sorted, disjoint. Empty spans touch nothing. A span
    starts in the page that holds its first token; whether that page is shared with somebody else is the caller's to
    know."""
    touched = sorted(
        (whole_pages(span.start, page_size), pages_for_tokens(span.end, page_size))
        for span in spans
        if span.end > span.start
    )
    merged: list[tuple[int, int]] = []
    for first, end in touched:
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged


def free_leftovers(allocator: PageAllocator, row_pages: I32, spans: Iterable[Span], page_size: int) -> I32:
    """Frees the pages of `spans` of the row whose entries are `row_pages`, each page once. Returns them."""
    parts = [row_pages[first:end] for first, end in merged_page_spans(spans, page_size)]
    if not parts:
        return np.empty(0, dtype=np.int32)
    pages = np.concatenate(parts)
    allocator.free(pages)
    return pages
