"""Whether a device computes what plain torch computes: kernels on awkward shapes, and a model's greedy tokens."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch

from baton.common.engine.backends import importable
from baton.common.engine.batch import BatchRow, PageTable, pack_batch
from baton.common.engine.gpu.plan import DevicePlan
from baton.common.engine.gpu.triton_attention import TritonPagedAttention
from baton.common.engine.paged_attention import AttentionParams, AttentionPlan, PagedAttention, TorchPagedAttention
from benchmarks.gpu.rig import Bench, Line, generate

REFERENCES: Final = Path(__file__).parents[2] / "tests" / "data" / "references" / "smollm2-135m-instruct.json"
DECODE: Final = ((1, 1), (1, 17), (1, 600), (1, 5000), (1, 64))  # (queries, KV length)
MIXED: Final = ((1, 17), (5, 5), (33, 130), (1, 3000), (300, 2100), (64, 64))
SMALL: Final = (((1, 1), (1, 40)), ((1, 17), (6, 20)))
TIE: Final = 1e-3
"""Logits that are closer than this may be told apart either way: the stored ones were computed on CPUs."""
TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
CASES: Final = (  # page size, head size, group, kv heads, window, soft cap, sinks
    (16, 64, 3, 3, 0, 0.0, False),
    (16, 128, 8, 2, 0, 0.0, False),
    (32, 80, 2, 2, 7, 0.0, False),
    (64, 256, 4, 1, 100, 30.0, False),
    (16, 64, 7, 1, 128, 0.0, True),
    (1, 96, 1, 2, 0, 50.0, False),
)


def kernels(bench: Bench) -> Iterator[Line]:
    backends: list[PagedAttention] = [TritonPagedAttention()]
    if importable("flashinfer") and not bench.interpret:
        from baton.common.engine.gpu.flashinfer_attention import FlashInferAttention

        backends.append(FlashInferAttention(importlib.import_module("flashinfer"), bench.device.place))
    steps, cases = (SMALL, CASES[:1]) if bench.interpret else ((DECODE, MIXED), CASES)
    for backend in backends:
        for dtype in (torch.float32, torch.bfloat16):
            if backend.name == "flashinfer" and dtype == torch.float32:
                continue
            usable = [case for case in cases if backend.name != "flashinfer" or case[1] in (64, 128, 256)]
            worst = max(_difference(bench, backend, dtype, rows, *case) for rows in steps for case in usable)
            what = f"{backend.name}, {str(dtype).removeprefix('torch.')}, {len(steps) * len(usable)} cases"
            yield Line("parity", what, f"differs by {worst:.1e} at most", worst <= TOLERANCE[dtype])


def _difference(
    bench: Bench,
    backend: PagedAttention,
    dtype: torch.dtype,
    rows: tuple[tuple[int, int], ...],
    page_size: int,
    head_dim: int,
    group: int,
    kv_heads: int,
    window: int,
    softcap: float,
    sinks: bool,
) -> float:
    """From plain torch on the host, at the most different number; infinite where other bytes of the pool are."""
    torch.manual_seed(0)
    held, first = list[BatchRow](), 1
    for key, (queries, kv_len) in enumerate(rows):
        count = -(-kv_len // page_size)
        pages = np.arange(first, first + count, dtype=np.int32)[::-1].copy()
        held.append(BatchRow(key, np.zeros(queries, np.int32), kv_len, pages, None))
        first += count
    batch = pack_batch(held, page_size)
    host = AttentionPlan.of(batch, PageTable(batch.slots, batch.page_offsets, batch.page_ids))
    place = bench.device.place
    plan = DevicePlan(*(getattr(host, name).to(place) for name in AttentionPlan.__slots__), host=host)
    pool = torch.randn(first, 2, 2, kv_heads, page_size, head_dim).to(dtype)
    query, key, value = (
        torch.randn(batch.num_tokens, n, head_dim).to(dtype) for n in (kv_heads * group, kv_heads, kv_heads)
    )
    logits = torch.randn(kv_heads * group) if sinks else None
    expected_pool = pool.clone()
    expected = TorchPagedAttention().attend(
        query, key, value, expected_pool, 1, host, AttentionParams(head_dim**-0.5, window, softcap, logits)
    )
    params = AttentionParams(head_dim**-0.5, window, softcap, None if logits is None else logits.to(place))
    with bench.device.stream():
        there = pool.to(place)
        found = backend.attend(query.to(place), key.to(place), value.to(place), there, 1, plan, params)
        found, written = found.cpu(), there.cpu()
    bench.device.event().wait()
    if not torch.equal(written, expected_pool):
        return float("inf")
    return float((found.float() - expected.float()).abs().max())


def model(bench: Bench) -> Iterator[Line]:
    """Greedy tokens in float32, with and without graphs, against what `transformers` generated."""
    prompts, expected, margins, stop = (_tiny_references if bench.interpret else _references)(bench)
    pages = 2 + sum(-(-(len(prompt) + bench.sizes.new_tokens) // 16) + 1 for prompt in prompts)
    for graph_rows in (0, len(prompts)):
        runner = bench.runner("float32", "auto", pages=pages, graph_rows=graph_rows)
        found = generate(runner, prompts, bench.sizes.new_tokens, stop)
        wrong = sum(not _same(*three) for three in zip(found, expected, margins, strict=True))
        what = f"greedy tokens, {'with' if graph_rows else 'without'} graphs ({runner.forward_path})"
        yield Line("parity", what, f"{len(prompts) - wrong} of {len(prompts)} prompts", wrong == 0)
        if graph_rows and runner.graphs is not None:
            yield Line("graphs", "captured, by rows", str(list(runner.graphs.captured)), bool(runner.graphs.captured))


def _same(found: list[int], expected: list[int], margins: list[float]) -> bool:
    """Up to the first token that was a tie."""
    for ours, theirs, margin in zip(found, expected, margins, strict=False):
        if ours != theirs:
            return margin < TIE
    return len(found) >= len(expected)


References = tuple[list[list[int]], list[list[int]], list[list[float]], frozenset[int]]


def _references(bench: Bench) -> References:
    stored = json.loads(REFERENCES.read_text())
    chosen = stored["prompts"][:: max(1, len(stored["prompts"]) // bench.sizes.prompts)]
    tokens = stored["corpus_tokens"]
    prompts = [[token for start, stop in one["slices"] for token in tokens[start:stop]] for one in chosen]
    stop = frozenset(stored["stop_token_ids"])
    return prompts, [one["outputs"] for one in chosen], [one["margins"] for one in chosen], stop


def _tiny_references(bench: Bench) -> References:
    from baton.common.model.loading import load_model

    theirs, prompts, outputs = load_model(bench.model, "float32"), [[5, 6, 7], [9, 8, 7, 6, 5, 4]], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=3, max_new_tokens=3
        )
        outputs.append(made[0, len(prompt) :].tolist())
    return prompts, outputs, [[1.0] * 3] * 2, frozenset()
