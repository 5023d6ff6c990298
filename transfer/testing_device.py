"""A device that is none: memory of this process, and streams whose work is done late, or when a test says so. Never
used outside of tests.

What was launched happens at the last moment at which it may: when its stream is found idle. So whoever reads, writes or
gives away too early is found out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.common.engine.batch import KvMemory
from baton.transfer.device_copier import DeviceCopier, DeviceStream, RowCopy
from baton.transfer.staging import unit_rows
from baton.transfer.transports.base import Bytes


class LateDevice:
    """See Device. A stream is idle when it has been asked `late` times, and never while `held`."""

    def __init__(self, late: int = 3) -> None:
        self.late = late
        self.held = False
        self.launched = 0
        self.under_way = 0
        self.pinned: list[Bytes] = []

    def stream(self) -> DeviceStream:
        return _LateStream(self)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype)

    empty_host = empty

    def pin(self, memory: Bytes) -> None:
        self.pinned.append(memory)

    def unpin(self, memory: Bytes) -> None:
        assert self.under_way == 0, "memory was given away under a copy"
        self.pinned = [other for other in self.pinned if other is not memory]

    def copier(self, memory: KvMemory, copy_rows: RowCopy, region_bytes: int) -> DeviceCopier:
        """Over the pools of `memory`, which the host sees as well: for tests to look at."""
        pools = {component: torch.from_numpy(rows) for component, rows in unit_rows(memory).items()}
        return DeviceCopier(pools, copy_rows, self, region_bytes)


class _LateStream:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._work: Callable[[], None] | None = None
        self._asked = 0

    def launch(self, work: Callable[[], None]) -> None:
        assert self._work is None, "the stream is not idle"
        self._work, self._asked = work, 0
        self._device.launched += 1
        self._device.under_way += 1

    def idle(self) -> bool:
        self._asked += 1
        if self._work is not None and not self._device.held and self._asked >= self._device.late:
            self.wait()
        return self._work is None

    def wait(self) -> None:
        if self._work is not None:
            self._work()
            self._work = None
            self._device.under_way -= 1


def copy_rows_torch(
    target: torch.Tensor, target_ids: torch.Tensor | None, source: torch.Tensor, source_ids: torch.Tensor | None
) -> None:
    """The same as the kernel."""
    rows = source if source_ids is None else source[source_ids.long()]
    target[slice(None) if target_ids is None else target_ids.long()] = rows
