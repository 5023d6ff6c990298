"""What a decode step takes over quantised KV, beside plain KV: one model, a pool in each format, measured in turns.

    python -m benchmarks.bench_kv_speed [--dtype bfloat16] [--contexts 1024 4096] [--batches 8 32] [--rounds 5]

Processor time of one thread, medians, and ratios to the plain pool in the same round: absolute times are the machine's.
Contexts are not computed: their pages hold noise, each row's in pages of its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import get_args

import numpy as np
import torch

from baton.common.engine.batch import Batch, BatchRow, pack_batch
from baton.common.engine.torch_runner import TorchRunner
from baton.common.kv.cache_dtype import CacheDtype
from baton.common.kv.quantised_pages import FORMS
from baton.common.kv.torch_buffer import TorchKvBuffer
from baton.common.messages import SamplingParams
from baton.common.model.loading import Dtype

MODEL = "smollm2-135m-instruct"
PAGE_SIZE = 16
NOISE_PAGES = 64


def fill(runner: TorchRunner, dtype: torch.dtype) -> None:
    """All pages hold numbers, in the pool's format."""
    info, memory = runner.info, runner.memory.main
    assert isinstance(memory, TorchKvBuffer)
    slots = torch.arange(NOISE_PAGES * PAGE_SIZE)
    keys, values = torch.randn(2, len(slots), info.num_kv_heads, info.head_dim).to(dtype)
    if memory.page_layout.quantised:
        for layer in range(memory.layers):
            FORMS[memory.page_layout].write(memory.pool, layer, slots, keys, values)
    else:
        memory.pool[:NOISE_PAGES] = torch.randn(memory.pool[:NOISE_PAGES].shape).to(dtype)
    pages = memory.as_bytes()
    for first in range(NOISE_PAGES, len(pages), NOISE_PAGES):
        pages[first : first + NOISE_PAGES] = pages[: len(pages[first : first + NOISE_PAGES])]


def decode_step(context: int, rows: int) -> Batch:
    need = -(-context // PAGE_SIZE)
    ids = np.random.default_rng(0).permutation(rows * need).astype(np.int32) + 1
    pages = ids.reshape(rows, need)
    token = np.full(1, 100, np.int32)
    return pack_batch([BatchRow(row, token, context, pages[row], SamplingParams()) for row in range(rows)], PAGE_SIZE)


def seconds(runner: TorchRunner, batch: Batch) -> float:
    began_s = time.process_time()
    runner.collect(runner.launch(batch))
    return time.process_time() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    most = max(options.contexts) // PAGE_SIZE * max(options.batches) + 2
    first = TorchRunner.load(MODEL, dtype=options.dtype, num_pages=most, page_size=PAGE_SIZE, threads=1)
    runners: dict[CacheDtype, TorchRunner] = {"auto": first}
    quantised: tuple[CacheDtype, ...] = ("int8", "fp8")
    for cache_dtype in quantised:
        runners[cache_dtype] = TorchRunner(
            first.model, first.info, dtype=options.dtype, num_pages=most, page_size=PAGE_SIZE, cache_dtype=cache_dtype
        )
    for runner in runners.values():
        fill(runner, getattr(torch, options.dtype))
    print(f"{MODEL}, {options.dtype}, {', '.join(f'{name} {one.forward_path}' for name, one in runners.items())}")
    for context in options.contexts:
        for rows in options.batches:
            batch = decode_step(context, rows)
            rounds = [{name: seconds(one, batch) for name, one in runners.items()} for _ in range(options.rounds + 1)]
            told = [f"context {context}, batch {rows}:"]
            for name in runners:
                took = statistics.median(one[name] for one in rounds[1:])
                ratio = statistics.median(one[name] / one["auto"] for one in rounds[1:])
                told.append(f"{name} {took * 1e3:.0f} ms ({ratio:.2f})")
            print("  ".join(told), flush=True)


if __name__ == "__main__":
    main()
