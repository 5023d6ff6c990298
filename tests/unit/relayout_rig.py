"""Memory in which each element holds its own coordinates, and what a re-layout must make of it, computed one element at
a time from the descriptions: shares nothing with the planner but the descriptions' meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import numpy.typing as npt

from baton.common.kv.layout import Component
from baton.transfer.relayout.dtypes import FORMATS, bits_type, convert
from baton.transfer.relayout.execute import apply
from baton.transfer.relayout.geometry import Runs
from baton.transfer.relayout.planner import Moves
from baton.transfer.relayout.sides import FieldLayout, SideLayout

Bytes = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
SPARE_PAGES = 2


@dataclass
class Side:
    """Pools and tables of all ranks, by component; the ids in each table are scattered and differ by rank."""

    layout: SideLayout
    tokens: int
    seed: int
    pools: dict[Component, list[Bytes]] = field(default_factory=dict)
    tables: dict[Component, list[I32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        for pool in self.layout.pools:
            pages = 1 if pool.component is Component.STATE else -(-self.tokens // self.layout.layout.page_size)
            ids = [1 + random.permutation(pages + SPARE_PAGES)[:pages] for _ in pool.page_bytes]
            self.tables[pool.component] = [page_ids.astype(np.int32) for page_ids in ids]
            self.pools[pool.component] = [
                random.integers(0, 256, (1 + pages + SPARE_PAGES, size), dtype=np.uint8) for size in pool.page_bytes
            ]

    def tag(self) -> Side:
        """Every element of every token becomes its tag."""
        for component in self.layout.layout.components:
            for rank, where in enumerate(self._elements(component, range(self.tokens))):
                for kept, at, coordinates in where:
                    write_bits(self.pools[component][rank], at, tags(component, kept, coordinates))
        return self

    def _elements(self, component: Component, tokens: range) -> Iterator[list[tuple[FieldLayout, I64, I64]]]:
        pool = self.layout.pool(component)
        for rank in range(self.layout.ranks):
            table = self.tables[component][rank]
            found = [(kept, *elements_of(self.layout, kept, rank, component, tokens, table)) for kept in pool.fields]
            yield [(kept, at, coordinates) for kept, at, coordinates in found if len(at)]

    def flat(self, component: Component) -> Bytes:
        """The pools of all ranks, one after the other."""
        return flat(self.pools[component])

    def expected(self, source: SideLayout, component: Component, tokens: range) -> tuple[Bytes, Bytes]:
        """What `flat` must be when `tokens` of a tagged `source` have come (of a state: it), and a 1 at each byte that
        belongs to them."""
        pools = [pool.copy() for pool in self.pools[component]]
        marks = [np.zeros_like(pool) for pool in pools]
        formats = {kept.field.name: kept.dtype for kept in source.pool(component).fields}
        for rank, where in enumerate(self._elements(component, tokens)):
            for kept, at, coordinates in where:
                came_as = formats[kept.field.name]
                came = convert(tags(component, kept, coordinates, came_as), came_as, kept.dtype)
                write_bits(pools[rank], at, came)
                write_bits(marks[rank], at, np.full(len(at), 0x01010101, dtype=np.uint32).astype(came.dtype))
        return flat(pools), flat(marks)


def flat(arrays: Sequence[Bytes]) -> Bytes:
    return np.concatenate([array.reshape(-1) for array in arrays])


def elements_of(
    side: SideLayout, kept: FieldLayout, rank: int, component: Component, tokens: range, table: I32
) -> tuple[I64, I64]:
    """[n] byte of each element in its rank's pool, and [n, axes + 1] its coordinates, the token last."""
    placement = kept.ranks[rank]
    if placement is None:
        return np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.int64)
    page_bytes = side.pool(component).page_bytes[rank]
    axes = [_axis(runs) for runs in placement.axes]
    if component is Component.STATE:
        axes.append((np.zeros(1, dtype=np.int64), np.array([int(table[0]) * page_bytes])))
    else:
        in_page = dict(zip(*(part.tolist() for part in _axis(placement.tokens)), strict=True))
        size = side.layout.page_size
        where = [int(table[token // size]) * page_bytes + in_page[token % size] for token in tokens]
        axes.append((np.array(tokens, dtype=np.int64), np.array(where, dtype=np.int64)))
    at = reduce(np.add.outer, [offsets for _, offsets in axes]).reshape(-1) + placement.offset
    grid = np.meshgrid(*(coordinates for coordinates, _ in axes), indexing="ij")
    return at, np.stack([part.reshape(-1) for part in grid], axis=1)


def _axis(runs: Runs) -> tuple[I64, I64]:
    coordinates = [run.first + i for run in runs for i in range(run.count)]
    offsets = [run.offset + i * run.stride for run in runs for i in range(run.count)]
    return np.array(coordinates, dtype=np.int64), np.array(offsets, dtype=np.int64)


def tags(component: Component, kept: FieldLayout, coordinates: I64, dtype: str = "") -> npt.NDArray[np.unsignedinteger]:
    """Distinct where the format has room for it; scrambled, so that neighbours differ in every byte."""
    number = np.full(len(coordinates), list(Component).index(component) + len(kept.field.name), dtype=np.uint64)
    for axis, column in zip([*kept.field.axes, None], coordinates.T, strict=True):
        number = number * np.uint64(axis.extent if axis else 1 << 10) + column.astype(np.uint64)
    scrambled = (number * np.uint64(0x9E3779B1)) % np.uint64((1 << 32) - 5)
    bits = FORMATS[dtype or kept.dtype].bits
    return (scrambled & np.uint64((1 << bits) - 1)).astype(bits_type(dtype or kept.dtype))


def write_bits(pool: Bytes, at: I64, values: npt.NDArray[np.unsignedinteger]) -> None:
    flat = pool.reshape(-1)
    for byte in range(values.itemsize):
        flat[at + byte] = values.view(np.uint8).reshape(-1, values.itemsize)[:, byte]


def written(moves: Moves, side: Side) -> I64:
    """How often the plan writes each byte of the side's pools: its loops, one step at a time. As `Side.flat`."""
    pools = side.pools[moves.component]
    counts = [np.zeros(pool.size, dtype=np.int64) for pool in pools]
    for move in moves.moves:
        itemsize = move.conversion.sink_itemsize if move.conversion else 1
        table = side.tables[moves.component][move.sink]
        pages = table[move.meeting.sink_pages].astype(np.int64) * pools[move.sink].shape[1]
        for box in move.boxes:
            steps = [np.arange(loop.count) * loop.sink_stride for loop in box.loops]
            at = reduce(np.add.outer, [pages + box.sink_offset, *steps, np.arange(itemsize)])
            np.add.at(counts[move.sink], at.reshape(-1), 1)
    return np.concatenate(counts)


def carry_out(moves: Moves, source: Side, sink: Side) -> None:
    here, there = ((side.pools[moves.component], side.tables[moves.component]) for side in (source, sink))
    apply(moves, *here, *there)
