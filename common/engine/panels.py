"""How a linear layer's weight is packed for our product (csrc/panel.h): in panels of 16 outputs, as it is or as int8.

An int8 weight has one scale per output, such that its largest weight becomes 127 or -127. The product multiplies the
integers and scales the sum, so inputs stay what they are.
Owns: the bytes. Never: says where they lie (`linears.WeightPlace`), or computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

WeightFormat = Literal["dtype", "int8"]
PANEL: Final = 16  # kPanel in csrc/panel.h
PACKING: Final[dict[WeightFormat, str]] = {"dtype": f"panels-{PANEL}-v1", "int8": f"panels-{PANEL}-int8-v1"}
"""Names what `PackedForm.pack` makes: another name where it makes something else."""
_STEP: Final = {torch.float32: 1, torch.bfloat16: 2}  # inputs that lie side by side in a panel
_LARGEST: Final = 127
_ROWS_AT_ONCE: Final = 256 * PANEL  # that are floats while they are rounded


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """`scales`: float32 [outputs up to whole panels], of int8 panels alone."""

    panels: torch.Tensor
    scales: torch.Tensor | None

    @property
    def scales_address(self) -> int | None:
        return None if self.scales is None else self.scales.data_ptr()


@dataclass(frozen=True, slots=True)
class PackedForm:
    """What a weight [outputs, inputs] of `dtype` becomes."""

    dtype: torch.dtype
    outputs: int
    inputs: int
    weights: WeightFormat

    @classmethod
    def of(cls, weight: torch.Tensor, weights: WeightFormat) -> PackedForm:
        assert has_panels(weight)
        outputs, inputs = weight.shape
        return cls(weight.dtype, outputs, inputs, weights)

    @property
    def _padded_outputs(self) -> int:
        return -(-self.outputs // PANEL) * PANEL

    @property
    def nbytes(self) -> int:
        if self.weights == "int8":
            return self._padded_outputs * (self.inputs + torch.float32.itemsize)
        return self._padded_outputs * self.inputs * self.dtype.itemsize

    def view(self, memory: torch.Tensor) -> PackedWeight:
        """Of what `pack` has written into `memory`, uint8 [nbytes]."""
        if self.weights == "dtype":
            return PackedWeight(memory.view(self.dtype), None)
        size = self._padded_outputs * self.inputs
        return PackedWeight(memory[:size].view(torch.int8), memory[size:].view(torch.float32))

    def pack(self, weight: torch.Tensor, memory: torch.Tensor) -> None:
        """Into `memory`, uint8 [nbytes]."""
        packed = self.view(memory)
        if packed.scales is None:
            _fill_panels(weight, packed.panels, _STEP[self.dtype])
            return
        packed.scales.zero_()
        for first in range(0, self.outputs, _ROWS_AT_ONCE):
            rows = weight[first : first + _ROWS_AT_ONCE].float()
            scales = rows.abs().amax(dim=1) / _LARGEST
            packed.scales[first : first + len(rows)] = scales
            rounded = (rows / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
            _fill_panels(rounded, packed.panels[first * self.inputs :], 1)


def has_panels(weight: torch.Tensor) -> bool:
    """Whether our product takes such a weight."""
    step = _STEP.get(weight.dtype)
    return step is not None and weight.shape[1] % step == 0


def _fill_panels(weight: torch.Tensor, memory: torch.Tensor, step: int) -> None:
    """From the begin of `memory` on; as many panels as the weight's rows take."""
    outputs, inputs = weight.shape
    whole, rest = divmod(outputs, PANEL)
    panels = memory[: -(-outputs // PANEL) * PANEL * inputs].view(-1, inputs // step, PANEL, step)
    panels[:whole] = weight[: whole * PANEL].view(whole, PANEL, inputs // step, step).transpose(1, 2)
    if rest:
        panels[whole, :, :rest] = weight[whole * PANEL :].view(rest, inputs // step, step).transpose(0, 1)
        panels[whole, :, rest:] = 0
