"""Computes steps of a `Decoder` over its pools: one call into csrc/forward.cpp for each.

Owns: the arguments of that call, the angles of the rotary embedding (as many positions as have come) and the memory
that a step works in. Used by one thread at a time. Never: allocates pages, or chooses tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from baton.common.engine.batch import I64, Batch, OnLayers, PageTable
from baton.common.engine.fused.arguments import (
    NORMS,
    WEIGHTS,
    LayerArgs,
    ModelArgs,
    PartTimes,
    Report,
    RowNorm,
    StepArgs,
    TableArgs,
    Weight,
)
from baton.common.engine.fused.decoder import Decoder, DecoderLayer, NotUnderstoodError
from baton.common.engine.kernels import LAYOUTS, Kernels
from baton.common.engine.linears import CompiledLinear
from baton.common.engine.pointwise import CompiledRmsNorm
from baton.common.engine.pool_layers import PoolLayers
from baton.common.kv.page_layout import PageLayout
from baton.common.memory import system_memory

LARGEST_KEPT_BYTES = 1 << 28
"""A step that needs more takes fresh memory: a worker must not hold for ever what its longest prompt once needed."""
_FIRST_POSITIONS = 1024


class FusedForward:
    """Of one decoder over its pools."""

    def __init__(
        self, decoder: Decoder, kernels: Kernels, pools: Sequence[PoolLayers], page_layout: PageLayout
    ) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._pools = pools  # kept alive: the arguments hold addresses
        self._layers = (LayerArgs * len(decoder.layers))()
        for number, layer in enumerate(decoder.layers):
            self._layers[number] = _layer_args(layer)
        for table, of_pool in enumerate(pools):
            for place, number in enumerate(of_pool.layers):
                args = self._layers[number]
                args.pool, args.table = of_pool.pool.data_ptr(), table
                args.pool_layers, args.pool_layer = len(of_pool.layers), place
        self._model = self._model_args(decoder, page_layout)
        self._angles: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}
        self._positions = 0
        self._hold_angles(_FIRST_POSITIONS)
        self._memory = torch.empty(0)
        self._part_ns = PartTimes()

    def part_s(self) -> dict[str, float]:
        """Seconds that each part of all steps so far has taken together."""
        return {field[0]: getattr(self._part_ns, field[0]) / 1e9 for field in PartTimes._fields_}

    def _model_args(self, decoder: Decoder, page_layout: PageLayout) -> ModelArgs:
        pool, first = self._pools[0].pool, decoder.layers[0]
        kv_heads, page_size, head_dim = pool.shape[3], pool.shape[4], decoder.head_dim
        return ModelArgs(
            is_bf16=decoder.dtype == torch.bfloat16,
            num_layers=len(decoder.layers),
            hidden=decoder.embedding.shape[1],
            inner=first.gate.out_features,
            q_heads=first.query.out_features // head_dim,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=decoder.head.out_features,
            page_size=page_size,
            page_layout=LAYOUTS.index(page_layout),
            gelu=decoder.gelu,
            layers=self._layers,
            embedding=decoder.embedding.data_ptr(),
            embedding_scale=decoder.embedding_scale,
            last_norm=_norm_args(decoder.last_norm),
            head=_weight_args(decoder.head),
            logits_softcap=decoder.logits_softcap,
        )

    def run(self, batch: Batch, asked: I64, reports: Mapping[int, int], on_layers: OnLayers) -> torch.Tensor | None:
        """Writes the step's keys and values; returns float32 logits [asked, vocabulary] after the tokens `asked`, None
        when there are none. `reports`: what to tell `on_layers` when a layer's keys and values are in the pages."""
        longest = int(batch.kv_lens.max())
        if longest > self._positions:
            self._hold_angles(longest)
        logits = torch.empty(len(asked), self._model.vocabulary) if len(asked) else None
        told = np.zeros(self._model.num_layers, np.int64)
        for layer, count in reports.items():
            told[layer] = count
        raised: list[BaseException] = []

        def report(count: int) -> None:
            try:
                on_layers(count)
            except BaseException as error:  # noqa: BLE001 - carried past the C++ that called, raised below
                raised.append(error)

        args = StepArgs(
            model=ctypes.pointer(self._model),
            num_tokens=batch.num_tokens,
            num_rows=batch.num_rows,
            num_asked=len(asked),
            input_ids=batch.input_ids.ctypes.data,
            positions=batch.positions.ctypes.data,
            q_offsets=batch.q_offsets.ctypes.data,
            kv_lens=batch.kv_lens.ctypes.data,
            asked=asked.ctypes.data,
            reports=told.ctypes.data if reports else None,
            report=Report(report) if reports else Report(),
            logits=None if logits is None else logits.data_ptr(),
            part_ns=ctypes.pointer(self._part_ns),
        )
        for place, table in enumerate((batch.main, batch.swa)[: len(self._pools)]):
            assert table is not None, "this model's sliding layers have a pool of their own"
            args.tables[place] = _table_args(table)
        memory = self._memory_of(self._kernels.forward_workspace_bytes(ctypes.byref(args)))
        args.workspace = memory.data_ptr()
        self._kernels.forward(ctypes.byref(args))
        if raised:
            raise raised[0]
        return logits

    def _memory_of(self, nbytes: int) -> torch.Tensor:
        if nbytes <= len(self._memory):
            return self._memory
        memory = system_memory(nbytes)
        if nbytes <= LARGEST_KEPT_BYTES:
            self._memory = memory
        return memory

    def _hold_angles(self, positions: int) -> None:
        """Of at least so many positions; asked of the model's own rotary embedding. Where that fails (there may be no
        memory), the layers keep what they have."""
        count = max(positions, 2 * self._positions)
        places, nothing = torch.arange(count)[None], torch.empty(0, dtype=torch.float32)
        angles: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}
        for kind in {layer.rope for layer in self._decoder.layers}:
            with torch.inference_mode():
                tables = self._decoder.rotary(nothing, places, *(() if kind is None else (kind,)))
            angles[kind] = _half(tables[0]), _half(tables[1])
        for number, layer in enumerate(self._decoder.layers):
            cosines, sines = angles[layer.rope]
            self._layers[number].cosines, self._layers[number].sines = cosines.data_ptr(), sines.data_ptr()
        self._angles, self._positions = angles, count


def _half(table: torch.Tensor) -> torch.Tensor:
    """Of [1, positions, head_dim], whose halves are equal."""
    half = table.shape[-1] // 2
    if not torch.equal(table[0, :, :half], table[0, :, half:]):
        raise NotUnderstoodError("a rotary embedding that turns other pairs than those of the two halves")
    return table[0, :, :half].contiguous()


def _layer_args(layer: DecoderLayer) -> LayerArgs:
    """Without its pages and its angles."""
    params = layer.attention
    return LayerArgs(
        **{name: _weight_args(getattr(layer, name)) for name in WEIGHTS},
        **{name: _norm_args(getattr(layer, name)) for name in NORMS},
        window=params.window,
        scale=params.scale,
        softcap=params.softcap,
    )


def _weight_args(linear: CompiledLinear) -> Weight:
    packed, bias = linear.packed, linear.float_bias
    return Weight(
        packed.panels.data_ptr(),
        packed.scales_address,
        None if bias is None else bias.data_ptr(),
        linear.out_features,
    )


def _norm_args(norm: CompiledRmsNorm | None) -> RowNorm:
    return RowNorm() if norm is None else RowNorm(norm.float_weight.data_ptr(), norm.eps)


def _table_args(table: PageTable) -> TableArgs:
    return TableArgs(table.slots.ctypes.data, table.page_offsets.ctypes.data, table.page_ids.ctypes.data)
