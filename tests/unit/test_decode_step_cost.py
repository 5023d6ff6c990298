"""What a decode step costs beside the model, in calls of functions: linear in the running requests, whatever the pool's
size. Counted, not timed: times are `make bench-step`'s.
"""

from __future__ import annotations

import sys
from types import FrameType

from core_rig import GATEWAY, decode_engine, prompt_of

from baton.common.engine.batch import StepResult
from baton.common.engine.core_api import EngineCore, FromPeer
from baton.common.ids import RequestId
from baton.common.messages import SamplingParams, Submit, pack_tokens

SIZES = (8, 64, 512)
CALLS_PER_REQUEST = 25
"""Of all functions, C's among them; 22 as this is written."""


def running_core(running: int, pages: int = 0) -> EngineCore:
    """A core whose requests all decode."""
    engine = decode_engine(
        pages=pages or running * 8,
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
    return core


def step(core: EngineCore, running: int) -> None:
    batch = core.next_batch(0.0)
    assert batch is not None
    assert batch.num_rows == running
    core.on_step(StepResult(batch.keys, (7,) * running, (None,) * running, 0.0), 0.0)


def calls_of_a_step(running: int, pages: int = 0) -> float:
    """Mean of a page's worth of steps, so that each request draws one page."""
    core, calls = running_core(running, pages), 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    step(core, running)
    sys.setprofile(count)
    try:
        for _ in range(16):
            step(core, running)
    finally:
        sys.setprofile(None)
    return calls / 16


def test_a_steps_work_is_linear_in_the_running_requests() -> None:
    few, some, many = (calls_of_a_step(running) for running in SIZES)
    per_request = (many - few) / (SIZES[2] - SIZES[0])
    assert per_request < CALLS_PER_REQUEST
    expected = few + (SIZES[1] - SIZES[0]) * per_request
    assert abs(some - expected) < 0.05 * expected, "not on the line through the others"


def test_a_steps_work_is_the_same_in_a_larger_pool() -> None:
    assert calls_of_a_step(64, pages=64 * 200) == calls_of_a_step(64)
