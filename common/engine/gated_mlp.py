"""`down(silu(gate(x)) * up(x))`, the feed-forward block of most families, with one pass between its products.

In float32 the inner tensors (the largest of a model) live in memory that all layers use one after the other: fresh
memory costs a page fault per 4 KiB, a tenth of a long prefill. A block is replaced only when it has these parts and no
others, and computes the same on random input.
Never: trusts a class's name for what the class computes.
"""

from __future__ import annotations

import torch
from torch import nn

from baton.common.engine.children import children_of
from baton.common.engine.linears import CompiledLinear, OneDnnLinear
from baton.common.engine.pointwise import CompiledSilu

PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")
LARGEST_KEPT_BYTES = 1 << 28
"""A step that needs more takes fresh memory: a worker must not hold for ever what its longest prompt once needed."""


class Scratch:
    """Two tensors at a time, valid until the next call. Used by one thread at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def pair(self, shape: torch.Size, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32, each `shape` with `width` as its last dimension."""
        whole = (*shape[:-1], width)
        count = shape[:-1].numel() * width
        memory = self._memory
        if 2 * count > len(memory):
            memory = torch.empty(2 * count)
            if 2 * count * memory.element_size() <= LARGEST_KEPT_BYTES:
                self._memory = memory
        return memory[:count].view(whole), memory[count : 2 * count].view(whole)


class GatedMlp(nn.Module):
    """Takes over the parts of a block whose layers and activation have been replaced already."""

    def __init__(self, block: nn.Module, scratch: Scratch) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (getattr(block, part) for part in PARTS)
        self._scratch = scratch if self.gate_proj.dtype == torch.float32 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._scratch is not None and isinstance(self.gate_proj, CompiledLinear):
            gate, up = self._scratch.pair(x.shape, self.gate_proj.out_features)
            self.gate_proj(x, gate)
            self.up_proj(x, up)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        self.act_fn.gate_(gate, up)
        return self.down_proj(gate)  # type: ignore[no-any-return]


def replace_gated_mlps(model: nn.Module) -> None:
    """After `pack_linears` and `replace_pointwise`."""
    scratch = Scratch()
    for parent, name, child in children_of(model):
        replacement = _replacement(child, scratch)
        if replacement is not None:
            setattr(parent, name, replacement)


def _replacement(block: nn.Module, scratch: Scratch) -> GatedMlp | None:
    parts = dict(block.named_children())
    if set(parts) != set(PARTS) or not isinstance(parts["act_fn"], CompiledSilu):
        return None
    gate = parts["gate_proj"]
    if not isinstance(gate, CompiledLinear | OneDnnLinear):
        return None
    replacement = GatedMlp(block, scratch)
    probe = torch.randn(3, gate.in_features, generator=torch.Generator().manual_seed(0)).to(gate.dtype)
    with torch.inference_mode():
        return replacement if torch.equal(block(probe), replacement(probe)) else None
