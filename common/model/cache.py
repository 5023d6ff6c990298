"""Things made once and kept: converted weights, compiled kernels. Safe when several processes ask at the same time.

An entry is a folder below `env.cache_dir()` that appears complete or not at all: it is built beside its place, written
to the disk, and renamed. What a builder leaves that fails is removed; what one leaves that is killed, by the next one.
A lock file per entry keeps all but one from building; a lock dies with its process. Never: decides what a key must
contain (the caller names everything that the content depends on), or deletes an entry.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import xxhash

from baton.common import env

Progress = Callable[[str], None]
_BLOCK_BYTES = 8 << 20


def silent(message: str) -> None:
    """The progress callback of those who want none."""


def cached(key: str, build: Callable[[Path], None], progress: Progress = silent) -> Path:
    """The folder of `key`, first filled by `build(folder)` if it does not exist. Waits for another builder. Raises
    OSError where the cache cannot be written, and what `build` raises."""
    entry = env.cache_dir() / key
    if entry.is_dir():
        return entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    with open(entry.with_name(entry.name + ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {key}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if entry.is_dir():
            return entry
        unfinished = entry.with_name(f"{entry.name}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a builder that died: we hold its lock now
        unfinished.mkdir()
        try:
            build(unfinished)
            _to_disk(unfinished)
            os.rename(unfinished, entry)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)  # it may have filled the disk
            raise
    return entry


def _to_disk(folder: Path) -> None:
    """Else a name may outlive a power cut, and its content not."""
    for path in (*(one for one in folder.rglob("*")), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def file_digest(path: Path) -> str:
    """64 bits of the file's content, in hex. For cache keys, not for security."""
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return str(digest.hexdigest())
