"""One process's pages, and an exact account of them: what is free holds the poison, what is lent is somebody's.

Content is a function of (hand-off, component, page of the prompt): whatever lands in a wrong page, from a wrong
hand-off, or from a page that was given back, is seen. Poison is looked at when a page is lent and at the end, so that
a write into a page that was given back is seen, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from baton.common.engine.batch import KvMemory
from baton.common.ids import HandoffKey
from baton.common.kv.allocator import PageAllocator
from baton.common.kv.layout import Component
from baton.transfer.plan import Segment, segments_of

POISON = np.uint64(0xA5A5_A5A5_A5A5_A5A5)
_STEP, _MIX, _PAGE = (
    np.uint64(0x9E37_79B9_7F4A_7C15),
    np.uint64(0xBF58_476D_1CE4_E5B9),
    np.uint64(0x94D0_49BB_1331_11EB),
)
_NUMBER = {component: number for number, component in enumerate(Component, start=1)}

Words = npt.NDArray[np.uint64]
Lent = Mapping[Component, npt.NDArray[np.int32]]


def content_of(key: HandoffKey, component: Component, pages: npt.NDArray[np.int64], words: int) -> Words:
    """uint64 [pages, words]: what pages number `pages` of the prompt hold."""
    seed = np.array([(key.handoff * 16 + key.attempt * 4 + _NUMBER[component]) % (1 << 64)], dtype=np.uint64)
    base = (pages.astype(np.uint64) + seed * _MIX) * _PAGE
    mixed: Words = (base[:, None] + np.arange(words, dtype=np.uint64) * _STEP) * _MIX
    mixed ^= mixed >> np.uint64(29)
    return mixed


class Pages:
    """All pools of one process."""

    def __init__(self, memory: KvMemory) -> None:
        self.layout = memory.layout
        self._words = {name: buffer.as_bytes().view(np.uint64) for name, buffer in memory.buffers.items()}
        self._allocators = {name: PageAllocator(buffer.num_pages) for name, buffer in memory.buffers.items()}
        self.touched = 0  # pages that were written after they had been given back
        for words in self._words.values():
            words[1:] = POISON

    def segments(self, start: int, total: int) -> tuple[Segment, ...]:
        """As engines see them: a state is one page."""
        return segments_of(self.layout, start, total)

    def lend(self, start: int, total: int) -> Lent | None:
        """Pages for all segments, or None."""
        lent: dict[Component, npt.NDArray[np.int32]] = {}
        for segment in self.segments(start, total):
            pages = self._allocators[segment.component].allocate(segment.units)
            if pages is None:
                self._free(lent)
                return None
            lent[segment.component] = pages
        for component, pages in lent.items():
            self.touched += self._written(component, pages)
        return lent

    def take_back(self, lent: Lent) -> None:
        for component, pages in lent.items():
            self._words[component][pages] = POISON
        self._free(lent)

    def fill(self, key: HandoffKey, segment: Segment, lent: Lent) -> None:
        """As if it had been computed."""
        pages = lent[segment.component]
        self._words[segment.component][pages] = self._wanted(key, segment)

    def wrong(self, key: HandoffKey, segment: Segment, lent: Lent, count: int | None = None) -> int:
        """Bytes of the first `count` pages of a segment that are not what its source put there."""
        pages = lent[segment.component][:count]
        there = self._words[segment.component][pages].view(np.uint8)
        return int((there != self._wanted(key, segment)[:count].view(np.uint8)).sum())

    @property
    def lent(self) -> int:
        return sum(one.total_pages - one.free_pages for one in self._allocators.values())

    def written_after_return(self) -> int:
        """Of all that are free now, and of those that were found when they were lent."""
        for allocator in self._allocators.values():
            allocator.check()
        free = {component: allocator.free_page_ids() for component, allocator in self._allocators.items()}
        return self.touched + sum(self._written(component, pages) for component, pages in free.items())

    def _free(self, lent: Lent) -> None:
        for component, pages in lent.items():
            self._allocators[component].free(pages)

    def _written(self, component: Component, pages: npt.NDArray[np.int32]) -> int:
        return int((self._words[component][pages] != POISON).any(axis=1).sum())

    def _wanted(self, key: HandoffKey, segment: Segment) -> Words:
        first = 0 if segment.component is Component.STATE else segment.first_token // self.layout.page_size
        numbers = np.arange(first, first + segment.units, dtype=np.int64)
        return content_of(key, segment.component, numbers, self._words[segment.component].shape[1])
