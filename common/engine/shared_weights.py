"""Packed weights once per host: a file in the cache folder, which all workers of the host map.

The first worker that needs them packs them into the file; the others find it, and pack nothing. Its pages are in memory
once for all of them, and the weights that they were made of are not read again. Who maps it writes into no file (what
it writes is its own), and compares the digest first: that also brings every page in before the first request.
Owns: the file's format (the bytes, with their digest beside). Never: knows what is packed, or fails a start: where the
file cannot be had, the weights are in this process's own memory, and the log says why.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from baton.common.engine.linears import in_own_memory
from baton.common.huge_pages import ask_for_huge_pages
from baton.common.log import EventLog
from baton.common.model.cache import Progress, cached, silent
from baton.common.units import format_bytes

LEAST_SHARED_BYTES = 32 << 20
"""Less is not worth a file."""
_BYTES, _DIGEST = "weights", "digest"

_log = EventLog("baton.model")


class _Damaged(Exception):
    """The file is not what was written."""


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """`WeightPlace` of all processes of this host. `key` names the unpacked weights by their content."""

    key: str
    progress: Progress = silent

    def __call__(self, layout: str, nbytes: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        if nbytes < LEAST_SHARED_BYTES:
            return in_own_memory(layout, nbytes, fill)

        def build(folder: Path) -> None:
            self.progress(f"packing {format_bytes(nbytes)} of weights (once)")
            _write(folder, nbytes, fill)

        try:
            return self._open(f"packed/{self.key}-{layout}", nbytes, build)
        except (OSError, _Damaged) as error:
            _log.warning("weights_not_shared", reason=str(error), nbytes=nbytes)
            return in_own_memory(layout, nbytes, fill)

    def _open(self, key: str, nbytes: int, build: Callable[[Path], None]) -> torch.Tensor:
        folder = cached(key, build, self.progress)
        try:
            return _map(folder, nbytes)
        except (FileNotFoundError, _Damaged) as error:
            _log.warning("packed_weights_damaged", folder=str(folder), reason=str(error))
            shutil.rmtree(folder, ignore_errors=True)  # those that map it keep what they have
            return _map(cached(key, build, self.progress), nbytes)


def _write(folder: Path, nbytes: int, fill: Callable[[torch.Tensor], None]) -> None:
    with open(folder / _BYTES, "w+b") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk says so here; a mapped write would end the process
        block = mmap.mmap(file.fileno(), nbytes)
        memory = torch.frombuffer(block, dtype=torch.uint8)
        fill(memory)
        (folder / _DIGEST).write_bytes(_digest(memory.numpy()))


def _map(folder: Path, nbytes: int) -> torch.Tensor:
    expected = (folder / _DIGEST).read_bytes()
    with open(folder / _BYTES, "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != nbytes:
            raise _Damaged(f"{found} bytes where {nbytes} were written")
        block = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY)
    ask_for_huge_pages(block)
    memory = torch.frombuffer(block, dtype=torch.uint8)
    if _digest(memory.numpy()) != expected:
        raise _Damaged("its digest differs from that of what was written")
    return memory


def _digest(content: npt.NDArray[np.uint8]) -> bytes:
    return xxhash.xxh3_128_hexdigest(content.data).encode()
