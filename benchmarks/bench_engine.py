"""Decode and prefill speed of the torch runner against `transformers` itself, same weights, same process, measured in
turns, medians.

    python benchmarks/bench_engine.py [--rounds 9] [--threads 1 2] [--write docs/benchmarks/engine.md]

Decode: one step of B rows at context 150, greedy token included. Prefill: one prompt in one piece, its last token
sampled. With one thread, processor time is shown too: a busy machine disturbs it less than the clock.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache, StaticCache

from baton.common.engine.batch import BatchRow, pack_batch
from baton.common.engine.torch_runner import TorchRunner
from baton.common.messages import SamplingParams
from baton.common.model.loading import Dtype, load_model
from baton.common.units import pages_for_tokens

MODEL = "smollm2-135m-instruct"
CONTEXT = 150
BATCHES = (1, 8, 32)
PROMPTS = (512, 2048)
PAGE_SIZE = 16
GREEDY = SamplingParams()
Step = Callable[[], object]


class Timing:
    """Times of one contender in one discipline."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def measure(self, step: Step) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        step()
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.thread_time() - cpu)

    def comparable_s(self, threads: int) -> float:
        """Median without the warm-up: processor time where one thread did it all, else by the clock."""
        return statistics.median((self.cpu_s if threads == 1 else self.wall_s)[1:])


def runner_step(runner: TorchRunner, rows: int, q_len: int, kv_len: int) -> Step:
    """One launch and collect; the KV before it is whatever the pool holds, which costs the same."""
    count = pages_for_tokens(kv_len, PAGE_SIZE)
    ids = np.arange(10, 10 + q_len, dtype=np.int32)
    pages = [np.arange(1 + row * count, 1 + (row + 1) * count, dtype=np.int32) for row in range(rows)]
    batch = pack_batch([BatchRow(row, ids, kv_len, pages[row], GREEDY) for row in range(rows)], PAGE_SIZE)
    return lambda: runner.collect(runner.launch(batch))


def transformers_decode(model: torch.nn.Module, rows: int, cache: DynamicCache | StaticCache) -> Step:
    """One decode step over a cache filled to CONTEXT - 1; it grows by a token per call, as in `generate`."""
    token = torch.full((rows, 1), 10)
    with torch.inference_mode():
        model(input_ids=torch.full((rows, CONTEXT - 1), 10), cache=cache, use_cache=True, logits_to_keep=1)

    def step() -> None:
        with torch.inference_mode():
            model(input_ids=token, cache=cache, use_cache=True).logits[:, -1].argmax(-1).tolist()

    return step


def transformers_prefill(model: torch.nn.Module, length: int) -> Step:
    ids = torch.arange(10, 10 + length)[None]

    def step() -> None:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()

    return step


def disciplines(dtype: Dtype, threads: int, rounds: int) -> dict[str, dict[str, Step]]:
    """Discipline -> contender -> what to time."""
    pages = max(BATCHES) * pages_for_tokens(CONTEXT, PAGE_SIZE) + pages_for_tokens(max(PROMPTS), PAGE_SIZE) + 1
    runner = TorchRunner.load(MODEL, dtype=dtype, num_pages=pages, page_size=PAGE_SIZE, threads=threads)
    model = load_model(MODEL, dtype)
    table: dict[str, dict[str, Step]] = {}
    for rows in BATCHES:
        static = StaticCache(config=model.config, max_cache_len=CONTEXT + rounds + 1)
        table[f"decode, batch {rows}"] = {
            "baton": runner_step(runner, rows, 1, CONTEXT),
            "transformers, dynamic cache": transformers_decode(model, rows, DynamicCache(config=model.config)),
            "transformers, static cache": transformers_decode(model, rows, static),
        }
    for length in PROMPTS:
        table[f"prefill {length}"] = {
            "baton": runner_step(runner, 1, length, length),
            "transformers": transformers_prefill(model, length),
        }
    return table


def measure(dtype: Dtype, threads: int, rounds: int) -> list[str]:
    """The table's lines for one type and thread count. The first round is warm-up."""
    lines = []
    for name, contenders in disciplines(dtype, threads, rounds).items():
        timings = {contender: Timing() for contender in contenders}
        for _ in range(rounds):
            for contender, step in contenders.items():
                timings[contender].measure(step)
        own = timings["baton"].comparable_s(threads)
        for contender, timing in timings.items():
            wall = statistics.median(timing.wall_s[1:])
            cpu = f"{1000 * statistics.median(timing.cpu_s[1:]):.0f}" if threads == 1 else ""
            speed = f"{wall * 1000:.1f} ms/step"
            if name.startswith("prefill"):
                speed = f"{int(name.split()[1]) / wall:.0f} tokens/s"
            best = f"{1000 * min(timing.wall_s[1:]):.1f}"
            ratio = f"{timing.comparable_s(threads) / own:.2f}"
            lines.append(f"| {dtype} | {threads} | {name} | {contender} | {speed} | {best} | {cpu} | {ratio} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    lines = []
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    for threads in options.threads:
        for dtype in dtypes:
            lines += measure(dtype, threads, options.rounds)
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(report(lines, options.rounds))


def report(lines: list[str], rounds: int) -> str:
    processor = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return (
        f"""# Engine speed against transformers

SmolLM2-135M-Instruct; decode steps at context {CONTEXT}, greedy token included; prefill of one prompt in one piece.
Both in one process on the same weights, measured in turns, medians of {rounds - 1} rounds after a warm-up. The last
column is how many times as long as Baton a contender takes (with one thread in processor time, which a busy machine
disturbs less than the clock): ratios count, absolute numbers depend on the machine.

- Machine: {processor}, {os.cpu_count()} cores, {platform.system()} {platform.release()}; torch {torch.__version__};
  load average {os.getloadavg()[0]:.1f} at the end (above the number of threads: others were busy meanwhile).
- Remake: `python benchmarks/bench_engine.py --rounds {rounds} --write docs/benchmarks/engine.md`

| type | threads | what | who | median | best, ms | processor ms (1 thread) | x Baton's time |
|---|---|---|---|---|---|---|---|
"""
        + "\n".join(lines)
        + "\n"
    )


if __name__ == "__main__":
    main()
