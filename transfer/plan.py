"""What a hand-off moves, which pages hold which of its tokens, and how a span is cut into regions. Pure arithmetic.

Owns the cutting rule: a region never crosses a page, has at most `region_pages` of them, and only the last region of a
hand-off may end inside one. Knows nothing of memory or peers. Both sides lay out a page alike (the layout fingerprint
is compared at registration), so that page i of a source span goes to page i of the destination span.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.common.kv.layout import Component, KvLayout
from baton.common.units import pages_for_tokens, whole_pages

PAGE_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """What a hand-off moves of one component: what that keeps of tokens [first_token, end_token), in `units` pages. A
    state is one unit, whatever its tokens."""

    component: Component
    first_token: int
    end_token: int
    units: int


def segments_of(layout: KvLayout, start: int, total: int) -> tuple[Segment, ...]:
    """All that a worker which has everything of tokens [0, start) needs to go on behind `total` tokens, in the order in
    which it is sent. `start` is page-aligned. Sliding layers send the pages that are still live then, and none when
    nothing is; a state goes whole."""
    assert 0 <= start <= total, (start, total)
    assert start % layout.page_size == 0, f"start {start} is not page-aligned"
    segments = []
    for component in layout.components:
        first = max(start, layout.live_from(total)) if component is Component.SWA else start
        units = 1 if component is Component.STATE else pages_for_tokens(total - first, layout.page_size)
        if first < total:
            segments.append(Segment(component, first, total, units))
    return tuple(segments)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [first_token, first_token + tokens) and the ids of the pages that hold them (little-endian int32)."""

    first_token: int
    tokens: int
    pages: bytes

    @property
    def end(self) -> int:
        return self.first_token + self.tokens


def pages_of_span(start: int, pages: bytes, first_token: int, tokens: int, page_size: int) -> bytes:
    """The ids out of `pages` (which hold the tokens from `start` on) that hold [first_token, first_token + tokens).
    `start` and `first_token` are page-aligned."""
    assert first_token >= start
    assert start % page_size == first_token % page_size == 0
    begin = whole_pages(first_token - start, page_size) * PAGE_ID_BYTES
    end = begin + pages_for_tokens(tokens, page_size) * PAGE_ID_BYTES
    assert end <= len(pages), f"[{first_token}, {first_token + tokens}) is not inside the pages from {start} on"
    return pages[begin:end]


def cut_into_regions(span: Span, page_size: int, region_pages: int) -> tuple[Span, ...]:
    """`span` as regions of at most `region_pages` pages, in order, without gap. O(pages)."""
    assert span.first_token % page_size == 0
    assert len(span.pages) == pages_for_tokens(span.tokens, page_size) * PAGE_ID_BYTES
    most_tokens = region_pages * page_size
    regions = []
    for first_token in range(span.first_token, span.end, most_tokens):
        tokens = min(most_tokens, span.end - first_token)
        pages = pages_of_span(span.first_token, span.pages, first_token, tokens, page_size)
        regions.append(Span(first_token, tokens, pages))
    return tuple(regions)
