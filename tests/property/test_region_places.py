"""The rule by which regions follow one another: whatever keeps it moves every layer of every unit once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.kv.layout import Component
from baton.common.messages import pack_tokens
from baton.transfer.plan import (
    Place,
    Segment,
    Span,
    cut_into_regions,
    is_first,
    is_last,
    is_next,
    is_within,
    most_in_region,
    most_regions,
    place_of,
    stretch_of,
)

SEGMENTS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3).map(
    lambda sizes: tuple(
        Segment(component, 0, units, units, layers)
        for component, (units, layers) in zip(Component, sizes, strict=False)
    )
)


def every_place(segments: tuple[Segment, ...]) -> Iterator[Place]:
    """And many that are none."""
    for index, segment in enumerate(segments):
        most = segment.units + 1
        for parts in range(1, segment.layers + 2):
            for part in range(parts + 1):
                for first in range(most):
                    for units in range(1, most + 1 - first):
                        for tail in range(most):
                            yield Place(index, first, units, part, parts, tail)


def layers_in(segments: tuple[Segment, ...], place: Place) -> Iterator[tuple[int, int, int]]:
    begin, end = stretch_of(segments[place.segment].layers, segments[place.segment].layers, place.part, place.parts)
    for unit in range(place.first, place.end):
        yield from ((place.segment, unit, layer) for layer in range(begin, end))


@settings(max_examples=60, deadline=None)
@given(segments=SEGMENTS, data=st.data())
def test_any_chain_of_neighbours_has_every_layer_of_every_unit_once(
    segments: tuple[Segment, ...], data: st.DataObject
) -> None:
    places = [place for place in every_place(segments) if is_within(segments, place)]
    at = data.draw(st.sampled_from([place for place in places if is_first(place)]))
    chain = [at]
    while not is_last(segments, at):
        following = [place for place in places if is_next(segments, at, place)]
        assert following, f"nothing can follow {at} of {segments}"
        at = data.draw(st.sampled_from(following))
        chain.append(at)
    assert not [place for place in places if is_next(segments, at, place)], "something follows the last one"
    moved = Counter(one for place in chain for one in layers_in(segments, place))
    whole = {
        (index, unit, layer)
        for index, segment in enumerate(segments)
        for unit in range(segment.units)
        for layer in range(segment.layers)
    }
    assert moved == Counter(whole)
    assert len(chain) <= most_regions(segments), "more regions than tags"


@settings(max_examples=200, deadline=None)
@given(units=st.integers(1, 20), tail=st.integers(0, 19), layers=st.integers(1, 9), data=st.data())
def test_what_a_source_cuts_is_such_a_chain_and_fits_its_slots(
    units: int, tail: int, layers: int, data: st.DataObject
) -> None:
    tail = min(tail, units - 1)
    segment = Segment(Component.FULL, 0, units, units, layers)
    parts = data.draw(st.integers(1, segment.most_parts))
    whole = data.draw(st.integers(1, 4))
    layer_bytes = 16
    ids = [1 + unit for unit in range(units)]
    regions = list(cut_into_regions(Span(Component.FULL, 0, pack_tokens(ids[:tail])), whole)) if tail else []
    for part in range(parts):
        span = Span(Component.FULL, tail, pack_tokens(ids[tail:]), part, parts, tail if parts > 1 else 0)
        regions += cut_into_regions(span, most_in_region(segment, whole, parts))
    places = [place_of((segment,), region) for region in regions]
    chain = [place for place in places if place is not None]
    assert len(chain) == len(places)
    assert all(is_within((segment,), place) for place in chain)
    assert is_first(chain[0])
    assert is_last((segment,), chain[-1])
    assert all(is_next((segment,), one, other) for one, other in pairwise(chain))
    for region in regions:
        begin, end = stretch_of(layers * layer_bytes, layers, region.part, region.parts)
        assert (end - begin) * region.units <= whole * layers * layer_bytes, "larger than a slot"
