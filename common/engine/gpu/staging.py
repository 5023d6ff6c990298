"""Brings a step's arrays to the device: through pinned memory that is used again, in one copy and one for each table.

Owns: that memory on both sides. An array lies at a place that follows from the step's sizes alone, so a graph that was
captured for a size finds the next step's arrays where it found the first one's.
Invariants. G1: host memory is written only when the copies that read it have been done. G2: a row of padding has one
token, sees nothing but the null page, and writes there: no real page is ever touched for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from baton.common.engine.batch import I64, Batch, PageTable
from baton.common.engine.gpu.device import EngineDevice, Event
from baton.common.engine.gpu.plan import DevicePlan
from baton.common.engine.module_forward import StepTensors
from baton.common.engine.paged_attention import AttentionPlan

I32 = npt.NDArray[np.int32]
IntT = TypeVar("IntT", I32, I64)
NULL_PAGE: Final = 0


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a step may have at most, or has."""

    tokens: int
    rows: int
    pages: int  # in the table of each pool, over all rows
    tables: int

    def fits(self, other: StepSizes) -> bool:
        """A step of these sizes has room in memory for the others."""
        mine, theirs = (self.tokens, self.rows, self.pages), (other.tokens, other.rows, other.pages)
        return all(one <= most for one, most in zip(mine, theirs, strict=True))

    def joined(self, other: StepSizes) -> StepSizes:
        """Room for either."""
        return StepSizes(
            max(self.tokens, other.tokens), max(self.rows, other.rows), max(self.pages, other.pages), self.tables
        )

    @property
    def words(self) -> int:
        """int32 words of everything but page ids. A token may be asked twice: for the next one, and for its score."""
        return 2 * self.tokens * (4 + self.tables) + (self.rows + 1) * (2 + self.tables)


class StepStaging:
    """See the module; for steps that fit `sizes`."""

    def __init__(self, device: EngineDevice, sizes: StepSizes) -> None:
        self.sizes = sizes
        self._device = device
        self._host = device.pinned(sizes.words, torch.int32)
        self._arrays = torch.zeros(sizes.words, dtype=torch.int32, device=device.place)
        self._host_pages = [device.pinned(sizes.pages, torch.int32) for _ in range(sizes.tables)]
        self._pages = [torch.zeros(sizes.pages, dtype=torch.int32, device=device.place) for _ in range(sizes.tables)]
        self._copied: Event | None = None

    def place(self, batch: Batch, asked: I64, rows: int = 0) -> StepTensors:
        """On the device's current stream. With `rows` the step, of rows of one token each, is padded to so many, and
        `asked` must be that long. Good until the next call."""
        if self._copied is not None:
            self._copied.wait()
        padding = max(0, rows - batch.num_rows)
        assert not padding or batch.num_tokens == batch.num_rows, "only rows of one token are padded"
        tables = (batch.main,) if batch.swa is None else (batch.main, batch.swa)
        arrays: list[npt.NDArray[np.int64] | I32] = [
            _padded(batch.input_ids, padding, 0),
            _padded(batch.positions, padding, 0),
            asked,
            *(_padded(table.slots, padding, NULL_PAGE) for table in tables),
            _counted_on(batch.q_offsets, padding),
            _padded(batch.kv_lens, padding, 1),
            *(_counted_on(table.page_offsets, padding) for table in tables),
        ]
        host, device = self._copy(arrays)
        ids = [self._copy_pages(place, table, padding) for place, table in enumerate(tables)]
        if rows:  # steps of a graph have different numbers of pages, and one tensor
            ids = [(host_ids, self._pages[place]) for place, (host_ids, _) in enumerate(ids)]
        self._copied = self._device.event()
        count = len(tables)
        plans = []
        for place, (host_ids, device_ids) in enumerate(ids):
            sides = []
            for views, page_ids in ((host, host_ids), (device, device_ids)):
                sides.append((views[3 + place], views[3 + count], views[4 + count], views[5 + count + place], page_ids))
            plans.append(DevicePlan(*sides[1], host=AttentionPlan(*sides[0])))
        return StepTensors(device[0], device[1], device[2], tuple(plans))

    def _copy(self, arrays: list[npt.NDArray[np.int64] | I32]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Views of the arrays on both sides. Those of 64 bits come first: each is aligned."""
        sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        begin = 0
        for array in arrays:
            kind = torch.int64 if array.dtype == np.int64 else torch.int32
            end = begin + len(array) * kind.itemsize // 4
            for side, memory in zip(sides, (self._host, self._arrays), strict=True):
                side.append(memory[begin:end].view(kind))
            sides[0][-1].numpy()[:] = array
            begin = end
        assert begin <= self.sizes.words, (begin, self.sizes)
        self._arrays[:begin].copy_(self._host[:begin], non_blocking=True)
        return sides

    def _copy_pages(self, place: int, table: PageTable, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What padding sees is the null page."""
        count = len(table.page_ids) + padding
        host, device = self._host_pages[place][:count], self._pages[place]
        host.numpy()[: count - padding] = table.page_ids
        host.numpy()[count - padding :] = NULL_PAGE
        return host, device[:count].copy_(host, non_blocking=True)


def _padded(array: IntT, padding: int, value: int) -> IntT:
    return np.concatenate((array, np.full(padding, value, array.dtype))) if padding else array


def _counted_on(offsets: I32, padding: int) -> I32:
    """One more of something for each row of padding."""
    return np.concatenate((offsets, offsets[-1] + np.arange(1, padding + 1, dtype=np.int32)))
