"""The generic path: a step through the modules of `transformers`, whose attention is replaced through
`AttentionInterface`.

A packed batch of ragged rows goes through as one sequence with explicit positions, so prefill, chunks and decode are
the same forward pass and nothing is padded. Any architecture whose attention can be replaced takes it; it says what
the fused path must compute.
Owns: what reaches a layer's attention. Never: allocates pages, or knows a family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from baton.common.engine.batch import I64, Batch, OnLayers
from baton.common.engine.paged_attention import AttentionParams, AttentionPlan, PagedAttention
from baton.common.engine.pool_layers import PoolLayers
from baton.common.engine.state_cache import SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_NAME = "baton_paged"


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's arrays where the model is. `plans` are of the pools, in their order."""

    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    asked: torch.Tensor  # int64: of the tokens
    plans: tuple[AttentionPlan, ...]

    @classmethod
    def of(cls, batch: Batch, asked: I64) -> StepTensors:
        """On the host, sharing memory with the batch."""
        tables = (batch.main,) if batch.swa is None else (batch.main, batch.swa)
        return cls(
            torch.from_numpy(batch.input_ids),
            torch.from_numpy(batch.positions),
            torch.from_numpy(asked),
            tuple(AttentionPlan.of(batch, table) for table in tables),
        )


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where an attention layer has its K and V in this step: the pool of its group, and its place within the group."""

    pool: torch.Tensor
    index: int
    plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class StepContext:
    """What reaches a layer's attention as the keyword `paged`."""

    places: Mapping[int, LayerPlace]
    backend: PagedAttention
    seen: list[tuple[int, AttentionParams]]  # what each layer asked for, as they came
    reports: Mapping[int, int]  # layer -> what to tell `on_layers` when its keys and values are in the pages
    on_layers: OnLayers


class ModuleForward:
    """See above. Takes the model's attention over; its other parts are as the caller left them."""

    def __init__(self, model: PreTrainedModel, attention: PagedAttention, pools: Sequence[PoolLayers]) -> None:
        self._model = model
        self._attention = attention
        self._pools = pools
        _register_attention()
        model.set_attn_implementation(ATTENTION_NAME)

    def run(
        self,
        batch: Batch,
        asked: I64,
        reports: Mapping[int, int],
        on_layers: OnLayers,
        cache: SlotCache | None = None,
        seen: list[tuple[int, AttentionParams]] | None = None,
    ) -> torch.Tensor | None:
        """Writes the step's keys and values; returns the logits [asked, vocabulary] after the tokens `asked`, None when
        there are none. With `cache` the rows are a batch of rows of one token each, or one row. `seen` gets what each
        layer asked for."""
        rows = batch.num_rows if cache is not None else 1
        return self.compute(StepTensors.of(batch, asked), reports, on_layers, cache, seen, rows)

    def compute(
        self,
        step: StepTensors,
        reports: Mapping[int, int],
        on_layers: OnLayers,
        cache: SlotCache | None = None,
        seen: list[tuple[int, AttentionParams]] | None = None,
        rows: int = 1,
    ) -> torch.Tensor | None:
        """The same of tensors that lie where the model does; as a batch of `rows` of equal lengths."""
        context = StepContext(self._places(step), self._attention, [] if seen is None else seen, reports, on_layers)
        # Where nothing is asked the head (a third of a small model) is not computed.
        run = self._model if len(step.asked) else self._model.base_model
        keywords: dict[str, object] = {} if cache is None else {"cache": cache}
        if len(step.asked) and rows == 1:
            keywords["logits_to_keep"] = step.asked
        with torch.inference_mode():
            output = run(
                input_ids=step.input_ids.view(rows, -1),
                position_ids=step.positions.view(rows, -1),
                use_cache=False,
                paged=context,
                **keywords,
            )
        if cache is not None:
            cache.store()
        if not len(step.asked):
            return None
        logits: torch.Tensor = output.logits
        return logits[0] if rows == 1 else logits[step.asked, 0]

    def _places(self, step: StepTensors) -> dict[int, LayerPlace]:
        assert len(step.plans) >= len(self._pools), "this model's sliding layers have a pool of their own"
        places: dict[int, LayerPlace] = {}
        for plan, of_pool in zip(step.plans, self._pools, strict=False):
            places |= {layer: LayerPlace(of_pool.pool, i, plan) for i, layer in enumerate(of_pool.layers)}
        return places


def _register_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _paged_attention)


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    *,
    paged: StepContext,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What `transformers` calls in each layer: tensors are [batch, heads, tokens, head_dim], keys already rotated.
    Batch and tokens together are the step's tokens."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    place = paged.places[layer]
    params = AttentionParams(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    heads = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    out = paged.backend.attend(heads[0], heads[1], heads[2], place.pool, place.index, place.plan, params)
    paged.seen.append((layer, params))
    if layer in paged.reports:
        paged.on_layers(paged.reports[layer])
    return out.view(query.shape[0], query.shape[2], *out.shape[1:]), None
