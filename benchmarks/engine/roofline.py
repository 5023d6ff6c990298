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


@dataclass(frozen=True, slots=True)
class Work:
    """What a part of a model reads, and the products that it makes."""

    nbytes: int
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
        queries = self._heads * info.head_dim
        self._products = {
            "projections": layers * hidden * (queries + 2 * kv),
            "output": layers * hidden * queries,
            "gate": layers * hidden * 2 * config.intermediate_size,
            "down": layers * hidden * config.intermediate_size,
            "head": hidden * info.vocab_size,
        }
        sliding = len(info.groups.sliding)
        self._windows = [(layers - sliding, info.max_positions), (sliding, info.groups.window)]

    def roof(self, case: Case, limits: Limits) -> Roof:
        work = self._work(case).values()
        nbytes, flops = sum(one.nbytes for one in work), sum(one.flops for one in work)
        reading_s, computing_s = nbytes / limits.reading(nbytes), flops / limits.flops
        return Roof(max(reading_s, computing_s), "memory" if reading_s > computing_s else "compute", flops)

    def part_roofs(self, case: Case, limits: Limits) -> dict[str, float]:
        """Seconds that each part of the model takes at least, as if it were alone; named as `PartTimes` does."""
        whole = limits.reading(sum(one.nbytes for one in self._work(case).values()))
        return {name: max(one.nbytes / whole, one.flops / limits.flops) for name, one in self._work(case).items()}

    def _work(self, case: Case) -> dict[str, Work]:
        """Keys and values of a prompt are not counted as read: they have just been made."""
        decode = case.kind == "decode"
        if decode:
            visible = sum(count * min(case.tokens + 1, window) for count, window in self._windows) * case.rows
        else:
            visible = sum(count * _causal_pairs(case.tokens, window) for count, window in self._windows) * case.rows
        tokens = case.rows if decode else case.rows * case.tokens
        work = {
            name: Work(numbers * self._itemsize, 2.0 * numbers * (case.rows if name == "head" else tokens))
            for name, numbers in self._products.items()
        }
        kv_bytes = visible * 2 * self._kv_heads * self._head_dim * self._itemsize if decode else 0
        return {**work, "attention": Work(kv_bytes, 4.0 * visible * self._heads * self._head_dim)}


def _causal_pairs(tokens: int, window: int) -> int:
    """Of a query and a key that it sees."""
    within = min(tokens, window)
    return within * (within + 1) // 2 + (tokens - within) * window
