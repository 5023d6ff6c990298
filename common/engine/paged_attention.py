"""Attention over paged KV for packed ragged batches: the interface and two implementations.

`compiled` is our C++ kernel (csrc/paged_attention.cpp); `torch` is the plain reference that needs no compiler and says
in a few lines what the kernel must compute. Both write K and V of the step's tokens into the pool first, then attend:
query at position i of a row sees keys j <= i, and with a window W only those with j > i - W. Keys that no query of the
step sees take no part at all, whatever lies there: their pages may be dead (page id 0).
Never: allocates pages, or knows which model calls.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from baton.common.engine.batch import Batch, PageTable
from baton.common.kv.page_layout import PageLayout, reordered_keys
from baton.common.kv.quantised_pages import FORMS

QUERY_BLOCK = 512  # most queries of a row that plain torch takes at once


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of a group need to know of a step's rows. Tensors share memory with the batch."""

    slots: torch.Tensor  # int64 [T]
    q_offsets: torch.Tensor  # int32 [B + 1]
    kv_lens: torch.Tensor  # int32 [B], after the step
    page_offsets: torch.Tensor  # int32 [B + 1]
    page_ids: torch.Tensor  # int32 [sum of pages]

    @classmethod
    def of(cls, batch: Batch, table: PageTable) -> AttentionPlan:
        return cls(
            torch.from_numpy(table.slots),
            torch.from_numpy(batch.q_offsets),
            torch.from_numpy(batch.kv_lens),
            torch.from_numpy(table.page_offsets),
            torch.from_numpy(table.page_ids),
        )


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What a layer asks for besides its tensors. `window` 0 and `softcap` 0.0 mean none. `sinks` [query heads] are
    logits that take part in the softmax without a value."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class PagedAttention(Protocol):
    """Writes K and V of T tokens into `pool[:, layer]`, then attends.

    query [T, query heads, head_dim], key and value [T, kv heads, head_dim] (any strides with a dense last dimension),
    all of the model's dtype; returns [T, query heads, head_dim], dense. Query heads are a multiple of the kv heads. All
    pools are laid out as `page_layout` says.
    """

    name: str
    page_layout: PageLayout

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        plan: AttentionPlan,
        params: AttentionParams,
    ) -> torch.Tensor: ...


class TorchPagedAttention:
    """The reference: gathers a row's pages and calls plain torch operations, row by row."""

    name = "torch"

    def __init__(self, page_layout: PageLayout = PageLayout.CANONICAL) -> None:
        assert page_layout is not PageLayout.PANELS, "panels are for compiled kernels"
        self.page_layout: PageLayout = page_layout

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        plan: AttentionPlan,
        params: AttentionParams,
    ) -> torch.Tensor:
        if self.page_layout.quantised:
            FORMS[self.page_layout].write(pool, layer, plan.slots, key, value)
        else:
            page_size = pool.shape[4]
            pages, offsets = plan.slots // page_size, plan.slots % page_size
            pool[pages, layer, 0, :, offsets] = key
            pool[pages, layer, 1, :, offsets] = value
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        attend_long_rows(query, pool, layer, self.page_layout, plan, params, 0, out)
        return out


def attend_long_rows(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    page_layout: PageLayout,
    plan: AttentionPlan,
    params: AttentionParams,
    min_queries: int,
    out: torch.Tensor,
) -> None:
    """Writes `out` for the rows with more than `min_queries` queries, in plain torch; K and V are in the pool already.
    Blocks of queries see only the keys up to their end, which halves the work of a long prompt, and only those from
    their window's begin on."""
    q_offsets, page_offsets = plan.q_offsets.tolist(), plan.page_offsets.tolist()
    page_size = pool.shape[4]
    for row, kv_len in enumerate(plan.kv_lens.tolist()):
        first, last = q_offsets[row], q_offsets[row + 1]
        if last - first <= min_queries:
            continue
        # Of the pages that the row's first query sees a key in; earlier ones may be dead.
        skipped = _first_visible(kv_len - (last - first), params) // page_size
        page_ids = plan.page_ids[page_offsets[row] + skipped : page_offsets[row + 1]].long()
        keys, values = _held(pool, layer, page_ids, page_layout, query.dtype)
        # A whole prompt goes in one piece: torch skips what its own causal mask hides.
        step = last - first if last - first == kv_len and not params.window else QUERY_BLOCK
        for start in range(first, last, step):
            stop = min(last, start + step)
            seen = slice(
                _first_visible(kv_len - (last - start), params) - skipped * page_size,
                kv_len - (last - stop) - skipped * page_size,
            )
            block = query[start:stop].transpose(0, 1)
            out[start:stop] = _attend_row(block, keys[:, seen], values[:, seen], params).transpose(0, 1)


def _held(
    pool: torch.Tensor, layer: int, page_ids: torch.Tensor, page_layout: PageLayout, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all tokens of these pages: each [kv heads, tokens, head_dim]."""
    if page_layout.quantised:
        return FORMS[page_layout].held(pool, layer, page_ids, dtype)
    held = pool[page_ids, layer]
    if page_layout is not PageLayout.CANONICAL:
        reorder_keys(held, page_layout, PageLayout.CANONICAL)
    keys, values = held.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return keys, values


def reorder_keys(pages: torch.Tensor, source: PageLayout, target: PageLayout) -> None:
    """In place, of pages of one layer [pages, 2, kv heads, page_size, head_dim]."""
    words = pages[:, 0].view(torch.int32)
    words[:] = torch.from_numpy(reordered_keys(words.numpy(), source, target))


def _first_visible(position: int, params: AttentionParams) -> int:
    """The first key that a query at this position sees."""
    return max(0, position - params.window + 1) if params.window else 0


@functools.lru_cache(maxsize=16)
def _visible(q_len: int, kv_len: int, window: int, device: torch.device) -> torch.Tensor:
    """bool [q_len, kv_len] for queries at the last positions. The same for all layers of a step, hence the cache."""
    position = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    key = torch.arange(kv_len, device=device)[None, :]
    visible = key <= position
    if window:
        visible &= key > position - window
    return visible


def _attend_row(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """query [query heads, q, head_dim] at the last q positions of keys and values [kv heads, kv_len, head_dim]."""
    q_len, kv_len = query.shape[1], keys.shape[1]
    if not params.softcap and params.sinks is None:
        square = q_len == kv_len and not params.window
        mask = None if square else _visible(q_len, kv_len, params.window, query.device)
        return F.scaled_dot_product_attention(
            query[None], keys[None], values[None], mask, is_causal=square, scale=params.scale, enable_gqa=True
        )[0]
    visible = _visible(q_len, kv_len, params.window, query.device)
    groups = query.shape[0] // keys.shape[0]
    scores = query.float() @ keys.float().repeat_interleave(groups, 0).transpose(1, 2) * params.scale
    if params.softcap:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.float()[:, None, None].expand(-1, q_len, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ values.float().repeat_interleave(groups, 0)).to(query.dtype)
