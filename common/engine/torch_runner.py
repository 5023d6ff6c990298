"""Runs `transformers` models over our paged KV pool: any dense causal language model, unchanged.

The model's attention is replaced through `AttentionInterface`; a packed batch of ragged rows goes through as one
sequence with explicit positions, so prefill, chunks and decode are the same forward pass and nothing is padded.
Owns: the model, its KV buffer and torch's thread count in this process. Never: allocates pages, keeps a request's
state between steps, or draws a random number of its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from baton.common.engine.backends import AttentionChoice, choose_backends
from baton.common.engine.batch import Batch, BatchRow, KvMemory, StepResult, Ticket, pack_batch
from baton.common.engine.gated_mlp import replace_gated_mlps
from baton.common.engine.linears import pack_linears
from baton.common.engine.paged_attention import AttentionParams, AttentionPlan, PagedAttention
from baton.common.engine.pointwise import replace_pointwise
from baton.common.engine.sampling import sample
from baton.common.errors import ConfigError
from baton.common.kv.torch_buffer import TorchKvBuffer
from baton.common.messages import SamplingParams, TokenLogprob
from baton.common.model.cache import Progress, silent
from baton.common.model.loading import Dtype, ModelInfo, load_model, model_info
from baton.common.model.spec import FIELD

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_NAME = "baton_paged"


@dataclass(frozen=True, slots=True)
class StepContext:
    """What reaches a layer's attention as the keyword `paged`."""

    pool: torch.Tensor
    plan: AttentionPlan
    backend: PagedAttention
    layers_seen: list[int]


@dataclass(frozen=True, slots=True)
class TorchTicket:
    """A computed step whose tokens have not been chosen yet."""

    batch: Batch
    sampled_rows: tuple[int, ...]
    logits: torch.Tensor | None  # [sampled rows, vocabulary]
    forward_s: float


class TorchRunner:
    """A `ModelRunner` on the CPU. Computes in `launch`, samples in `collect`; both on the caller's thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        info: ModelInfo,
        *,
        dtype: Dtype,
        num_pages: int,
        page_size: int,
        attention: AttentionChoice = "auto",
        threads: int | None = None,
        progress: Progress = silent,
    ) -> None:
        """`num_pages` counts the null page. Prefer `TorchRunner.load`."""
        if threads is not None:
            torch.set_num_threads(threads)
        backends = choose_backends(attention, info.head_dim, progress)
        self.attention = backends.attention
        self.vocab_size = info.vocab_size
        self.max_positions = info.max_positions
        self.info = info
        buffer = TorchKvBuffer(
            num_pages=num_pages,
            page_size=page_size,
            num_layers=info.num_layers,
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            dtype=dtype,
        )
        self.memory = KvMemory.full(buffer, page_size)
        self._pool = buffer.pool
        self.model = model
        _register_attention()
        model.set_attn_implementation(ATTENTION_NAME)
        pack_linears(model, backends.kernels)
        if backends.kernels is not None:
            replace_pointwise(model, backends.kernels)
            replace_gated_mlps(model)
        self._check_layers()

    @classmethod
    def load(
        cls,
        spec: str,
        *,
        dtype: Dtype,
        num_pages: int,
        page_size: int,
        attention: AttentionChoice = "auto",
        threads: int | None = None,
        progress: Progress = silent,
    ) -> TorchRunner:
        """Loads `spec` (see `model.spec`) and makes it ready to run. Raises ConfigError."""
        info = model_info(spec, progress)
        model = load_model(spec, dtype, progress)
        return cls(
            model,
            info,
            dtype=dtype,
            num_pages=num_pages,
            page_size=page_size,
            attention=attention,
            threads=threads,
            progress=progress,
        )

    def launch(self, batch: Batch) -> Ticket:
        assert batch.page_size == self.memory.layout.page_size, (batch.page_size, self.memory.layout)
        started = time.perf_counter()
        sampled = tuple(row for row, params in enumerate(batch.sampling) if params is not None)
        logits, _ = self._forward(batch, sampled)
        return TorchTicket(batch, sampled, logits, time.perf_counter() - started)

    def collect(self, ticket: Ticket) -> StepResult:
        assert isinstance(ticket, TorchTicket)
        started = time.perf_counter()
        batch = ticket.batch
        tokens = [-1] * batch.num_rows
        logprobs: list[TokenLogprob | None] = [None] * batch.num_rows
        if ticket.logits is not None:
            params = [_wanted(batch.sampling[row]) for row in ticket.sampled_rows]
            indices = [batch.output_indices[row] for row in ticket.sampled_rows]
            with torch.inference_mode():
                chosen, scores = sample(ticket.logits, params, indices)
            for row, token, score in zip(ticket.sampled_rows, chosen, scores, strict=True):
                tokens[row], logprobs[row] = token, score
        elapsed_s = ticket.forward_s + time.perf_counter() - started
        return StepResult(batch.keys, tuple(tokens), tuple(logprobs), elapsed_s)

    def logits(self, batch: Batch, rows: tuple[int, ...]) -> torch.Tensor:
        """The step's logits after the last token of `rows` [rows, vocabulary]; for tests and diagnosis."""
        logits, _ = self._forward(batch, rows)
        assert logits is not None
        return logits

    def _forward(self, batch: Batch, rows: tuple[int, ...]) -> tuple[torch.Tensor | None, list[int]]:
        context = StepContext(self._pool, AttentionPlan.of(batch), self.attention, [])
        # Without a row that samples the head (a third of a small model) is not computed.
        run = self.model if rows else self.model.base_model
        keep = (
            {"logits_to_keep": torch.from_numpy(batch.q_offsets[1:][list(rows)].astype(np.int64) - 1)} if rows else {}
        )
        with torch.inference_mode():
            output = run(
                input_ids=torch.from_numpy(batch.input_ids)[None],
                position_ids=torch.from_numpy(batch.positions)[None],
                use_cache=False,
                paged=context,
                **keep,
            )
        return (output.logits[0] if rows else None), context.layers_seen

    def _check_layers(self) -> None:
        """One token through the null page: every layer must come to our attention, once, in order, with the shapes that
        the pool was made for. Also pays what the first step would pay."""
        row = BatchRow(0, np.zeros(1, np.int32), 1, np.zeros(1, np.int32), SamplingParams())
        logits, seen = self._forward(pack_batch([row], self.memory.layout.page_size), (0,))
        if seen != list(range(self.info.num_layers)) or logits is None or logits.shape != (1, self.vocab_size):
            reason = f"architecture {self.info.architecture} does not attend once per layer ({seen})"
            raise ConfigError(FIELD, self.info.name, reason, "dense attention layers are supported")


def _wanted(params: SamplingParams | None) -> SamplingParams:
    assert params is not None
    return params


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
    """What `transformers` calls in each layer: tensors are [1, heads, T, head_dim], keys already rotated."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    params = AttentionParams(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    heads = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    out = paged.backend.attend(heads[0], heads[1], heads[2], paged.pool, layer, paged.plan, params)
    paged.layers_seen.append(layer)
    return out[None], None
