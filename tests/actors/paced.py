"""Workers whose steps take as long as those of a small real model, so that a kill can meet them at work."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.common.engine.batch import Batch, ModelRunner, OnLayers, StepResult, Ticket, tell_nobody
from baton.decode.actor import DecodeActor
from baton.prefill.actor import PrefillActor
from baton.transfer.model_runner import make_runner
from baton.transfer.process import ProcessSpec

STEP_S = 0.004
TOKEN_S = 0.00004

PACED = {
    "prefill": "paced:PacedPrefillActor",
    "decode": "paced:PacedDecodeActor",
    "gateway": "baton.deploy.gateway:GatewayActor",
}


class PacedRunner:
    """A `ModelRunner` that computes what `inner` computes, but not so fast."""

    def __init__(self, inner: ModelRunner) -> None:
        self._inner = inner
        self.memory = inner.memory
        self.vocab_size = inner.vocab_size
        self.max_positions = inner.max_positions
        self.forward_path = inner.forward_path
        self.guides = inner.guides
        self._step_s = 0.0

    def launch(self, batch: Batch, on_layers: OnLayers = tell_nobody) -> Ticket:
        self._step_s = STEP_S + TOKEN_S * batch.num_tokens
        return self._inner.launch(batch, on_layers)

    def collect(self, ticket: Ticket) -> StepResult:
        time.sleep(self._step_s)  # this is the computing
        return self._inner.collect(ticket)


class PacedPrefillActor(PrefillActor):
    def make_runner(self, spec: ProcessSpec, progress: Callable[[str], None]) -> ModelRunner:
        return PacedRunner(make_runner(spec, progress))


class PacedDecodeActor(DecodeActor):
    def make_runner(self, spec: ProcessSpec, progress: Callable[[str], None]) -> ModelRunner:
        return PacedRunner(make_runner(spec, progress))
