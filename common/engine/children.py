"""The layers of a model, by where they hang: for whoever puts others in their place. Owns nothing."""

from __future__ import annotations

from torch import nn


def children_of(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, child) of every layer below `model`; a snapshot, so that they may be replaced on the way."""
    return [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
