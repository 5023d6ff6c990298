"""Paged attention by FlashInfer's kernels, over our pools as they are: a layer of a pool is its "HND" cache, whose
pages lie apart.

FlashInfer plans a step on the host, once for all layers that ask for the same, so the step's arrays are needed there
too (`DevicePlan`). Ours stay: the writing of K and V, and layers with a sliding window or sinks. To the left of a
window FlashInfer reads what it multiplies by zero, and there a page may be dead, and be another request's by now.
Owns: FlashInfer's workspace, and its plans of the current step. Never: a copy of K or V. Tested against a stand-in that
takes its arguments at their word; not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from baton.common.engine.gpu.plan import DevicePlan
from baton.common.engine.gpu.triton_attention import TritonPagedAttention
from baton.common.engine.gpu.write_kv import write_kv
from baton.common.engine.paged_attention import AttentionParams, AttentionPlan, PagedAttention
from baton.common.kv.page_layout import PageLayout

WORKSPACE_BYTES: Final = 128 << 20
"""What FlashInfer recommends."""
TENSOR_CORE_GROUP: Final = 4
"""From so many query heads per kv head on its decode is faster on tensor cores."""


@dataclass(slots=True)
class _Planned:
    """One of FlashInfer's wrappers, and the step that it is planned for."""

    wrapper: Any
    plan: AttentionPlan | None = None


class FlashInferAttention:
    """See PagedAttention. Pools are bfloat16; plans are `DevicePlan`s. `library` is the package."""

    name = "flashinfer"
    page_layout = PageLayout.CANONICAL

    def __init__(self, library: Any, device: torch.device, own: PagedAttention | None = None) -> None:
        self._library = library
        self._own = own or TritonPagedAttention()
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._planned: dict[tuple[bool, float, float], _Planned] = {}

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
        if params.window or params.sinks is not None:
            return self._own.attend(query, key, value, pool, layer, plan, params)
        assert isinstance(plan, DevicePlan), "FlashInfer plans on the host"
        key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (key, value))
        write_kv(key, value, pool, layer, plan.slots)
        wrapper = self._wrapper(query, pool, plan, params)
        out: torch.Tensor = wrapper.run(query.contiguous(), pool[:, layer])
        return out

    def _wrapper(self, query: torch.Tensor, pool: torch.Tensor, plan: DevicePlan, params: AttentionParams) -> Any:
        """Planned for this step."""
        decode = len(query) == len(plan.kv_lens)
        key, group = (decode, params.scale, params.softcap), query.shape[1] // pool.shape[3]
        if key not in self._planned:
            self._planned[key] = _Planned(self._new_wrapper(decode, group))
        planned = self._planned[key]
        if planned.plan is not plan:
            self._plan(planned.wrapper, decode, query, pool, plan, params)
            planned.plan = plan
        return planned.wrapper

    def _new_wrapper(self, decode: bool, group: int) -> Any:
        if not decode:
            return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="HND")
        make: Callable[..., Any] = self._library.BatchDecodeWithPagedKVCacheWrapper
        return make(self._workspace, kv_layout="HND", use_tensor_cores=group >= TENSOR_CORE_GROUP)

    def _plan(
        self,
        wrapper: Any,
        decode: bool,
        query: torch.Tensor,
        pool: torch.Tensor,
        plan: DevicePlan,
        params: AttentionParams,
    ) -> None:
        host, page_size = plan.host, pool.shape[4]
        heads = (query.shape[1], pool.shape[3], query.shape[2])
        asked = {
            "sm_scale": params.scale,
            "logits_soft_cap": params.softcap,
            "q_data_type": query.dtype,
            "kv_data_type": pool.dtype,
        }
        last_page_len = (host.kv_lens - 1) % page_size + 1
        pages = (host.page_offsets, plan.page_ids, last_page_len)
        if decode:
            wrapper.plan(*pages, *heads, page_size, **asked)
        else:
            wrapper.plan(host.q_offsets, *pages, *heads, page_size, causal=True, **asked)
