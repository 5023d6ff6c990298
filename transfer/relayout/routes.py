"""Who sends what to whom: for each sink rank, every element it has comes from exactly one source rank. No tokens yet.

Each axis is cut into *zones*: stretches that each rank has wholly or not at all. A *cell* is one zone of each axis. The
sources that have a cell are its owners; where there are several (replicated heads), the cells with the same owners are
lined up by sink rank, and each owner takes an equal stretch of that line, cut between layers.

Invariants. A1: an element of a sink rank is on one route. A2: of cells with the same n owners, each owner sends 1/n, to
within one layer of one cell. A3: between sides that differ in nothing but pages, rank r sends to rank r alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

from baton.common.errors import ConfigError
from baton.transfer.relayout.dtypes import Conversion
from baton.transfer.relayout.geometry import Box, Runs, combine, meet
from baton.transfer.relayout.sides import Axis, FieldLayout, Interval, Placement


@dataclass(frozen=True, slots=True)
class Route:
    """What `source` sends `sink` of one field, for each token (of a state: at all). Offsets in `boxes` are those of a
    page, with token coordinates left out; these are `source_tokens` and `sink_tokens`."""

    source: int
    sink: int
    conversion: Conversion
    boxes: tuple[Box, ...]
    source_tokens: Runs
    sink_tokens: Runs


Cell = tuple[Interval, ...]


class _Zone(NamedTuple):
    """`owners` and `holders`: bit r is set where source, or sink, rank r has it."""

    interval: Interval
    owners: int
    holders: int


class _Share(NamedTuple):
    sink: int
    cell: Cell


def routes_of(name: str, source: FieldLayout, sink: FieldLayout, conversion: Conversion) -> tuple[Route, ...]:
    """Ordered by source, then sink. Raises ConfigError where one of the sides does not have all of the field."""
    zones = [_zones(axis, index, source, sink) for index, axis in enumerate(source.field.axes)]
    by_owners: dict[int, list[_Share]] = defaultdict(list)
    for cell in product(*zones):
        owners, holders = -1, -1
        for zone in cell:
            owners &= zone.owners
            holders &= zone.holders
        if not owners or not holders:
            _refuse_gap(name, source, cell, "source" if not owners else "sink")
        by_owners[owners].extend(_Share(rank, tuple(zone.interval for zone in cell)) for rank in _bits(holders))
    cells: dict[tuple[int, int], list[Cell]] = defaultdict(list)
    for owners, shares in by_owners.items():
        shares.sort(key=lambda share: share.sink)
        for rank, share in _deal(shares, _bits(owners)):
            cells[rank, share.sink].append(share.cell)
    return tuple(_route(pair, source, sink, conversion, _merge(kept)) for pair, kept in sorted(cells.items()))


def _zones(axis: Axis, index: int, source: FieldLayout, sink: FieldLayout) -> list[_Zone]:
    owned = [placement.axes[index] if placement else () for placement in source.ranks]
    held = [placement.axes[index] if placement else () for placement in sink.ranks]
    bounds = {0, axis.extent} | {bound for runs in (*owned, *held) for run in runs for bound in (run.first, run.end)}
    zones: list[_Zone] = []
    for first, end in pairwise(sorted(bounds)):
        owners, holders = _having(owned, first), _having(held, first)
        if zones and zones[-1][1:] == (owners, holders):
            first = zones.pop().interval[0]
        zones.append(_Zone((first, end), owners, holders))
    return zones


def _having(ranks: Sequence[Runs], coordinate: int) -> int:
    return sum(1 << rank for rank, runs in enumerate(ranks) if any(run.first <= coordinate < run.end for run in runs))


def _bits(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


def _refuse_gap(name: str, layout: FieldLayout, cell: Sequence[_Zone], side: str) -> None:
    where = ", ".join(f"{axis.name} {zone.interval}" for axis, zone in zip(layout.field.axes, cell, strict=True))
    raise ConfigError(f"{side}.{name}", where, f"no rank of the {side} has it", "each side must have all of the model")


def _deal(shares: Sequence[_Share], owners: Sequence[int]) -> Iterator[tuple[int, _Share]]:
    """Each owner's stretch of `shares`. The first axis of a cell, its layers, may be cut."""
    weights = [math.prod(end - first for first, end in share.cell[1:]) for share in shares]  # of one layer
    total = sum(weight * _size(share.cell[0]) for weight, share in zip(weights, shares, strict=True))
    dealt, turn = 0, 0
    for weight, (sink, ((first, end), *rest)) in zip(weights, shares, strict=True):
        while first < end:
            layers = end - first
            if turn + 1 < len(owners):
                due = total * (turn + 1) - dealt * len(owners)  # both sides times the number of owners
                unit = weight * len(owners)
                layers = min(layers, max(0, (2 * due + unit) // (2 * unit)))
            if layers == 0:
                turn += 1
                continue
            yield owners[turn], _Share(sink, ((first, first + layers), *rest))
            first += layers
            dealt += layers * weight


def _size(interval: Interval) -> int:
    return interval[1] - interval[0]


def _merge(cells: list[Cell]) -> list[Cell]:
    """Neighbours become one."""
    for axis in reversed(range(len(cells[0]))):
        cells.sort(key=lambda cell: (*cell[:axis], *cell[axis + 1 :], cell[axis]))
        merged: list[Cell] = []
        for cell in cells:
            last = merged[-1] if merged else None
            if last and last[axis][1] == cell[axis][0] and _without(last, axis) == _without(cell, axis):
                cell = (*cell[:axis], (last[axis][0], cell[axis][1]), *cell[axis + 1 :])
                merged.pop()
            merged.append(cell)
        cells = merged
    return cells


def _without(cell: Cell, axis: int) -> Cell:
    return (*cell[:axis], *cell[axis + 1 :])


def _route(
    pair: tuple[int, int], source: FieldLayout, sink: FieldLayout, conversion: Conversion, cells: Sequence[Cell]
) -> Route:
    here, there = _having_it(source, pair[0]), _having_it(sink, pair[1])
    offset = (Box(here.offset, there.offset, ()),)
    boxes: list[Box] = []
    for cell in cells:
        axes = zip(here.axes, there.axes, cell, strict=True)
        boxes.extend(combine([offset, *(meet(a, first, b, first, end - first) for a, b, (first, end) in axes)]))
    return Route(*pair, conversion, tuple(boxes), here.tokens, there.tokens)


def _having_it(layout: FieldLayout, rank: int) -> Placement:
    placement = layout.ranks[rank]
    assert placement is not None, rank
    return placement
