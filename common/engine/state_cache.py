"""What recurrent layers of `transformers` take for their cache: the states of a forward pass's rows, from our slots.

Owns nothing: a row's state lives in its slot. One row works in its slot directly; several rows work on copies, which
`store` puts back. Every family we run continues from a state that it is given, token by token and in chunks alike: the
chunked scans take an initial state, convolutions are shown their last inputs. A fresh sequence starts from zeros, which
is what those layers assume without a cache.
Never: keeps K and V (attention has them in pages already), or outlives one forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from baton.common.kv.torch_buffer import TorchStateBuffer


class SlotCache:
    """The part of `transformers.Cache` that layers and models of 5.24 call; they ask for `state_idx` 0 only."""

    def __init__(self, states: TorchStateBuffer, places: Mapping[int, int], slots: list[int]) -> None:
        """`places` maps a layer's number to its place among the recurrent layers; one slot per row."""
        self._states = states
        self._places = places
        self._rows = slice(slots[0], slots[0] + 1) if len(slots) == 1 else torch.tensor(slots)
        self._conv: dict[int, torch.Tensor] = {}
        self._recurrent: dict[int, torch.Tensor] = {}

    @property
    def layers_seen(self) -> tuple[int, ...]:
        """Whose state was asked for, in this order."""
        return tuple(self._conv)

    def store(self) -> None:
        """After the pass: what was worked on outside of the slots goes into them."""
        if isinstance(self._rows, slice):
            return
        for layer, conv in self._conv.items():
            self._states.conv[self._places[layer]][self._rows] = conv
        for layer, recurrent in self._recurrent.items():
            self._states.recurrent[self._places[layer]][self._rows] = recurrent

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention layers keep nothing here."""
        return keys, values

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """[rows, channels, width], oldest input first; the layer may change it in place."""
        if layer_idx not in self._conv:
            self._conv[layer_idx] = self._states.conv[self._places[layer_idx]][self._rows]
        return self._conv[layer_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """[rows, *recurrent], float32; the layer may change it in place."""
        if layer_idx not in self._recurrent:
            self._recurrent[layer_idx] = self._states.recurrent[self._places[layer_idx]][self._rows]
        return self._recurrent[layer_idx]

    def update_conv_state(self, inputs: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> torch.Tensor:
        """Returns the inputs [rows, channels, tokens] behind those that came before, and keeps the last ones."""
        state = self.get_conv_state(layer_idx)
        whole = torch.cat([state, inputs], dim=-1)
        state.copy_(whole[..., -state.shape[-1] :])
        return whole

    def update_recurrent_state(
        self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        state = self.get_recurrent_state(layer_idx)
        assert new.shape == state.shape, (layer_idx, new.shape, state.shape)
        return state.copy_(new)
