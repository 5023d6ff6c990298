"""Paged attention of our own Triton kernels: for every head size, window, soft cap and sink that a model asks for.

Owns nothing. Imported only where there is a GPU to work for, and by tests. Run in Triton's interpreter and compiled for
GPUs; not yet run on one.
"""

from __future__ import annotations

import torch

from baton.common.engine.gpu.decode_attention import decode_attention
from baton.common.engine.gpu.varlen_attention import varlen_attention
from baton.common.engine.gpu.write_kv import write_kv
from baton.common.engine.paged_attention import AttentionParams, AttentionPlan
from baton.common.kv.page_layout import PageLayout


class TritonPagedAttention:
    """See PagedAttention. Everything lies on one device, and is done in the order of its current stream."""

    name = "triton"
    page_layout = PageLayout.CANONICAL

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
        query, key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value))
        write_kv(key, value, pool, layer, plan.slots)
        single = len(query) == len(plan.kv_lens)  # every row has one query at least
        return (decode_attention if single else varlen_attention)(query, pool, layer, plan, params)
