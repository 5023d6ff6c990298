"""Device memory that is none: shared memory of the host, which another process maps by a handle, and copies that are
done by a thread of their own, when a test lets them. Never used outside of tests and of checks in miniature."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from baton.common.shared_memory import NONCE_BYTES, NotShared, SharedBlock, SharedView
from baton.transfer.device_ipc import DEVICE_BYTES, HANDLE_BYTES, Exported, IpcRefused, Mapped, Move

_HANDLE = struct.Struct(f"<qqq{NONCE_BYTES}s{HANDLE_BYTES - 24 - NONCE_BYTES}x")


class HostIpc:
    """See IpcDevice. `blocks` are this process's allocations. Copies run while `running` is set; the next one fails
    with `next_failure`, half done."""

    def __init__(self, *blocks: SharedBlock, name: bytes = b"host") -> None:
        self._blocks = blocks
        self._name = name.ljust(DEVICE_BYTES, b"\0")
        self._views: dict[int, SharedView] = {}
        self._thread = ThreadPoolExecutor(1)
        self.running = Event()
        self.running.set()
        self.next_failure = ""
        self.copies = 0

    @property
    def mapped(self) -> int:
        """Mappings that are open."""
        return len(self._views)

    def device_id(self) -> bytes:
        return self._name

    def export(self, pointer: int) -> Exported:
        for block in self._blocks:
            offset = pointer - block.memory.ctypes.data
            if 0 <= offset < block.memory.nbytes:
                return Exported(_HANDLE.pack(os.getpid(), block.fd, block.memory.nbytes, block.nonce), offset)
        raise IpcRefused("no handle for this memory")

    def open(self, handle: bytes, owner: int) -> Mapped:
        """Also of this process: two ends of a test."""
        pid, fd, nbytes, nonce = _HANDLE.unpack(handle)
        try:
            view = SharedView(pid, fd, nonce, nbytes)
        except (NotShared, ValueError, OverflowError) as error:
            raise IpcRefused(f"the handle opens nothing: {error}") from error
        base = view.memory.ctypes.data
        self._views[base] = view
        return Mapped(base, nbytes)

    def close(self, mapped: Mapped) -> None:
        del self._views[mapped.base]

    def copy(self, moves: Sequence[Move]) -> _ThreadCopy:
        failure, self.next_failure = self.next_failure, ""
        self.copies += len(moves)
        return _ThreadCopy(self._thread.submit(self._move, moves[: len(moves) // 2] if failure else moves), failure)

    def _move(self, moves: Sequence[Move]) -> None:
        self.running.wait()
        for target, source, nbytes in moves:
            ctypes.memmove(target, source, nbytes)


class _ThreadCopy:
    """See IpcCopy."""

    def __init__(self, future: Future[None], failure: str) -> None:
        self._future, self.failure = future, failure

    def ended(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()
