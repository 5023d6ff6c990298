"""A pool together with the layers that have their K and V in it: what each way of computing a step is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PoolLayers:
    """`pool` [pages, layers, 2, kv heads, page size, width] (`TorchKvBuffer`), its layers in the order of `layers`.
    Where there are several, the main component's is the first."""

    pool: torch.Tensor
    layers: tuple[int, ...]
