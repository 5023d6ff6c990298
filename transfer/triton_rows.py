"""Copies rows of a pool on a GPU: what `copying.copy_rows` does, as a Triton kernel. Gathers pages into a contiguous
buffer of the device, scatters them out of one, or copies from pool to pool.

Owns nothing. Never: checks ids, waits, or touches a byte outside of the rows that it was given. Imported only where
there is a GPU to work for, and by tests: a worker on CPUs has no use for Triton. Tested in Triton's interpreter, and
compiled for GPUs; not yet run on one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WORD_BYTES = 16
"""What one thread loads and stores at once, where both sides allow: as two 8-byte numbers side by side, which the
compiler joins (Triton has no wider type)."""
SMALL_BLOCK_BYTES, BLOCK_BYTES = 512, 8192
"""Of one program, for rows that fit the small one, and for others: one word, or four, of each of its threads."""


@triton.jit
def _copy_words(target, source, count, block, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Number `block` of the stretches of BLOCK elements, of `count` elements in all."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


# Compiled anew for nothing but what `warm_up` goes through: whatever is known of alignment is said by WORDS.
@triton.jit(
    do_not_specialize=["target_step", "source_step", "row_bytes"],
    do_not_specialize_on_alignment=["target", "target_ids", "source", "source_ids"],
)
def copy_rows_kernel(  # type: ignore[no-untyped-def]
    target,
    target_ids,
    target_step,
    source,
    source_ids,
    source_step,
    row_bytes,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Program (i, b): bytes [b * BLOCK, (b + 1) * BLOCK) of row i. Steps from row to row are in words where WORDS,
    else in bytes."""
    i, block = tl.program_id(0), tl.program_id(1)
    to = tl.load(target_ids + i) if target_ids is not None else i
    from_ = tl.load(source_ids + i) if source_ids is not None else i
    # In 64 bits: a pool may have more than 2 GiB.
    if WORDS:
        words = tl.pointer_type(tl.int64)
        to_row = tl.multiple_of(target + to.to(tl.int64) * target_step * 16, 16)
        from_row = tl.multiple_of(source + from_.to(tl.int64) * source_step * 16, 16)
        whole = row_bytes // 16
        _copy_words(to_row.to(words), from_row.to(words), whole * 2, block, BLOCK // 8)
        if block == 0:
            _copy_words(to_row + whole * 16, from_row + whole * 16, row_bytes - whole * 16, 0, 16)
    else:
        to_row = target + to.to(tl.int64) * target_step
        from_row = source + from_.to(tl.int64) * source_step
        _copy_words(to_row, from_row, row_bytes, block, BLOCK)


def copy_rows_on_device(
    target: torch.Tensor, target_ids: torch.Tensor | None, source: torch.Tensor, source_ids: torch.Tensor | None
) -> None:
    """target[target_ids[i]] = source[source_ids[i]] for every i; without ids all rows, in order. All of one device and
    on its current stream: done when that is. Both sides are uint8 [rows, bytes of one] with rows of one length; rows
    may lie apart, a row's bytes may not. Ids are int32 and must be right."""
    count, row_bytes = len(target if target_ids is None else target_ids), target.shape[1]
    assert count == len(source if source_ids is None else source_ids), "rows for rows"
    assert row_bytes == source.shape[1], f"rows of {source.shape[1]} bytes for rows of {row_bytes}"
    assert target.stride(1) == source.stride(1) == 1, "a row's bytes lie side by side"
    if count == 0:
        return
    words = _in_words(target) and _in_words(source)
    unit = WORD_BYTES if words else 1
    block_bytes, warps = (SMALL_BLOCK_BYTES, 1) if row_bytes <= SMALL_BLOCK_BYTES else (BLOCK_BYTES, 4)
    copy_rows_kernel[count, triton.cdiv(row_bytes, block_bytes)](
        target,
        target_ids,
        target.stride(0) // unit,
        source,
        source_ids,
        source.stride(0) // unit,
        row_bytes,
        BLOCK=block_bytes,
        WORDS=words,
        num_warps=warps,
    )


def warm_up(device: torch.device) -> None:
    """Compiles all that gathers and scatters will need: seconds, the first time on a machine. For whoever starts a
    worker, since the thread that copies must not wait."""
    ids = torch.zeros(1, dtype=torch.int32, device=device)
    for row_bytes in (WORD_BYTES, SMALL_BLOCK_BYTES + WORD_BYTES):
        for offset in (0, 1):  # in words, and in bytes
            memory = torch.zeros(offset + 2 * row_bytes, dtype=torch.uint8, device=device)[offset:]
            one, other = memory.view(2, 1, row_bytes)
            copy_rows_on_device(one, None, other, ids)
            copy_rows_on_device(one, ids, other, None)


def _in_words(rows: torch.Tensor) -> bool:
    """Every row begins where a word may."""
    return (rows.data_ptr() | rows.stride(0)) % WORD_BYTES == 0
