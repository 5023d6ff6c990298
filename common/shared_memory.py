"""Memory that other processes of this user on this host may map for reading: what a KV pool lives in.

Owns: the memory, the descriptor through which a peer opens it (`/proc/<pid>/fd/<fd>`), and the nonce by which it
knows that it has the right one. Never: a way for anybody else to write, or to pull the memory from under a reader: the
size is sealed, and the bytes stay for as long as somebody maps them, also after this process is dead.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import weakref
from pathlib import Path
from typing import Final, final

import numpy as np
import numpy.typing as npt

from baton.common.huge_pages import ask_for_huge_pages

NONCE_BYTES: Final = 16
HEADER_BYTES: Final = mmap.PAGESIZE
"""The nonce's page, before the memory itself."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Bytes = npt.NDArray[np.uint8]


class NotShared(Exception):
    """There is no such block, or none that may be read; the message says why."""


@final
class SharedBlock:
    """`memory`: uint8 [nbytes], zeroed, committed by the system when first touched."""

    def __init__(self, nbytes: int) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, HEADER_BYTES + nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        mapped = mmap.mmap(self.fd, HEADER_BYTES + nbytes)
        ask_for_huge_pages(mapped)
        whole = np.frombuffer(mapped, dtype=np.uint8)
        self._nonce = whole[:NONCE_BYTES]
        self._nonce[:] = np.frombuffer(self.nonce, dtype=np.uint8)
        self.memory: Bytes = whole[HEADER_BYTES:]

    def revoke(self) -> None:
        """Whoever still reads is told that it must not (`SharedView.valid`)."""
        self._nonce[:] = 0


@final
class SharedView:
    """Another process's block, for reading. Raises NotShared when it cannot be opened or is another one."""

    def __init__(self, pid: int, fd: int, nonce: bytes, nbytes: int) -> None:
        try:
            ours = os.open(Path(f"/proc/{pid}/fd/{fd}"), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise NotShared(f"its memory cannot be opened: {error.strerror}") from error
        try:
            whole = _map_sealed(ours, HEADER_BYTES + nbytes)
        finally:
            os.close(ours)
        self._expected = nonce
        self._nonce = whole[:NONCE_BYTES]
        self.memory: Bytes = whole[HEADER_BYTES:]
        if not self.valid:
            raise NotShared("another process sits at that pid")

    @property
    def valid(self) -> bool:
        """The owner still lets us read."""
        return self._nonce.tobytes() == self._expected


def _map_sealed(fd: int, nbytes: int) -> Bytes:
    """Only what can never shrink: reading behind the end of a file kills the reader."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        sealed = False
    if not sealed:
        raise NotShared("another process sits at that pid: this is no sealed memory")
    if os.fstat(fd).st_size != nbytes:
        raise NotShared(f"its memory has {os.fstat(fd).st_size} bytes where {nbytes} were announced")
    return np.frombuffer(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), dtype=np.uint8)
