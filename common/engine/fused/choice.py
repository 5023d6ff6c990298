"""Which path computes a model's steps: fused where the model is understood and both paths say the same.

The fused path is tried out at load: a few tokens of random text through both paths, over pages of their own. So a
family whose parts have familiar names and another meaning is found out before its first request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import torch

from baton.common.engine.backends import Backends
from baton.common.engine.batch import Batch, BatchRow, pack_batch, tell_nobody
from baton.common.engine.fused.decoder import Decoder, NotUnderstoodError, read_decoder
from baton.common.engine.fused.forward import FusedForward
from baton.common.engine.kernels import CompiledPagedAttention
from baton.common.engine.module_forward import ModuleForward
from baton.common.engine.paged_attention import AttentionParams
from baton.common.engine.pool_layers import PoolLayers
from baton.common.errors import ConfigError
from baton.common.kv.page_layout import PageLayout
from baton.common.kv.quantised_pages import head_dim_of
from baton.common.log import EventLog
from baton.common.units import pages_for_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = EventLog("baton.engine")

PathChoice = Literal["fastest", "fused", "generic"]
FIELD: Final = "model.forward_path"
_TRIED_LENGTHS: Final = (19, 1, 6)  # tokens of the rows of a trial
_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Of the logits' length as a vector. Two orders of rounding differ by a fraction of it; two formulas by far more."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is ready to compute on the generic path. `attention` is what each of its layers asked for."""

    model: PreTrainedModel
    backends: Backends
    pools: Sequence[PoolLayers]
    attention: Sequence[AttentionParams]


def choose_path(choice: PathChoice, subject: Subject) -> FusedForward | None:
    """None: the generic path, and why is logged. Raises ConfigError when "fused" was asked for and cannot be had."""
    if choice == "generic":
        return None
    try:
        fused = _fused(subject)
    except NotUnderstoodError as error:
        if choice == "fused":
            raise ConfigError(FIELD, choice, str(error), 'use "fastest" or "generic"') from error
        _log.info("generic_path", reason=str(error))
        return None
    _log.info("fused_path", model=str(subject.model.config.model_type))
    return fused


def _fused(subject: Subject) -> FusedForward:
    kernels, pools, layout = subject.backends.kernels, subject.pools, subject.backends.attention.page_layout
    if kernels is None:
        raise NotUnderstoodError("there are no compiled kernels")
    if not pools or len(subject.attention) != sum(len(one.layers) for one in pools):
        raise NotUnderstoodError("there are layers that do not attend")
    decoder = read_decoder(subject.model, subject.attention, head_dim_of(layout, pools[0].pool))
    batch = _trial(pools, decoder.head.out_features)
    asked, tried = np.arange(batch.num_tokens), [_pools_for(batch, pools, decoder) for _ in range(2)]
    # Over plain pages: by quantising, one rounding more becomes a step of a byte.
    plain = PageLayout.CANONICAL if layout.quantised else layout
    modules = ModuleForward(subject.model, CompiledPagedAttention(kernels, plain), tried[0])
    expected = modules.run(batch, asked, {}, tell_nobody)
    found = FusedForward(decoder, kernels, tried[1], plain).run(batch, asked, {}, tell_nobody)
    assert expected is not None
    assert found is not None
    error = float((expected.float() - found).norm() / expected.float().norm())
    if not error <= _TOLERANCE[decoder.dtype]:
        raise NotUnderstoodError(f"the paths differ by {error:.2g} of the logits")
    return FusedForward(decoder, kernels, pools, layout)


def _trial(pools: Sequence[PoolLayers], vocabulary: int) -> Batch:
    page_size, rng = pools[0].pool.shape[4], np.random.default_rng(0)
    rows, next_page = list[BatchRow](), 1
    for key, length in enumerate(_TRIED_LENGTHS):
        count = pages_for_tokens(length, page_size)
        pages = np.arange(next_page, next_page + count, dtype=np.int32)
        ids = rng.integers(0, vocabulary, length).astype(np.int32)
        rows.append(BatchRow(key, ids, length, pages, None, 0, pages if len(pools) > 1 else None))
        next_page += count
    return pack_batch(rows, page_size)


def _pools_for(batch: Batch, pools: Sequence[PoolLayers], decoder: Decoder) -> list[PoolLayers]:
    """Small, zero and not quantised; of the shapes of `pools` otherwise."""
    pages, dim, dtype = int(batch.page_ids.max()) + 1, decoder.head_dim, decoder.dtype
    return [PoolLayers(torch.zeros((pages, *one.pool.shape[1:5], dim), dtype=dtype), one.layers) for one in pools]
