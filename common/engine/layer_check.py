"""Whether a model does in a step what its configuration says: one token through the null page and slot.

Owns nothing. Every layer must come to our attention or to its state once, in order, with the window and the shapes that
its pool was made for.
"""

from __future__ import annotations

import numpy as np
import torch
from msgspec import structs

from baton.common.engine.batch import Batch, BatchRow, pack_batch
from baton.common.engine.paged_attention import AttentionParams
from baton.common.errors import ConfigError
from baton.common.kv.layout import KvLayout
from baton.common.messages import SamplingParams
from baton.common.model.loading import ModelInfo
from baton.common.model.spec import FIELD


def null_step(layout: KvLayout) -> Batch:
    """One token, whose logits are place 0."""
    null = np.zeros(1, np.int32)
    row = BatchRow(0, null, 1, null[: len(layout.paged)], SamplingParams(), 0, null if len(layout.paged) > 1 else None)
    batch = pack_batch([row], layout.page_size)
    return structs.replace(batch, state_slots=null) if layout.state else batch


def check_layers(
    info: ModelInfo,
    seen: list[tuple[int, AttentionParams]],
    recurrent: tuple[int, ...],
    logits: torch.Tensor | None,
) -> list[AttentionParams]:
    """What each layer asked of our attention, given what was `seen` in a `null_step`, and whose states were asked for.
    Raises ConfigError."""
    attended = [(layer, one.window if one.window < info.max_positions else 0) for layer, one in seen]
    expected = [(layer, info.groups.window * (layer in info.groups.sliding)) for layer in info.groups.attention]
    if attended != expected or recurrent != info.groups.recurrent:
        reason = f"architecture {info.architecture} does not attend as its configuration says"
        raise ConfigError(FIELD, info.name, reason, f"(layer, window) {attended}, recurrent {recurrent}")
    if logits is None or logits.shape != (1, info.vocab_size):
        raise ConfigError(FIELD, info.name, f"architecture {info.architecture} gives no logits of its vocabulary")
    return [params for _, params in seen]
