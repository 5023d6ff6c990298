"""Carries a plan out on numpy memory: the reference for faster ones, and good enough for a CPU.

What a source rank sends a sink rank is *packed*: its moves one after the other, each page by page, each page in the
order of the boxes' loops, in the format that travels. Both ends compute the places; nothing but numbers is sent.
Never: a byte outside of the plan, or page 0, which is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.transfer.relayout.dtypes import Bits, bits_type, convert
from baton.transfer.relayout.geometry import Box
from baton.transfer.relayout.planner import I64, Move, Moves

Bytes = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]


def gather(moves: Moves, source: int, sink: int, pool: Bytes, table: I32) -> Bytes:
    """What rank `source` sends rank `sink`. `pool`: uint8 [pages, bytes of one], contiguous. `table[p]`: the id of page
    number p of the row; of a state, its slot."""
    parts = [
        _packed(move, box, pool, _page_ids(table, move.meeting.source_pages))
        for move in moves.between(source, sink)
        for box in move.boxes
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)


def scatter(moves: Moves, source: int, sink: int, packed: Bytes, pool: Bytes, table: I32) -> None:
    """Writes what `gather` packed into the pages of rank `sink`."""
    at = 0
    for move in moves.between(source, sink):
        page_ids = _page_ids(table, move.meeting.sink_pages)
        for box in move.boxes:
            end = at + len(page_ids) * box.elements * move.wire_itemsize
            _unpack(move, box, packed[at:end], pool, page_ids)
            at = end
    assert at == len(packed), f"{len(packed)} bytes came, {at} belong there"


def apply(
    moves: Moves,
    source_pools: Sequence[Bytes],
    source_tables: Sequence[I32],
    sink_pools: Sequence[Bytes],
    sink_tables: Sequence[I32],
) -> None:
    """All pairs, here and now; everything by rank."""
    for source, sink in moves.bytes_by_pair():
        packed = gather(moves, source, sink, source_pools[source], source_tables[source])
        scatter(moves, source, sink, packed, sink_pools[sink], sink_tables[sink])


def _page_ids(table: I32, pages: I64) -> I32:
    page_ids: I32 = table[pages]
    assert page_ids.min() > 0, "the null page is nobody's to send or fill"
    return page_ids


def _packed(move: Move, box: Box, pool: Bytes, page_ids: I32) -> Bytes:
    conversion = move.conversion
    kind = bits_type(conversion.source) if conversion else np.dtype(np.uint8)
    offsets = [(loop.count, loop.source_stride) for loop in box.loops]
    found = _view(pool, box.source_offset, offsets, kind)[page_ids]
    if conversion:
        found = convert(found, conversion.source, conversion.wire)
    return np.ascontiguousarray(found).reshape(-1).view(np.uint8)


def _unpack(move: Move, box: Box, packed: Bytes, pool: Bytes, page_ids: I32) -> None:
    conversion = move.conversion
    kind = bits_type(conversion.sink) if conversion else np.dtype(np.uint8)
    offsets = [(loop.count, loop.sink_stride) for loop in box.loops]
    view = _view(pool, box.sink_offset, offsets, kind)
    came: Bits = packed
    if conversion:
        came = convert(packed.view(bits_type(conversion.wire)), conversion.wire, conversion.sink)
    view[page_ids] = came.reshape(len(page_ids), *view.shape[1:])


def _view(pool: Bytes, offset: int, loops: Sequence[tuple[int, int]], kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """[pages, *counts]: the box's elements in every page of the pool."""
    counts = [count for count, _ in loops]
    strides = [stride for _, stride in loops]
    return np.ndarray((len(pool), *counts), kind, pool, offset, (pool.shape[1], *strides))
