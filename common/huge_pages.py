"""Huge pages for large blocks of memory: streaming through a gigabyte in small ones loses a third of its speed to
address translation. Owns no memory.
"""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path
from typing import Final

OF_SHARED_MEMORY: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def ask_for_huge_pages(block: mmap.mmap) -> None:
    """Before it is touched. Nothing happens where the system has none to give."""
    with contextlib.suppress(OSError):  # a kernel without them
        block.madvise(mmap.MADV_HUGEPAGE)


def shared_huge_pages() -> bool:
    """Whether the system gives shared memory huge pages to those who ask."""
    try:
        choice = OF_SHARED_MEMORY.read_text()
    except OSError:
        return False
    return any(f"[{name}]" in choice for name in ("always", "within_size", "advise", "force"))
