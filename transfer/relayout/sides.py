"""How one side of a hand-off keeps a model's KV: which element of the model lies at which byte, on which rank.

Terms. A *field* is one array of the model: all keys and values of full attention, or all convolution states. An element
has one model-wide coordinate on each axis, the same on both sides; the first axis is the layer. A *placement* says
where a rank has its part of a field: the offset of an element is a sum over the axes, so any order of axes, padding,
blocked axes and interleaving can be described, and nothing is assumed. Tokens are an axis of their own, of one page.

Invariants, checked by `check`. L1: a rank's elements lie inside its page and share no byte. L2: a page has all of its
tokens. (That each side has all of the model is checked where two of them meet: `routes`.)
Never: memory, or a token range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.common.errors import ConfigError
from baton.common.kv.layout import Component, KvLayout
from baton.transfer.relayout.dtypes import FORMATS
from baton.transfer.relayout.geometry import Box, Run, Runs, combine, meet

Interval = tuple[int, int]
"""Coordinates [first, end)."""
TOKEN = "token"


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    extent: int


@dataclass(frozen=True, slots=True)
class Field:
    """Of the whole model, without its tokens."""

    name: str
    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """A rank's part of a field: byte of an element = `offset` + what its coordinate on each axis adds. `axes` as
    `Field.axes`; `tokens` of a page, empty where the field is a state."""

    offset: int
    axes: tuple[Runs, ...]
    tokens: Runs


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """`ranks[r]` is None where rank r has nothing of it."""

    field: Field
    dtype: str
    ranks: tuple[Placement | None, ...]


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """A component on all ranks. `page_bytes[r]`: of a page, or of a state's slot, on rank r."""

    component: Component
    fields: tuple[FieldLayout, ...]
    page_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SideLayout:
    """One side. Hashable: equal sides are laid out alike to the byte."""

    layout: KvLayout
    ranks: int
    pools: tuple[PoolLayout, ...]

    def __post_init__(self) -> None:
        assert tuple(pool.component for pool in self.pools) == self.layout.components, self.layout
        for pool in self.pools:
            assert len(pool.page_bytes) == self.ranks, (pool.component, pool.page_bytes, self.ranks)
            for kept in pool.fields:
                assert len(kept.ranks) == self.ranks, (kept.field, self.ranks)

    def pool(self, component: Component) -> PoolLayout:
        return self.pools[self.layout.components.index(component)]

    def check(self, name: str) -> None:
        """L1 and L2, by a full walk. Raises ConfigError, naming the side, for a description that cannot be true."""
        for pool in self.pools:
            tokens = 0 if pool.component is Component.STATE else self.layout.page_size
            for rank, page_bytes in enumerate(pool.page_bytes):
                _check_rank(f"{name}.{pool.component}", pool, rank, page_bytes, tokens)


def dense_placement(
    kept: Sequence[tuple[str, Sequence[Interval]]], order: Sequence[str], page_size: int, itemsize: int, offset: int = 0
) -> Placement:
    """A rank's part of a field without any gap. `kept`: of each axis its name and what the rank has of it, in the order
    in which it lies there. `order`: all axes from the outermost to the innermost, TOKEN among them where there is one.
    """
    sizes = {name: sum(end - first for first, end in intervals) for name, intervals in kept} | {TOKEN: page_size}
    assert sorted(order) == sorted({name for name, _ in kept} | ({TOKEN} if page_size else set())), (order, kept)
    strides: dict[str, int] = {}
    stride = itemsize
    for name in reversed(order):
        strides[name] = stride
        stride *= sizes[name]
    tokens = (Run(0, page_size, 0, strides[TOKEN]),) if page_size else ()
    return Placement(offset, tuple(_runs(intervals, strides[name]) for name, intervals in kept), tokens)


def _runs(intervals: Sequence[Interval], stride: int) -> Runs:
    runs, at = [], 0
    for first, end in intervals:
        runs.append(Run(first, end - first, at * stride, stride))
        at += end - first
    return tuple(runs)


def _check_rank(name: str, pool: PoolLayout, rank: int, page_bytes: int, tokens: int) -> None:
    spans: list[npt.NDArray[np.int64]] = []
    for kept in pool.fields:
        placement = kept.ranks[rank]
        if placement is None:
            continue
        label = f"{name}.{kept.field.name}"
        for axis, runs in zip(kept.field.axes, placement.axes, strict=True):
            if not runs or not _distinct(runs, axis.extent):
                raise ConfigError(f"{label}.{axis.name}", runs, f"not distinct coordinates below {axis.extent}")
        if not _distinct(placement.tokens, tokens) or sum(run.count for run in placement.tokens) != tokens:
            raise ConfigError(f"{label}.{TOKEN}", placement.tokens, f"not each token of a page of {tokens} once")
        if kept.dtype not in FORMATS:
            raise ConfigError(label, kept.dtype, "a number format of unknown size", f"known: {', '.join(FORMATS)}")
        spans.extend(_spans(placement, FORMATS[kept.dtype].itemsize))
    if not spans:
        return
    every = np.concatenate(spans)
    every = every[np.argsort(every[:, 0])]
    if every[0, 0] < 0 or every[-1, 1] > page_bytes or (every[1:, 0] < every[:-1, 1]).any():
        raise ConfigError(name, f"rank {rank}", f"elements share bytes, or leave the page of {page_bytes} bytes")


def _distinct(runs: Runs, extent: int) -> bool:
    ordered = sorted(runs, key=lambda run: run.first)
    bounds = [0, *(bound for run in ordered for bound in (run.first, run.end)), extent]
    return all(run.count > 0 for run in runs) and bounds == sorted(bounds)


def _spans(placement: Placement, itemsize: int) -> Iterator[npt.NDArray[np.int64]]:
    """[n, 2] first and end byte of each stretch without gap."""
    for box in _own_boxes(placement):
        run = box.run_elements(itemsize, itemsize)
        starts = np.array([box.source_offset], dtype=np.int64)
        for loop in box.loops[:-1] if run > 1 else box.loops:
            starts = np.add.outer(starts, np.arange(loop.count, dtype=np.int64) * loop.source_stride).reshape(-1)
        yield np.stack([starts, starts + run * itemsize], axis=1)


def _own_boxes(placement: Placement) -> tuple[Box, ...]:
    offset = (Box(placement.offset, placement.offset, ()),)
    axes = [*placement.axes, placement.tokens] if placement.tokens else placement.axes
    return combine([offset, *(meet(runs, 0, runs, 0, max(run.end for run in runs)) for runs in axes)])
