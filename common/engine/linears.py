"""Linear layers with weights repacked once, for products that read them in one stream.

Plain `nn.Linear` walks its weight badly for small batches, which costs most of what `transformers` loses there. Float32
and bfloat16 use our product (csrc/matrix.h): each row's result is independent of its batch to the bit, so an answer
continued on another worker is the same answer. What our product does not take, and all where there is no compiler, goes
to oneDNN's packed product, where the last bit of a row may depend on how many rows it is computed with.
Owns: the replacement of a model's linear layers. Never: keeps a second copy of a weight, or says where the packed ones
lie (`WeightPlace`: in this process, or once for all of a host) and how (`panels`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Protocol

import torch
import xxhash
from torch import nn

from baton.common.engine.children import children_of
from baton.common.engine.kernels import Kernels, LinearArgs
from baton.common.engine.panels import PACKING, PackedForm, PackedWeight, WeightFormat, has_panels
from baton.common.memory import system_memory


class WeightPlace(Protocol):
    """Memory of `nbytes` that holds what `fill` writes into such memory. Equal `layout`s of equal weights are filled
    with equal bytes: they may have been written before, and by another process."""

    def __call__(self, layout: str, nbytes: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor: ...


def in_own_memory(layout: str, nbytes: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """`WeightPlace` of this process alone."""
    memory = system_memory(nbytes)  # one block: one stream
    fill(memory)
    return memory


class CompiledLinear(nn.Module):
    """`y = x W^T + b`. Used by one thread at a time (the arguments are kept between calls)."""

    def __init__(self, linear: nn.Linear, kernels: Kernels, packed: PackedWeight) -> None:
        super().__init__()
        self.dtype = linear.weight.dtype
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.weight = torch.empty(0, dtype=self.dtype)  # some models ask for its dtype
        self.packed = packed
        self.float_bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
        self._linear = kernels.linear
        self._args = LinearArgs(
            is_bf16=self.dtype == torch.bfloat16,
            inputs=linear.in_features,
            outputs=linear.out_features,
            packed=packed.panels.data_ptr(),
            scales=packed.scales_address,
            bias=None if self.float_bias is None else self.float_bias.data_ptr(),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """Into `y` (dense, of the layer's dtype) where the caller has memory for it."""
        assert x.dtype == self.dtype, (x.dtype, self.dtype)
        x = x.contiguous()
        if y is None:
            y = torch.empty((*x.shape[:-1], self.out_features), dtype=self.dtype)
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


def pack_linears(
    model: nn.Module, kernels: Kernels | None, place: WeightPlace = in_own_memory, weights: WeightFormat = "dtype"
) -> None:
    """Replaces every plain linear layer of `model`: by our product where we have one, else by oneDNN's. Where that is
    missing as well, layers stay as they are. `weights` says how ours has them."""
    found = [(parent, name, child) for parent, name, child in children_of(model) if type(child) is nn.Linear]
    compiled = [child for _, _, child in found if kernels is not None and has_panels(child.weight)]
    forms = [PackedForm.of(child.weight, weights) for child in compiled]
    sizes = [form.nbytes for form in forms]

    def fill(arena: torch.Tensor) -> None:
        for child, form, part in zip(compiled, forms, _parts(arena, sizes), strict=True):
            form.pack(child.weight.detach(), part)

    arena = place(_layout(forms), sum(sizes), fill) if compiled else torch.empty(0, dtype=torch.uint8)
    packed = zip(forms, _parts(arena, sizes), strict=True)
    for parent, name, child in found:
        if kernels is not None and has_panels(child.weight):
            form, part = next(packed)
            setattr(parent, name, CompiledLinear(child, kernels, form.view(part)))
        elif _is_packed_by_onednn(child.weight.dtype):
            setattr(parent, name, OneDnnLinear(child))


def _is_packed_by_onednn(dtype: torch.dtype) -> bool:
    """bfloat16 takes a processor with AVX-512."""
    if not torch._C._has_mkldnn:
        return False
    return dtype is not torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _parts(arena: torch.Tensor, sizes: list[int]) -> Iterator[torch.Tensor]:
    for begin, end in pairwise(accumulate(sizes, initial=0)):
        yield arena[begin:end]


def _layout(forms: list[PackedForm]) -> str:
    shapes = [(str(one.dtype), (one.outputs, one.inputs)) for one in forms]
    return f"{PACKING[forms[0].weights]}-{xxhash.xxh3_64_hexdigest(repr(shapes).encode())}"
