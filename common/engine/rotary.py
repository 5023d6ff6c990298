"""Rotary embeddings whose angles depend on more than the position are made to depend on the position alone.

`transformers` takes one of LongRoPE's two sets of factors for a whole pass, by its longest row. In a packed step that
is another request's row, and the keys in a page stay as they were turned once: answers would depend on who shares a
step, and prefix hits and handed-over pages would be wrong. Here a model has one set for good: the long one where its
positions go beyond those of its first training. What is shorter then differs from `transformers`, which takes the short
set for it.
Owns: nothing. ("dynamic" embeddings change only beyond the model's last position, where no request comes.)
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

_LONGROPE: Final = "longrope"
_FIXED: Final = "default"  # a kind for which `transformers` computes nothing anew


def fix_angles(model: nn.Module, max_positions: int) -> None:
    """Of all rotary embeddings of `model`, which is served up to `max_positions`."""
    last = torch.tensor([[max_positions - 1]])
    with torch.no_grad():
        for module in model.modules():
            attributes = vars(module)
            kind = attributes.get("rope_type")
            if kind == _LONGROPE:
                module(torch.empty(0), last)
                attributes["rope_type"] = _FIXED
            elif isinstance(kind, dict):  # by kind of layer
                for layers in [layers for layers, one in kind.items() if one == _LONGROPE]:
                    module(torch.empty(0), last, layers)
                    kind[layers] = _FIXED
