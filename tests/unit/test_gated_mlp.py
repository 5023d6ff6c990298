"""The feed-forward block that stands in for a family's own computes the same bits, and only where it does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP

from baton.common.engine.gated_mlp import LARGEST_KEPT_BYTES, GatedMlp, Scratch, replace_gated_mlps
from baton.common.engine.kernels import Kernels
from baton.common.engine.linears import pack_linears
from baton.common.engine.pointwise import replace_pointwise

HIDDEN, INNER = 80, 200


def llama_mlp(bias: bool = False) -> LlamaMLP:
    return LlamaMLP(LlamaConfig(hidden_size=HIDDEN, num_attention_heads=4, intermediate_size=INNER, mlp_bias=bias))


class ScaledMlp(LlamaMLP):
    """A family that differs in one multiplication."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x) * 0.5) * self.up_proj(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_is_replaced_and_keeps_every_bit(kernels: Kernels, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(llama_mlp(bias), llama_mlp(bias)).to(dtype)
    pack_linears(model, kernels)
    replace_pointwise(model, kernels)
    reference = nn.Sequential(*model)  # the family's own forward over the same layers
    replace_gated_mlps(model)
    assert [type(block) for block in model] == [GatedMlp, GatedMlp]
    with torch.inference_mode():
        for rows in (200, 1, 7, 333):
            x = torch.randn(1, rows, HIDDEN).to(dtype)
            assert torch.equal(model(x), reference(x))


def test_another_formula_keeps_its_own_code(kernels: Kernels) -> None:
    gelu = llama_mlp()
    gelu.act_fn = ACT2FN["gelu"]
    scaled = ScaledMlp(LlamaConfig(hidden_size=HIDDEN, num_attention_heads=4, intermediate_size=INNER))
    model = nn.Sequential(scaled, gelu)
    pack_linears(model, kernels)
    replace_pointwise(model, kernels)
    replace_gated_mlps(model)
    assert [type(block) for block in model] == [ScaledMlp, LlamaMLP]


def test_memory_is_kept_for_the_next_layer_but_not_without_limit() -> None:
    scratch = Scratch()
    gate, up = scratch.pair(torch.Size((1, 30, 8)), 16)
    assert gate.shape == up.shape == (1, 30, 16)
    gate.fill_(1)
    up.fill_(2)
    assert gate.unique().tolist() == [1]
    again, _ = scratch.pair(torch.Size((1, 3, 8)), 16)
    assert again.data_ptr() == gate.data_ptr()
    rows = LARGEST_KEPT_BYTES // 4 // 16
    huge, _ = scratch.pair(torch.Size((rows, 8)), 16)
    assert huge.shape == (rows, 16)
    assert scratch.pair(torch.Size((1, 3, 8)), 16)[0].data_ptr() == gate.data_ptr()
