"""Copies between staging slots and pools that lie on a device: a kernel gathers rows into a contiguous buffer there,
and one transfer brings it into the slot; or the other way.

Owns: a small ring of those buffers, each with a stream of its own, so that the kernel of one copy runs while another
one crosses the bus, and neither stands in the way of the engine's streams. Never: a wait, but in `close`.

Invariants. D1: what a copy uses (buffer, ids, slot, rows) is nobody else's until its stream says that it is idle, seen
by this process. D2: nothing is allocated on the way. D3: at most DEPTH copies are on the device; the others wait here,
and each of them holds a staging slot.

Who reads or writes rows on other streams: the engine ships pages when it has seen the step that wrote them end, and
uses landed ones in steps that it launches after it has heard of them. What this process has seen to be done is done for
whatever it launches afterwards, so no stream has to wait for another.

Tested with streams that are not a GPU's and with the kernel in Triton's interpreter. Not yet run on hardware.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from baton.common.kv.layout import Component
from baton.common.messages import MAX_REGION_UNITS
from baton.transfer.digest import LINE_BYTES, Lines
from baton.transfer.transports.base import Bytes, Rows

DEPTH = 2
"""Copies on the device at a time: one in its kernel, one on the bus."""

RowCopy = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None], None]
"""`triton_rows.copy_rows_on_device`, or something that means the same."""


class DeviceStream(Protocol):
    """Work that is done in order, while this thread goes on."""

    def launch(self, work: Callable[[], None]) -> None:
        """Enqueues what `work` starts. The stream is idle before."""
        ...

    def idle(self) -> bool:
        """What was launched is done. Never waits."""
        ...

    def wait(self) -> None: ...


class Device(Protocol):
    """Where the pools lie."""

    def stream(self) -> DeviceStream: ...

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device."""
        ...

    def empty_host(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device can read and write by itself."""
        ...

    def pin(self, memory: Bytes) -> None:
        """Makes it such memory. Raises ConfigError where the system does not allow it."""
        ...

    def unpin(self, memory: Bytes) -> None: ...


class _Track:
    """One place of the ring: what one copy needs besides its two ends."""

    def __init__(self, device: Device, region_bytes: int) -> None:
        self.stream = device.stream()
        self.buffer = device.empty(region_bytes, torch.uint8)
        self.ids = device.empty(MAX_REGION_UNITS, torch.int32)
        self.host_ids = device.empty_host(MAX_REGION_UNITS, torch.int32)
        self.host_bytes = device.empty_host(region_bytes, torch.uint8)  # for what came outside of a slot


class _Copy:
    """See Copying. It waits, is on its track, or is done."""

    def __init__(
        self, owner: DeviceCopier, rows: Rows, host: Bytes, *, to_host: bool, lines: Lines | None = None
    ) -> None:
        self.rows, self.host, self.to_host, self.lines = rows, host, to_host, lines
        self.ended = False
        self._owner = owner

    def done(self) -> bool:
        self._owner.advance()
        return self.ended


class DeviceCopier:
    """See PoolCopier. `pools` are uint8 [units, bytes of one] tensors on `device`, one unit one contiguous block; no
    region is larger than `region_bytes`."""

    def __init__(
        self, pools: Mapping[Component, torch.Tensor], copy_rows: RowCopy, device: Device, region_bytes: int
    ) -> None:
        for pool in pools.values():
            assert pool.dtype == torch.uint8
            assert pool.dim() == 2
            assert pool.is_contiguous(), "one unit is one contiguous block"
        self._pools = dict(pools)
        self._copy_rows = copy_rows
        self._device = device
        self._staging: list[Bytes] = []
        self._idle = [_Track(device, region_bytes) for _ in range(DEPTH)]
        self._running: deque[tuple[_Track, _Copy]] = deque()
        self._waiting: deque[_Copy] = deque()

    @property
    def host_pools(self) -> Mapping[Component, Bytes]:
        return {}

    def shape(self, component: Component) -> tuple[int, int]:
        units, unit_bytes = self._pools[component].shape
        return units, unit_bytes

    def use_staging(self, memory: Bytes) -> None:
        self._device.pin(memory)
        self._staging.append(memory)

    def gather(self, source: Rows, slot: Bytes) -> _Copy:
        assert len(slot) == source.nbytes, (len(slot), source.nbytes)
        return self._start(_Copy(self, source, slot, to_host=True))

    def gather_lines(self, source: Rows, lines: Lines, slot: Bytes) -> _Copy:
        assert len(slot) == len(source.units) * lines.nbytes, (len(slot), source, lines)
        return self._start(_Copy(self, source, slot, to_host=True, lines=lines))

    def scatter(self, target: Rows, data: Bytes) -> _Copy:
        assert len(data) == target.nbytes, (len(data), target.nbytes)
        return self._start(_Copy(self, target, data, to_host=False))

    def close(self) -> None:
        self._waiting.clear()
        for track, _ in self._running:
            track.stream.wait()
        self.advance()
        for memory in self._staging:
            self._device.unpin(memory)
        self._staging.clear()

    def advance(self) -> None:
        """Ends what is done, and begins what there is room for."""
        for _ in range(len(self._running)):
            track, copy = self._running.popleft()
            if track.stream.idle():
                copy.ended = True
                self._idle.append(track)
            else:
                self._running.append((track, copy))
        while self._waiting and self._idle:
            track, copy = self._idle.pop(), self._waiting.popleft()
            self._launch(track, copy)
            self._running.append((track, copy))

    def _start(self, copy: _Copy) -> _Copy:
        self._waiting.append(copy)
        self.advance()
        return copy

    def _launch(self, track: _Track, copy: _Copy) -> None:
        units = copy.rows.units
        track.host_ids[: len(units)].numpy()[:] = units
        if copy.to_host:
            track.stream.launch(lambda: self._gather(track, copy.rows, copy.lines, torch.from_numpy(copy.host)))
        else:
            staged = self._pinned(track, copy.host)
            track.stream.launch(lambda: self._scatter(track, copy.rows, staged))

    def _gather(self, track: _Track, source: Rows, lines: Lines | None, slot: torch.Tensor) -> None:
        ids, buffer = self._ids(track, source), track.buffer[: len(slot)]
        if lines is None:
            self._copy_rows(buffer.view(len(ids), -1), None, self._stretch(source), ids)
        else:  # small, and rows of rows: torch's own kernel does it as well
            blocks = self._stretch(source).view(-1, lines.count, lines.apart)
            line = blocks[:, :, lines.begin : lines.begin + LINE_BYTES]
            torch.index_select(line, 0, ids, out=buffer.view(len(ids), lines.count, LINE_BYTES))
        slot.copy_(buffer, non_blocking=True)

    def _scatter(self, track: _Track, target: Rows, staged: torch.Tensor) -> None:
        ids, buffer = self._ids(track, target), track.buffer[: target.nbytes]
        buffer.copy_(staged, non_blocking=True)
        self._copy_rows(self._stretch(target), ids, buffer.view(len(ids), -1), None)

    def _ids(self, track: _Track, rows: Rows) -> torch.Tensor:
        ids = track.ids[: len(rows.units)]
        return ids.copy_(track.host_ids[: len(ids)], non_blocking=True)

    def _stretch(self, rows: Rows) -> torch.Tensor:
        """The bytes that count of every unit of the pool."""
        return self._pools[rows.component][:, rows.begin : rows.end]

    def _pinned(self, track: _Track, data: Bytes) -> torch.Tensor:
        """`data` where the device reaches it: a transfer from anywhere else would make this thread wait."""
        if any(_within(data, memory) for memory in self._staging):
            return torch.from_numpy(data)
        staged = track.host_bytes[: len(data)]
        staged.numpy()[:] = data
        return staged


def _within(data: Bytes, memory: Bytes) -> bool:
    first = data.ctypes.data - memory.ctypes.data
    return 0 <= first <= memory.nbytes - data.nbytes
