"""A step's arrays on their way to a device: the same numbers, at the same places, and what padding is made of."""

from __future__ import annotations

import numpy as np
import torch

from baton.common.engine.batch import Batch, BatchRow, pack_batch
from baton.common.engine.gpu.device import Event, HostDevice
from baton.common.engine.gpu.plan import DevicePlan
from baton.common.engine.gpu.staging import StepSizes, StepStaging
from baton.common.engine.module_forward import StepTensors

SIZES = StepSizes(tokens=16, rows=8, pages=40, tables=2)


def batch_of(*rows: tuple[int, int]) -> Batch:
    """(queries, KV length) over pages of four, two pools."""
    held, first = list[BatchRow](), 1
    for key, (queries, kv_len) in enumerate(rows):
        pages = np.arange(first, first - (-kv_len // 4), dtype=np.int32)
        held.append(BatchRow(key, np.arange(7, 7 + queries, dtype=np.int32), kv_len, pages, None, 0, pages + 100))
        first += len(pages)
    return pack_batch(held, 4)


def addresses(step: StepTensors) -> list[int]:
    plans = [tensor for plan in step.plans for tensor in (plan.slots, plan.kv_lens, plan.page_offsets, plan.page_ids)]
    return [tensor.data_ptr() for tensor in (step.input_ids, step.positions, step.asked, *plans)]


def test_what_arrives_is_the_batch() -> None:
    staging, asked = StepStaging(HostDevice(), SIZES), np.array([0, 5, 5])
    for batch in (batch_of((1, 9), (5, 5)), batch_of((3, 12))):
        step = staging.place(batch, asked)
        assert step.input_ids.tolist() == batch.input_ids.tolist()
        assert step.positions.tolist() == batch.positions.tolist()
        assert step.asked.tolist() == [0, 5, 5]
        assert batch.swa is not None
        for plan, table in zip(step.plans, (batch.main, batch.swa), strict=True):
            assert isinstance(plan, DevicePlan)
            for side in (plan, plan.host):
                assert side.slots.tolist() == table.slots.tolist()
                assert side.q_offsets.tolist() == batch.q_offsets.tolist()
                assert side.kv_lens.tolist() == batch.kv_lens.tolist()
                assert side.page_offsets.tolist() == table.page_offsets.tolist()
                assert side.page_ids.tolist() == table.page_ids.tolist()
                assert (side.slots.dtype, side.kv_lens.dtype) == (torch.int64, torch.int32)


def test_rows_of_padding_have_one_token_in_the_null_page() -> None:
    batch = batch_of((1, 9), (1, 4))
    step = StepStaging(HostDevice(), SIZES).place(batch, np.arange(4), 4)
    assert (step.input_ids.tolist(), step.positions.tolist()) == ([7, 7, 0, 0], [8, 3, 0, 0])
    for plan, pages in zip(step.plans, ([1, 2, 3, 4], [101, 102, 103, 104]), strict=True):
        assert plan.slots.tolist()[2:] == [0, 0]
        assert plan.kv_lens.tolist() == [9, 4, 1, 1]
        assert plan.q_offsets.tolist() == [0, 1, 2, 3, 4]
        assert plan.page_offsets.tolist() == [0, 3, 4, 5, 6]
        assert plan.page_ids.tolist()[:6] == [*pages, 0, 0]


def test_a_graphs_next_step_lies_where_the_first_one_did() -> None:
    staging = StepStaging(HostDevice(), SIZES)
    first = addresses(staging.place(batch_of((1, 9), (1, 4), (1, 30)), np.arange(4), 4))
    staging.place(batch_of((1, 2)), np.arange(2), 2)
    assert addresses(staging.place(batch_of((1, 1), (1, 17)), np.arange(4), 4)) == first


class Watching(HostDevice):
    """Notes what the host's side holds when its copies are waited for."""

    def __init__(self) -> None:
        self.step: StepTensors | None = None
        self.held: list[list[int]] = []

    def event(self) -> Event:
        return _Watched(self)


class _Watched:
    def __init__(self, device: Watching) -> None:
        self._device = device

    def wait(self) -> None:
        assert self._device.step is not None
        plan = self._device.step.plans[0]
        assert isinstance(plan, DevicePlan)
        self._device.held.append(plan.host.kv_lens.tolist() + plan.host.page_ids.tolist())


def test_host_memory_is_written_when_its_copies_have_been_waited_for() -> None:
    device = Watching()
    staging = StepStaging(device, SIZES)
    device.step = staging.place(batch_of((1, 9)), np.arange(1))
    assert device.held == []
    staging.place(batch_of((1, 3)), np.arange(1))
    assert device.held == [[9, 1, 2, 3]]
