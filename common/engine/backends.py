"""Decides what computes a step on this machine: compiled kernels, or plain torch and a word about why; on a GPU
FlashInfer, our Triton kernels, or plain torch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from baton.common.engine.kernels import CompiledPagedAttention, Kernels, load_kernels
from baton.common.engine.paged_attention import PagedAttention, TorchPagedAttention
from baton.common.errors import ConfigError
from baton.common.kv.cache_dtype import CacheDtype
from baton.common.kv.page_layout import LayoutChoice, choose_layout
from baton.common.log import EventLog
from baton.common.model.cache import Progress, silent
from baton.common.native import BuildError

if TYPE_CHECKING:
    import torch

_log = EventLog("baton.engine")

AttentionChoice = Literal["auto", "compiled", "torch", "triton", "flashinfer"]
FIELD: Final = "model.attention"
FLASHINFER_HEADS: Final = (64, 128, 256)


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
    cache_dtype: CacheDtype = "auto",
) -> Backends:
    """ "auto" prefers the compiled kernels and says why they are not used. Raises ConfigError when what was asked for,
    "compiled" or a page layout, cannot be had."""
    if choice == "torch":
        return Backends(
            TorchPagedAttention(choose_layout(layout, page_size, compiled=False, cache_dtype=cache_dtype)), None
        )
    if choice in ("triton", "flashinfer"):
        raise ConfigError(FIELD, choice, "computes on a GPU, and this worker has none", "model.device=cuda, or auto")
    reason = f"head size {head_dim} is not a multiple of 16"
    if head_dim % 16 == 0:
        try:
            kernels = load_kernels(progress)
            pages = choose_layout(layout, page_size, compiled=True, cache_dtype=cache_dtype)
            return Backends(CompiledPagedAttention(kernels, pages), kernels)
        except BuildError as error:
            reason = str(error)
    if choice == "compiled":
        raise ConfigError(FIELD, choice, reason, 'use "auto" or "torch"')
    pages = choose_layout(layout, page_size, compiled=False, cache_dtype=cache_dtype)
    _log.warning("kernels_missing", reason=reason)
    progress(f"steps run on plain torch, several times slower: {reason}")
    return Backends(TorchPagedAttention(pages), None)


@dataclass(frozen=True, slots=True)
class DeviceBackends:
    """`in_graphs` is what steps of a CUDA graph attend with; None: there can be no graph."""

    attention: PagedAttention
    in_graphs: PagedAttention | None


def importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def choose_device_backends(
    choice: AttentionChoice,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    has: Callable[[str], bool] = importable,
) -> DeviceBackends:
    """ "auto" takes FlashInfer where it is installed and can do this model, then Triton, then plain torch, and says
    why. Raises ConfigError when what was asked for cannot be had."""
    if choice == "compiled":
        raise ConfigError(FIELD, choice, "is for CPUs, and this worker computes on a GPU", 'use "auto" or "triton"')
    if choice == "torch":
        return DeviceBackends(TorchPagedAttention(), None)
    missing = "" if has("triton") else "triton is not installed"
    unusable = missing or _why_not_flashinfer(head_dim, dtype, has)
    reason = unusable if choice == "flashinfer" else missing
    if reason and choice != "auto":
        raise ConfigError(FIELD, choice, reason, 'pip install "baton-pd[gpu]" flashinfer-python; or "auto"')
    if missing:
        _log.warning("gpu_kernels_missing", reason=missing, advice='pip install "baton-pd[gpu]"')
        return DeviceBackends(TorchPagedAttention(), None)
    from baton.common.engine.gpu.triton_attention import TritonPagedAttention  # only here: CPUs do without Triton

    ours = TritonPagedAttention()
    if choice == "triton" or unusable:
        _log.info("attention", backend=ours.name, without_flashinfer=unusable or "not asked for")
        return DeviceBackends(ours, ours)
    from baton.common.engine.gpu.flashinfer_attention import FlashInferAttention

    return DeviceBackends(FlashInferAttention(importlib.import_module("flashinfer"), device, ours), ours)


def _why_not_flashinfer(head_dim: int, dtype: torch.dtype, has: Callable[[str], bool]) -> str:
    """Empty: it can be used."""
    if not has("flashinfer"):
        return "flashinfer is not installed"
    if head_dim not in FLASHINFER_HEADS:
        return f"flashinfer has no kernels for head size {head_dim}"
    if str(dtype) != "torch.bfloat16":
        return f"flashinfer does not compute in {str(dtype).removeprefix('torch.')}"
    return ""
