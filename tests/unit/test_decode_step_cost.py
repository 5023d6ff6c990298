"""Scheduler overhead of a decode step: printed, and held to be linear in the running requests."""

from __future__ import annotations

import time

from core_rig import GATEWAY, decode_engine, prompt_of

from baton.common.engine.batch import StepResult
from baton.common.engine.core_api import FromPeer
from baton.common.ids import RequestId
from baton.common.messages import SamplingParams, Submit, pack_tokens

SIZES = (64, 256)


def overhead_s(running: int, steps: int = 40) -> float:
    """Best time of one next_batch + on_step with `running` requests, of this thread alone: others may want the cores.
    The model's time is not in it."""
    engine = decode_engine(
        pages=running * 24,
        page_size=16,
        rows=running,
        context=512,
        max_running_requests=running,
        num_reserved_decode_tokens=0,
        chunk_tokens=1 << 16,
    )
    core = engine.core
    for number in range(running):
        submit = Submit(
            request_id=RequestId(f"r{number}"),
            placement=0,
            prompt=pack_tokens(prompt_of(100, number)),
            sampling=SamplingParams(max_tokens=300),
            ttl_s=1e6,
        )
        core.handle(FromPeer(GATEWAY, submit), 0.0)
    engine.step()
    best = float("inf")
    for _ in range(steps):
        started = time.thread_time()
        batch = core.next_batch(0.0)
        planned = time.thread_time()
        assert batch is not None
        assert batch.num_rows == running
        result = StepResult(batch.keys, (7,) * running, (None,) * running, 0.0)
        computed = time.thread_time()
        core.on_step(result, 0.0)
        best = min(best, time.thread_time() - computed + planned - started)
    return best


def test_step_overhead_is_linear_in_running_requests() -> None:
    small, large = (overhead_s(running) for running in SIZES)
    print(f"\nscheduler overhead per step: {small * 1e3:.2f} ms for {SIZES[0]}, {large * 1e3:.2f} ms for {SIZES[1]}")
    assert large < small * (SIZES[1] / SIZES[0]) * 2.5
