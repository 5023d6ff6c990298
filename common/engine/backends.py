"""Decides what computes a step on this machine: compiled kernels, or plain torch and a word about why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton.common.engine.kernels import CompiledPagedAttention, Kernels, load_kernels
from baton.common.engine.paged_attention import PagedAttention, TorchPagedAttention
from baton.common.errors import ConfigError
from baton.common.kv.page_layout import LayoutChoice, choose_layout
from baton.common.log import EventLog
from baton.common.model.cache import Progress, silent
from baton.common.native import BuildError

_log = EventLog("baton.engine")

AttentionChoice = Literal["auto", "compiled", "torch"]


@dataclass(frozen=True, slots=True)
class Backends:
    """`kernels` is None where linear layers have to do without ours."""

    attention: PagedAttention
    kernels: Kernels | None


def choose_backends(
    choice: AttentionChoice,
    head_dim: int,
    progress: Progress = silent,
    layout: LayoutChoice = "canonical",
    page_size: int = 1,
) -> Backends:
    """ "auto" prefers the compiled kernels and says why they are not used. Raises ConfigError when what was asked for,
    "compiled" or a page layout, cannot be had."""
    if choice == "torch":
        choose_layout(layout, page_size, compiled=False)
        return Backends(TorchPagedAttention(), None)
    reason = f"head size {head_dim} is not a multiple of 16"
    if head_dim % 16 == 0:
        try:
            kernels = load_kernels(progress)
            return Backends(CompiledPagedAttention(kernels, choose_layout(layout, page_size, compiled=True)), kernels)
        except BuildError as error:
            reason = str(error)
    if choice == "compiled":
        raise ConfigError("model.attention", choice, reason, 'use "auto" or "torch"')
    choose_layout(layout, page_size, compiled=False)
    _log.warning("kernels_missing", reason=reason)
    progress(f"steps run on plain torch, several times slower: {reason}")
    return Backends(TorchPagedAttention(), None)
