"""The compiled attention kernel: built once per machine and source, called through ctypes.

Owns: the build (into the cache folder, keyed by everything that decides the machine code) and the choice of a backend.
A call releases the interpreter lock, so that the I/O thread runs while a step computes. Never: fails a start because a
compiler is missing, unless the compiled backend was asked for by name.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import shutil
import subprocess
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import ClassVar, Literal

import torch
import xxhash

from baton.common import env
from baton.common.engine.paged_attention import AttentionParams, AttentionPlan, PagedAttention, TorchPagedAttention
from baton.common.errors import ConfigError
from baton.common.model.cache import Progress, cached, silent

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
# -ffast-math would break the -inf of masked scores; these two change no result.
FLAGS = ["-O3", "-std=c++17", "-march=native", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
BUILD_TIMEOUT_S = 300
MAX_HEAD_DIM = 512


class _AttendArgs(ctypes.Structure):
    """`AttendArgs` in csrc/paged_attention.cpp, field for field."""

    _fields_: ClassVar = [
        ("is_bf16", c_int64),
        ("pool", c_void_p),
        *((name, c_int64) for name in ("num_layers", "layer", "kv_heads", "page_size", "head_dim", "q_heads")),
        *((name, c_int64) for name in ("num_rows", "num_tokens")),
        *((name, c_void_p) for name in ("slots", "q_offsets", "kv_lens", "page_offsets", "page_ids")),
        *((name, c_void_p) for name in ("query", "key", "value")),
        *((f"{name}_{axis}", c_int64) for name in ("query", "key", "value") for axis in ("token", "head")),
        ("out", c_void_p),
        ("scale", c_double),
        ("softcap", c_double),
        ("window", c_int64),
        ("sinks", c_void_p),
    ]


class KernelBuildError(Exception):
    """The compiler is missing or refused; the message is for a person."""


class CompiledPagedAttention:
    """The C++ kernel. Head sizes are multiples of 16 up to 512; pools are float32 or bfloat16."""

    name = "compiled"

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._attend = self._library.baton_attend
        self._attend.argtypes, self._attend.restype = [ctypes.POINTER(_AttendArgs)], None
        self._library.baton_args_bytes.restype = c_int64
        assert self._library.baton_args_bytes() == ctypes.sizeof(_AttendArgs), "AttendArgs differs in C++ and Python"

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
        _, num_layers, _, kv_heads, page_size, pool_dim = pool.shape
        assert query.dtype == key.dtype == value.dtype == pool.dtype, (query.dtype, key.dtype, pool.dtype)
        assert head_dim == pool_dim, (head_dim, pool_dim)
        assert key.shape == value.shape == (tokens, kv_heads, head_dim), (key.shape, value.shape, pool.shape)
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        out = torch.empty(query.shape, dtype=query.dtype)
        args = _AttendArgs(
            is_bf16=pool.dtype == torch.bfloat16,
            pool=pool.data_ptr(),
            num_layers=num_layers,
            layer=layer,
            kv_heads=kv_heads,
            page_size=page_size,
            head_dim=head_dim,
            q_heads=q_heads,
            num_rows=len(plan.kv_lens),
            num_tokens=tokens,
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
        return out


def choose_attention(
    choice: Literal["auto", "compiled", "torch"], head_dim: int, progress: Progress = silent
) -> PagedAttention:
    """The backend for `choice`. "auto" prefers the compiled kernel and says once why it is not used. Raises ConfigError
    when "compiled" was asked for and cannot be had."""
    if choice == "torch":
        return TorchPagedAttention()
    try:
        if head_dim % 16 or head_dim > MAX_HEAD_DIM:
            raise KernelBuildError(f"head size {head_dim} is not a multiple of 16 up to {MAX_HEAD_DIM}")
        return load_compiled_attention(progress)
    except KernelBuildError as error:
        if choice == "compiled":
            raise ConfigError("model.attention", choice, str(error), 'use "auto" or "torch"') from error
        log.warning("paged attention runs on plain torch, several times slower: %s", error)
        return TorchPagedAttention()


def load_compiled_attention(progress: Progress = silent) -> CompiledPagedAttention:
    """Builds the kernel if this machine has not done so yet. Raises KernelBuildError."""
    compiler = shutil.which(env.compiler())
    if compiler is None:
        raise KernelBuildError(f"there is no C++ compiler ({env.compiler()} is not on PATH)")
    folder = cached(
        f"kernels/attention-{_build_key(compiler)}", functools.partial(_build, compiler, progress), progress
    )
    return CompiledPagedAttention(folder / "paged_attention.so")


def _build_key(compiler: str) -> str:
    """Of the sources, the flags, the compiler and, because of -march=native, the processor's abilities."""
    digest = xxhash.xxh3_64()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    digest.update(" ".join([compiler, *FLAGS, platform.machine()]).encode())
    cpu = Path("/proc/cpuinfo")
    if cpu.is_file():
        lines = cpu.read_text().splitlines()
        digest.update(next((line for line in lines if line.startswith(("flags", "Features"))), "").encode())
    return str(digest.hexdigest())


def _build(compiler: str, progress: Progress, folder: Path) -> None:
    progress("compiling the attention kernel (once; about ten seconds)")
    command = [compiler, *FLAGS, str(SOURCES / "paged_attention.cpp"), "-o", str(folder / "paged_attention.so")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"the compiler could not be run: {error}") from error
    if done.returncode != 0:
        raise KernelBuildError(f"{compiler} failed: {done.stderr.strip()[:500]}")
