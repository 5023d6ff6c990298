"""Log probabilities of a prompt's own tokens, packed: as workers compute them, chunk by chunk, and as they travel.

Owns their shape and its bounds. Never: computes one (`engine/scoring.py` does).

A prompt of n tokens has n - 1: nothing says how likely the first one is. All are of the model's own distribution,
before any sampling parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

MAX_PROMPT_LOGPROBS = 1 << 19
"""Of one prompt: its tokens, times what is wanted of each (itself and the best). Half of what a frame may have."""

_Packed = Annotated[bytes, Meta(max_length=4 * MAX_PROMPT_LOGPROBS)]


class PromptLogprobs(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of n consecutive tokens, and the k likeliest in the place of each. Little-endian int32 and float32."""

    ranks: _Packed  # [n] of the token among all: 1 is the likeliest
    logprobs: _Packed  # [n]
    top_tokens: _Packed = b""  # [n, k] the likeliest first
    top_logprobs: _Packed = b""  # [n, k]

    def __post_init__(self) -> None:
        """Raises ValueError (which makes a frame malformed) unless all are of the same n and k."""
        rest = len(self.top_tokens) % len(self.ranks) if self.ranks else len(self.top_tokens)
        whole = len(self.ranks) % 4 == 0 and rest == 0
        if not whole or len(self.logprobs) != len(self.ranks) or len(self.top_logprobs) != len(self.top_tokens):
            raise ValueError("prompt_logprobs: ranks, logprobs and the best are not of the same tokens")

    @classmethod
    def of(cls, ranks: I32, logprobs: F32, top_tokens: I32, top_logprobs: F32) -> PromptLogprobs:
        return cls(
            ranks=_packed(ranks, "<i4"),
            logprobs=_packed(logprobs, "<f4"),
            top_tokens=_packed(top_tokens, "<i4"),
            top_logprobs=_packed(top_logprobs, "<f4"),
        )

    def __len__(self) -> int:
        return len(self.ranks) // 4

    def rows(self) -> list[tuple[int, float, list[tuple[int, float]]]]:
        """Token by token: (rank, log probability, the best with theirs)."""
        ranks, logprobs = np.frombuffer(self.ranks, "<i4").tolist(), np.frombuffer(self.logprobs, "<f4").tolist()
        top_tokens = np.frombuffer(self.top_tokens, "<i4").reshape(len(self), -1).tolist()
        top_logprobs = np.frombuffer(self.top_logprobs, "<f4").reshape(len(self), -1).tolist()
        tops = [list(zip(ids, values, strict=True)) for ids, values in zip(top_tokens, top_logprobs, strict=True)]
        return list(zip(ranks, logprobs, tops, strict=True))


def _packed(values: I32 | F32, dtype: str) -> bytes:
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def join_chunks(chunks: Sequence[PromptLogprobs]) -> PromptLogprobs | None:
    """Of one prompt, in order; None where nothing was asked for."""
    if len(chunks) < 2:
        return chunks[0] if chunks else None
    return PromptLogprobs(
        ranks=b"".join(chunk.ranks for chunk in chunks),
        logprobs=b"".join(chunk.logprobs for chunk in chunks),
        top_tokens=b"".join(chunk.top_tokens for chunk in chunks),
        top_logprobs=b"".join(chunk.top_logprobs for chunk in chunks),
    )


def explain_too_many(tokens: int, top: int) -> str:
    """Why so many are not given of a prompt; "" when they are. `top` < 0: none are asked for."""
    asked = tokens * (top + 1)
    if asked <= MAX_PROMPT_LOGPROBS:
        return ""
    return (
        f"{tokens} prompt tokens with {top} alternatives each are {asked} log probabilities; at most "
        f"{MAX_PROMPT_LOGPROBS} are given"
    )
