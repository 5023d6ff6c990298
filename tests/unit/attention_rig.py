"""Plans of steps for attention alone: rows of (queries, KV length) over pages in any order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from baton.common.engine.paged_attention import AttentionPlan


def make_plan(rows: tuple[tuple[int, int], ...], page_size: int, pages: Iterator[int]) -> AttentionPlan:
    held = [np.array([next(pages) for _ in range(-(-kv // page_size))], np.int64) for _, kv in rows]
    positions = [np.arange(kv - q, kv) for q, kv in rows]
    slots = [p[at // page_size] * page_size + at % page_size for p, at in zip(held, positions, strict=True)]
    return AttentionPlan(
        slots=torch.from_numpy(np.concatenate(slots)),
        q_offsets=torch.tensor(np.cumsum([0, *(q for q, _ in rows)]), dtype=torch.int32),
        kv_lens=torch.tensor([kv for _, kv in rows], dtype=torch.int32),
        page_offsets=torch.tensor(np.cumsum([0, *(len(p) for p in held)]), dtype=torch.int32),
        page_ids=torch.from_numpy(np.concatenate(held).astype(np.int32)),
    )


def shuffled_pages(count: int) -> Iterator[int]:
    return iter((np.random.default_rng(1).permutation(count - 1) + 1).tolist())
