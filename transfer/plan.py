"""What a hand-off moves, in which order, and how it is cut into regions. Pure arithmetic; knows nothing of memory.

Owns the vocabulary of the border between engines, which count tokens, and the transfer plane, which counts *units*. A
hand-off has one *segment* per component of the model, in the order of `Component`. A unit is what travels whole: a
page; of a state, one of the equal pieces into which its slot is cut, so that a state may be larger than a staging slot.

Rules: a region is a run of units of one segment, at most as many as fit a staging slot. Regions follow one another
without gap through all segments. The last units of a segment, its *tail*, may travel *by layers*, while the last layers
are still being computed: part 0 of all of them, then part 1, until the last; part g of G is the layers
[g * L // G, (g + 1) * L // G) of a unit, which are one stretch of its bytes. Both sides lay out their memory alike, but
for the order within a layer of a page, which the sink sees to (fingerprints are compared at registration): unit i of a
source's segment goes to unit i of the sink's, and the last page's unused end travels with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import MAX_PARTS, MAX_REGION_UNITS, pack_tokens
from baton.common.units import pages_for_tokens, whole_pages

PAGE_ID_BYTES = 4
STATE_PIECE_BYTES = 16 << 10
"""Most bytes in a piece of a state. Neighbours are copied, digested and pulled in one go: small ones cost little."""

I32 = npt.NDArray[np.int32]
NO_LAYERS: Mapping[Component, int] = {}
"""Units that are one stretch, whatever they hold."""


class Segment(Struct, frozen=True):
    """What a hand-off moves of one component: what that keeps of tokens [first_token, end_token), in `units` units of
    `layers` equal stretches."""

    component: Component
    first_token: int
    end_token: int
    units: int
    layers: int = 1

    @property
    def most_parts(self) -> int:
        return min(self.layers, MAX_PARTS)


class Span(Struct, frozen=True):
    """Units [first_unit, first_unit + units) of a segment, and the ids of what holds them (little-endian int32). All of
    them, or part `part` of their layers: then the segment travels by layers from unit `tail` on."""

    component: Component
    first_unit: int
    pages: bytes
    part: int = 0
    parts: int = 1
    tail: int = 0

    @property
    def units(self) -> int:
        return len(self.pages) // PAGE_ID_BYTES


class Cut(Protocol):
    """What a `Span` and a `Chunk` say of their place."""

    @property
    def component(self) -> Component: ...
    @property
    def first_unit(self) -> int: ...
    @property
    def units(self) -> int: ...
    @property
    def part(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def tail(self) -> int: ...


class Place(NamedTuple):
    """Where a region lies in a hand-off. `segment` counts them."""

    segment: int
    first: int
    units: int
    part: int
    parts: int
    tail: int

    @property
    def end(self) -> int:
        return self.first + self.units


def segments_of(
    layout: KvLayout, start: int, total: int, state_pieces: int = 1, layers: Mapping[Component, int] = NO_LAYERS
) -> tuple[Segment, ...]:
    """All that a worker which has everything of tokens [0, start) needs to go on behind `total` tokens, in the order in
    which it is sent. `start` is page-aligned. Sliding layers send the pages that are still live then, and none when
    nothing is; a state goes whole: one unit to an engine, `state_pieces` of them on the way. `layers`: of a unit."""
    assert 0 <= start <= total, (start, total)
    assert start % layout.page_size == 0, f"start {start} is not page-aligned"
    segments = []
    for component in layout.components:
        first = max(start, layout.live_from(total)) if component is Component.SWA else start
        units = state_pieces if component is Component.STATE else pages_for_tokens(total - first, layout.page_size)
        if first < total:
            segments.append(Segment(component, first, total, units, layers.get(component, 1)))
    return tuple(segments)


def pieces_of_state(slot_bytes: int) -> int:
    """Into how many equal pieces a state of `slot_bytes` is cut; whole words where the state has whole words."""
    word = 8 if slot_bytes % 8 == 0 else 1
    words, most = slot_bytes // word, STATE_PIECE_BYTES // word
    return words // next(piece for piece in range(min(most, words), 0, -1) if words % piece == 0)


def unit_ids(component: Component, pages: I32, state_pieces: int) -> bytes:
    """Page ids as ids of units: those of a page are the same, the pieces of state slot s are s * n, s * n + 1, ..."""
    assert np.minimum.reduce(pages) > 0, "the null page is nobody's to send or fill"
    if component is Component.STATE and state_pieces > 1:
        return pack_tokens(np.add.outer(pages * np.int32(state_pieces), np.arange(state_pieces)).reshape(-1))
    return pack_tokens(pages)


def count_units(segments: Sequence[Segment]) -> int:
    return sum(segment.units for segment in segments)


def most_regions(segments: Sequence[Segment]) -> int:
    return sum(segment.units * segment.most_parts for segment in segments)


def find_segment(segments: Sequence[Segment], component: Component) -> int | None:
    """Which of `segments` is `component`'s."""
    return next((index for index, segment in enumerate(segments) if segment.component is component), None)


def place_of(segments: Sequence[Segment], cut: Cut) -> Place | None:
    """None: of a component that is no part of the hand-off."""
    index = find_segment(segments, cut.component)
    return None if index is None else Place(index, cut.first_unit, cut.units, cut.part, cut.parts, cut.tail)


def is_within(segments: Sequence[Segment], place: Place) -> bool:
    """Whether there is such a place at all."""
    segment = segments[place.segment]
    if not (0 <= place.first < place.end <= segment.units and 0 <= place.part < place.parts <= segment.most_parts):
        return False
    return 0 <= place.tail <= place.first if place.parts > 1 else place.tail == 0


def is_first(place: Place) -> bool:
    return place.segment == 0 and _begins(place)


def is_next(segments: Sequence[Segment], before: Place, place: Place) -> bool:
    """Whether `place` begins where `before` ends. Both are within. So a chain from a first to a last place has every
    part of every unit once."""
    done = before.end == segments[before.segment].units
    if place.segment != before.segment:
        return place.segment == before.segment + 1 and done and before.part == before.parts - 1 and _begins(place)
    if before.parts == 1:
        return place.first == before.end and (place.parts == 1 or (place.part == 0 and place.tail == before.end))
    at = (before.part + 1, before.tail) if done else (before.part, before.end)
    return (place.parts, place.tail) == (before.parts, before.tail) and (place.part, place.first) == at


def is_last(segments: Sequence[Segment], place: Place) -> bool:
    last = len(segments) - 1
    return place.segment == last and place.end == segments[last].units and place.part == place.parts - 1


def _begins(place: Place) -> bool:
    """It is the first of its segment."""
    return place.first == place.part == 0


def stretch_of(unit_bytes: int, layers: int, part: int, parts: int) -> tuple[int, int]:
    """Where part `part` of `parts` begins and ends in a unit."""
    assert unit_bytes % layers == 0, f"{layers} layers in {unit_bytes} bytes"
    layer_bytes, of_part = unit_bytes // layers, layers_of_part(layers, part, parts)
    return of_part.start * layer_bytes, of_part.stop * layer_bytes


def layers_of_part(layers: int, part: int, parts: int) -> slice:
    """Which of a unit's layers part `part` of `parts` is."""
    return slice(part * layers // parts, (part + 1) * layers // parts)


def most_in_region(segment: Segment, whole_units: int, parts: int) -> int:
    """Units of which `parts`-th parts take no more than `whole_units` whole ones."""
    return min(whole_units * segment.layers // -(-segment.layers // parts), MAX_REGION_UNITS)


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
        replace(span, first_unit=span.first_unit + at // PAGE_ID_BYTES, pages=span.pages[at : at + step])
        for at in range(0, len(span.pages), step)
    )
