"""How K and V of one layer lie inside a page: the names that configuration, status and fingerprints use.

Owns: `PageLayout`. Never: memory, or a kernel that reads it.

A page is [layers][2 (K, V)][kv heads], and for each of these one *plane*: K or V of `page_size` tokens of one head. A
layout says what lies where in a plane, so a layer of a page is one stretch of bytes in each of them.
"""

from __future__ import annotations

from enum import StrEnum


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


_FORMS = {
    PageLayout.CANONICAL: "page-layer-kv-head-plane/2",
    PageLayout.PANELS: "page-layer-kv-head-plane/2",
}
