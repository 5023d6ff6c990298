"""Strided copies: where two layouts of the same elements meet, in as few and as long loops as they allow.

Invariants. G1: the boxes of `meet` and `combine` cover each common element once. G2: their loops are ordered from the
outermost to the innermost, of the sink, and no two neighbours could be one. Never: knows what an axis means.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True)
class Run:
    """Coordinates [first, first + count) of an axis: the i-th of them lies `offset + i * stride` bytes further on."""

    first: int
    count: int
    offset: int
    stride: int

    @property
    def end(self) -> int:
        return self.first + self.count


Runs = tuple[Run, ...]
"""One axis on one rank: the coordinates it has, and where. Several runs describe blocked axes, and sections."""


@dataclass(frozen=True, slots=True)
class Loop:
    """`count` steps of so many bytes on each side."""

    count: int
    source_stride: int
    sink_stride: int


@dataclass(frozen=True, slots=True)
class Box:
    """A strided copy inside of a page: loops around one element, which may differ in size between the sides."""

    source_offset: int
    sink_offset: int
    loops: tuple[Loop, ...]

    @property
    def elements(self) -> int:
        return math.prod(loop.count for loop in self.loops)

    def run_elements(self, source_itemsize: int, sink_itemsize: int) -> int:
        """Elements that follow one another without gap on both sides."""
        inner = self.loops[-1] if self.loops else None
        dense = inner is not None and (inner.source_stride, inner.sink_stride) == (source_itemsize, sink_itemsize)
        return inner.count if inner is not None and dense else 1


def meet(source: Runs, source_first: int, sink: Runs, sink_first: int, count: int) -> tuple[Box, ...]:
    """Of one axis: coordinate `source_first + i` of the source goes to `sink_first + i` of the sink, for all i below
    `count` that both have. In the order of i."""
    cuts = []
    for here in source:
        for there in sink:
            first = max(here.first - source_first, there.first - sink_first, 0)
            end = min(here.end - source_first, there.end - sink_first, count)
            if first < end:
                source_offset = here.offset + (source_first + first - here.first) * here.stride
                sink_offset = there.offset + (sink_first + first - there.first) * there.stride
                cuts.append((first, Box(source_offset, sink_offset, (Loop(end - first, here.stride, there.stride),))))
    cuts.sort(key=lambda cut: cut[0])
    return _fold([box for _, box in cuts])


def combine(axes: Iterable[Sequence[Box]]) -> tuple[Box, ...]:
    """Of all axes together: every combination of their boxes, which add up."""
    return tuple(
        Box(
            sum(part.source_offset for part in parts),
            sum(part.sink_offset for part in parts),
            _coalesce([loop for part in parts for loop in part.loops if loop.count > 1]),
        )
        for parts in product(*axes)
    )


def _fold(boxes: Sequence[Box]) -> tuple[Box, ...]:
    """Like boxes at equal distances become one loop around them. Greedy: an axis in blocks of one size is one box."""
    folded = []
    at = 0
    while at < len(boxes):
        head, end = boxes[at], at + 1
        if end < len(boxes):
            source_step = boxes[end].source_offset - head.source_offset
            sink_step = boxes[end].sink_offset - head.sink_offset
            while end < len(boxes) and boxes[end] == _moved(head, (end - at) * source_step, (end - at) * sink_step):
                end += 1
            if end > at + 1:
                head = Box(head.source_offset, head.sink_offset, (Loop(end - at, source_step, sink_step), *head.loops))
        folded.append(head)
        at = end
    return tuple(folded)


def _moved(box: Box, source_bytes: int, sink_bytes: int) -> Box:
    return Box(box.source_offset + source_bytes, box.sink_offset + sink_bytes, box.loops)


def _coalesce(loops: list[Loop]) -> tuple[Loop, ...]:
    joined: list[Loop] = []
    for loop in sorted(loops, key=lambda loop: (abs(loop.sink_stride), abs(loop.source_stride)), reverse=True):
        inner = loop
        if joined and (joined[-1].source_stride, joined[-1].sink_stride) == (
            loop.count * loop.source_stride,
            loop.count * loop.sink_stride,
        ):
            inner = Loop(joined.pop().count * loop.count, loop.source_stride, loop.sink_stride)
        joined.append(inner)
    return tuple(joined)
