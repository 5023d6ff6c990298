"""The KV pool as one torch tensor: the memory behind page ids for `TorchRunner`.

Layout `[num_pages][layers][2 (K, V)][kv_heads][page_size][head_dim]`: one page of all layers is one contiguous block
(gather and scatter copy whole pages), and inside a page a head's tokens follow one another (attention streams them).
Never: decides which page belongs to whom.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from baton.common.memory import system_memory

LAYOUT = "page-layer-kv-head-token-dim/1"


class TorchKvBuffer:
    """`num_pages` counts the null page 0. Memory is zeroed, and committed by the system when first written."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Literal["float32", "bfloat16"],
    ) -> None:
        assert num_pages > 1, "page 0 is the null page: a pool needs at least one more"
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_pages, num_layers, 2, num_kv_heads, page_size, head_dim)
        kind: torch.dtype = getattr(torch, dtype)
        self.pool = system_memory(math.prod(shape) * kind.itemsize).view(kind).view(shape)
        self.page_bytes = self.pool[0].numel() * self.pool.element_size()

    def as_bytes(self) -> npt.NDArray[np.uint8]:
        bytes_view: npt.NDArray[np.uint8] = self.pool.view(self.num_pages, -1).view(torch.uint8).numpy()
        return bytes_view

    def fingerprint(self) -> dict[str, str]:
        _, layers, _, heads, _, head_dim = self.pool.shape
        return {
            "kv_layout": LAYOUT,
            "kv_dtype": str(self.pool.dtype).removeprefix("torch."),
            "kv_layers": str(layers),
            "kv_heads": str(heads),
            "kv_head_dim": str(head_dim),
        }
