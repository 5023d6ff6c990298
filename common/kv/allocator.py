"""`PageAllocator`: which pages are free. Owns the free class and nothing else; knows no tokens and no requests.

Invariant: a page is free, or it was handed out by `allocate` exactly once since it was last free. Page 0 is the null
page: never handed out, never taken back.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.common.kv.errors import OwnershipError
from baton.common.kv.prefix.interface import I32


class PageAllocator:
    """`num_pages` counts the null page, as `KvBuffer.num_pages` does; ids 1 .. num_pages - 1 are handed out."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages = {num_pages}: a pool needs the null page and at least one other")
        self.total_pages = num_pages - 1
        self.free_pages = self.total_pages
        # A stack: the page freed last is the one whose memory is most likely still warm.
        self._stack: I32 = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._is_free[0] = False
        self._stamp = np.zeros(num_pages, dtype=np.int32)

    def allocate(self, count: int) -> I32 | None:
        """`count` pages, or None when there are not that many: never fewer."""
        if count > self.free_pages:
            return None
        top = self.free_pages - count
        pages = self._stack[top : self.free_pages].copy()
        if count == 1:  # a decode step with page size 1 comes here once per running request
            self._is_free[pages.item()] = False
        else:
            self._is_free[pages] = False
        self.free_pages = top
        return pages

    def free(self, pages: I32) -> None:
        """Takes pages back. Raises OwnershipError, and takes none, if one of them is free already, is named twice, or
        is not of this pool."""
        count = len(pages)
        if count == 0:
            return
        # Reductions without the wrappers of methods: most calls are of a few pages, where those would be half the cost.
        if np.minimum.reduce(pages) < 1 or np.maximum.reduce(pages) > self.total_pages:
            raise OwnershipError(f"pages {pages.tolist()} are not all in 1..{self.total_pages}")
        if np.logical_or.reduce(self._is_free[pages]):
            raise OwnershipError(f"double free: pages {pages[self._is_free[pages]].tolist()} are free already")
        if count > 1:
            order = np.arange(count, dtype=np.int32)
            self._stamp[pages] = order  # a page named twice keeps only its last number
            twice = self._stamp[pages] != order
            if np.logical_or.reduce(twice):
                raise OwnershipError(f"pages {pages[twice].tolist()} are freed twice in one call")
        self._stack[self.free_pages : self.free_pages + count] = pages
        self._is_free[pages] = True
        self.free_pages += count

    def is_free(self, page: int) -> bool:
        return bool(self._is_free[page])

    def free_page_ids(self) -> I32:
        """A copy, in no particular order."""
        return self._stack[: self.free_pages].copy()

    @property
    def memory(self) -> tuple[I32, npt.NDArray[np.bool_]]:
        """The stack, of which the first `free_pages` entries count, and the marks: to be read. Where they lie never
        changes."""
        return self._stack, self._is_free

    def check(self) -> None:
        """Raises OwnershipError unless stack and marks say the same."""
        on_stack: npt.NDArray[np.bool_] = np.zeros_like(self._is_free)
        on_stack[self._stack[: self.free_pages]] = True
        if not np.array_equal(on_stack, self._is_free) or int(on_stack.sum()) != self.free_pages:
            wrong = np.flatnonzero(on_stack != self._is_free)
            raise OwnershipError(f"free list and free marks disagree about pages {wrong.tolist()}")
