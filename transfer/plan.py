"""What a hand-off moves, in which order, and how it is cut into regions. Pure arithmetic; knows nothing of memory.

Owns the vocabulary of the border between engines, which count tokens, and the transfer plane, which counts *units*. A
hand-off has one *segment* per component of the model, in the order of `Component`. A unit is what travels whole: a
page; of a state, one of the equal pieces into which its slot is cut, so that a state may be larger than a staging slot.

Rules: a region is a run of units of one segment, at most as many as fit a staging slot. Regions follow one another
without gap through all segments, so that a unit has one number in the whole hand-off. Both sides lay out their memory
alike (the layout fingerprint is compared at registration): unit i of a source's segment goes to unit i of the sink's,
and the last page's unused tail travels with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import pack_tokens
from baton.common.units import pages_for_tokens, whole_pages

PAGE_ID_BYTES = 4
STATE_PIECE_BYTES = 16 << 10
"""Most bytes in a piece of a state. Neighbours are copied, digested and pulled in one go: small ones cost little."""

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Segment:
    """What a hand-off moves of one component: what that keeps of tokens [first_token, end_token), in `units` units."""

    component: Component
    first_token: int
    end_token: int
    units: int


@dataclass(frozen=True, slots=True)
class Span:
    """Units [first_unit, first_unit + units) of a segment, and the ids of what holds them (little-endian int32)."""

    component: Component
    first_unit: int
    pages: bytes

    @property
    def units(self) -> int:
        return len(self.pages) // PAGE_ID_BYTES


def segments_of(layout: KvLayout, start: int, total: int, state_pieces: int = 1) -> tuple[Segment, ...]:
    """All that a worker which has everything of tokens [0, start) needs to go on behind `total` tokens, in the order in
    which it is sent. `start` is page-aligned. Sliding layers send the pages that are still live then, and none when
    nothing is; a state goes whole: one unit to an engine, `state_pieces` of them on the way."""
    assert 0 <= start <= total, (start, total)
    assert start % layout.page_size == 0, f"start {start} is not page-aligned"
    segments = []
    for component in layout.components:
        first = max(start, layout.live_from(total)) if component is Component.SWA else start
        units = state_pieces if component is Component.STATE else pages_for_tokens(total - first, layout.page_size)
        if first < total:
            segments.append(Segment(component, first, total, units))
    return tuple(segments)


def pieces_of_state(slot_bytes: int) -> int:
    """Into how many equal pieces a state of `slot_bytes` is cut; whole words where the state has whole words."""
    word = 8 if slot_bytes % 8 == 0 else 1
    words, most = slot_bytes // word, STATE_PIECE_BYTES // word
    return words // next(piece for piece in range(min(most, words), 0, -1) if words % piece == 0)


def unit_ids(component: Component, pages: I32, state_pieces: int) -> bytes:
    """Page ids as ids of units: those of a page are the same, the pieces of state slot s are s * n, s * n + 1, ..."""
    assert pages.min() > 0, "the null page is nobody's to send or fill"
    if component is Component.STATE and state_pieces > 1:
        return pack_tokens(np.add.outer(pages * np.int32(state_pieces), np.arange(state_pieces)).reshape(-1))
    return pack_tokens(pages)


def count_units(segments: Sequence[Segment]) -> int:
    return sum(segment.units for segment in segments)


def find_segment(segments: Sequence[Segment], component: Component) -> tuple[int, int] | None:
    """Which of `segments` is `component`'s, and the number of its first unit in the whole hand-off."""
    first_number = 0
    for index, segment in enumerate(segments):
        if segment.component is component:
            return index, first_number
        first_number += segment.units
    return None


def span_of_tokens(segment: Segment, first_token: int, tokens: int, pages: bytes, page_size: int) -> Span:
    """Tokens [first_token, first_token + tokens) of `segment`, held by the units `pages`. Asserts that these are whole
    units of it, and their ids exactly; of a state only the whole will do."""
    end = first_token + tokens
    assert segment.first_token <= first_token < end <= segment.end_token, f"[{first_token}, {end}) is not in {segment}"
    if segment.component is Component.STATE:
        assert tokens == segment.end_token - segment.first_token, f"[{first_token}, {end}) is a part of {segment}"
        first_unit, units = 0, segment.units
    else:
        assert first_token % page_size == 0, f"[{first_token}, {end}) begins inside a page"
        assert end % page_size == 0 or end == segment.end_token, f"[{first_token}, {end}) ends inside a page"
        first_unit = whole_pages(first_token - segment.first_token, page_size)
        units = pages_for_tokens(tokens, page_size)
    assert len(pages) == units * PAGE_ID_BYTES, f"{len(pages) // PAGE_ID_BYTES} ids for {units} units"
    return Span(segment.component, first_unit, pages)


def cut_into_regions(span: Span, region_units: int) -> tuple[Span, ...]:
    """`span` as regions of at most `region_units` units, in order, without gap. O(units)."""
    step = region_units * PAGE_ID_BYTES
    return tuple(
        Span(span.component, span.first_unit + at // PAGE_ID_BYTES, span.pages[at : at + step])
        for at in range(0, len(span.pages), step)
    )
