"""What a decode step costs beside the forward pass: planning, sampling and telling, by running requests.

    python -m benchmarks.bench_step [--vocabulary 49152] [--steps 64] [--write docs/benchmarks/step.md]

No model runs: logits are made up. Processor time of one thread, so that a busy machine disturbs little; best of the
steps for what is counted in microseconds. That the work is linear in the requests, and the same in a larger pool, is
held by `tests/unit/test_decode_step_cost.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from baton.common.config import DecodeConfig, TransferConfig
from baton.common.engine.batch import Batch, StepResult
from baton.common.engine.core_api import FromPeer
from baton.common.engine.sampling import sample
from baton.common.ids import Epoch, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.pool import KvPool
from baton.common.messages import SamplingParams, Submit, pack_tokens
from baton.decode.core import DecodeCore
from benchmarks.engine.cases import prompt_ids
from benchmarks.transfer.report import machine, table

RUNNING = (1, 8, 32, 128, 512)
POOLS = (1, 16)
"""As many times the pages that the requests need."""
PROMPT, PAGE_SIZE, CONTEXT = 120, 16, 512
GATEWAY = Stamp(WorkerId("gateway-0"), 1, Epoch(1))
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=300),
    "temperature": SamplingParams(max_tokens=300, temperature=0.8, seed=1),
    "top-k 50": SamplingParams(max_tokens=300, temperature=0.8, top_k=50, seed=1),
    "top-p 0.9": SamplingParams(max_tokens=300, temperature=0.8, top_p=0.9, seed=1),
    "5 log probabilities": SamplingParams(max_tokens=300, logprobs=5),
}


def decoding_core(running: int, pages: int) -> DecodeCore:
    """All its requests decode."""
    pool = KvPool(KvLayout(PAGE_SIZE), {Component.FULL: pages + 1}, running, CONTEXT, "radix", None, 1 << 16)
    config = DecodeConfig(max_running_requests=running, num_reserved_decode_tokens=0, chunk_tokens=1 << 16)
    core = DecodeCore(Stamp(WorkerId("decode-0"), 1, Epoch(2)), pool, config, TransferConfig(), CONTEXT, 1 << 16)
    for row in range(running):
        submit = Submit(
            request_id=RequestId(f"r{row}"),
            placement=0,
            prompt=pack_tokens(prompt_ids(row, PROMPT)),
            sampling=SAMPLINGS["greedy"],
            ttl_s=1e6,
        )
        core.handle(FromPeer(GATEWAY, submit), 0.0)
    while not (batch := planned(core)).num_rows == batch.num_tokens == running:
        core.on_step(made_up(batch), 0.0)
    core.on_step(made_up(batch), 0.0)
    return core


def planned(core: DecodeCore) -> Batch:
    batch = core.next_batch(0.0)
    assert batch is not None
    return batch


def made_up(batch: Batch) -> StepResult:
    tokens = tuple(-1 if one is None else 7 for one in batch.sampling)
    return StepResult(batch.keys, tokens, (None,) * batch.num_rows, 0.0)


def took_s(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def core_rows(steps: int) -> list[list[str]]:
    rows = []
    for running in RUNNING:
        cells = [str(running)]
        for times in POOLS:
            core, plan_s, tell_s = decoding_core(running, times * running * CONTEXT // PAGE_SIZE), [], []
            for _ in range(steps):
                batches: list[Batch] = []
                plan_s.append(took_s(lambda core=core, batches=batches: batches.append(planned(core))))
                result = made_up(batches[0])
                tell_s.append(took_s(lambda core=core, result=result: core.on_step(result, 0.0)))
            cells += [f"{1e6 * min(plan_s):.0f}", f"{1e6 * min(tell_s):.0f}"]
        rows.append(cells)
    return rows


def sampling_rows(vocabulary: int, steps: int) -> list[list[str]]:
    """Logits of a token or two that are likely, and many that are not: as models make them."""
    torch.manual_seed(0)
    logits = torch.randn(max(RUNNING), vocabulary) * 1.5
    logits[:, :100] += torch.rand(max(RUNNING), 100) * 12
    rows = []
    for running in RUNNING:
        cells = [str(running)]
        for params in SAMPLINGS.values():
            every, indices = [params] * running, list(range(running))
            tries = max(3, steps // running)
            best = min(took_s(lambda: sample(logits[: len(every)], every, indices)) for _ in range(tries))  # noqa: B023
            cells.append(f"{1e3 * best:.2f}")
        rows.append(cells)
    return rows


def document(vocabulary: int, steps: int) -> list[str]:
    pools = [f"{name}, pool {times}x" for times in POOLS for name in ("plan", "tell")]
    return [
        "# What a decode step costs beside the forward pass",
        "",
        f"`python -m benchmarks.bench_step`; {machine()}; processor time of one thread, best of {steps} steps.",
        "",
        "Plan: a token's room for each request, and the batch's arrays. Tell: each request's token to its gateway.",
        "",
        *table(["running requests, µs", *pools], core_rows(steps)),
        f"Sampling, of {vocabulary:,} tokens:",
        "",
        *table(["running requests, ms", *SAMPLINGS], sampling_rows(vocabulary, steps)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = "\n".join(document(arguments.vocabulary, arguments.steps))
    print(text)
    if arguments.write:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
