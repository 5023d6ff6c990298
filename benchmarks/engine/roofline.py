"""The least time that a case can take on this machine: all weights and all visible KV read once, or all products made
at the measured peak, whichever takes longer. Pure arithmetic over what `machine_end` measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.common.model.loading import ITEMSIZE, Dtype, load_config, model_info
from baton.common.model.spec import resolve_source
from benchmarks.engine.cases import Case


@dataclass(frozen=True, slots=True)
class Limits:
    """Medians over the rounds, per second. `read`: bytes, by the size in MiB of what is read again and again."""

    read: Mapping[int, float]
    read_small_pages: float
    copy: float
    copy_small_pages: float
    flops: float

    def reading(self, nbytes: int) -> float:
        """Bytes per second of what is `nbytes` large: parts of it may lie in the last cache."""
        return self.read[min((mib for mib in self.read if mib << 20 >= nbytes), default=max(self.read))]


@dataclass(frozen=True, slots=True)
class Roof:
    least_s: float
    bound: str  # "memory" or "compute"
    flops: float


class Shape:
    """A model's sizes, as far as they cost something. The head is counted where a token is sampled; it may be the
    embedding itself."""

    def __init__(self, model: str, dtype: Dtype) -> None:
        config: Any = load_config(resolve_source(model))
        info = model_info(model)
        self._itemsize = ITEMSIZE[dtype]
        self._heads = config.num_attention_heads
        self._head_dim, self._kv_heads, layers = info.head_dim, info.num_kv_heads, info.num_layers
        hidden, kv = config.hidden_size, info.num_kv_heads * info.head_dim
        attention = hidden * (self._heads * info.head_dim * 2 + 2 * kv)
        self._body = layers * (attention + 3 * hidden * config.intermediate_size)
        self._head = hidden * info.vocab_size
        sliding = len(info.groups.sliding)
        self._windows = [(layers - sliding, info.max_positions), (sliding, info.groups.window)]

    def roof(self, case: Case, limits: Limits) -> Roof:
        if case.kind == "decode":
            visible = sum(count * min(case.tokens + 1, window) for count, window in self._windows) * case.rows
            nbytes = (self._body + self._head + visible * 2 * self._kv_heads * self._head_dim) * self._itemsize
            flops = 2.0 * (self._body + self._head) * case.rows
        else:
            pairs = sum(count * _causal_pairs(case.tokens, window) for count, window in self._windows)
            visible = pairs * case.rows
            nbytes = (self._body + self._head) * self._itemsize
            flops = 2.0 * (self._body * case.tokens + self._head) * case.rows
        flops += 4.0 * visible * self._heads * self._head_dim
        reading_s, computing_s = nbytes / limits.reading(nbytes), flops / limits.flops
        return Roof(max(reading_s, computing_s), "memory" if reading_s > computing_s else "compute", flops)


def _causal_pairs(tokens: int, window: int) -> int:
    """Of a query and a key that it sees."""
    within = min(tokens, window)
    return within * (within + 1) // 2 + (tokens - within) * window
