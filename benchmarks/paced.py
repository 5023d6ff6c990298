"""A decode worker of the fake model whose steps take as long as PACE_S says: so fast tokens come, and no faster.

Owns nothing but the waiting.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from baton.common.engine.batch import Batch, ModelRunner, OnLayers, StepResult, Ticket, tell_nobody
from baton.decode.actor import DecodeActor
from baton.transfer.model_runner import make_runner
from baton.transfer.process import ProcessSpec

PACE_S = "BENCH_PACE_S"


class PacedRunner:
    """Computes what `inner` computes; a step ends `step_s` after the one before, or when it is computed."""

    def __init__(self, inner: ModelRunner, step_s: float) -> None:
        self._inner = inner
        self._step_s = step_s
        self._due_s = 0.0
        self.memory = inner.memory
        self.vocab_size = inner.vocab_size
        self.max_positions = inner.max_positions
        self.forward_path = inner.forward_path
        self.guides = inner.guides

    def launch(self, batch: Batch, on_layers: OnLayers = tell_nobody) -> Ticket:
        return self._inner.launch(batch, on_layers)

    def collect(self, ticket: Ticket) -> StepResult:
        result = self._inner.collect(ticket)
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        self._due_s = time.monotonic() + self._step_s
        return result


class PacedDecodeActor(DecodeActor):
    def make_runner(self, spec: ProcessSpec, progress: Callable[[str], None]) -> ModelRunner:
        return PacedRunner(make_runner(spec, progress), float(os.environ[PACE_S]))
