"""Workers whose pools lie on a device: which lanes they have, and whole hand-offs, with a device whose work is late."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from io_rig import (
    NUM_PAGES,
    PAGE_BYTES,
    PAGE_SIZE,
    WAIT_S,
    StandInController,
    Worker,
    expected_pages,
    io_config,
    open_sink,
)
from triton_rig import interpreted_kernel, interpreting

from baton.common.config import ClusterConfig, ModelConfig
from baton.common.engine.batch import KvMemory
from baton.common.errors import ConfigError
from baton.common.kv.layout import Component
from baton.common.kv.torch_buffer import TorchKvBuffer
from baton.transfer.api import SinkCommitted, SinkFailed
from baton.transfer.testing_device import LateDevice, copy_rows_torch
from baton.transfer.testing_ends import random_pool
from baton.transfer.transports.base import Bytes


class DevicePool(TorchKvBuffer):
    """Of a device that the test can look into, and nobody else."""

    looking = False

    def as_bytes(self) -> Bytes:
        if not self.looking:
            raise TypeError("can't convert a device's tensor to numpy")
        return super().as_bytes()


class DeviceKv:
    """As KvSpec."""

    def build(self, fill: int) -> KvMemory:
        pool = DevicePool(
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            num_layers=4,
            num_kv_heads=1,
            head_dim=32,
            dtype="float32",
            device=torch.device("cpu"),
        )
        assert pool.page_bytes == PAGE_BYTES
        if fill:
            pool.units()[:] = torch.from_numpy(random_pool(NUM_PAGES, PAGE_BYTES, fill))
        return KvMemory.full(pool, PAGE_SIZE)


class DeviceWorker(Worker):
    """`pool` is for the test: the product's every look at it fails."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        DevicePool.looking = True  # the rig's own view
        try:
            super().__init__(*args, kv=DeviceKv(), **kwargs)
        finally:
            DevicePool.looking = False


@pytest.fixture
def controller() -> Iterator[StandInController]:
    running = StandInController(True)
    yield running
    running.close()


@pytest.fixture
def late_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a GPU's place."""
    interpreted_kernel()
    with interpreting():
        pools = importlib.import_module("baton.transfer.device_pools")
    monkeypatch.setattr(
        pools,
        "cuda_copier",
        lambda memory, region_bytes: pools.device_copier(memory, region_bytes, LateDevice(), copy_rows_torch),
    )


@pytest.mark.usefixtures("late_devices")
def test_pages_on_devices_change_hands_on_staged_lanes_alone(controller: StandInController) -> None:
    config = io_config("local", "tcp", "zmq")
    decode = DeviceWorker("decode-0", "decode", 11, config, controller.door)
    prefill = DeviceWorker("prefill-0", "prefill", 22, config, controller.door, fill=5)
    try:
        decode.io.wait_admitted(WAIT_S)
        decode.events.wait_view(lambda view: len(view.members) == 2)
        command = open_sink(decode, "prefill-0", 157, 1)
        [committed] = decode.events.wait(SinkCommitted)
        assert committed.lane == "zmq"
        assert np.array_equal(decode.pool[command.pages[Component.FULL]], expected_pages(command))
        assert not decode.pool[np.setdiff1d(np.arange(NUM_PAGES), command.pages[Component.FULL])].any()
        assert not decode.events.of(SinkFailed)
    finally:
        decode.close()
        prefill.close()


@pytest.mark.usefixtures("late_devices")
def test_without_a_staged_lane_there_is_none(controller: StandInController) -> None:
    with pytest.raises(ConfigError, match=r"transfer\.lanes.*local: the pools lie on a device"):
        DeviceWorker("decode-0", "decode", 11, io_config("local", "tcp"), controller.door)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_torch_has_no_gpu_a_worker_says_so_at_its_start() -> None:
    from baton.common.engine.gpu.loading import load_on_cuda

    model = ClusterConfig(model=ModelConfig(device="cuda")).model
    with pytest.raises(ConfigError, match=r"model\.device"):
        load_on_cuda(model.model, dtype=model.dtype, num_pages={Component.FULL: 8}, page_size=16)
