"""The compiled kernels (attention, linear layers, pointwise, steps): built once per machine, called through ctypes.

Owns: the foreign signatures, and the flags of the build (`native` builds). A call releases the interpreter lock, so
that the I/O thread runs while a step computes. Never: decides what happens without a compiler (`backends` does).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import ClassVar

import torch

from baton.common.engine.fused.arguments import LayerArgs, ModelArgs, PartTimes, StepArgs
from baton.common.engine.paged_attention import AttentionParams, AttentionPlan, attend_long_rows
from baton.common.kv.page_layout import PageLayout
from baton.common.kv.quantised_pages import head_dim_of, pool_dtype
from baton.common.model.cache import Progress, silent
from baton.common.native import NativeLibrary, built

LIBRARY = NativeLibrary(
    name="kernels",
    what="the kernels (once; about ten seconds)",
    sources=Path(__file__).parent / "csrc",
    # -ffast-math would break the -inf of masked scores; the last two change no result.
    flags=("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"),
)
UNIT_QUERIES = 64  # from here on matrix units win
LAYOUTS = (PageLayout.CANONICAL, PageLayout.PANELS, PageLayout.INT8, PageLayout.FP8)
"""By their numbers in csrc/pages.h."""


class _AttendArgs(ctypes.Structure):
    """`AttendArgs` in csrc/attention.h, field for field."""

    _fields_: ClassVar = [
        ("is_bf16", c_int64),
        ("pool", c_void_p),
        *(
            (name, c_int64)
            for name in ("page_layout", "num_layers", "layer", "kv_heads", "page_size", "head_dim", "q_heads")
        ),
        *((name, c_int64) for name in ("num_rows", "num_tokens", "max_queries")),
        *((name, c_void_p) for name in ("slots", "q_offsets", "kv_lens", "page_offsets", "page_ids")),
        *((name, c_void_p) for name in ("query", "key", "value")),
        *((f"{name}_{axis}", c_int64) for name in ("query", "key", "value") for axis in ("token", "head")),
        ("out", c_void_p),
        ("scale", c_double),
        ("softcap", c_double),
        ("window", c_int64),
        ("sinks", c_void_p),
    ]


class LinearArgs(ctypes.Structure):
    """`LinearArgs` in csrc/linear.cpp, field for field."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("is_bf16", "rows", "inputs", "outputs")),
        *((name, c_void_p) for name in ("x", "packed", "scales", "bias", "y")),
    ]


class NormArgs(ctypes.Structure):
    """`NormArgs` in csrc/pointwise.cpp, field for field."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("is_bf16", "rows", "size")),
        *((name, c_void_p) for name in ("x", "weight", "y")),
        ("eps", c_double),
        ("round_first", c_int64),
    ]


class SiluArgs(ctypes.Structure):
    """`SiluArgs` in csrc/pointwise.cpp, field for field."""

    _fields_: ClassVar = [
        ("is_bf16", c_int64),
        ("count", c_int64),
        ("x", c_void_p),
        ("gated", c_void_p),
        ("y", c_void_p),
    ]


class Kernels:
    """The loaded library. Each function takes a pointer to its arguments."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.attend = self._function("attend", _AttendArgs)
        self.linear = self._function("linear", LinearArgs)
        self.norm = self._function("norm", NormArgs)
        self.silu = self._function("silu", SiluArgs)
        self.forward = self._function("forward", StepArgs)
        self._check_size("forward_model_bytes", ModelArgs)
        self._check_size("forward_layer_bytes", LayerArgs)
        self._check_size("forward_parts_bytes", PartTimes)
        self.forward_workspace_bytes = self._library["baton_forward_workspace_bytes"]
        self.forward_workspace_bytes.argtypes = [ctypes.POINTER(StepArgs)]
        self.forward_workspace_bytes.restype = c_int64
        self.matrix_units = bool(self._library["baton_has_matrix_units"]())
        """Whether products of bfloat16 use them."""

    def _check_size(self, name: str, args: type[ctypes.Structure]) -> None:
        size = self._library[f"baton_{name}"]
        size.restype = c_int64
        assert size() == ctypes.sizeof(args), f"{args.__name__} differs in C++ and Python"

    def _function(self, name: str, args: type[ctypes.Structure]) -> Callable[[object], None]:
        self._check_size(f"{name}_args_bytes", args)
        function = self._library[f"baton_{name}"]
        function.argtypes, function.restype = [ctypes.POINTER(args)], None
        return function


class CompiledPagedAttention:
    """The C++ kernel. Head sizes are multiples of 16; pools are float32, bfloat16 or quantised. Long prefills over
    bfloat16 go to torch where the processor has matrix units. Our kernel uses them, too, but the two have not been
    compared since it does."""

    name = "compiled"

    def __init__(self, kernels: Kernels, page_layout: PageLayout = PageLayout.CANONICAL) -> None:
        self.page_layout = page_layout
        self._attend = kernels.attend
        self._matrix_units = torch.cpu._is_amx_tile_supported()

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        plan: AttentionPlan,
        params: AttentionParams,
    ) -> torch.Tensor:
        query, key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value))
        tokens, q_heads, head_dim = query.shape
        _, num_layers, _, kv_heads, page_size, _ = pool.shape
        assert query.dtype == key.dtype == value.dtype, (query.dtype, key.dtype, value.dtype)
        assert pool.dtype == pool_dtype(self.page_layout, query.dtype), (pool.dtype, query.dtype)
        assert head_dim == head_dim_of(self.page_layout, pool), (head_dim, pool.shape)
        assert self.page_layout.fits(page_size), (self.page_layout, page_size)
        assert key.shape == value.shape == (tokens, kv_heads, head_dim), (key.shape, value.shape, pool.shape)
        plain = not params.softcap and params.sinks is None
        max_queries = UNIT_QUERIES if self._matrix_units and pool.dtype == torch.bfloat16 and plain else tokens
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        out = torch.empty(query.shape, dtype=query.dtype)
        args = _AttendArgs(
            is_bf16=query.dtype == torch.bfloat16,
            pool=pool.data_ptr(),
            page_layout=LAYOUTS.index(self.page_layout),
            num_layers=num_layers,
            layer=layer,
            kv_heads=kv_heads,
            page_size=page_size,
            head_dim=head_dim,
            q_heads=q_heads,
            num_rows=len(plan.kv_lens),
            num_tokens=tokens,
            max_queries=max_queries,
            slots=plan.slots.data_ptr(),
            q_offsets=plan.q_offsets.data_ptr(),
            kv_lens=plan.kv_lens.data_ptr(),
            page_offsets=plan.page_offsets.data_ptr(),
            page_ids=plan.page_ids.data_ptr(),
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            query_token=query.stride(0),
            query_head=query.stride(1),
            key_token=key.stride(0),
            key_head=key.stride(1),
            value_token=value.stride(0),
            value_head=value.stride(1),
            out=out.data_ptr(),
            scale=params.scale,
            softcap=params.softcap,
            window=params.window,
            sinks=None if sinks is None else sinks.data_ptr(),
        )
        self._attend(ctypes.byref(args))
        if max_queries < tokens:
            attend_long_rows(query, pool, layer, self.page_layout, plan, params, max_queries, out)
        return out


def load_kernels(progress: Progress = silent) -> Kernels:
    """Builds the library if this machine has not done so yet. Raises BuildError."""
    return Kernels(built(LIBRARY, progress))
