"""What a step of a long prompt takes, with chunks of one length and with chunks that a predictor chooses.

    python -m benchmarks.bench_chunks [--tokens 6000] [--rounds 3] [--dtype bfloat16] [--target 0.25]

The real prefill core over the real model on one pinned core, without a cluster: one prompt is offered, and computed
step by step. Both kinds take turns. Steps are measured in processor time of the engine's thread, which other processes
on the machine disturb less than the clock; the profile and the predictor see the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np
from msgspec.structs import replace

from baton.common.config import PrefillConfig
from baton.common.engine.batch import Batch, OnLayers, StepResult, Ticket, tell_nobody
from baton.common.engine.chunk_predictor import ChunkPredictor, Unfit
from baton.common.engine.profiling import predictor_for
from baton.common.engine.torch_runner import TorchRunner
from baton.common.ids import Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component
from baton.common.kv.pool import KvPool
from baton.common.messages import SamplingParams
from baton.prefill.core import PrefillCore
from baton.transfer.api import OfferReceived

MODEL = "smollm2-135m-instruct"
PAGE_SIZE = 16
PEER = Stamp(WorkerId("decode-0"), 1, Epoch(1))


class CpuTimed:
    """Says of each step what this thread computed for it, instead of what the clock says."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self.memory, self.guides = runner.memory, runner.guides
        self.vocab_size, self.max_positions = runner.vocab_size, runner.max_positions
        self.forward_path = runner.forward_path
        self._began_s = 0.0

    def launch(self, batch: Batch, on_layers: OnLayers = tell_nobody) -> Ticket:
        self._began_s = time.thread_time()
        return self._runner.launch(batch, on_layers)

    def collect(self, ticket: Ticket) -> StepResult:
        result = self._runner.collect(ticket)
        return replace(result, compute_s=time.thread_time() - self._began_s)


def steps_of(pool: KvPool, runner: CpuTimed, predictor: ChunkPredictor | None, tokens: np.ndarray) -> list[float]:
    """Seconds of each step of one prompt, nothing of which is cached."""
    config = PrefillConfig(layer_groups=1)
    core = PrefillCore(pool, config, runner.vocab_size, predictor=predictor)
    key = HandoffKey(HandoffId(1), 0)
    core.handle(OfferReceived(key, PEER, RequestId("r"), tokens, 0, True, SamplingParams(max_tokens=1), 1e9), 0.0)
    seconds: list[float] = []
    while (batch := core.next_batch(0.0)) is not None:
        result = runner.collect(runner.launch(batch))
        seconds.append(result.compute_s)
        core.on_step(result, 0.0)
    return seconds


def told(name: str, rounds: list[list[float]]) -> str:
    all_ms = sorted(1000 * one for steps in rounds for one in steps[:-1])  # the last one is as long as what is left
    total_s = statistics.median(sum(steps) for steps in rounds)
    quantiles = [all_ms[0], statistics.median(all_ms), all_ms[-1]]
    shown = " | ".join(f"{one:.0f}" for one in quantiles)
    return f"| {name} | {len(rounds[0])} | {shown} | {quantiles[-1] / quantiles[0]:.1f} | {total_s:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--target", type=float, default=0.25, help="seconds that a step may take")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pages = 2 * arguments.tokens // PAGE_SIZE
    model = TorchRunner.load(MODEL, dtype=arguments.dtype, num_pages=pages + 1, page_size=PAGE_SIZE, threads=1)
    runner = CpuTimed(model)

    def pool() -> KvPool:
        return KvPool(runner.memory.layout, {Component.FULL: pages + 1}, 4, arguments.tokens + 1, "chunk")

    began_s = time.thread_time()
    found = predictor_for(pool(), runner, PrefillConfig().chunk_tokens, arguments.target)
    if isinstance(found, Unfit):
        raise SystemExit(found.reason)
    print(f"profile: {time.thread_time() - began_s:.1f} s; {found}")
    tokens = np.random.default_rng(0).integers(5, 40_000, arguments.tokens).astype(np.int32)
    fixed: list[list[float]] = []
    chosen: list[list[float]] = []
    for _ in range(arguments.rounds):
        fixed.append(steps_of(pool(), runner, None, tokens))
        chosen.append(steps_of(pool(), runner, found, tokens))
    print(f"{MODEL} {arguments.dtype}, one prompt of {arguments.tokens} tokens, one core, {arguments.rounds} rounds\n")
    print("| chunks | steps | shortest step, ms | median | longest | longest / shortest | prompt, s |")
    print("|---|---|---|---|---|---|---|")
    print(told("of 512 tokens", fixed))
    print(told(f"for {arguments.target * 1000:.0f} ms", chosen))


if __name__ == "__main__":
    main()
