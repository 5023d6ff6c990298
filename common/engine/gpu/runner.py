"""Runs `transformers` models over paged KV pools that lie on a device, with the weights: a `ModelRunner`.

A step's arrays go there from pinned memory, its tokens are chosen there, and only their numbers come back; steps of
decode are CUDA graphs where they can be. Everything is asked for on one stream, in order. What `collect` returns has
been seen to be done: whoever hears of a step may ship or reuse its pages (ADR 0014), and `on_layers` is told there too,
each count when its event has come.
Owns: the model on the device, its pools and its stream. Never: allocates pages, or keeps a request's state between
steps anywhere else. Tested with the host in the device's place; not yet run on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from baton.common.engine.backends import DeviceBackends
from baton.common.engine.batch import I64, NO_TOKEN, Batch, KvMemory, OnLayers, StepResult, Ticket, tell_nobody
from baton.common.engine.gpu.device import EngineDevice, Event
from baton.common.engine.gpu.graphs import DecodeGraphs
from baton.common.engine.gpu.sampling import host_arguments, needs_host, sample_on_device
from baton.common.engine.gpu.staging import StepSizes, StepStaging
from baton.common.engine.guiding import Guides, no_vocabulary
from baton.common.engine.layer_check import check_layers, null_step
from baton.common.engine.module_forward import ModuleForward
from baton.common.engine.paged_attention import AttentionParams
from baton.common.engine.pool_layers import PoolLayers
from baton.common.engine.rotary import fix_angles
from baton.common.engine.step_places import asked_tokens, choose_tokens, params_of, sampled_rows, scores_of
from baton.common.errors import ConfigError
from baton.common.kv.layout import Component
from baton.common.kv.torch_buffer import TorchKvBuffer
from baton.common.messages import TokenLogprob
from baton.common.model.loading import Dtype, ModelInfo
from baton.common.prompt_logprobs import PromptLogprobs
from baton.common.units import pages_for_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIRST_TOKENS: Final = 1024
"""Room for a step's arrays to begin with; a longer step takes more, once."""


@dataclass(frozen=True, slots=True)
class DeviceTicket:
    """A step that the device computes. `tokens` arrive with `done`; those of `host_rows` (places among the sampled)
    are chosen here, from `logits`."""

    batch: Batch
    sampled_rows: tuple[int, ...]
    tokens: torch.Tensor  # int64 [sampled rows], in pinned memory
    logits: torch.Tensor | None  # [sampled rows, vocabulary], on the device, of this step alone
    scores: Mapping[int, PromptLogprobs]
    done: Event
    layers: tuple[tuple[int, Event], ...]
    on_layers: OnLayers
    began_s: float


class DeviceRunner:
    """See the module. One step at a time: it is collected before the next is launched."""

    def __init__(
        self,
        model: PreTrainedModel,
        info: ModelInfo,
        device: EngineDevice,
        backends: DeviceBackends,
        *,
        dtype: Dtype,
        num_pages: Mapping[Component, int],
        page_size: int,
        max_graph_rows: int = 64,
        guides: Guides | None = None,
    ) -> None:
        """`max_graph_rows` 0: no graphs. Raises ConfigError, also for models with recurrent layers."""
        if info.groups.state is not None:
            reason = f"architecture {info.architecture} has recurrent layers, whose states are kept on CPUs only"
            raise ConfigError("model.device", str(device.place), reason, "model.device=cpu")
        groups, layout = info.layer_groups(), info.layout(page_size)
        self.vocab_size, self.max_positions, self.info = info.vocab_size, info.max_positions, info
        self.guides = guides or Guides(no_vocabulary)
        self.device = device
        with device.stream():  # or its first steps would overtake what is filled on another one
            buffers = {
                component: TorchKvBuffer(
                    num_pages=num_pages[component],
                    page_size=page_size,
                    num_layers=len(groups.of(component)),
                    num_kv_heads=info.num_kv_heads,
                    head_dim=info.head_dim,
                    dtype=dtype,
                    device=device.place,
                )
                for component in layout.paged
            }
            self.memory = KvMemory(layout, buffers)
            fix_angles(model, info.max_positions)
            self.model = model.to(device.place)
            pools = [PoolLayers(buffer.pool, groups.of(component)) for component, buffer in buffers.items()]
            self._layers = groups.of(layout.paged[0])
            self._modules = ModuleForward(self.model, backends.attention, pools)
            self._staging = StepStaging(device, StepSizes(FIRST_TOKENS, FIRST_TOKENS, FIRST_TOKENS, len(pools)))
            self._tokens = device.pinned(FIRST_TOKENS, torch.int64)
            self.graphs: DecodeGraphs | None = None
            if max_graph_rows and backends.in_graphs is not None:
                pages = max_graph_rows * (pages_for_tokens(info.max_positions, page_size) + 1)
                modules = ModuleForward(self.model, backends.in_graphs, pools)
                self.graphs = DecodeGraphs(
                    device, modules, StepSizes(max_graph_rows, max_graph_rows, pages, len(pools))
                )
        self._check_layers()
        with_graphs = "" if self.graphs is None else f", graphs of up to {max_graph_rows} rows"
        self.forward_path = f"generic, on {device.place}, {backends.attention.name}{with_graphs}"

    def _check_layers(self) -> None:
        seen = list[tuple[int, AttentionParams]]()
        with self.device.stream():
            step = self._staging.place(null_step(self.memory.layout), np.zeros(1, np.int64))
            logits = self._modules.compute(step, {}, tell_nobody, seen=seen)
        check_layers(self.info, seen, (), logits)

    def launch(self, batch: Batch, on_layers: OnLayers = tell_nobody) -> Ticket:
        assert batch.page_size == self.memory.layout.page_size, (batch.page_size, self.memory.layout)
        began_s, sampled = time.perf_counter(), sampled_rows(batch)
        told: list[tuple[int, Event]] = []
        with self.device.stream(), torch.inference_mode():
            logits, scores = self._logits(batch, sampled, lambda count: told.append((count, self.device.event())))
            tokens = self._choose(batch, sampled, logits)
        return DeviceTicket(
            batch, sampled, tokens, logits, scores, self.device.event(), tuple(told), on_layers, began_s
        )

    def collect(self, ticket: Ticket) -> StepResult:
        assert isinstance(ticket, DeviceTicket)
        batch = ticket.batch
        for count, reached in ticket.layers:
            reached.wait()
            ticket.on_layers(count)
        ticket.done.wait()
        tokens = [NO_TOKEN] * batch.num_rows
        logprobs: list[TokenLogprob | None] = [None] * batch.num_rows
        for row, token in zip(ticket.sampled_rows, ticket.tokens.tolist(), strict=True):
            tokens[row] = token
        for row, token, logprob in self._choose_on_host(ticket):
            tokens[row], logprobs[row] = token, logprob
        elapsed_s = time.perf_counter() - ticket.began_s
        return StepResult(batch.keys, tuple(tokens), tuple(logprobs), elapsed_s, ticket.scores)

    def _logits(
        self, batch: Batch, sampled: tuple[int, ...], on_layers: OnLayers
    ) -> tuple[torch.Tensor | None, dict[int, PromptLogprobs]]:
        """Of the sampled rows, and what was to be scored."""
        found = None if self.graphs is None else self.graphs.run(batch)
        if found is not None:
            return found if len(sampled) == batch.num_rows else found[list(sampled)], {}
        logits = self._compute(batch, asked_tokens(batch, sampled), on_layers)
        if logits is None:
            return None, {}
        return logits[: len(sampled)], scores_of(batch, logits[len(sampled) :])

    def _compute(self, batch: Batch, asked: I64, on_layers: OnLayers) -> torch.Tensor | None:
        reports = {self._layers[count - 1]: count for count in batch.report_after}
        tables = [table for table in (batch.main, batch.swa) if table is not None]
        needed = StepSizes(batch.num_tokens, batch.num_rows, max(len(table.page_ids) for table in tables), len(tables))
        if not needed.fits(self._staging.sizes):
            self._staging = StepStaging(self.device, needed.joined(self._staging.sizes))
        return self._modules.compute(self._staging.place(batch, asked), reports, on_layers)

    def _choose(self, batch: Batch, sampled: tuple[int, ...], logits: torch.Tensor | None) -> torch.Tensor:
        """On the device, and on their way here. Also for rows whose token the host chooses: that changes nothing."""
        if len(sampled) > len(self._tokens):
            self._tokens = self.device.pinned(len(sampled), torch.int64)
        tokens = self._tokens[: len(sampled)]
        if logits is None or not sampled:
            return tokens
        rows = host_arguments(params_of(batch, sampled), [batch.output_indices[row] for row in sampled])
        arguments = None
        if rows:
            pinned = self.device.pinned(5 * len(rows), torch.float64).view(-1, 5)
            pinned.numpy()[:] = rows
            arguments = pinned.to(self.device.place, non_blocking=True)
        return tokens.copy_(sample_on_device(logits, arguments), non_blocking=True)

    def _choose_on_host(self, ticket: DeviceTicket) -> list[tuple[int, int, TokenLogprob | None]]:
        """(row, token, log probability) of the rows that penalties, biases, grammars or log probabilities are for."""
        batch = ticket.batch
        params = zip(ticket.sampled_rows, params_of(batch, ticket.sampled_rows), strict=True)
        places = [place for place, (_, wanted) in enumerate(params) if needs_host(wanted)]
        if ticket.logits is None or not places:
            return []
        with self.device.stream():
            logits = ticket.logits[places].float().cpu()
        return list(choose_tokens(self.guides, batch, [ticket.sampled_rows[place] for place in places], logits))
