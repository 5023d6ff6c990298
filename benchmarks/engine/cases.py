"""What is measured of every engine: decode steps and prompts, by size; and the protocol's words for them.

Runs in the peers' environments too: nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

STEPS = 8
"""Most decode steps that are timed in one turn; the context grows by so many."""
ENOUGH_S = 0.6
"""A turn's steps stop when they took so long, after the first."""


@dataclass(frozen=True, slots=True)
class Case:
    """decode: one token for each of `rows` requests that have `tokens` of KV. prefill: `rows` prompts of `tokens`, and
    their first tokens."""

    kind: Literal["decode", "prefill"]
    rows: int
    tokens: int

    @property
    def name(self) -> str:
        size = f"{self.tokens // 1024}k" if self.tokens % 1024 == 0 else str(self.tokens)
        if self.kind == "decode":
            return f"decode, batch {self.rows}, context {size}"
        return f"prefill {self.rows} x {size}" if self.rows > 1 else f"prefill {size}"

    @property
    def longest(self) -> int:
        """Most tokens of one request."""
        return self.tokens + 1 + (STEPS + 1 if self.kind == "decode" else 0)


DECODE = tuple(Case("decode", rows, context) for context in (128, 1024, 4096) for rows in (1, 8, 32, 128))
PREFILL = (Case("prefill", 32, 128), Case("prefill", 1, 512), Case("prefill", 1, 2048), Case("prefill", 1, 8192 - 8))
FULL = (*DECODE, *PREFILL)
"""8,184 tokens: the first output has to fit into the 8,192 positions as well."""
QUICK = (Case("decode", 1, 128), Case("decode", 8, 128), Case("decode", 32, 128), Case("prefill", 1, 512))


def prompt_ids(row: int, tokens: int) -> list[int]:
    """The same for every engine, and no two rows alike."""
    return [100 + (row * 7919 + place * 104729) % 40_000 for place in range(tokens)]


def shown(cases: Iterable[Case]) -> str:
    return "; ".join(case.name for case in cases)
