"""Into how many groups of layers the end of a prompt is cut on its way. Pure arithmetic; owns no state.

Earlier chunks travel while later ones compute. Behind the last chunk nothing is computed any more: sent as a whole, all
of its bytes (the *tail*) are still to come when the last layer is done. In G groups, each sent as soon as its layers
are computed, about 1/G of them are; or, where the lane is slower than the computing, what it could not move meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from baton.common.engine.batch import KvMemory
from baton.common.kv.layout import Component
from baton.common.messages import MAX_PARTS

SHORT_TAIL_S = 0.002
"""A tail so short is not worth more regions; and of a longer one, no more than this need be left."""
SMALL_SHARE = 0.02
"""Of the chunk's computing: so much is not noticed either."""
LEAST_REGION_BYTES = 256 << 10
"""Smaller regions cost more than they save."""

Setting = Literal["adaptive"] | int


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """What the pages of full attention look like, and what the configuration says of their groups of layers."""

    layers: int
    page_bytes: int
    wanted: Setting

    @classmethod
    def of(cls, memory: KvMemory, wanted: Setting) -> LayerGroups:
        """Of a model without full attention: one group, as nothing is shipped before its last layer."""
        full = memory.buffers.get(Component.FULL)
        return cls(1, 0, 1) if full is None else cls(full.layers, full.page_bytes, wanted)

    def choose(self, pages: int, lane_gbps: float, compute_s: float) -> int:
        """For a tail of `pages`, on a lane of this speed (0: not known), behind a step that takes about so long (0: not
        known). At least 1, at most MAX_PARTS."""
        most = min(self.layers, MAX_PARTS)
        if self.wanted != "adaptive":
            return min(self.wanted, most)
        nbytes = pages * self.page_bytes
        if lane_gbps <= 0 or compute_s <= 0:
            return 1
        tail_s = nbytes / (lane_gbps * 1e9)
        if tail_s <= max(SHORT_TAIL_S, SMALL_SHARE * compute_s):
            return 1
        return max(1, min(most, nbytes // LEAST_REGION_BYTES, math.ceil(tail_s / SHORT_TAIL_S)))

    def layers_until(self, part: int, parts: int) -> int:
        """So many layers are computed when `part` of `parts` is complete."""
        return (part + 1) * self.layers // parts


ONE_GROUP = LayerGroups(1, 0, 1)
