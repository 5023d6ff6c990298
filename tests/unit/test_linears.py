"""Packed linear layers compute what `nn.Linear` computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from baton.common.engine.kernels import Kernels
from baton.common.engine.linears import CompiledLinear, OneDnnLinear, in_own_memory, pack_linears
from baton.common.engine.panels import WeightFormat


class Block(nn.Module):
    """Layers of awkward sizes: fewer outputs than a panel, no multiple of 16, with and without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(37, 150)
        self.small = nn.Linear(64, 3, bias=False)
        self.inner = nn.Sequential(nn.Linear(129, 64), nn.ReLU())


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 97, 200])
def test_float32_layers_agree(kernels: Kernels, rows: int) -> None:
    torch.manual_seed(0)
    block, twin = Block(), Block()
    twin.load_state_dict(block.state_dict())
    pack_linears(block, kernels)
    assert isinstance(block.inner[0], CompiledLinear)
    for name, inputs in (("odd", 37), ("small", 64), ("inner", 129)):
        x = torch.randn(1, rows, inputs)
        with torch.inference_mode():
            ours, expected = getattr(block, name)(x), getattr(twin, name)(x)
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("inputs", [576, 70])  # with and without matrix units, where the processor has them
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 33, 97, 200])
def test_bfloat16_layers_agree(kernels: Kernels, rows: int, inputs: int) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(inputs, 150), nn.Linear(inputs, 3, bias=False)).to(torch.bfloat16)
    packed = nn.Sequential(*layers)  # its own list of the same layers
    pack_linears(packed, kernels)
    for layer, ours in zip(layers, packed, strict=True):
        assert isinstance(ours, CompiledLinear)
        x = torch.randn(1, rows, inputs).to(torch.bfloat16)
        with torch.inference_mode():
            exact = nn.functional.linear(
                x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double()
            )
            torch.testing.assert_close(ours(x).double(), exact, atol=1e-5, rtol=2**-8)


def nearest_int8(weight: torch.Tensor) -> torch.Tensor:
    """What an int8 weight stands for, of all that its scales (a row's largest weight is 127) can say the nearest."""
    scales = weight.double().abs().amax(dim=1, keepdim=True) / 127
    return (weight.double() / torch.where(scales == 0, 1.0, scales)).round() * scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 13, 97, 200])
def test_int8_layers_compute_with_the_nearest_int8_weights(kernels: Kernels, rows: int, dtype: torch.dtype) -> None:
    """Of awkward sizes, and with a row of zeros and one that is a thousand times as large."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(70, 150), nn.Linear(96, 3, bias=False), nn.Linear(64, 4100)).to(dtype)
    with torch.no_grad():
        layers[0].weight[5] = 0
        layers[0].weight[6] *= 1000
    packed = nn.Sequential(*layers)
    pack_linears(packed, kernels, weights="int8")
    for layer, ours in zip(layers, packed, strict=True):
        assert isinstance(layer, nn.Linear)
        x = torch.randn(1, rows, layer.in_features).to(dtype)
        bias = None if layer.bias is None else layer.bias.double()
        with torch.inference_mode():
            exact = nn.functional.linear(x.double(), nearest_int8(layer.weight), bias)
            found = ours(x).double()
        close = {"atol": 1e-5, "rtol": 2**-8} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
        torch.testing.assert_close(found, exact, **close)


def test_int8_weights_take_a_byte_each_and_a_scale_per_output(kernels: Kernels) -> None:
    taken = list[int]()

    def place(layout: str, nbytes: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        taken.append(nbytes)
        return in_own_memory(layout, nbytes, fill)

    pack_linears(nn.Sequential(nn.Linear(576, 199)), kernels, place, "int8")
    assert taken == [208 * (576 + 4)]


@pytest.mark.parametrize("weights", ["dtype", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_in_every_batch(kernels: Kernels, dtype: torch.dtype, weights: WeightFormat) -> None:
    layer = nn.Sequential(nn.Linear(576, 200)).to(dtype)
    pack_linears(layer, kernels, weights=weights)
    x = torch.randn(150, 576).to(dtype)
    with torch.inference_mode():
        whole = layer(x)
        assert all(
            torch.equal(layer(x[i : i + n]), whole[i : i + n])
            for i, n in ((0, 1), (149, 1), (7, 2), (4, 5), (3, 8), (9, 13), (50, 99))
        )


def test_an_empty_batch_is_no_work(kernels: Kernels) -> None:
    layer = nn.Sequential(nn.Linear(16, 20))
    pack_linears(layer, kernels)
    with torch.inference_mode():
        assert layer(torch.empty(1, 0, 16)).shape == (1, 0, 20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_kernels_onednn_takes_over_where_it_can(dtype: torch.dtype) -> None:
    layer = nn.Sequential(nn.Linear(64, 48)).to(dtype)
    x = torch.randn(1, 5, 64).to(dtype)
    with torch.inference_mode():
        expected = layer(x)
        pack_linears(layer, None)
        packed = dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        assert type(layer[0]) is (OneDnnLinear if packed else nn.Linear)
        torch.testing.assert_close(layer(x), expected, atol=2e-2, rtol=2e-2)
