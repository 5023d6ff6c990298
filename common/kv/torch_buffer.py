"""A pool as one torch tensor: the memory behind page ids, and behind state slots, for `TorchRunner`.

K and V: layout `[num_pages][layers][2 (K, V)][kv_heads][page_size][width]`: one page of all layers is one contiguous
block (gather and scatter copy whole pages). That is the shape of the tensor; what lies where in its last two dimensions
is the `PageLayout`'s to say. The width is the head size, and what a token's scale takes where it has one. States: a
slot is one contiguous block too, the states of all recurrent layers of one sequence one after the other, each in its
own dtype.
Where they are `shared`, other processes of this host may map them: the `local` lane reads them there.
Never: decides which page belongs to whom.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from baton.common.kv.page_layout import PageLayout, reordered_keys
from baton.common.kv.quantised_pages import head_dim_of, pool_dtype, pool_width
from baton.common.kv.state_shape import StateShape
from baton.common.memory import system_memory
from baton.common.shared_memory import SharedBlock

I32 = npt.NDArray[np.int32]
STATE_LAYOUT = "slot-layer-conv-recurrent/1"


def _zeroed(nbytes: int, shared: bool) -> tuple[torch.Tensor, SharedBlock | None]:
    """uint8 [nbytes], and the block that it is the memory of, if others may map it."""
    if not shared:
        return system_memory(nbytes), None
    block = SharedBlock(nbytes)
    return torch.from_numpy(block.memory), block


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
        page_layout: PageLayout = PageLayout.CANONICAL,
        shared: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """`dtype`: what the model computes in. `device`: where the pool lies, if not in host memory; then nobody can
        map it."""
        assert num_pages > 1, "page 0 is the null page: a pool needs at least one more"
        self.num_pages = num_pages
        self.page_size = page_size
        self.layers = num_layers
        self.page_layout = page_layout
        self.on_device = device is not None
        self._computed_in = dtype
        shape = (num_pages, num_layers, 2, num_kv_heads, page_size, pool_width(page_layout, head_dim))
        kind = pool_dtype(page_layout, getattr(torch, dtype))
        nbytes = math.prod(shape) * kind.itemsize
        if device is None:
            memory, self.block = _zeroed(nbytes, shared)
        else:
            memory, self.block = torch.zeros(nbytes, dtype=torch.uint8, device=device), None
        self.pool = memory.view(kind).view(shape)
        self.page_bytes = self.pool[0].numel() * self.pool.element_size()

    def adopt(self, pages: I32, layers: slice, source: PageLayout) -> None:
        """Pages came as a pool laid out as `source` has them: of these layers, puts them into this pool's order."""
        _, count, _, heads, page_size, _ = self.pool.shape
        words = self.as_bytes().view(np.int32).reshape(self.num_pages, count, 2, heads, page_size, -1)
        words[pages, layers, 0] = reordered_keys(words[pages, layers, 0], source, self.page_layout)

    def as_bytes(self) -> npt.NDArray[np.uint8]:
        """Only of host memory: torch raises TypeError for a pool on a device."""
        bytes_view: npt.NDArray[np.uint8] = self.units().numpy()
        return bytes_view

    def units(self) -> torch.Tensor:
        """uint8 [num_pages, page_bytes], wherever the pool lies; a view."""
        return self.pool.view(self.num_pages, -1).view(torch.uint8)

    def fingerprint(self) -> dict[str, str]:
        _, layers, _, heads, *_ = self.pool.shape
        layout = self.page_layout
        # Models with one name that compute in different dtypes write different codes.
        quantised = {"kv_computed_in": self._computed_in} if layout.quantised else {}
        return quantised | {
            "kv_layout": layout.form,
            "kv_dtype": layout.value if layout.quantised else self._computed_in,
            "kv_layers": str(layers),
            "kv_heads": str(heads),
            "kv_head_dim": str(head_dim_of(layout, self.pool)),
        }


class TorchStateBuffer:
    """`num_slots` counts the null slot 0. Memory is zeroed: a fresh sequence's state is all zeros."""

    page_layout = PageLayout.CANONICAL
    on_device = False

    def __init__(
        self,
        *,
        num_slots: int,
        num_layers: int,
        shape: StateShape,
        dtype: Literal["float32", "bfloat16"],
        shared: bool = False,
    ) -> None:
        assert num_slots > 1, "slot 0 is the null slot: a pool needs at least one more"
        kind: torch.dtype = getattr(torch, dtype)
        self.num_pages = num_slots
        self.layers = 1
        self.page_bytes = num_layers * shape.layer_bytes(kind.itemsize)
        self.shape = shape
        self._kind = kind
        memory, self.block = _zeroed(num_slots * self.page_bytes, shared)
        self._slots = memory.view(num_slots, self.page_bytes)
        conv_bytes, layer_bytes = shape.conv_bytes(kind.itemsize), shape.layer_bytes(kind.itemsize)
        starts = range(0, self.page_bytes, layer_bytes)
        # Per recurrent layer, over all slots: [num_slots, channels, width], and [num_slots, *recurrent] if it has one.
        self.conv = tuple(self._tensors(start, shape.conv, kind) for start in starts)
        self.recurrent = tuple(
            self._tensors(start + conv_bytes, shape.recurrent, torch.float32) for start in starts if shape.recurrent
        )

    def _tensors(self, start: int, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        """A view of one tensor of every slot."""
        flat = self._slots[:, start : start + math.prod(shape) * kind.itemsize].view(kind)
        return flat.view(len(flat), *shape)

    def as_bytes(self) -> npt.NDArray[np.uint8]:
        bytes_view: npt.NDArray[np.uint8] = self._slots.numpy()
        return bytes_view

    def adopt(self, pages: I32, layers: slice, source: PageLayout) -> None:
        """A state is the same in every layout."""

    def copy(self, source: int, target: int) -> None:
        """The whole state of a slot; that of slot 0 is a fresh sequence's, whatever lies there."""
        if source:
            self._slots[target] = self._slots[source]
        else:
            self._slots[target] = 0

    def fingerprint(self) -> dict[str, str]:
        return {
            "state_layout": STATE_LAYOUT,
            "state_dtype": str(self._kind).removeprefix("torch."),
            "state_layers": str(len(self.conv)),
            "state_conv": "x".join(map(str, self.shape.conv)),
            "state_recurrent": "x".join(map(str, self.shape.recurrent)),
        }
