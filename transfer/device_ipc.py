"""A pool of device memory that another process of the host opens, for copies between two pools of devices.

Owns: what is said of such a pool (`share_pool`), the proofs before one is opened, the open mapping and its end
(`PeerPool`). Never: an address of a peer's, a write into a peer's pool, a wait but in `close`, or a decision about a
hand-off: whoever copies holds a grant of the source, as on `local`.

Invariants. I1: a handle is used only after its owner has named this host, this user and a device that is the same as
ours. I2: every read lies within what the driver says was mapped, whatever was
announced. I3: a mapping is closed once, when no copy reads it any more; copies that have begun cannot be called back.

A handle is of an allocation, not of a pool: a pool that lies within a larger one is at `offset` of it, and whoever
opens it may read all of that. A handle is bound to its allocation: one of an earlier process opens nothing else.

Tested over shared host memory of another process (`testing_ipc.py`). Not yet run on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from baton.transfer.transports.base import UnitIds
from baton.transfer.transports.local import host_id

HANDLE_BYTES: Final = 64
DEVICE_BYTES: Final = 16

IpcAddress = dict[str, str | int]
Move = tuple[int, int, int]
"""Address to write, address to read, bytes."""


class IpcRefused(Exception):
    """A pool that cannot be shared or opened; the reason is for the link's status."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The allocation around a pointer, and where the pointer lies in it."""

    handle: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class Mapped:
    """A peer's allocation in this process; `nbytes` is the driver's word, not the peer's."""

    base: int
    nbytes: int


class IpcCopy(Protocol):
    """Copies under way."""

    def ended(self) -> bool:
        """Nothing is read or written any more. Never waits. Stays true."""
        ...

    def wait(self) -> None: ...

    @property
    def failure(self) -> str:
        """Once ended: why the target holds anything; empty when it holds what it should."""
        ...


class IpcDevice(Protocol):
    """The few calls of a driver that are needed, for one device; from one thread at a time."""

    def device_id(self) -> bytes:
        """DEVICE_BYTES that no other device has."""
        ...

    def export(self, pointer: int) -> Exported:
        """Raises IpcRefused for memory that has no handle."""
        ...

    def open(self, handle: bytes, owner: int) -> Mapped:
        """`owner`: who has said that it is of its memory. Raises IpcRefused for a handle that opens nothing here."""
        ...

    def close(self, mapped: Mapped) -> None: ...

    def copy(self, moves: Sequence[Move]) -> IpcCopy:
        """Begins them all; they may run in any order. What cannot be begun is the copy's failure."""
        ...


@dataclass(frozen=True, slots=True)
class OwnPool:
    """uint8 [units, unit_bytes] at `pointer` of this process's device."""

    pointer: int
    units: int
    unit_bytes: int


def share_pool(device: IpcDevice, pool: OwnPool) -> IpcAddress:
    """What another process needs for `PeerPool`. Raises IpcRefused."""
    exported = device.export(pool.pointer)
    return {
        "host": host_id(),
        "pid": os.getpid(),
        "device": device.device_id().hex(),
        "handle": exported.handle.hex(),
        "offset": exported.offset,
        "units": pool.units,
        "unit_bytes": pool.unit_bytes,
    }


class PeerPool:
    """The pool that `address` tells of, opened for copies into `ours`. Raises IpcRefused."""

    def __init__(self, device: IpcDevice, address: IpcAddress, ours: OwnPool) -> None:
        self._device, self._ours = device, ours
        handle, offset, self.units = _checked(device, address, ours)
        self._mapped = device.open(handle, owner_of(address))
        if offset + self.units * ours.unit_bytes > self._mapped.nbytes:
            device.close(self._mapped)
            told = f"{self.units} units of {ours.unit_bytes} bytes at {offset}"
            raise IpcRefused(f"its allocation has {self._mapped.nbytes} bytes where it announced {told}")
        self._begin = self._mapped.base + offset
        self._running: list[IpcCopy] = []
        self._closing = self.closed = False

    def copy(self, theirs: UnitIds, ours: UnitIds, begin: int, end: int) -> IpcCopy:
        """Begins to copy bytes [begin, end) of each unit `theirs` to the unit of `ours` in the same place of its list.
        Raises IpcRefused, having touched nothing, for units outside of either pool and lists that do not match."""
        if self._closing:
            raise IpcRefused("the link is not open")
        if len(theirs) != len(ours):
            raise IpcRefused(f"{len(theirs)} units for {len(ours)} of ours")
        if not 0 <= begin < end <= self._ours.unit_bytes:
            raise IpcRefused(f"bytes [{begin}, {end}) of a unit of {self._ours.unit_bytes}")
        for units, count in ((theirs, self.units), (ours, self._ours.units)):
            if len(units) and not 0 <= int(units.min()) <= int(units.max()) < count:
                raise IpcRefused("a unit outside of the pool")
        copy = self._device.copy(self._moves(theirs, ours, begin, end))
        self._running = [other for other in self._running if not other.ended()] + [copy]
        return copy

    def begin_close(self) -> bool:
        """No copy begins from here on; the mapping goes when the last one has ended. True: it is gone. Never waits."""
        self._closing = True
        self._running = [copy for copy in self._running if not copy.ended()]
        if not self._running and not self.closed:
            self.closed = True
            self._device.close(self._mapped)
        return self.closed

    def close(self) -> None:
        """Waits for copies that have begun."""
        for copy in self._running:
            copy.wait()
        self.begin_close()

    def _moves(self, theirs: UnitIds, ours: UnitIds, begin: int, end: int) -> list[Move]:
        """Whole units that follow one another on both sides are one move."""
        unit_bytes = self._ours.unit_bytes
        breaks = np.ones(len(ours), np.bool_)
        if end - begin == unit_bytes:
            breaks[1:] = (np.diff(theirs) != 1) | (np.diff(ours) != 1)
        firsts = np.flatnonzero(breaks)
        counts = np.diff(np.append(firsts, len(ours)))
        return [
            (
                self._ours.pointer + int(ours[first]) * unit_bytes + begin,
                self._begin + int(theirs[first]) * unit_bytes + begin,
                int(count) * (end - begin),
            )
            for first, count in zip(firsts, counts, strict=True)
        ]


def owner_of(address: IpcAddress) -> int:
    """The process that the pool is of, which is one of this host, user and PID namespace. Raises IpcRefused."""
    try:
        host, pid = str(address["host"]), int(address["pid"])
    except (KeyError, ValueError) as error:
        raise IpcRefused("its address makes no sense") from error
    if host != host_id():
        raise IpcRefused("another host, pid namespace or user")
    return pid


def _checked(device: IpcDevice, address: IpcAddress, ours: OwnPool) -> tuple[bytes, int, int]:
    """Handle, offset and units. Raises IpcRefused."""
    owner_of(address)
    try:
        unit_bytes = int(address["unit_bytes"])
        its_device, handle = bytes.fromhex(str(address["device"])), bytes.fromhex(str(address["handle"]))
        offset, units = int(address["offset"]), int(address["units"])
    except (KeyError, ValueError) as error:
        raise IpcRefused("its address makes no sense") from error
    if len(handle) != HANDLE_BYTES or len(its_device) != DEVICE_BYTES or offset < 0 or units < 1:
        raise IpcRefused("its address makes no sense")
    if its_device != device.device_id():
        raise IpcRefused(f"its pool is on device {its_device.hex()}, ours on {device.device_id().hex()}")
    if unit_bytes != ours.unit_bytes:
        raise IpcRefused(f"a unit of its pool has {unit_bytes} bytes, of ours {ours.unit_bytes}")
    return handle, offset, units
