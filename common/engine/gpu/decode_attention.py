"""Paged attention for rows of one query each, on a GPU: decode.

A row's keys are split among up to MAX_SPLITS programs per kv head, and a second kernel merges what they found, so that
few rows of long contexts fill a GPU too. How a row is split follows from its own length alone: its result does not
depend, to the bit, on the rows beside it, and a launch needs to know no length, which lets a CUDA graph keep it.
All query heads of a kv head are one tile, so each key is read once.
Owns nothing. Never: reads a key that the row does not see. Imported only where there is a GPU to work for, and by
tests. Run in Triton's interpreter and compiled for GPUs; not yet run on one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.common.engine.gpu.softmax import LOG2_E, fold, scores_of, wide
from baton.common.engine.paged_attention import AttentionParams, AttentionPlan

MAX_SPLITS = 16
MIN_SPLIT_KEYS = 256
"""A program's worth: fewer keys are not worth a program of their own. A multiple of every block of keys."""


@triton.jit
def _split_keys(visible, MAX_SPLITS: tl.constexpr, MIN_SPLIT_KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of a row's `visible` keys one program takes."""
    share = tl.cdiv(visible, MAX_SPLITS)
    return tl.maximum(tl.cdiv(share, MIN_SPLIT_KEYS), 1) * MIN_SPLIT_KEYS


@triton.jit
def split_kernel(  # type: ignore[no-untyped-def]
    query,
    layer_pool,
    page_offsets,
    page_ids,
    kv_lens,
    part_sums,
    part_tops,
    part_totals,
    query_token,
    query_head,
    page_stride,
    scale,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT_KEYS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Program (b, h, s): part s of the keys of row b, for the query heads of kv head h."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(kv_lens + row)
    first = tl.maximum(kv_len - window, 0) if WINDOW else 0
    share = _split_keys(kv_len - first, MAX_SPLITS, MIN_SPLIT_KEYS)
    begin = first + split * share
    end = tl.minimum(begin + share, kv_len)
    if begin >= end:  # the merge does not look here
        return
    heads, dims = tl.arange(0, BLOCK_GROUP), tl.arange(0, BLOCK_DIM)
    in_tile = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    first_head = kv_head * GROUP
    from_ = query + row.to(tl.int64) * query_token + (first_head + heads)[:, None] * query_head + dims[None, :]
    tile = tl.load(from_, mask=in_tile, other=0.0)
    head_pool = layer_pool + kv_head * (PAGE_SIZE * HEAD_DIM)
    table = page_ids + tl.load(page_offsets + row)
    top = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    sums = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        keys = start + tl.arange(0, BLOCK_KEYS)
        seen = keys < end
        pages = tl.load(table + keys // PAGE_SIZE, mask=seen, other=0).to(tl.int64)
        place = (head_pool + pages * page_stride + keys % PAGE_SIZE * HEAD_DIM)[:, None] + dims[None, :]
        mask = seen[:, None] & (dims < HEAD_DIM)[None, :]
        scores = scores_of(tile, tl.load(place, mask=mask, other=0.0), scale, softcap, SOFTCAP, WIDE)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        values = tl.load(place + KV_HEADS * PAGE_SIZE * HEAD_DIM, mask=mask, other=0.0)
        top, total, sums = fold(scores, values, top, total, sums, WIDE)
    part = (row.to(tl.int64) * KV_HEADS * GROUP + first_head + heads) * MAX_SPLITS + split
    tl.store(part_tops + part, top, mask=heads < GROUP)
    tl.store(part_totals + part, total, mask=heads < GROUP)
    tl.store(part_sums + part[:, None] * HEAD_DIM + dims[None, :], sums, mask=in_tile)


@triton.jit
def merge_kernel(  # type: ignore[no-untyped-def]
    part_sums,
    part_tops,
    part_totals,
    kv_lens,
    sinks,
    out,
    window,
    Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_SPLIT_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Program (b, h): query head h of row b, from its parts. `sinks` may be None."""
    row, head = tl.program_id(0), tl.program_id(1)
    kv_len = tl.load(kv_lens + row)
    visible = tl.minimum(kv_len, window) if WINDOW else kv_len
    splits, dims = tl.arange(0, MAX_SPLITS), tl.arange(0, BLOCK_DIM)
    used = splits < tl.cdiv(visible, _split_keys(visible, MAX_SPLITS, MIN_SPLIT_KEYS))
    first = (row.to(tl.int64) * Q_HEADS + head) * MAX_SPLITS
    tops = tl.load(part_tops + first + splits, mask=used, other=float("-inf"))
    totals = tl.load(part_totals + first + splits, mask=used, other=0.0)
    top = tl.max(tops, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    shares = tl.exp2(tops - top)
    total = tl.sum(totals * shares, 0)
    if sinks is not None:
        total += tl.exp2(sink - top)
    place = (first + splits)[:, None] * HEAD_DIM + dims[None, :]
    sums = tl.load(part_sums + place, mask=used[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    found = tl.sum(sums * shares[:, None], 0) / total
    to = out + (row.to(tl.int64) * Q_HEADS + head) * HEAD_DIM + dims
    tl.store(to, found.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def decode_attention(
    query: torch.Tensor, pool: torch.Tensor, layer: int, plan: AttentionPlan, params: AttentionParams
) -> torch.Tensor:
    """As `PagedAttention`, for T = B rows of one query, whose K and V are in the pool already."""
    rows, q_heads, head_dim = query.shape
    _, _, _, kv_heads, page_size, _ = pool.shape
    assert rows == len(plan.kv_lens), (query.shape, len(plan.kv_lens))
    assert query.stride(2) == 1, query.stride()
    group, block_dim = q_heads // kv_heads, max(16, triton.next_power_of_2(head_dim))
    sums = torch.empty(rows, q_heads, MAX_SPLITS, head_dim, dtype=torch.float32, device=query.device)
    tops, totals = torch.empty(2, rows, q_heads, MAX_SPLITS, dtype=torch.float32, device=query.device)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    split_kernel[rows, kv_heads, MAX_SPLITS](
        query,
        pool[:, layer],
        plan.page_offsets,
        plan.page_ids,
        plan.kv_lens,
        sums,
        tops,
        totals,
        query.stride(0),
        query.stride(1),
        pool.stride(0),
        params.scale,
        params.softcap,
        params.window,
        KV_HEADS=kv_heads,
        GROUP=group,
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        MAX_SPLITS=MAX_SPLITS,
        MIN_SPLIT_KEYS=MIN_SPLIT_KEYS,
        BLOCK_GROUP=max(16, triton.next_power_of_2(group)),  # what tensor cores take at least
        BLOCK_DIM=block_dim,
        BLOCK_KEYS=block_keys(pool.dtype, block_dim),
        SOFTCAP=bool(params.softcap),
        WINDOW=bool(params.window),
        WIDE=wide(pool),
        num_warps=4,
        num_stages=2,
    )
    merge_kernel[rows, q_heads](
        sums,
        tops,
        totals,
        plan.kv_lens,
        params.sinks,
        out,
        params.window,
        Q_HEADS=q_heads,
        HEAD_DIM=head_dim,
        MAX_SPLITS=MAX_SPLITS,
        MIN_SPLIT_KEYS=MIN_SPLIT_KEYS,
        BLOCK_DIM=block_dim,
        WINDOW=bool(params.window),
        num_warps=4,
    )
    return out


def block_keys(dtype: torch.dtype, block_dim: int) -> int:
    """Keys of one step of a program's loop: K and V of two steps take 50 KB of shared memory at most."""
    return max(16, min(64, 16384 // (block_dim * dtype.itemsize)))
