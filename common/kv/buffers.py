"""Plain host memory behind page ids. Owns the bytes of one pool; never knows who owns which page."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.common.kv.page_layout import PageLayout
from baton.common.shared_memory import SharedBlock


class NumpyKvBuffer:
    """`num_pages` pages (page 0, the null page, included), each one contiguous block of `page_bytes` bytes: `layers`
    equal stretches. `shared`: other processes may map them, at the price of a descriptor."""

    page_layout = PageLayout.CANONICAL
    on_device = False

    def __init__(
        self,
        num_pages: int,
        page_bytes: int,
        page_size: int,
        kind: str = "numpy",
        *,
        layers: int = 1,
        shared: bool = False,
    ) -> None:
        assert min(num_pages - 1, page_bytes, page_size) > 0, (num_pages, page_bytes, page_size)
        assert page_bytes % layers == 0, (page_bytes, layers)
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.page_size = page_size
        self.layers = layers
        self._kind = kind
        self.block = SharedBlock(num_pages * page_bytes) if shared else None
        memory = np.zeros(num_pages * page_bytes, dtype=np.uint8) if self.block is None else self.block.memory
        self._memory = memory.reshape(num_pages, page_bytes)

    def as_bytes(self) -> npt.NDArray[np.uint8]:
        """The live memory, [num_pages, page_bytes]."""
        return self._memory

    def adopt(self, pages: npt.NDArray[np.int32], layers: slice, source: PageLayout) -> None:
        """Bytes that mean nothing have no order."""

    def fingerprint(self) -> dict[str, str]:
        return {
            "kind": self._kind,
            "page_bytes": str(self.page_bytes),
            "page_size": str(self.page_size),
            "layers": str(self.layers),
        }
