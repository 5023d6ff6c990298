"""A runner that computes some steps and then no more: for tests and simulation. Owns nothing but the count."""

from __future__ import annotations

from baton.common.engine.batch import Batch, ModelRunner, OnLayers, StepResult, Ticket, tell_nobody


class BreakingRunner:
    """`ModelRunner` over another one; raises `error` instead of launching more than `steps`."""

    def __init__(self, runner: ModelRunner, steps: int, error: BaseException) -> None:
        self.memory = runner.memory
        self.vocab_size = runner.vocab_size
        self.max_positions = runner.max_positions
        self.forward_path = runner.forward_path
        self.guides = runner.guides
        self._runner = runner
        self._left = steps
        self._error = error

    def launch(self, batch: Batch, on_layers: OnLayers = tell_nobody) -> Ticket:
        if self._left == 0:
            raise self._error
        self._left -= 1
        return self._runner.launch(batch, on_layers)

    def collect(self, ticket: Ticket) -> StepResult:
        return self._runner.collect(ticket)
