"""Random descriptions of two sides of one random model, from a seed: ranks in any number, pages of any size, axes in
any order, with gaps, in blocks, in sections, with parts on several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

from baton.common.kv.layout import Component, KvLayout
from baton.transfer.relayout.dtypes import FORMATS
from baton.transfer.relayout.geometry import Run, Runs
from baton.transfer.relayout.sides import Axis, Field, FieldLayout, Interval, Placement, PoolLayout, SideLayout

PAGE_SIZES = (1, 3, 4, 16, 24)
Model = dict[Component, tuple[Field, ...]]


def two_sides(seed: int, dtypes: Sequence[str]) -> tuple[SideLayout, SideLayout]:
    """`dtypes`: each field of each side has one of them."""
    random = Random(seed)
    have = [component for component in Component if random.random() < 0.5] or [random.choice(list(Component))]
    window = random.randint(1, 40) if Component.SWA in have else 0
    model = {component: _fields(random, component) for component in have}
    layouts = [
        KvLayout(random.choice(PAGE_SIZES), Component.FULL in have, window, Component.STATE in have) for _ in range(2)
    ]
    first, second = (_side(random, layout, model, dtypes) for layout in layouts)
    return first, second


def _fields(random: Random, component: Component) -> tuple[Field, ...]:
    layers, heads = Axis("layer", random.randint(1, 4)), Axis("head", random.choice([1, 2, 3, 4, 8]))
    if component is Component.STATE:
        conv = Field("conv", (layers, Axis("channel", random.choice([2, 6, 8])), Axis("tap", 3)))
        return (conv, Field("recurrent", (layers, heads, Axis("cell", 4))))[: random.randint(1, 2)]
    return (Field("kv", (layers, heads, Axis("kv", 2), Axis("head_dim", random.choice([1, 3, 8])))),)


def _side(random: Random, layout: KvLayout, model: Model, dtypes: Sequence[str]) -> SideLayout:
    """The second axis of each field is cut over the ranks of a stage."""
    tensor = random.choice([1, 1, 2, 3, 4, 8])
    stages = random.randint(1, min(3, *(fields[0].axes[0].extent for fields in model.values())))
    pools = []
    for component, fields in model.items():
        layers = _parts(random, fields[0].axes[0].extent, stages)
        ends = [0] * (stages * tensor)
        kept_fields = []
        for field in fields:
            dtype, parts = random.choice(dtypes), _shards(random, field.axes[1].extent, tensor)
            placed: list[Placement | None] = []
            for rank in range(stages * tensor):
                kept = [
                    [layers[rank // tensor]],
                    parts[rank % tensor],
                    *([(0, axis.extent)] for axis in field.axes[2:]),
                ]
                page_size = 0 if component is Component.STATE else layout.page_size
                place, ends[rank] = _placement(random, kept, page_size, FORMATS[dtype].itemsize, ends[rank])
                placed.append(place)
            kept_fields.append(FieldLayout(field, dtype, tuple(placed)))
        pools.append(PoolLayout(component, tuple(kept_fields), tuple(end + random.randint(0, 3) for end in ends)))
    return SideLayout(layout, stages * tensor, tuple(pools))


def _parts(random: Random, extent: int, parts: int) -> list[Interval]:
    return list(pairwise([0, *sorted(random.sample(range(1, extent), parts - 1)), extent]))


def _shards(random: Random, extent: int, ranks: int) -> list[list[Interval]]:
    """Of each rank what it has of an axis: all of it is somewhere, some of it perhaps in several places."""
    if ranks > extent:
        return [[(rank * extent // ranks, rank * extent // ranks + 1)] for rank in range(ranks)]
    half = extent // 2
    if extent % 2 == 0 and half >= ranks and random.random() < 0.3:  # two sections, each cut alike
        return [[(first, end), (half + first, half + end)] for first, end in _parts(random, half, ranks)]
    parts, wider = _parts(random, extent, ranks), random.choice([0, 0, 1])
    if random.random() < 0.3:  # ranks may be numbered in any order
        random.shuffle(parts)
    return [[(max(0, first - wider), min(extent, end + wider))] for first, end in parts]


def _placement(
    random: Random, kept: Sequence[Sequence[Interval]], page_size: int, itemsize: int, offset: int
) -> tuple[Placement, int]:
    """And the byte behind it. An axis is one digit of an offset, or two where it lies in blocks."""
    axes = [*kept, *([[(0, page_size)]] if page_size else [])]
    sizes = [sum(end - first for first, end in intervals) for intervals in axes]
    blocks = [random.choice([size, *(b for b in (2, 4) if size % b == 0)]) for size in sizes]
    digits = [(axis, blocks[axis], False) for axis in range(len(axes))]
    digits += [(axis, size // blocks[axis], True) for axis, size in enumerate(sizes) if blocks[axis] < size]
    random.shuffle(digits)
    strides: dict[tuple[int, bool], int] = {}
    stride = itemsize
    for axis, count, outer in digits:
        strides[axis, outer] = stride
        stride = stride * count + random.choice([0, 0, 0, 1, itemsize])
    runs = [
        _runs(intervals, blocks[axis], strides[axis, False], strides.get((axis, True), 0))
        for axis, intervals in enumerate(axes)
    ]
    return Placement(offset, tuple(runs[: len(kept)]), runs[-1] if page_size else ()), offset + stride


def _runs(intervals: Sequence[Interval], block: int, inner: int, outer: int) -> Runs:
    """Coordinates in order: within a block `inner` bytes apart, blocks `outer` bytes apart."""
    runs, at = [], 0
    for first, end in intervals:
        while first < end:
            count = min(end - first, block - at % block)
            runs.append(Run(first, count, at // block * outer + at % block * inner, inner))
            first, at = first + count, at + count
    return tuple(runs)
