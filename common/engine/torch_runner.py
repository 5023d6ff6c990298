"""Runs `transformers` models over our paged KV pools: causal language models.

A step goes through the model's own modules (`module_forward`) or, for the Llama family, through one call that computes
the same over the same weights (`fused`).
Recurrent layers know rows only as a batch of equal lengths: such a model computes the rows of one token in one pass and
each longer row in a pass of its own, from and to the rows' slots.
Owns: the model, its KV memory and torch's thread count in this process. Never: allocates pages or slots, keeps a
request's state between steps anywhere else, or draws a random number of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import structs

from baton.common.engine.backends import AttentionChoice, choose_backends
from baton.common.engine.batch import (
    I64,
    Batch,
    KvBuffer,
    KvMemory,
    OnLayers,
    StepResult,
    Ticket,
    tell_nobody,
)
from baton.common.engine.fused.choice import PathChoice, Subject, choose_path
from baton.common.engine.gated_mlp import replace_gated_mlps
from baton.common.engine.guiding import Guides, model_vocabulary, no_vocabulary
from baton.common.engine.layer_check import check_layers, null_step
from baton.common.engine.linears import WeightPlace, in_own_memory, pack_linears
from baton.common.engine.module_forward import ModuleForward
from baton.common.engine.packing import take_rows
from baton.common.engine.paged_attention import AttentionParams
from baton.common.engine.panels import WeightFormat
from baton.common.engine.pointwise import replace_pointwise
from baton.common.engine.pool_layers import PoolLayers
from baton.common.engine.rotary import fix_angles
from baton.common.engine.shared_weights import SharedWeights
from baton.common.engine.state_cache import SlotCache
from baton.common.engine.step_places import asked_tokens, choose_tokens, last_tokens, sampled_rows, scores_of
from baton.common.errors import ConfigError
from baton.common.kv.cache_dtype import CacheDtype
from baton.common.kv.layout import Component
from baton.common.kv.page_layout import LayoutChoice
from baton.common.kv.torch_buffer import TorchKvBuffer, TorchStateBuffer
from baton.common.messages import TokenLogprob
from baton.common.model.cache import Progress, silent
from baton.common.model.loading import Dtype, ModelInfo, load_model, load_tokenizer, model_info, weights_key
from baton.common.prompt_logprobs import PromptLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_KERNELS = "only the compiled kernels compute with them, and there are none here (the log says why)"
NumPages = int | Mapping[Component, int]
"""Pages and slots of each component, the null page counted. A number alone is for models that have one component."""


@dataclass(frozen=True, slots=True)
class TorchTicket:
    """A computed step whose tokens have not been chosen yet."""

    batch: Batch
    sampled_rows: tuple[int, ...]
    logits: torch.Tensor | None  # [sampled rows, vocabulary]
    scores: Mapping[int, PromptLogprobs]
    forward_s: float


class TorchRunner:
    """A `ModelRunner` on the CPU. Computes in `launch`, samples in `collect`; both on the caller's thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        info: ModelInfo,
        *,
        dtype: Dtype,
        num_pages: NumPages,
        page_size: int,
        sliding_groups: bool = True,
        page_layout: LayoutChoice = "auto",
        cache_dtype: CacheDtype = "auto",
        attention: AttentionChoice = "auto",
        forward_path: PathChoice = "fastest",
        weights: WeightFormat = "dtype",
        threads: int | None = None,
        shared: bool = False,
        guides: Guides | None = None,
        place: WeightPlace = in_own_memory,
        progress: Progress = silent,
    ) -> None:
        """Without `sliding_groups` sliding layers keep every token, in one pool with the full ones. Without `guides` no
        row has a grammar. Prefer `TorchRunner.load`. Raises ConfigError."""
        if threads is not None:
            torch.set_num_threads(threads)
        backends = choose_backends(attention, info.head_dim, progress, page_layout, page_size, cache_dtype)
        if weights == "int8" and backends.kernels is None:
            raise ConfigError("model.weights", weights, NO_KERNELS, 'use "dtype"')
        self.attention = backends.attention
        self.cache_dtype: CacheDtype = cache_dtype
        self.vocab_size = info.vocab_size
        self.max_positions = info.max_positions
        self.info = info
        self.guides = guides or Guides(no_vocabulary)
        self._groups = info.layer_groups(sliding_groups)
        buffers = self._make_buffers(dtype, num_pages, page_size, shared)
        self.memory = KvMemory(info.layout(page_size, sliding_groups), buffers)
        self.model = model
        fix_angles(model, info.max_positions)
        pack_linears(model, backends.kernels, place, weights)
        if backends.kernels is not None:
            replace_pointwise(model, backends.kernels)
            replace_gated_mlps(model)
        pools = [PoolLayers(pool, self._groups.of(component)) for component, pool in self._pools.items()]
        self._modules = ModuleForward(model, backends.attention, pools)
        subject = Subject(model, backends, pools, self._check_layers())
        self._fused = choose_path(forward_path, subject)
        self.forward_path = "generic" if self._fused is None else "fused"

    @classmethod
    def load(
        cls,
        spec: str,
        *,
        dtype: Dtype,
        num_pages: NumPages,
        page_size: int,
        sliding_groups: bool = True,
        page_layout: LayoutChoice = "auto",
        cache_dtype: CacheDtype = "auto",
        attention: AttentionChoice = "auto",
        forward_path: PathChoice = "fastest",
        weights: WeightFormat = "dtype",
        threads: int | None = None,
        shared: bool = False,
        progress: Progress = silent,
    ) -> TorchRunner:
        """Loads `spec` (see `model.spec`) and makes it ready to run; `shared`: other processes may map its pools.
        Raises ConfigError."""
        info = model_info(spec, progress)
        key = weights_key(spec, dtype)
        model = load_model(spec, dtype, progress)
        unchanged = (
            weights_key(spec, dtype) == key
        )  # else what was loaded would be kept by the name of what replaced it
        return cls(
            model,
            info,
            dtype=dtype,
            num_pages=num_pages,
            page_size=page_size,
            sliding_groups=sliding_groups,
            page_layout=page_layout,
            cache_dtype=cache_dtype,
            attention=attention,
            forward_path=forward_path,
            weights=weights,
            threads=threads,
            shared=shared,
            place=SharedWeights(key, progress) if unchanged else in_own_memory,
            guides=Guides(lambda: model_vocabulary(load_tokenizer(spec), info.vocab_size, info.eos_token_ids)),
            progress=progress,
        )

    def _make_buffers(
        self, dtype: Dtype, num_pages: NumPages, page_size: int, shared: bool
    ) -> dict[Component, KvBuffer]:
        info, groups = self.info, self._groups
        components = groups.layout(page_size).components
        if not isinstance(num_pages, Mapping):
            num_pages = dict.fromkeys(components, num_pages) if len(components) == 1 else {}
        if set(num_pages) != set(components):
            needed = ", ".join(components)
            raise ConfigError(
                "kv.num_pages", sorted(num_pages), f"{info.name} has pools for {needed}, each of its own size"
            )
        self._pools: dict[Component, torch.Tensor] = {}  # of attention layers, the main component's first
        self._states: TorchStateBuffer | None = None
        buffers: dict[Component, KvBuffer] = {}
        for component in components:
            count, layers = num_pages[component], len(groups.of(component))
            if component is Component.STATE:
                assert groups.state is not None
                self._states = TorchStateBuffer(
                    num_slots=count, num_layers=layers, shape=groups.state, dtype=dtype, shared=shared
                )
                buffers[component] = self._states
                continue
            buffer = TorchKvBuffer(
                num_pages=count,
                page_size=page_size,
                num_layers=layers,
                num_kv_heads=info.num_kv_heads,
                head_dim=info.head_dim,
                dtype=dtype,
                page_layout=self.attention.page_layout,
                shared=shared,
            )
            self._pools[component] = buffer.pool
            buffers[component] = buffer
        return buffers

    def launch(self, batch: Batch, on_layers: OnLayers = tell_nobody) -> Ticket:
        assert batch.page_size == self.memory.layout.page_size, (batch.page_size, self.memory.layout)
        started = time.perf_counter()
        sampled = sampled_rows(batch)
        logits = self._compute(batch, asked_tokens(batch, sampled), on_layers)
        scores: dict[int, PromptLogprobs] = {}
        if logits is not None:
            with torch.inference_mode():
                scores = scores_of(batch, logits[len(sampled) :])
            logits = logits[: len(sampled)] if sampled else None
        return TorchTicket(batch, sampled, logits, scores, time.perf_counter() - started)

    def collect(self, ticket: Ticket) -> StepResult:
        assert isinstance(ticket, TorchTicket)
        started = time.perf_counter()
        batch = ticket.batch
        tokens = [-1] * batch.num_rows
        logprobs: list[TokenLogprob | None] = [None] * batch.num_rows
        if ticket.logits is not None:
            for row, token, score in choose_tokens(self.guides, batch, ticket.sampled_rows, ticket.logits):
                tokens[row], logprobs[row] = token, score
        elapsed_s = ticket.forward_s + time.perf_counter() - started
        return StepResult(batch.keys, tuple(tokens), tuple(logprobs), elapsed_s, ticket.scores)

    def logits(self, batch: Batch, rows: tuple[int, ...]) -> torch.Tensor:
        """Computes the step; its logits after the last token of `rows` [rows, vocabulary], for tests and diagnosis."""
        logits = self._compute(batch, last_tokens(batch, rows), tell_nobody)
        assert logits is not None
        return logits

    def _compute(self, batch: Batch, asked: I64, on_layers: OnLayers) -> torch.Tensor | None:
        """All of a step. Logits after the tokens `asked` (places among the step's) in their order, None when there are
        none."""
        if self._states is None:
            return self._forward(batch, asked, None, on_layers)
        assert batch.state_slots is not None
        assert len(set(batch.state_slots.tolist())) == batch.num_rows, "two rows would write one state"
        for source, target in () if batch.state_copies is None else batch.state_copies.tolist():
            self._states.copy(source, target)
        single = np.diff(batch.q_offsets) == 1
        passes = [np.flatnonzero(single)] if single.any() else []
        passes += [np.array([row]) for row in np.flatnonzero(~single)]
        found: dict[int, torch.Tensor] = {}
        for members in passes:
            tokens = np.concatenate([np.arange(*batch.q_offsets[row : row + 2]) for row in members])
            places = np.flatnonzero(np.isin(tokens, asked))
            part = batch if len(passes) == 1 else take_rows(batch, members)
            if members is passes[-1]:  # only then a layer of all rows is there
                part = structs.replace(part, report_after=batch.report_after)
            logits = self._forward(part, places, self._slot_cache(part), on_layers)
            if logits is not None:
                found |= dict(zip(tokens[places].tolist(), logits, strict=True))
        return torch.stack([found[token] for token in asked.tolist()]) if len(asked) else None

    def _slot_cache(self, batch: Batch) -> SlotCache | None:
        if self._states is None:
            return None
        assert batch.state_slots is not None
        places = {layer: place for place, layer in enumerate(self._groups.recurrent)}
        return SlotCache(self._states, places, batch.state_slots.tolist())

    def part_s(self) -> dict[str, float]:
        """Seconds that the parts of all steps so far have taken, as far as the path tells: the fused one does."""
        return {} if self._fused is None else self._fused.part_s()

    def _forward(
        self, batch: Batch, asked: I64, cache: SlotCache | None, on_layers: OnLayers = tell_nobody
    ) -> torch.Tensor | None:
        """One pass; its logits after the tokens `asked`. With `cache` the rows are a batch of rows of one token each,
        or one row."""
        if self._fused is not None:
            return self._fused.run(batch, asked, self._reports(batch), on_layers)
        return self._modules.run(batch, asked, self._reports(batch), on_layers, cache)

    def _reports(self, batch: Batch) -> dict[int, int]:
        if not batch.report_after:
            return {}
        layers = self._groups.of(next(iter(self._pools)))
        return {layers[count - 1]: count for count in batch.report_after}

    def _check_layers(self) -> list[AttentionParams]:
        """Of the generic path. What each layer asked of our attention. Also pays what the first step would pay."""
        batch, seen = null_step(self.memory.layout), list[tuple[int, AttentionParams]]()
        cache = self._slot_cache(batch)
        logits = self._modules.run(batch, np.zeros(1, np.int64), {}, tell_nobody, cache, seen)
        return check_layers(self.info, seen, () if cache is None else cache.layers_seen, logits)
