"""Root-mean-square norms in one kernel call instead of eight torch operations, and SiLU with our exponential.

`transformers` has one norm class per family, with small differences. A layer is replaced only when it is a norm by its
parts and our kernel reproduces its output on random input; any other keeps its own code.
Never: trusts a class's name for what the class computes.
"""

from __future__ import annotations

import ctypes
import inspect

import torch
from torch import nn

from baton.common.engine.children import children_of
from baton.common.engine.kernels import Kernels, NormArgs, SiluArgs

_EPS_NAMES = ("variance_epsilon", "eps")


class CompiledRmsNorm(nn.Module):
    """`x / rms(x) * (shift + weight)`. Used by one thread at a time (the arguments are kept between calls)."""

    def __init__(self, norm: nn.Module, eps: float, shift: float, round_first: bool, kernels: Kernels) -> None:
        """In place of `norm`, which goes on to serve what comes in another dtype than its weight's."""
        super().__init__()
        weight = norm.weight
        assert isinstance(weight, torch.Tensor)
        self.weight = weight
        self._plain = norm.forward
        self.float_weight = (weight.detach().float() + shift).contiguous()
        self.eps = eps
        self._size = len(weight)
        self._norm = kernels.norm
        self._args = NormArgs(
            is_bf16=weight.dtype == torch.bfloat16,
            size=self._size,
            weight=self.float_weight.data_ptr(),
            eps=eps,
            round_first=round_first,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:
            return self._plain(x)  # type: ignore[no-any-return]
        x = x.contiguous()
        y = torch.empty_like(x)
        args = self._args
        args.rows, args.x, args.y = x.numel() // self._size, x.data_ptr(), y.data_ptr()
        self._norm(ctypes.byref(args))
        return y


class CompiledSilu(nn.Module):
    """`x / (1 + exp(-x))` for float32 and bfloat16, alone or as the gate of another tensor."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self._silu = kernels.silu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        self._silu(ctypes.byref(SiluArgs(x.dtype == torch.bfloat16, x.numel(), x.data_ptr(), None, y.data_ptr())))
        return y

    def gate_(self, x: torch.Tensor, gated: torch.Tensor) -> None:
        """Puts `silu(x) * gated` into `x`; both dense and of one shape."""
        args = SiluArgs(x.dtype == torch.bfloat16, x.numel(), x.data_ptr(), gated.data_ptr(), x.data_ptr())
        self._silu(ctypes.byref(args))


def replace_pointwise(model: nn.Module, kernels: Kernels) -> None:
    """Replaces every SiLU of `model`, and every norm that our kernel is found to reproduce."""
    from transformers.activations import SiLUActivation

    for parent, name, child in children_of(model):
        silu = type(child) in (nn.SiLU, SiLUActivation)
        replacement = CompiledSilu(kernels) if silu else _norm_replacement(child, kernels)
        if replacement is not None:
            setattr(parent, name, replacement)


def _norm_replacement(norm: nn.Module, kernels: Kernels) -> CompiledRmsNorm | None:
    parameters = dict(norm.named_parameters())
    eps = next((getattr(norm, name) for name in _EPS_NAMES if isinstance(getattr(norm, name, None), float)), None)
    weight = parameters.get("weight")
    if eps is None or weight is None or len(parameters) > 1 or weight.dim() != 1 or len(weight) % 16:
        return None
    if len(inspect.signature(norm.forward).parameters) > 1:  # a gated norm: it takes more than what it norms
        return None
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    probe = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    with torch.inference_mode():
        expected = norm(probe)
        for shift, round_first in ((0.0, True), (1.0, False)):  # Llama's order of rounding, and Gemma's
            candidate = CompiledRmsNorm(norm, eps, shift, round_first, kernels)
            # One unit of the last bfloat16 place may differ; another formula differs by far more.
            tolerance = 1e-5 if weight.dtype == torch.float32 else 1e-2
            if torch.allclose(candidate(probe), expected, rtol=tolerance, atol=1e-6):
                return candidate
    return None
