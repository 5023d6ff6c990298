"""Paged attention for packed rows of any number of queries, on a GPU: prefill, chunks, and steps that mix both kinds.

A program takes a block of one row's queries and one kv head, the head's query heads side by side, so each key is read
once per block. Blocks are numbered over all rows without anybody counting them: row b's begin at number
q_offsets[b] // BLOCK_QUERIES + b, which leaves room for one that is not full, and a program finds its row by bisection.
Owns nothing. Never: reads a key that no query of its block sees. Imported only where there is a GPU to work for, and by
tests. Run in Triton's interpreter and compiled for GPUs; not yet run on one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.common.engine.gpu.softmax import LOG2_E, fold, scores_of, wide
from baton.common.engine.paged_attention import AttentionParams, AttentionPlan

TILE_BYTES = 16384
"""Of the queries of a program, of each of K and V of one step: 82 KB of shared memory with all, two steps under way."""
_MOST_PLACES = {torch.bfloat16: 128, torch.float32: 32}
"""Of float32, whose products are unrolled into registers, a larger tile spills."""


@triton.jit
def _row_of(block, q_offsets, rows, BLOCK_QUERIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last row whose blocks begin at or before number `block`."""
    low, high = block * 0, rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        behind = tl.load(q_offsets + middle) // BLOCK_QUERIES + middle > block
        low = tl.where(behind, low, middle)
        high = tl.where(behind, middle - 1, high)
    return low


@triton.jit(do_not_specialize=["rows"])
def varlen_kernel(  # type: ignore[no-untyped-def]
    query,
    layer_pool,
    q_offsets,
    page_offsets,
    page_ids,
    kv_lens,
    sinks,
    out,
    rows,
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
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_TILE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Program (n, h): block number n of queries, for the query heads of kv head h. A tile's place i is query
    i // GROUP, head i % GROUP. `sinks` may be None."""
    block, kv_head = tl.program_id(0), tl.program_id(1)
    row = _row_of(block, q_offsets, rows, BLOCK_QUERIES)
    first_token = tl.load(q_offsets + row)
    q_len = tl.load(q_offsets + row + 1) - first_token
    first_query = (block - (first_token // BLOCK_QUERIES + row)) * BLOCK_QUERIES
    if first_query >= q_len:
        return
    kv_len = tl.load(kv_lens + row)
    places, dims = tl.arange(0, BLOCK_TILE), tl.arange(0, BLOCK_DIM)
    queries = first_query + places // GROUP
    positions = kv_len - q_len + queries
    there = (places < BLOCK_QUERIES * GROUP) & (queries < q_len)
    in_tile = there[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + places % GROUP
    tokens = (first_token + queries).to(tl.int64)
    tile = tl.load(
        query + (tokens * query_token + heads * query_head)[:, None] + dims[None, :], mask=in_tile, other=0.0
    )
    first_position = kv_len - q_len + first_query
    begin = tl.maximum(first_position - window + 1, 0) if WINDOW else 0
    end = tl.minimum(first_position + BLOCK_QUERIES, kv_len)
    if sinks is not None:
        top = tl.load(sinks + heads).to(tl.float32) * LOG2_E
        total = tl.full([BLOCK_TILE], 1.0, tl.float32)
    else:
        top = tl.full([BLOCK_TILE], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_TILE], tl.float32)
    sums = tl.zeros([BLOCK_TILE, BLOCK_DIM], tl.float32)
    head_pool = layer_pool + kv_head * (PAGE_SIZE * HEAD_DIM)
    table = page_ids + tl.load(page_offsets + row)
    for start in range(begin, end, BLOCK_KEYS):
        keys = start + tl.arange(0, BLOCK_KEYS)
        held = keys < end
        pages = tl.load(table + keys // PAGE_SIZE, mask=held, other=0).to(tl.int64)
        place = (head_pool + pages * page_stride + keys % PAGE_SIZE * HEAD_DIM)[:, None] + dims[None, :]
        mask = held[:, None] & (dims < HEAD_DIM)[None, :]
        scores = scores_of(tile, tl.load(place, mask=mask, other=0.0), scale, softcap, SOFTCAP, WIDE)
        seen = keys[None, :] <= positions[:, None]
        if WINDOW:
            seen &= keys[None, :] > positions[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
        values = tl.load(place + KV_HEADS * PAGE_SIZE * HEAD_DIM, mask=mask, other=0.0)
        top, total, sums = fold(scores, values, top, total, sums, WIDE)
    to = out + ((tokens * KV_HEADS * GROUP + heads) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(to, (sums / total[:, None]).to(out.dtype.element_ty), mask=in_tile)


def varlen_attention(
    query: torch.Tensor, pool: torch.Tensor, layer: int, plan: AttentionPlan, params: AttentionParams
) -> torch.Tensor:
    """As `PagedAttention`; K and V of the step are in the pool already."""
    tokens, q_heads, head_dim = query.shape
    _, _, _, kv_heads, page_size, _ = pool.shape
    assert query.stride(2) == 1, query.stride()
    rows, group, block_dim = len(plan.kv_lens), q_heads // kv_heads, max(16, triton.next_power_of_2(head_dim))
    tile = tile_places(pool.dtype, group, block_dim)
    block_queries = tile // group
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    varlen_kernel[tokens // block_queries + rows, kv_heads](
        query,
        pool[:, layer],
        plan.q_offsets,
        plan.page_offsets,
        plan.page_ids,
        plan.kv_lens,
        params.sinks,
        out,
        rows,
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
        BLOCK_QUERIES=block_queries,
        BLOCK_TILE=tile,
        BLOCK_DIM=block_dim,
        BLOCK_KEYS=block_keys(pool.dtype, block_dim),
        SOFTCAP=bool(params.softcap),
        WINDOW=bool(params.window),
        WIDE=wide(pool),
        num_warps=warps(tile),
        num_stages=2,
    )
    return out


def tile_places(dtype: torch.dtype, group: int, block_dim: int) -> int:
    """Places of a program's tile: at least one query of every head, at most what shared memory and registers hold."""
    fits = max(16, min(_MOST_PLACES[dtype], TILE_BYTES // (block_dim * dtype.itemsize)))
    return max(fits, int(triton.next_power_of_2(group)))


def block_keys(dtype: torch.dtype, block_dim: int) -> int:
    """Keys of one step of a program's loop."""
    return max(16, min(_MOST_PLACES[dtype] // 2, TILE_BYTES // (block_dim * dtype.itemsize)))


def warps(tile: int) -> int:
    return 4 if tile <= 64 else 8
