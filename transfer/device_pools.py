"""The copier, and the lane of its own, of a worker whose pools lie on a GPU. Owns nothing; not yet run on hardware."""

from __future__ import annotations

import torch

from baton.common.engine.batch import KvMemory
from baton.common.kv.layout import Component
from baton.common.kv.torch_buffer import TorchKvBuffer
from baton.transfer.cuda_device import CudaDevice
from baton.transfer.cuda_ipc import CudaIpc
from baton.transfer.device_copier import Device, DeviceCopier, RowCopy
from baton.transfer.device_ipc import IpcDevice, OwnPool
from baton.transfer.transports.cuda_ipc import CudaIpcTransport
from baton.transfer.triton_rows import copy_rows_on_device, warm_up


def device_pools(memory: KvMemory) -> dict[Component, torch.Tensor]:
    """uint8 [pages, bytes of one] of each component: views over the live memory, all on one device."""
    pools: dict[Component, torch.Tensor] = {}
    for component, buffer in memory.buffers.items():
        assert isinstance(buffer, TorchKvBuffer), "states are kept in host memory"
        pools[component] = buffer.units()
    assert len({pool.device for pool in pools.values()}) == 1, "pools of several devices"
    return pools


def cuda_ipc_lane(memory: KvMemory) -> CudaIpcTransport:
    """Raises IpcRefused where the driver does not share these pools."""
    place = next(iter(device_pools(memory).values())).device
    return ipc_lane(memory, CudaIpc(place.index or 0))


def ipc_lane(memory: KvMemory, device: IpcDevice) -> CudaIpcTransport:
    pools = device_pools(memory).items()
    return CudaIpcTransport(device, {component: OwnPool(pool.data_ptr(), *pool.shape) for component, pool in pools})


def cuda_copier(memory: KvMemory, region_bytes: int) -> DeviceCopier:
    """Compiles its kernels first: seconds, once on a machine."""
    place = next(iter(device_pools(memory).values())).device
    warm_up(place)
    torch.cuda.synchronize(place)
    return device_copier(memory, region_bytes, CudaDevice(place), copy_rows_on_device)


def device_copier(memory: KvMemory, region_bytes: int, device: Device, copy_rows: RowCopy) -> DeviceCopier:
    return DeviceCopier(device_pools(memory), copy_rows, device, region_bytes)
