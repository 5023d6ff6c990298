"""What the attention kernels have in common: scores of a block of keys, and the running softmax over such blocks.

Owns nothing. Powers are of two, which is what a GPU computes: scores are multiplied by log2(e) once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def product(a, b, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """a @ b in float32. WIDE: of factors in float32, without rounding them to what tensor cores take."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def scores_of(query, keys, scale, softcap, SOFTCAP: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """[queries, keys], times log2(e), for query [queries, dim] and keys [keys, dim]."""
    scores = product(query, tl.trans(keys), WIDE) * scale
    if SOFTCAP:
        scores = (2 * tl.sigmoid(2 * scores / softcap) - 1) * softcap  # softcap * tanh(scores / softcap)
    return scores * LOG2_E


@triton.jit
def fold(scores, values, top, total, sums, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """One block of keys more. `top` and `total` [queries], `sums` [queries, dim]: the largest score so far, and the
    weights and weighted values relative to it. Keys that a query does not see have the score -inf; a query may have
    seen none yet."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    sums = sums * shrink[:, None] + product(weights.to(values.dtype), values, WIDE)
    return new_top, total, sums


def wide(pool: torch.Tensor) -> bool:
    """Whether products are of float32 factors. The interpreter, which is what computes on host memory, cannot multiply
    bfloat16."""
    return pool.dtype == torch.float32 or not pool.is_cuda
