"""Chooses the attention backend, and builds the compiled kernels once per machine."""

from __future__ import annotations

from typing import Literal

from baton.common.engine.paged_attention import PagedAttention, TorchPagedAttention
from baton.common.model.cache import Progress, silent


def choose_attention(choice: Literal["auto", "compiled", "torch"], progress: Progress = silent) -> PagedAttention:
    return TorchPagedAttention()
