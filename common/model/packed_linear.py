"""Linear layers with weights repacked once into the blocked order that oneDNN's products want.

Plain `nn.Linear` repacks (or reads badly) in every call, which costs most of what small batches lose. Owns: the
replacement of a model's linear layers. Never: changes what they compute beyond the rounding of another sum order.
"""

from __future__ import annotations

import torch
from torch import nn


class PackedLinear(nn.Module):
    """`y = x W^T + b`. Holds only the packed weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")  # type: ignore[no-any-return]


def pack_linears(model: nn.Module) -> int:
    """Replaces every plain linear layer of `model`. Returns how many. Does nothing where oneDNN is missing."""
    if not torch._C._has_mkldnn:
        return 0
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype in (torch.float32, torch.bfloat16):
                setattr(parent, name, PackedLinear(child))
                replaced += 1
    return replaced
