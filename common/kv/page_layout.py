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
from baton.common.kv.cache_dtype import CacheDtype, is_quantised

PAGE_LAYOUT = "kv_page_layout"
"""What a worker calls it in its fingerprint."""
PANEL_TOKENS = 16
Words = npt.NDArray[np.int32]
"""What is moved: a float32, or a pair of bfloat16."""


class PageLayout(StrEnum):
    """`canonical`: [token][dim]. `panels`: K of each 16 tokens lies ready for dot products, float32 as [dim][token],
    bfloat16 as [pair of dims][token][2]; V as in `canonical`. `int8`, `fp8`: a byte for each number, and scales behind
    them (`quantised_pages`)."""

    CANONICAL = "canonical"
    PANELS = "panels"
    INT8 = "int8"
    FP8 = "fp8"

    @property
    def form(self) -> str:
        """What two pools must have in common to exchange pages. Layouts of one form hold the same numbers in another
        order."""
        return _FORMS[self]

    def fits(self, page_size: int) -> bool:
        return self is not PageLayout.PANELS or page_size % PANEL_TOKENS == 0

    @property
    def quantised(self) -> bool:
        return self in (PageLayout.INT8, PageLayout.FP8)


def layout_of(fingerprint: Mapping[str, str]) -> PageLayout | None:
    """In which a worker has its pages; None: in one that is not known here."""
    name = fingerprint.get(PAGE_LAYOUT, PageLayout.CANONICAL)
    return PageLayout(name) if name in set(PageLayout) else None


LayoutChoice = Literal["auto", "canonical", "panels", "int8", "fp8"]
_FORMS = {
    PageLayout.CANONICAL: "page-layer-kv-head-plane/2",
    PageLayout.PANELS: "page-layer-kv-head-plane/2",
    PageLayout.INT8: "page-layer-kv-head-int8-scales/1",
    PageLayout.FP8: "page-layer-kv-head-fp8-scales/1",
}


def choose_layout(
    choice: LayoutChoice, page_size: int, *, compiled: bool, cache_dtype: CacheDtype = "auto"
) -> PageLayout:
    """Of pools that compiled kernels read, or plain torch. Raises ConfigError when what was asked for cannot be had."""
    if is_quantised(cache_dtype):
        if choice not in ("auto", cache_dtype):
            reason = f"pages of {cache_dtype} have a layout of their own"
            raise ConfigError("kv.page_layout", choice, reason, 'use "auto", or kv.cache_dtype=auto')
        return PageLayout(cache_dtype)
    best = PageLayout.PANELS if compiled and PageLayout.PANELS.fits(page_size) else PageLayout.CANONICAL
    if choice == "auto":
        return best
    wanted = PageLayout(choice)
    if wanted.quantised:
        raise ConfigError("kv.page_layout", choice, f"kv.cache_dtype is {cache_dtype}", f"kv.cache_dtype={choice}")
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
