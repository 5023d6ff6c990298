"""A CUDA device for `device_copier.py`: streams, events, and memory that the device reaches.

Owns the streams that it was asked for. Not yet run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.common.errors import ConfigError
from baton.transfer.device_copier import DeviceStream
from baton.transfer.transports.base import Bytes


class _CudaStream:
    """See DeviceStream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._event = torch.cuda.Event()

    def launch(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()
        self._event.record(self._stream)

    def idle(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CudaDevice:
    """See Device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.init()

    def stream(self) -> DeviceStream:
        return _CudaStream(self._device)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=self._device)

    def empty_host(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def pin(self, memory: Bytes) -> None:
        status = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
        if int(status) != 0:
            reason = f"the CUDA driver does not pin it (error {int(status)})"
            raise ConfigError("transfer.staging_ring_bytes", memory.nbytes, reason, "less, or a higher `ulimit -l`")

    def unpin(self, memory: Bytes) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)
