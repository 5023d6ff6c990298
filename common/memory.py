"""Large blocks of memory straight from the system: zero until written, committed when first touched, in huge pages if
the system gives them (streaming through a gigabyte in small pages loses a third of its speed to address translation).
"""

from __future__ import annotations

import contextlib
import mmap

import torch


def system_memory(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes], zeroed. Lives as long as a tensor that views it."""
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)
