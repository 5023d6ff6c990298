"""What a model keeps of the tokens it has seen: the components of its KV, in one vocabulary for all parts.

Owns: `Component` and `KvLayout`. Never: memory, pages or a model.

Layers of one kind form a *group* with a pool of its own. Full-attention layers keep every token; sliding-window layers
need the last `window` of them; recurrent layers keep one state per sequence, whatever its length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from baton.common.units import page_floor


class Component(StrEnum):
    """The kinds of layer groups; also the order in which they are named, counted and sent."""

    FULL = "full"
    SWA = "swa"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class KvLayout:
    """`page_size` in tokens, the same for full and sliding layers; a state is one slot, not paged. `window` in tokens:
    the query at position i sees keys j with i - window < j <= i; 0 when no layer slides."""

    page_size: int
    full: bool = True
    window: int = 0
    state: bool = False

    def __post_init__(self) -> None:
        assert self.page_size > 0, self
        assert self.window >= 0, self
        assert self.full or self.window or self.state, "a model without layers keeps nothing"

    @property
    def components(self) -> tuple[Component, ...]:
        return _COMPONENTS[self.full, self.window > 0, self.state]

    @property
    def only_full(self) -> bool:
        """Whether all layers attend to every token: then each page is of use as it is, whatever follows. What sliding
        and recurrent layers keep is good only at the end of the tokens."""
        return self.full and not self.window and not self.state

    @property
    def paged(self) -> tuple[Component, ...]:
        """The components that keep something per token."""
        return _COMPONENTS[self.full, self.window > 0, False]

    def live_from(self, length: int) -> int:
        """Where the pages begin that sliding layers still need once `length` tokens are known: page-aligned. The next
        query stands at `length` and sees keys from `length - window + 1` on."""
        return page_floor(max(0, length - self.window + 1), self.page_size) if self.window else 0


_COMPONENTS: Mapping[tuple[bool, bool, bool], tuple[Component, ...]] = {
    (full, swa, state): tuple(one for one, there in zip(Component, (full, swa, state), strict=True) if there)
    for full, swa, state in product((False, True), repeat=3)
}
