"""The sides that our own buffers make (`common/kv/torch_buffer.py`), cut over ranks: tensor parallel, and in stages.

Ranks are numbered stage by stage. Owns: the rule for who has which heads. Never: a model, or memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from baton.common.errors import ConfigError
from baton.common.kv.layout import Component
from baton.common.kv.state_shape import StateShape
from baton.common.model.groups import LayerGroups
from baton.transfer.relayout.dtypes import FORMATS
from baton.transfer.relayout.geometry import Run
from baton.transfer.relayout.sides import (
    TOKEN,
    Axis,
    Field,
    FieldLayout,
    Interval,
    Placement,
    PoolLayout,
    SideLayout,
    dense_placement,
)

PAGE_ORDER = ("layer", "kv", "head", TOKEN, "head_dim")
"""Of `TorchKvBuffer`, from the outermost axis to the innermost."""
STATE_DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class ConvPart:
    """Channels of a convolution that belong together: `heads` times `channels`, cut by heads."""

    heads: int
    channels: int


@dataclass(frozen=True, slots=True)
class ModelKv:
    """What a model keeps. `conv_parts`: the channels of `groups.state`, in order; all of them singly when empty."""

    groups: LayerGroups
    kv_heads: int
    head_dim: int
    conv_parts: tuple[ConvPart, ...] = ()

    def __post_init__(self) -> None:
        channels = sum(part.heads * part.channels for part in self.conv_parts)
        assert not self.conv_parts or (self.groups.state and channels == self.groups.state.conv[0]), self

    @property
    def num_layers(self) -> int:
        return len({*self.groups.full, *self.groups.sliding, *self.groups.recurrent})


@dataclass(frozen=True, slots=True)
class Cut:
    """`tensor` ranks in each stage; `stages[i]`: how many of the model's layers stage i has (empty: one has all)."""

    tensor: int = 1
    stages: tuple[int, ...] = ()


def split_heads(heads: int, ranks: int) -> tuple[Interval, ...]:
    """Heads of each rank. The first ranks have one more where it does not divide; with more ranks than heads, each head
    is on neighbouring ranks, as evenly as can be."""
    if ranks > heads:
        return tuple((rank * heads // ranks, rank * heads // ranks + 1) for rank in range(ranks))
    each, more = divmod(heads, ranks)
    return tuple(pairwise(accumulate((each + (rank < more) for rank in range(ranks)), initial=0)))


def describe_side(
    model: ModelKv, cut: Cut, page_size: int, dtype: str, order: Sequence[str] = PAGE_ORDER
) -> SideLayout:
    """`dtype` of keys, values and convolutions; recurrent sums are float32. Raises ConfigError for a dtype that is not
    known, and stages that do not add up to the model."""
    if dtype not in FORMATS:
        raise ConfigError("dtype", dtype, "a number format of unknown size", f"known: {', '.join(FORMATS)}")
    stages = cut.stages or (model.num_layers,)
    if sum(stages) != model.num_layers or min(stages) < 1:
        raise ConfigError("stages", stages, f"do not add up to the model's {model.num_layers} layers")
    pools = []
    layout = model.groups.layout(page_size)
    for component in layout.components:
        layers = _stage_layers(model.groups.of(component), stages)
        if component is Component.STATE:
            pools.append(_state_pool(model, layers, cut.tensor, dtype))
        else:
            pools.append(_paged_pool(component, model, layers, cut.tensor, page_size, dtype, order))
    return SideLayout(layout, len(stages) * cut.tensor, tuple(pools))


def _stage_layers(numbers: Sequence[int], stages: Sequence[int]) -> tuple[Interval, ...]:
    """Of each stage, its layers as counted within the group, whose layers have these `numbers` in the model."""
    ends = accumulate(stages, initial=0)
    return tuple(pairwise(bisect_left(numbers, end) for end in ends))


def _paged_pool(
    component: Component,
    model: ModelKv,
    layers: Sequence[Interval],
    tensor: int,
    page_size: int,
    dtype: str,
    order: Sequence[str],
) -> PoolLayout:
    itemsize = FORMATS[dtype].itemsize
    heads = split_heads(model.kv_heads, tensor)
    placements: list[Placement | None] = []
    page_bytes = []
    for (first, end), (first_head, end_head) in ((stage, kept) for stage in layers for kept in heads):
        shards = [("layer", [(first, end)]), ("kv", [(0, 2)]), ("head", [(first_head, end_head)])]
        shards.append(("head_dim", [(0, model.head_dim)]))
        placements.append(dense_placement(shards, order, page_size, itemsize) if first < end else None)
        page_bytes.append((end - first) * 2 * (end_head - first_head) * page_size * model.head_dim * itemsize)
    extents = {"layer": layers[-1][1], "kv": 2, "head": model.kv_heads, "head_dim": model.head_dim}
    field = Field("kv", tuple(Axis(name, extent) for name, extent in extents.items()))
    return PoolLayout(component, (FieldLayout(field, dtype, tuple(placements)),), tuple(page_bytes))


def _state_pool(model: ModelKv, layers: Sequence[Interval], tensor: int, dtype: str) -> PoolLayout:
    """As `TorchStateBuffer`: layer by layer, first the convolution, then the recurrent state."""
    shape = model.groups.state
    assert shape is not None, "recurrent layers without a state"
    itemsize = FORMATS[dtype].itemsize
    channels = _channels(model.conv_parts or (ConvPart(shape.conv[0], 1),), tensor)
    heads = split_heads(shape.recurrent[0], tensor) if shape.recurrent else ((0, 0),) * tensor
    convs: list[Placement | None] = []
    sums: list[Placement | None] = []
    slot_bytes = []
    for stage, rank in ((stage, rank) for stage in layers for rank in range(tensor)):
        held = heads[rank][1] - heads[rank][0]
        mine = StateShape(
            (sum(end - first for first, end in channels[rank]), shape.conv[1]),
            (held, *shape.recurrent[1:]) if shape.recurrent else (),
        )
        layer_bytes = mine.layer_bytes(itemsize)
        taps = [("channel", channels[rank]), ("tap", [(0, shape.conv[1])])]
        cells = [("head", [heads[rank]]), *((f"cell{i}", [(0, n)]) for i, n in enumerate(shape.recurrent[1:]))]
        convs.append(_of_layers(taps, stage, layer_bytes, itemsize, 0))
        sums.append(_of_layers(cells, stage, layer_bytes, FORMATS[STATE_DTYPE].itemsize, mine.conv_bytes(itemsize)))
        slot_bytes.append((stage[1] - stage[0]) * layer_bytes)
    layer = Axis("layer", layers[-1][1])
    conv_axes = (layer, Axis("channel", shape.conv[0]), Axis("tap", shape.conv[1]))
    fields = [FieldLayout(Field("conv", conv_axes), dtype, tuple(convs))]
    if shape.recurrent:
        cell_axes = (Axis(f"cell{i}", n) for i, n in enumerate(shape.recurrent[1:]))
        axes = (layer, Axis("head", shape.recurrent[0]), *cell_axes)
        fields.append(FieldLayout(Field("recurrent", axes), STATE_DTYPE, tuple(sums)))
    return PoolLayout(Component.STATE, tuple(fields), tuple(slot_bytes))


def _channels(parts: Sequence[ConvPart], tensor: int) -> list[list[Interval]]:
    """Of each rank: its heads of each part, in order."""
    ranks: list[list[Interval]] = [[] for _ in range(tensor)]
    at = 0
    for part in parts:
        for kept, (first, end) in zip(ranks, split_heads(part.heads, tensor), strict=True):
            kept.append((at + first * part.channels, at + end * part.channels))
        at += part.heads * part.channels
    return ranks


def _of_layers(
    kept: Sequence[tuple[str, Sequence[Interval]]], stage: Interval, layer_bytes: int, itemsize: int, offset: int
) -> Placement | None:
    """A tensor that is dense within each layer, `offset` bytes behind its beginning."""
    if stage[0] == stage[1]:
        return None
    inner = dense_placement(kept, [name for name, _ in kept], 0, itemsize, offset)
    return replace(inner, axes=((Run(stage[0], stage[1] - stage[0], 0, layer_bytes),), *inner.axes))
