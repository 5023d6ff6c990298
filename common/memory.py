"""Large blocks of memory straight from the system: zero until written, committed when first touched, in huge pages if
the system gives them.
"""

from __future__ import annotations

import mmap

import torch

from baton.common.huge_pages import ask_for_huge_pages


def system_memory(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes], zeroed. Lives as long as a tensor that views it."""
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ask_for_huge_pages(block)
    return torch.frombuffer(block, dtype=torch.uint8)
