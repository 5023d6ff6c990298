"""K and V in pages as a byte for each number, for torch: the layouts `int8` and `fp8`.

A pool is uint8 `[pages][layers][2 (K, V)][kv_heads][page_size][head_dim + 2]`: what a head has of a page is one stretch
of bytes, and so is a layer: all that hand-offs, tiers and copies of pages know. The stretch of a head is the numbers of
all its tokens, one byte each, K as [head_dim][page_size] (what a kernel multiplies with needs no turning then) and V as
[page_size][head_dim]; behind them the tokens' scales, bfloat16 [page_size].

A token is quantised once, when it is written, by itself: the bytes of a page do not depend on what else a step
computes, and are never computed anew from what was read.
csrc/quantised_kv.h has the same, byte for byte. Never: decides which page belongs to whom.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from baton.common.kv.cache_dtype import SCALE_BYTES
from baton.common.kv.page_layout import PageLayout


@dataclass(frozen=True, slots=True)
class QuantisedForm:
    """A byte per number. `limit` is the largest number that a byte can say; a scale is the largest of a token's head,
    divided by it and rounded up."""

    dtype: torch.dtype
    limit: float

    def write(
        self, pool: torch.Tensor, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """key and value [T, kv heads, head_dim]; `slots` int64 [T] are page * page_size + offset."""
        page_size = pool.shape[4]
        pages, offsets = slots // page_size, slots % page_size
        for kind, tensor in enumerate((key, value)):
            codes, scales = self._parts(pool[:, layer, kind])
            found, found_scales = self.quantise(tensor.float())
            if kind == 0:
                _split(codes, page_size, last=True)[pages, :, :, offsets] = found.view(torch.uint8)
            else:
                _split(codes, page_size, last=False)[pages, :, offsets] = found.view(torch.uint8)
            scales[pages, :, offsets] = found_scales

    def held(
        self, pool: torch.Tensor, layer: int, page_ids: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all tokens of these pages, in order: each [kv heads, tokens, head_dim]."""
        page_size, stretches = pool.shape[4], pool[page_ids, layer]
        found = list[torch.Tensor]()
        for kind in range(2):
            codes, scales = self._parts(stretches[:, kind])
            numbers = codes.view(self.dtype).float()
            if kind == 0:
                numbers = _split(numbers, page_size, last=True).transpose(2, 3)
            else:
                numbers = _split(numbers, page_size, last=False)
            numbers = numbers * scales.float()[..., None]
            found.append(numbers.transpose(0, 1).flatten(1, 2).to(dtype))
        return found[0], found[1]

    def quantise(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [..., head_dim] as codes of `dtype` [..., head_dim] and bfloat16 scales [...]."""
        largest = numbers.abs().amax(-1)
        wanted = (largest / self.limit).clamp_min(torch.finfo(torch.float32).tiny)
        # Rounded up to a bfloat16, so that no quotient is larger than the limit.
        scales = ((wanted.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
        quotients = numbers / scales[..., None]
        if not self.dtype.is_floating_point:
            quotients = quotients.round()
        return quotients.to(self.dtype), scales.to(torch.bfloat16)

    def _parts(self, stretches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of [pages, kv heads, page_size, width]: the codes [pages, kv heads, page_size * head_dim] and the scales
        [pages, kv heads, page_size]."""
        page_size, width = stretches.shape[2:]
        flat, codes = stretches.flatten(2), page_size * (width - SCALE_BYTES)
        return flat[..., :codes], flat[..., codes:].view(torch.bfloat16)


def _split(numbers: torch.Tensor, page_size: int, *, last: bool) -> torch.Tensor:
    """[..., page_size * head_dim] as [..., head_dim, page_size] (tokens are `last`) or [..., page_size, head_dim]."""
    return numbers.view(*numbers.shape[:-1], *((-1, page_size) if last else (page_size, -1)))


FORMS: Mapping[PageLayout, QuantisedForm] = {
    PageLayout.INT8: QuantisedForm(torch.int8, 127.0),
    PageLayout.FP8: QuantisedForm(torch.float8_e4m3fn, 448.0),
}


def pool_dtype(layout: PageLayout, computed: torch.dtype) -> torch.dtype:
    """Of a pool's tensor, where the model computes in `computed`."""
    return torch.uint8 if layout.quantised else computed


def pool_width(layout: PageLayout, head_dim: int) -> int:
    """The last dimension of a pool's tensor."""
    return head_dim + SCALE_BYTES if layout.quantised else head_dim


def head_dim_of(layout: PageLayout, pool: torch.Tensor) -> int:
    return pool.shape[5] - SCALE_BYTES if layout.quantised else pool.shape[5]
