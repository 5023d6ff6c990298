"""How K and V of one layer lie inside a page: the names that configuration, status and fingerprints use, and what turns
one order into another.

Owns: `PageLayout` and the order of numbers in each. Never: memory, or a kernel that reads it (engine/csrc/pages.h).

A page is [layers][2 (K, V)][kv heads], and for each of these one *plane*: K or V of `page_size` tokens of one head. A
layout says what lies where in a plane, so a layer of a page is one stretch of bytes in each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from baton.common.errors import ConfigError

PAGE_LAYOUT = "kv_page_layout"
"""What a worker calls it in its fingerprint."""
PANEL_TOKENS = 16
Words = npt.NDArray[np.int32]
"""What is moved: a float32, or a pair of bfloat16."""


class PageLayout(StrEnum):
    """`canonical`: [token][dim]. `panels`: K of each 16 tokens lies ready for dot products, float32 as [dim][token],
    bfloat16 as [pair of dims][token][2]; V as in `canonical`."""

    CANONICAL = "canonical"
    PANELS = "panels"

    @property
    def form(self) -> str:
        """What two pools must have in common to exchange pages. Layouts of one form hold the same numbers in another
        order."""
        return _FORMS[self]

    def fits(self, page_size: int) -> bool:
        return self is PageLayout.CANONICAL or page_size % PANEL_TOKENS == 0


def layout_of(fingerprint: Mapping[str, str]) -> PageLayout | None:
    """In which a worker has its pages; None: in one that is not known here."""
    name = fingerprint.get(PAGE_LAYOUT, PageLayout.CANONICAL)
    return PageLayout(name) if name in set(PageLayout) else None


LayoutChoice = Literal["auto", "canonical", "panels"]
_FORMS = {
    PageLayout.CANONICAL: "page-layer-kv-head-plane/2",
    PageLayout.PANELS: "page-layer-kv-head-plane/2",
}


def choose_layout(choice: LayoutChoice, page_size: int, *, compiled: bool) -> PageLayout:
    """Of pools that compiled kernels read, or plain torch. Raises ConfigError when what was asked for cannot be had."""
    best = PageLayout.PANELS if compiled and PageLayout.PANELS.fits(page_size) else PageLayout.CANONICAL
    if choice == "auto":
        return best
    wanted = PageLayout(choice)
    if wanted is PageLayout.PANELS and best is not wanted:
        reason = "it is for compiled kernels" if not compiled else f"a page of {page_size} tokens has no whole panels"
        hint = "model.attention compiled" if not compiled else f"a kv.page_size that {PANEL_TOKENS} divides"
        raise ConfigError("kv.page_layout", choice, reason, f'{hint}, or "auto"')
    return wanted


def reordered_keys(planes: Words, source: PageLayout, target: PageLayout) -> Words:
    """Planes of K [..., page_size, words of a token] that are laid out as in `source`, as `target` has them. May be
    `planes` itself."""
    if source is target:
        return planes
    *rest, page_size, words = planes.shape
    panels = page_size // PANEL_TOKENS
    shape = (PANEL_TOKENS, words) if source is PageLayout.CANONICAL else (words, PANEL_TOKENS)
    return planes.reshape(*rest, panels, *shape).swapaxes(-1, -2).reshape(planes.shape)
