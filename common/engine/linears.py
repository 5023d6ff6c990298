"""Linear layers with weights repacked once, for products that read them in one stream.

Plain `nn.Linear` walks its weight badly for small batches, which costs most of what `transformers` loses there. Float32
uses our kernel: as fast as the vendor's, and each row's result is independent of its batch to the bit, so an answer
continued on another worker is the same answer. Bfloat16 uses oneDNN's packed product (matrix units for every batch
size), where the last bit of a row may depend on how many rows it is computed with.
Owns: the replacement of a model's linear layers. Never: keeps a second copy of a weight.
"""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from baton.common.engine.children import children_of
from baton.common.engine.kernels import Kernels, LinearArgs
from baton.common.memory import system_memory

PANEL = 64  # kPanel in csrc/linear.cpp


class CompiledLinear(nn.Module):
    """`y = x W^T + b` in float32. Used by one thread at a time (the arguments are kept between calls)."""

    dtype = torch.float32

    def __init__(self, linear: nn.Linear, kernels: Kernels, memory: torch.Tensor) -> None:
        """Packs the weight into `memory`, float32 [packed_floats(linear)]."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.weight = torch.empty(0, dtype=torch.float32)  # some models ask for its dtype
        panels = memory.view(-1, linear.in_features, PANEL)
        whole = linear.out_features // PANEL
        weight = linear.weight.detach()
        panels[:whole] = weight[: whole * PANEL].view(whole, PANEL, linear.in_features).transpose(1, 2)
        if whole < len(panels):
            rest = linear.out_features - whole * PANEL
            panels[whole, :, :rest] = weight[whole * PANEL :].t()
            panels[whole, :, rest:] = 0
        self._packed = memory
        self._linear = kernels.linear
        self._args = LinearArgs(
            inputs=linear.in_features,
            outputs=linear.out_features,
            packed=memory.data_ptr(),
            bias=None if linear.bias is None else linear.bias.data_ptr(),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """Into `y` (dense, float32) where the caller has memory for it."""
        x = x.contiguous()
        if y is None:
            y = torch.empty((*x.shape[:-1], self.out_features), dtype=torch.float32)
        args = self._args
        args.rows, args.x, args.y = x.numel() // self.in_features, x.data_ptr(), y.data_ptr()
        self._linear(ctypes.byref(args))
        return y


class OneDnnLinear(nn.Module):
    """`y = x W^T + b` with the weight in oneDNN's blocked order."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.dtype = linear.weight.dtype
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.weight = torch.empty(0, dtype=self.dtype)  # some models ask for its dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")  # type: ignore[no-any-return]


def pack_linears(model: nn.Module, kernels: Kernels | None) -> None:
    """Replaces every plain linear layer of `model`. Without `kernels` float32 goes to oneDNN too; where that is missing
    as well, layers stay as they are."""
    found = [(parent, name, child) for parent, name, child in children_of(model) if type(child) is nn.Linear]
    compiled = [child for _, _, child in found if kernels is not None and child.weight.dtype == torch.float32]
    floats = sum(packed_floats(child) for child in compiled)
    arena = system_memory(4 * floats).view(torch.float32) if floats else torch.empty(0)  # one block: one stream
    for parent, name, child in found:
        if kernels is not None and child.weight.dtype == torch.float32:
            size = packed_floats(child)
            setattr(parent, name, CompiledLinear(child, kernels, arena[:size]))
            arena = arena[size:]
        elif torch._C._has_mkldnn:
            setattr(parent, name, OneDnnLinear(child))


def packed_floats(linear: nn.Linear) -> int:
    """Floats of a packed weight: outputs rounded up to whole panels."""
    return -(-linear.out_features // PANEL) * PANEL * linear.in_features
