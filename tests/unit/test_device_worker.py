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
    wait_until,
)
from triton_rig import interpreted_kernel, interpreting

from baton.common.config import ClusterConfig, ModelConfig
from baton.common.engine.batch import KvMemory
from baton.common.errors import ConfigError, ErrorCode
from baton.common.kv.layout import Component
from baton.common.kv.torch_buffer import TorchKvBuffer
from baton.common.messages import Failure
from baton.transfer.api import AbortSink, SinkCommitted, SinkFailed, SourceAborted, SourceReleased
from baton.transfer.cuda_ipc import CudaIpc
from baton.transfer.data_plane import DataPlaneSnapshot
from baton.transfer.device_ipc import IpcRefused
from baton.transfer.link import LaneStatus, LaneView
from baton.transfer.testing_device import LateDevice, copy_rows_torch
from baton.transfer.testing_ends import random_pool
from baton.transfer.testing_ipc import HostIpc
from baton.transfer.transports.base import Bytes
from baton.transfer.transports.cuda_ipc import CudaIpcTransport


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
            shared=True,
        )
        pool.on_device = True
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


@pytest.fixture
def devices(late_devices: None, monkeypatch: pytest.MonkeyPatch) -> list[HostIpc]:
    """Their drivers, in the order in which workers start, if these take the lane `cuda_ipc`."""
    pools, made = importlib.import_module("baton.transfer.device_pools"), []

    def lane(memory: KvMemory) -> CudaIpcTransport:
        made.append(HostIpc(memory.main.block))
        return pools.ipc_lane(memory, made[-1])

    monkeypatch.setattr(pools, "cuda_ipc_lane", lane)
    return made


def data_of(worker: Worker) -> DataPlaneSnapshot:
    data = worker.io.snapshot().data
    assert data is not None
    return data


def views(worker: Worker) -> dict[str, LaneView]:
    return {view.lane: view for lanes in data_of(worker).lanes.values() for view in lanes}


def start_pair(config: ClusterConfig, controller: StandInController) -> tuple[DeviceWorker, DeviceWorker]:
    decode = DeviceWorker("decode-0", "decode", 11, config, controller.door)
    prefill = DeviceWorker("prefill-0", "prefill", 22, config, controller.door, fill=5)
    decode.io.wait_admitted(WAIT_S)
    decode.events.wait_view(lambda view: len(view.members) == 2)
    return decode, prefill


def test_pages_on_one_device_go_from_pool_to_pool(controller: StandInController, devices: list[HostIpc]) -> None:
    decode, prefill = start_pair(io_config("cuda_ipc", "zmq"), controller)
    try:
        wait_until(lambda: {lane for lane, view in views(decode).items() if view.gbps} == {"cuda_ipc", "zmq"})
        command = open_sink(decode, "prefill-0", 157, 1)
        [committed] = decode.events.wait(SinkCommitted)
        assert committed.lane == "cuda_ipc"
        pages = command.pages[Component.FULL]
        assert np.array_equal(decode.pool[pages], expected_pages(command))
        assert not decode.pool[np.setdiff1d(np.arange(NUM_PAGES), pages)][1:].any(), "probes move the null page alone"
        prefill.events.wait(SourceReleased)
        assert not decode.events.of(SinkFailed)
    finally:
        decode.close()
        prefill.close()
    assert [device.mapped for device in devices] == [0, 0]


def test_a_busy_device_is_not_measured_nor_waited_for(controller: StandInController, devices: list[HostIpc]) -> None:
    config = io_config("cuda_ipc", "zmq")
    decode = DeviceWorker("decode-0", "decode", 11, config, controller.door)
    devices[0].running.clear()
    prefill = DeviceWorker("prefill-0", "prefill", 22, config, controller.door, fill=5)
    try:
        wait_until(lambda: "zmq" in views(decode) and views(decode)["zmq"].gbps > 0)
        assert views(decode)["cuda_ipc"].status is LaneStatus.UP
        assert views(decode)["cuda_ipc"].gbps == 0.0
        command = open_sink(decode, "prefill-0", 157, 1)
        wait_until(lambda: data_of(decode).open_operations > 0)
        decode.io.post(AbortSink(command.key, Failure(code=ErrorCode.CANCELLED, reason="the client is gone")))
        wait_until(lambda: data_of(decode).open_sinks == 0)
        assert data_of(decode).open_operations > 0
        assert not decode.events.of(SinkFailed), "its pages are being written"
        assert not prefill.events.of(SourceAborted), "its pages are being read"
        devices[0].running.set()
        decode.events.wait(SinkFailed)
        prefill.events.wait(SourceAborted)
    finally:
        devices[0].running.set()
        decode.close()
        prefill.close()


def test_a_driver_that_refuses_is_told_with_the_lane_and_another_one_serves(
    controller: StandInController, late_devices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(ordinal: int) -> CudaIpc:
        raise IpcRefused("no CUDA driver here")

    monkeypatch.setattr(importlib.import_module("baton.transfer.device_pools"), "CudaIpc", refuse)
    decode, prefill = start_pair(io_config("cuda_ipc", "zmq"), controller)
    try:
        open_sink(decode, "prefill-0", 157, 1)
        [committed] = decode.events.wait(SinkCommitted)
        assert committed.lane == "zmq"
        wait_until(lambda: "cuda_ipc" in views(decode))
        absent = views(decode)["cuda_ipc"]
        assert (absent.status, absent.reason) == (LaneStatus.ABSENT, "no CUDA driver here")
    finally:
        decode.close()
        prefill.close()


def test_pools_in_host_memory_have_no_such_lane_and_say_so(controller: StandInController) -> None:
    decode = Worker("decode-0", "decode", 11, io_config("cuda_ipc", "zmq"), controller.door)
    prefill = Worker("prefill-0", "prefill", 22, io_config("cuda_ipc", "zmq"), controller.door)
    try:
        wait_until(lambda: "cuda_ipc" in views(decode))
        assert views(decode)["cuda_ipc"].reason == "the pools lie in host memory"
        assert [address.lane for address in decode.io.member.lanes] == ["zmq"]
    finally:
        decode.close()
        prefill.close()
    with pytest.raises(ConfigError, match=r"transfer\.lanes.*cuda_ipc: the pools lie in host memory"):
        Worker("decode-0", "decode", 11, io_config("cuda_ipc"), controller.door)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_torch_has_no_gpu_a_worker_says_so_at_its_start() -> None:
    from baton.common.engine.gpu.loading import load_on_cuda

    model = ClusterConfig(model=ModelConfig(device="cuda")).model
    with pytest.raises(ConfigError, match=r"model\.device"):
        load_on_cuda(model.model, dtype=model.dtype, num_pages={Component.FULL: 8}, page_size=16)
