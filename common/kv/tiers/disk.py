"""`DiskStore`: pages in the files of a directory that belongs to this process. Survives restarts.

Owns: the directory (a lock proves it), an index of its files, and their total size. Never: shares the directory with
another process (`external.SharedDirectoryStore` does), or trusts what it reads.

A file that is damaged, truncated or foreign is a miss: counted, logged once by name, and removed. Pages of another
model that lie in the directory have other keys, so nobody asks for them: they age and leave.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from baton.common.kv.tiers.keys import PageKey
from baton.common.kv.tiers.pagefile import PageFiles, Verdict, path_of, scan
from baton.common.kv.tiers.store import Bytes, Demote, StoreCounters, StoreUnavailable


class DiskStore:
    """`capacity_bytes` bounds the files' sizes, headers included. Raises StoreUnavailable when the directory cannot be
    used, or is used by another process."""

    name = "disk"

    def __init__(self, directory: Path, capacity_bytes: int, page_bytes: int, root: PageKey) -> None:
        self.page_bytes = page_bytes
        self.capacity_bytes = capacity_bytes
        self.counters = StoreCounters()
        self._files = PageFiles(self.name, directory, capacity_bytes, page_bytes, root, self.counters)
        self._directory = directory
        self._size_of: OrderedDict[PageKey, int] = OrderedDict()  # least recently used first
        self._used_bytes = 0
        self._leaving: Bytes = np.empty(page_bytes, dtype=np.uint8)
        self._lock_fd = self._lock()
        try:
            self._read_index()
        except OSError as error:
            os.close(self._lock_fd)
            raise StoreUnavailable(f"disk tier: {directory}: {error.strerror}") from error
        self._make_room(0, None)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def known_prefix(self, keys: Sequence[PageKey]) -> int:
        return next((index for index, key in enumerate(keys) if key not in self._size_of), len(keys))

    def read(self, key: PageKey, out: Bytes) -> bool:
        if key not in self._size_of:
            self.counters.misses += 1
            return False
        if self._files.read(key, out) is not Verdict.GOOD:
            self._remove(key)
            return False
        self._size_of.move_to_end(key)
        return True

    def write(self, key: PageKey, data: Bytes, demote: Demote | None = None) -> bool:
        if key in self._size_of:
            self._size_of.move_to_end(key)
            with contextlib.suppress(OSError):  # gone: reading will find out
                os.utime(path_of(self._directory, key))
            return True
        nbytes = self._files.format.file_bytes
        self._make_room(nbytes, demote)
        if not self._files.write(key, data):
            return False
        self._size_of[key] = nbytes
        self._used_bytes += nbytes
        return True

    def close(self) -> None:
        """Another process may use the directory. Not to be used afterwards."""
        os.close(self._lock_fd)

    # ------------------------------------------------------------------------------------------ inside

    def _lock(self) -> int:
        """Held until `close`, or until this process ends."""
        path = self._directory / "owner.lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnavailable(f"disk tier: {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise StoreUnavailable(f"disk tier: {self._directory} is used by another process") from error
        return fd

    def _read_index(self) -> None:
        for found in sorted(scan(self._directory)):
            if found.key is None:  # left by a process that ended while it wrote
                found.path.unlink(missing_ok=True)
            else:
                self._size_of[found.key] = found.nbytes
                self._used_bytes += found.nbytes

    def _make_room(self, nbytes: int, demote: Demote | None) -> None:
        while self._used_bytes + nbytes > self.capacity_bytes:
            key = next(iter(self._size_of))
            if demote is not None:
                found = self._files.format.read(path_of(self._directory, key), key, self._leaving)
                if found is Verdict.GOOD:
                    demote(key, self._leaving)
            self._remove(key)
            self.counters.evicted += 1

    def _remove(self, key: PageKey) -> None:
        self._used_bytes -= self._size_of.pop(key)
        path = path_of(self._directory, key)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._files.complain("tier_page_stays", path.name, error)
