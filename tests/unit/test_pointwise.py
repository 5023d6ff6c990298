"""The pointwise kernels stand in for the families' own classes only where they compute the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from baton.common.engine.kernels import Kernels
from baton.common.engine.pointwise import CompiledRmsNorm, CompiledSilu, replace_pointwise


@pytest.mark.parametrize("family", [LlamaRMSNorm, Gemma2RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_known_families_are_replaced_and_agree(kernels: Kernels, family: type[nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(family(80))
    nn.init.normal_(model[0].weight)
    model = model.to(dtype)
    x = 5 * torch.randn(1, 70, 2, 80).to(dtype)
    with torch.inference_mode():
        expected = model(x)
        replace_pointwise(model, kernels)
        assert isinstance(model[0], CompiledRmsNorm)
        ours = model(x)
        torch.testing.assert_close(ours, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
        assert torch.equal(model(x[:, 7:8]), ours[:, 7:8])


class MeanNorm(nn.Module):
    """Looks like a norm by its parts, and is another function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x - x.mean(-1, keepdim=True))


class GatedNorm(LlamaRMSNorm):
    """A norm, but of more than one tensor."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * gate)


def test_a_residual_in_another_dtype_keeps_the_class_s_own_code(kernels: Kernels) -> None:
    """Mamba-2 keeps its residual in float32 beside weights in bfloat16."""
    model = nn.Sequential(LlamaRMSNorm(32)).to(torch.bfloat16)
    x = torch.randn(3, 32)
    expected = model(x)
    replace_pointwise(model, kernels)
    assert isinstance(model[0], CompiledRmsNorm)
    assert torch.equal(model(x), expected)
    assert model[0].weight.dtype == torch.bfloat16


def test_anything_else_keeps_its_own_code(kernels: Kernels) -> None:
    model = nn.Sequential(MeanNorm(), nn.LayerNorm(32), GatedNorm(32), LlamaRMSNorm(40))  # 40 is not a multiple of 16
    replace_pointwise(model, kernels)
    assert [type(layer) for layer in model] == [MeanNorm, nn.LayerNorm, GatedNorm, LlamaRMSNorm]


@pytest.mark.parametrize("count", [1, 15, 16, 5000, 40_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_agrees(kernels: Kernels, count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ACT2FN["silu"])
    replace_pointwise(model, kernels)
    assert isinstance(model[0], CompiledSilu)
    x = (20 * torch.randn(count)).to(dtype)
    x[: count // 3] *= 10  # far beyond where the exponential underflows
    with torch.inference_mode():
        ours = model(x)
    torch.testing.assert_close(
        ours, torch.nn.functional.silu(x), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6
    )
