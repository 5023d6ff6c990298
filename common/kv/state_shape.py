"""What one recurrent layer keeps of a sequence, and how the layers of a model lie in one slot.

Never: memory (`torch_buffer.TorchStateBuffer` has it), or how a layer computes its state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ALIGNMENT_BYTES = 64  # of each tensor in a slot, and of the slot: a cache line


@dataclass(frozen=True, slots=True)
class StateShape:
    """Of one layer: the last inputs of its convolution, in the model's dtype, and its recurrent state, in float32
    whatever the model's dtype is (a sum over the whole sequence). `recurrent` is empty for a plain convolution.
    """

    conv: tuple[int, int]  # channels, width of the convolution
    recurrent: tuple[int, ...] = ()

    def conv_bytes(self, itemsize: int) -> int:
        return _aligned(math.prod(self.conv) * itemsize)

    def recurrent_bytes(self) -> int:
        return _aligned(math.prod(self.recurrent) * 4) if self.recurrent else 0

    def layer_bytes(self, itemsize: int) -> int:
        """Of one layer in a slot; layers follow one another. `itemsize` is that of the model's dtype."""
        return self.conv_bytes(itemsize) + self.recurrent_bytes()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
