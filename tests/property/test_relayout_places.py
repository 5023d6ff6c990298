"""Re-layout between random sides: every destination byte written once, from the right element."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relayout_rig import Side, carry_out, written
from relayout_sides_rig import two_sides

from baton.common.kv.layout import Component
from baton.transfer.relayout.dtypes import FORMATS, Conversion
from baton.transfer.relayout.planner import Moves, Relayout, RelayoutSegment, plan_relayout
from baton.transfer.relayout.sides import SideLayout

EVERY_FORMAT = tuple(FORMATS)
ROUNDING = frozenset(c.name for a in FORMATS for b in FORMATS if not (c := Conversion(a, b)).exact)
SEEDS = st.integers(0, (1 << 32) - 1)


@dataclass(frozen=True)
class Case:
    """Tokens [start, total) of them, bound in parts cut at `cuts`, from a source that has its window from `held` on."""

    seed: int
    start_page: int
    total: int
    cuts: tuple[int, ...]
    extra_held: int

    def start(self, sink: SideLayout) -> int:
        size = sink.layout.page_size
        return self.start_page % -(-self.total // size) * size

    def held(self, source: SideLayout) -> int:
        """Where the source has its window from: where it must, or earlier."""
        return max(0, source.layout.live_from(self.total) - self.extra_held)

    def parts(self, relayout: Relayout, segment: RelayoutSegment) -> list[Moves]:
        """Of a state there is one."""
        cuts = {cut for cut in self.cuts if segment.first_token < cut < segment.end_token}
        if segment.component is Component.STATE:
            cuts = set()
        bounds = sorted({segment.first_token, segment.end_token} | cuts)
        return [relayout.bind(segment, first, end) for first, end in pairwise(bounds)]


CASES = st.builds(
    Case,
    seed=SEEDS,
    start_page=st.integers(0, 80),
    total=st.integers(1, 75),
    cuts=st.lists(st.integers(1, 74), max_size=4).map(tuple),
    extra_held=st.sampled_from([0, 0, 1, 5, 100]),
)


def check_places(case: Case, dtypes: tuple[str, ...]) -> None:
    source_layout, sink_layout = two_sides(case.seed, dtypes)
    relayout = plan_relayout(source_layout, sink_layout, ROUNDING)
    assert not relayout.alike, "gaps are random: if this ever happens, take another seed"
    source, sink = Side(source_layout, case.total, seed=1).tag(), Side(sink_layout, case.total, seed=2)
    start, held = case.start(sink_layout), case.held(source_layout)
    segments = {segment.component: segment for segment in relayout.segments(start, case.total, held)}
    for component in sink_layout.layout.components:
        first = start
        if component is Component.SWA:
            first = max(start, held, sink_layout.layout.live_from(case.total))
        if component not in segments:
            assert first == case.total
            continue
        expected, marks = sink.expected(source_layout, component, range(first, case.total))
        binds = case.parts(relayout, segments[component])
        counts = np.sum([written(moves, sink) for moves in binds], axis=0)
        assert np.array_equal(counts, marks), "each byte of the range once, and no other"
        for moves in binds:
            carry_out(moves, source, sink)
        assert np.array_equal(sink.flat(component), expected)


@given(case=CASES)
@settings(max_examples=200, deadline=None)
def test_each_byte_is_written_once_from_the_right_element(case: Case) -> None:
    check_places(case, ("float32",))


@given(case=CASES)
@settings(max_examples=100, deadline=None)
def test_whatever_the_formats(case: Case) -> None:
    check_places(case, EVERY_FORMAT)


@pytest.mark.slow
@given(case=CASES)
@settings(max_examples=1500, deadline=None)
def test_thousands_of_pairs(case: Case) -> None:
    check_places(case, EVERY_FORMAT)


@given(case=CASES)
@settings(max_examples=100, deadline=None)
def test_there_and_back_again_is_where_it_was(case: Case) -> None:
    """For each byte that travelled: what the way there did not bring, the way back does not ask for."""
    source_layout, sink_layout = two_sides(case.seed, ("bfloat16",))
    there, back = plan_relayout(source_layout, sink_layout), plan_relayout(sink_layout, source_layout)
    source, sink = Side(source_layout, case.total, seed=1).tag(), Side(sink_layout, case.total, seed=2)
    returned = Side(source_layout, case.total, seed=3)
    held = {}
    for segment in there.segments(0, case.total):
        held[segment.component] = segment.first_token
        carry_out(there.bind(segment, segment.first_token, segment.end_token), source, sink)
    for segment in back.segments(0, case.total, held.get(Component.SWA)):
        component = segment.component
        tokens = range(segment.first_token, segment.end_token)
        expected, _ = returned.expected(source_layout, component, tokens)
        carry_out(back.bind(segment, segment.first_token, segment.end_token), sink, returned)
        assert np.array_equal(returned.flat(component), expected)


@given(seed=SEEDS, total=st.integers(1, 75))
@settings(max_examples=200, deadline=None)
def test_nothing_travels_twice(seed: int, total: int) -> None:
    """What is planned is what must be, but for tokens that share a page with the window."""
    source, sink = two_sides(seed, EVERY_FORMAT)
    relayout = plan_relayout(source, sink, ROUNDING)
    for segment in relayout.segments(0, total):
        moves = relayout.bind(segment, segment.first_token, segment.end_token)
        beside = segment.needed_token - segment.first_token
        assert moves.planned_bytes == moves.least_bytes + beside * relayout.least_bytes[segment.component]
        assert 0 <= beside < sink.layout.page_size
        assert moves.planned_bytes == sum(moves.bytes_by_pair().values())
