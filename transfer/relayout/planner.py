"""Re-layout plans: what moves where, so that a sink's pages hold what the sources' pages held.

A plan has two parts. `Relayout` belongs to a pair of layouts: it is made once, when two sides meet, and refuses what
cannot be done. `Relayout.bind` adds a token range, cheaply: page numbers, and the copies inside of pages.

Invariants. P1: each byte of each element of a bound range is written once, on every sink rank that has it; no other
byte of a page is written (where both sides are alike, whole pages are). P2: the binds of ranges that partition a
segment partition what they write. P3: both sides compute the same plan from the same description.
Never: memory, page ids, or a decision about a hand-off.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.common.errors import ConfigError
from baton.common.kv.layout import Component
from baton.common.units import page_ceil
from baton.transfer.relayout.dtypes import FORMATS, Conversion, check_lossy, conversion_of
from baton.transfer.relayout.geometry import Box, Loop, combine, meet
from baton.transfer.relayout.routes import Route, routes_of
from baton.transfer.relayout.sides import FieldLayout, PoolLayout, SideLayout

I64 = npt.NDArray[np.int64]
SAME_MODEL = "both sides must run one model, with the same layers in each group"


@dataclass(frozen=True, slots=True)
class RelayoutSegment:
    """What moves of one component: what the source has of tokens [first_token, end_token).

    A query behind `end_token` sees tokens from `needed_token` on. `missing_tokens` are those before `first_token` in
    the page it is in that the source no longer has (a window whose page boundaries differ): that page may be read,
    but nobody may be told that it holds all of its tokens."""

    component: Component
    first_token: int
    end_token: int
    needed_token: int
    missing_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """All places of a range where tokens [source_token, + tokens) of a source page are tokens [sink_token, + tokens) of
    a sink page. Page number p of a row is that of tokens [p * page_size, (p + 1) * page_size); 0 for a state."""

    source_token: int
    sink_token: int
    tokens: int
    source_pages: I64
    sink_pages: I64


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Each of `boxes`, from each source page of `meeting` to its sink page. `conversion` is None where bytes move."""

    source: int
    sink: int
    conversion: Conversion | None
    meeting: Meeting
    boxes: tuple[Box, ...]

    @property
    def wire_itemsize(self) -> int:
        return self.conversion.wire_itemsize if self.conversion else 1

    @property
    def wire_bytes(self) -> int:
        return len(self.meeting.sink_pages) * sum(box.elements for box in self.boxes) * self.wire_itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """A plan for tokens [first, end) of a segment. `least_bytes`: what must travel whatever the plan, if each sink
    rank gets what its next query can see once, in the smaller format."""

    component: Component
    first: int
    end: int
    whole_pages: bool
    moves: tuple[Move, ...]
    least_bytes: int

    @property
    def planned_bytes(self) -> int:
        return sum(move.wire_bytes for move in self.moves)

    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """By (source rank, sink rank); pairs that exchange nothing are left out."""
        found: dict[tuple[int, int], int] = defaultdict(int)
        for move in self.moves:
            found[move.source, move.sink] += move.wire_bytes
        return dict(found)

    def between(self, source: int, sink: int) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if (move.source, move.sink) == (source, sink))


@dataclass(frozen=True, slots=True, eq=False)
class Relayout:
    """What moves between two sides, for every token. `alike`: whole pages do, from rank r to rank r; `routes` is empty
    then. `least_bytes`: of a token, or of a state, what all sink ranks have of it, in the smaller format."""

    source: SideLayout
    sink: SideLayout
    routes: Mapping[Component, tuple[Route, ...]]
    least_bytes: Mapping[Component, int]

    @property
    def alike(self) -> bool:
        return not self.routes

    def segments(self, start: int, total: int, window_held_from: int | None = None) -> tuple[RelayoutSegment, ...]:
        """All that a sink which has everything of tokens [0, start) needs to go on behind `total` tokens. `start` is
        aligned to the sink's pages. `window_held_from`: where the pages begin that the source has of sliding layers,
        when it has more than it must (`KvLayout.live_from`)."""
        assert 0 <= start <= total, (start, total)
        assert start % self.sink.layout.page_size == 0, f"start {start} is not aligned to the sink's pages"
        if start == total:
            return ()
        segments = []
        for component in self.sink.layout.components:
            if component is not Component.SWA:
                segments.append(RelayoutSegment(component, start, total, start))
                continue
            wanted = max(start, self.sink.layout.live_from(total))
            held = self.source.layout.live_from(total) if window_held_from is None else window_held_from
            needed = max(start, total - self.sink.layout.window + 1)
            assert held <= needed, f"the source has the window from {held}, and {needed} is needed"
            first = max(wanted, held)
            if first < total:
                segments.append(RelayoutSegment(component, first, total, max(first, needed), first - wanted))
        return tuple(segments)

    def bind(self, segment: RelayoutSegment, first: int, end: int) -> Moves:
        """The plan for tokens [first, end) of `segment`; a state goes whole. Where both sides are alike it moves whole
        pages, and the range must be made of such."""
        assert segment.first_token <= first < end <= segment.end_token, f"[{first}, {end}) is not in {segment}"
        state = segment.component is Component.STATE
        assert not state or (first, end) == (segment.first_token, segment.end_token), f"[{first}, {end}) of {segment}"
        needed_tokens = 1 if state else max(0, end - max(first, segment.needed_token))
        least = needed_tokens * self.least_bytes[segment.component]
        if self.alike:
            moves = self._whole_pages(segment, first, end)
        else:
            met = _state_meeting() if state else self._meetings(first, end)
            moves = tuple(_move(route, meeting) for meeting in met for route in self.routes[segment.component])
        return Moves(segment.component, first, end, self.alike, moves, least)

    def _whole_pages(self, segment: RelayoutSegment, first: int, end: int) -> tuple[Move, ...]:
        meeting = _state_meeting()[0]
        if segment.component is not Component.STATE:
            page_size = self.sink.layout.page_size
            assert first % page_size == 0, f"[{first}, {end}) begins inside a page"
            assert end % page_size == 0 or end == segment.end_token, f"[{first}, {end}) ends inside a page"
            pages = np.arange(first, page_ceil(end, page_size), page_size) // page_size
            meeting = Meeting(0, 0, page_size, pages, pages)
        return tuple(
            Move(rank, rank, None, meeting, (Box(0, 0, (Loop(page_bytes, 1, 1),)),))
            for rank, page_bytes in enumerate(self.sink.pool(segment.component).page_bytes)
            if page_bytes
        )

    def _meetings(self, first: int, end: int) -> tuple[Meeting, ...]:
        """Cut at every page boundary of either side, pieces repeat with the period of both. What is left of a piece at
        the ends of the range is of a kind of its own."""
        source_size, sink_size = self.source.layout.page_size, self.sink.layout.page_size
        cuts = [np.arange(page_ceil(first + 1, size), end, size) for size in {source_size, sink_size}]
        bounds = np.sort(np.concatenate([[first, end], *cuts]))
        bounds = bounds[np.flatnonzero(np.diff(bounds, prepend=-1))]
        starts, last = bounds[:-1], len(bounds) - 1
        period = math.lcm(source_size, sink_size)
        kinds = period // source_size + period // sink_size - 1
        head = int(first % source_size > 0 and first % sink_size > 0)
        tail = max(head, last - int(end % source_size > 0 and end % sink_size > 0))
        repeated = [slice(head + kind, tail, kinds) for kind in range(min(kinds, tail - head))]
        meetings = []
        for pieces in [*[slice(0, 1)] * head, *repeated, *[slice(tail, last)] * (last - tail)]:
            at = int(starts[pieces][0])
            tokens = int(bounds[pieces.start + 1]) - at
            pages = starts[pieces] // source_size, starts[pieces] // sink_size
            meetings.append(Meeting(at % source_size, at % sink_size, tokens, *pages))
        return tuple(meetings)


def plan_relayout(source: SideLayout, sink: SideLayout, lossy: Collection[str] = ()) -> Relayout:
    """Raises ConfigError, naming the field and both values, for sides that do not keep one model, a description that
    cannot be true, and a conversion that rounds and is not in `lossy` ("float32->bfloat16")."""
    check_lossy(lossy)
    if source == sink:
        least = {pool.component: _least_alike(pool, sink.layout.page_size) for pool in sink.pools}
        return Relayout(source, sink, {}, least)
    _require_equal("components", "+".join(source.layout.components), "+".join(sink.layout.components))
    _require_equal("window", source.layout.window, sink.layout.window)
    met = [
        (here, there, _conversions(here, there, lossy)) for here, there in zip(source.pools, sink.pools, strict=True)
    ]
    source.check("source")
    sink.check("sink")
    routes = {there.component: _routes(here, there, conversions) for here, there, conversions in met}
    least = {there.component: _least_converted(there, conversions) for _, there, conversions in met}
    return Relayout(source, sink, routes, least)


def _conversions(source: PoolLayout, sink: PoolLayout, lossy: Collection[str]) -> tuple[Conversion, ...]:
    """By field, which are the same on both sides: checked."""
    name = source.component
    _require_equal(f"{name}.fields", _names(source), _names(sink))
    for here, there in zip(source.fields, sink.fields, strict=True):
        label = f"{name}.{here.field.name}"
        _require_equal(f"{label}.axes", *("+".join(axis.name for axis in kept.field.axes) for kept in (here, there)))
        for a, b in zip(here.field.axes, there.field.axes, strict=True):
            _require_equal(f"{label}.{a.name}", a.extent, b.extent)
    return tuple(
        conversion_of(f"{name}.{here.field.name}.dtype", here.dtype, there.dtype, lossy)
        for here, there in zip(source.fields, sink.fields, strict=True)
    )


def _names(pool: PoolLayout) -> str:
    return "+".join(kept.field.name for kept in pool.fields)


def _require_equal(field: str, source: object, sink: object) -> None:
    if source != sink:
        raise ConfigError(
            field, f"{source} -> {sink}", "source and sink differ in what a plan cannot change", SAME_MODEL
        )


def _routes(source: PoolLayout, sink: PoolLayout, conversions: Sequence[Conversion]) -> tuple[Route, ...]:
    return tuple(
        route
        for here, there, conversion in zip(source.fields, sink.fields, conversions, strict=True)
        for route in routes_of(f"{source.component}.{here.field.name}", here, there, conversion)
    )


def _elements(kept: FieldLayout) -> int:
    """Of all ranks, per token or per state."""
    return sum(
        math.prod(sum(run.count for run in runs) for runs in placement.axes) for placement in kept.ranks if placement
    )


def _least_converted(pool: PoolLayout, conversions: Sequence[Conversion]) -> int:
    """As `Relayout.least_bytes`."""
    fields = zip(pool.fields, conversions, strict=True)
    return sum(_elements(kept) * conversion.wire_itemsize for kept, conversion in fields)


def _least_alike(pool: PoolLayout, page_size: int) -> int:
    """As `Relayout.least_bytes`; of a format that we do not know, all of a page."""
    if all(kept.dtype in FORMATS for kept in pool.fields):
        return sum(_elements(kept) * FORMATS[kept.dtype].itemsize for kept in pool.fields)
    return sum(pool.page_bytes) // (1 if pool.component is Component.STATE else page_size)


def _state_meeting() -> tuple[Meeting, ...]:
    """One slot on each side."""
    only = np.zeros(1, dtype=np.int64)
    return (Meeting(0, 0, 0, only, only),)


def _move(route: Route, meeting: Meeting) -> Move:
    boxes = route.boxes
    if meeting.tokens:
        tokens = meet(route.source_tokens, meeting.source_token, route.sink_tokens, meeting.sink_token, meeting.tokens)
        boxes = combine([boxes, tokens])
    return Move(route.source, route.sink, route.conversion, meeting, boxes)
