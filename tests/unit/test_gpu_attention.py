"""The Triton kernels of the engine against plain torch: in Triton's interpreter, and what is compiled for GPUs."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from attention_rig import make_plan, shuffled_pages
from triton_rig import HAS_TRITON, WITHOUT, interpreting

from baton.common.engine.paged_attention import AttentionParams, PagedAttention, TorchPagedAttention
from baton.common.memory import system_memory

PLAIN = TorchPagedAttention()
DECODE = ((1, 1), (1, 150), (1, 64))  # (queries, KV length)
MIXED = ((1, 17), (5, 5), (12, 70))
ROWS = {"decode": DECODE, "mixed": MIXED}


def gpu_module(name: str) -> ModuleType:
    with interpreting():
        return importlib.import_module(f"baton.common.engine.gpu.{name}")


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[PagedAttention]:
    """The product's, but for how finely it splits: the interpreter takes milliseconds for each program."""
    if not HAS_TRITON:
        pytest.skip(WITHOUT)
    attention: PagedAttention = gpu_module("triton_attention").TritonPagedAttention()
    monkeypatch.setattr(gpu_module("decode_attention"), "MAX_SPLITS", 2)
    monkeypatch.setattr(gpu_module("decode_attention"), "MIN_SPLIT_KEYS", 16)
    with interpreting():
        yield attention


def pages_of(rows: tuple[tuple[int, int], ...], page_size: int) -> int:
    return 2 + sum(-(-kv_len // page_size) for _, kv_len in rows)


def compare(
    attention: PagedAttention,
    rows: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    page_size: int,
    head_dim: int,
    group: int,
    kv_heads: int,
    params: AttentionParams,
) -> None:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_pages, tokens = pages_of(rows, page_size), sum(queries for queries, _ in rows)
    plan = make_plan(rows, page_size, shuffled_pages(num_pages))
    pool = normal(num_pages, 2, 2, kv_heads, page_size, head_dim)
    twin = pool.clone()
    query = 2 * normal(group * kv_heads, tokens, head_dim).transpose(0, 1)  # as a model hands it over: not dense
    key, value = normal(tokens, kv_heads, head_dim), normal(kv_heads, tokens, head_dim).transpose(0, 1)
    ours = attention.attend(query, key, value, pool, 1, plan, params)
    expected = PLAIN.attend(query, key, value, twin, 1, plan, params)
    assert torch.equal(pool, twin), "both write the same K and V, and nothing else"
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(ours.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(
    ("dtype", "page_size", "head_dim", "group", "kv_heads", "window", "softcap", "sinks"),
    [
        (torch.bfloat16, 16, 64, 3, 1, 0, 0.0, False),
        (torch.float32, 16, 80, 2, 2, 7, 0.0, False),
        (torch.bfloat16, 32, 256, 1, 1, 65, 30.0, True),
    ],
)
def test_triton_and_plain_attention_agree(
    triton: PagedAttention,
    rows: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    page_size: int,
    head_dim: int,
    group: int,
    kv_heads: int,
    window: int,
    softcap: float,
    sinks: bool,
) -> None:
    logits = torch.linspace(-2, 2, group * kv_heads).to(dtype) if sinks else None
    params = AttentionParams(head_dim**-0.5, window, softcap, logits)
    compare(triton, rows, dtype, page_size, head_dim, group, kv_heads, params)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page_size", "head_dim"), [(1, 64), (4, 16), (16, 96), (32, 128), (64, 256), (128, 64)])
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (7, 1), (17, 1)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (64, 20.0)])
def test_triton_and_plain_attention_agree_on_all_shapes(
    triton: PagedAttention,
    rows: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    page_size: int,
    head_dim: int,
    group: int,
    kv_heads: int,
    window: int,
    softcap: float,
) -> None:
    params = AttentionParams(head_dim**-0.5, window, softcap)
    compare(triton, rows, dtype, page_size, head_dim, group, kv_heads, params)


def test_a_decode_row_has_the_same_bits_whatever_it_is_computed_with(triton: PagedAttention) -> None:
    torch.manual_seed(3)
    rows, params = ((1, 90), (1, 3), (1, 50)), AttentionParams(0.125)
    plan = make_plan(rows, 16, iter(range(1, 40)))
    pool = torch.randn(40, 1, 2, 1, 16, 64)
    query, key, value = torch.randn(3, 2, 64), torch.randn(3, 1, 64), torch.randn(3, 1, 64)
    together = triton.attend(query, key, value, pool, 0, plan, params)
    alone = make_plan(((1, 50),), 16, iter(plan.page_ids[plan.page_offsets[2] :].tolist()))
    assert torch.equal(triton.attend(query[2:], key[2:], value[2:], pool, 0, alone, params), together[2:])


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_what_lies_in_dead_pages_changes_nothing(triton: PagedAttention, rows: tuple[tuple[int, int], ...]) -> None:
    """A row's pages before the window of its first query are gone, and page 0, which stands for them, is full of NaN;
    so is what the live pages hold of tokens outside of every window."""
    torch.manual_seed(1)
    window, page_size, num_pages = 20, 16, pages_of(rows, 16)
    plan = make_plan(rows, page_size, shuffled_pages(num_pages))
    clean = torch.randn(num_pages, 1, 2, 1, page_size, 64)
    poisoned, page_ids = torch.full_like(clean, float("nan")), plan.page_ids.clone()
    for (queries, kv_len), start in zip(rows, plan.page_offsets.tolist(), strict=False):
        first = max(0, kv_len - queries - window + 1)
        seen = torch.arange(first, kv_len)
        pages, places = plan.page_ids[start + seen // page_size].long(), seen % page_size
        poisoned[pages, :, :, :, places] = clean[pages, :, :, :, places]
        page_ids[start : start + first // page_size] = 0
    query, key, value = (torch.randn(plan.q_offsets[-1], heads, 64) for heads in (2, 1, 1))
    params, dead = AttentionParams(0.125, window), dataclasses.replace(plan, page_ids=page_ids)
    expected = triton.attend(query, key, value, clean, 0, plan, params)
    assert torch.equal(triton.attend(query, key, value, poisoned, 0, dead, params), expected)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_nan_shows_and_is_nobody_elses(triton: PagedAttention, rows: tuple[tuple[int, int], ...]) -> None:
    torch.manual_seed(5)
    num_pages = pages_of(rows, 16)
    plan = make_plan(rows, 16, shuffled_pages(num_pages))
    query, key, value = (torch.randn(plan.q_offsets[-1], heads, 64) for heads in (2, 1, 1))
    pool, params = torch.randn(num_pages, 1, 2, 1, 16, 64), AttentionParams(0.125)
    clean = triton.attend(query, key, value, pool, 0, plan, params)
    query[1, 1] = float("nan")
    found = triton.attend(query, key, value, pool, 0, plan, params)
    assert found[1, 1].isnan().all()
    found[1, 1] = clean[1, 1]
    assert torch.equal(found, clean)


@pytest.mark.parametrize("queries", [1, 3])
def test_offsets_beyond_two_gibi_elements(triton: PagedAttention, queries: int) -> None:
    """int32_overflow: the pool is larger than 2^31 elements; only the touched pages take memory."""
    page_size, head_dim, layers = 16, 64, 16
    page_elements = layers * 2 * page_size * head_dim
    num_pages = (1 << 31) // page_elements + 8
    pool = system_memory(num_pages * page_elements * 2).view(torch.bfloat16).view(num_pages, layers, 2, 1, 16, -1)
    query, key, value = (torch.randn(queries, heads, head_dim).bfloat16() for heads in (2, 1, 1))
    far = make_plan(((queries, 20),), page_size, iter((num_pages - 1, num_pages - 3)))
    ours = triton.attend(query, key, value, pool, layers - 1, far, AttentionParams(0.125))
    small, near = torch.zeros(3, 1, 2, 1, 16, head_dim).bfloat16(), make_plan(((queries, 20),), page_size, iter((1, 2)))
    assert torch.equal(ours, triton.attend(query, key, value, small, 0, near, AttentionParams(0.125)))
    assert torch.equal(pool[num_pages - 1, layers - 1], small[1, 0])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_TRITON, reason=WITHOUT)
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_it_compiles_for_gpus(arch: int, tmp_path: object) -> None:
    """A100, H100, B200 and what is sold for desks."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    program = [sys.executable, str(Path(__file__).with_name("gpu_compiler.py")), str(arch)]
    made = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=590)
    assert made.returncode == 0, made.stderr
