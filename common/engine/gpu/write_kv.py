"""Writes the keys and values of a step's tokens into their pages, on a GPU.

What plain torch does with two indexed assignments (`paged_attention.TorchPagedAttention`), in one launch. Owns nothing.
Never: checks slots, waits, or touches a page that no slot names. Imported only where there is a GPU to work for, and by
tests. Run in Triton's interpreter and compiled for GPUs; not yet run on one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def write_kv_kernel(  # type: ignore[no-untyped-def]
    key,
    value,
    layer_pool,
    slots,
    key_token,
    key_head,
    value_token,
    value_head,
    page_stride,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Program (t): all heads of token t. `layer_pool` is the layer's place in page 0."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)  # 64 bits: a pool may have more than 2 GiB
    heads, dims = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_DIM)[None, :]
    mask = (heads < KV_HEADS) & (dims < HEAD_DIM)
    target = layer_pool + slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * HEAD_DIM
    place = target + heads * (PAGE_SIZE * HEAD_DIM) + dims
    one_key = tl.load(key + token * key_token + heads * key_head + dims, mask=mask)
    one_value = tl.load(value + token * value_token + heads * value_head + dims, mask=mask)
    tl.store(place, one_key, mask=mask)
    tl.store(place + KV_HEADS * PAGE_SIZE * HEAD_DIM, one_value, mask=mask)


def write_kv(key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, layer: int, slots: torch.Tensor) -> None:
    """key and value [T, kv heads, head_dim], dense in the last dimension, go to `pool[:, layer]` at `slots` int64 [T].
    Slots differ from each other, but for those of padding."""
    tokens, kv_heads, head_dim = key.shape
    block_heads, block_dim = triton.next_power_of_2(kv_heads), triton.next_power_of_2(head_dim)
    page_size = pool.shape[4]
    assert key.shape == value.shape, (key.shape, value.shape)
    assert pool.shape[2:] == (2, kv_heads, page_size, head_dim), (pool.shape, key.shape)
    assert pool[0].is_contiguous(), "a page is one block"
    assert key.stride(2) == value.stride(2) == 1, (key.stride(), value.stride())
    assert key.dtype == value.dtype == pool.dtype, (key.dtype, value.dtype, pool.dtype)
    write_kv_kernel[(tokens,)](
        key,
        value,
        pool[:, layer],
        slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        pool.stride(0),
        KV_HEADS=kv_heads,
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=block_dim,
        num_warps=warps(block_heads * block_dim),
    )


def warps(block: int) -> int:
    """Of a program that copies so many elements: eight for each thread, 16 bytes of bfloat16."""
    return max(1, min(8, block // (8 * 32)))
