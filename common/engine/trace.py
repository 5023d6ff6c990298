"""What an engine thread does, for `baton trace`: slices that follow one another, and the hand-offs that pass through.

Owns: the names of the slices: "plan" (events, timers, the next batch), "prefill" | "decode" | "mixed" (a step's
computing), "outcome" (what the step means, told to everybody). Never: runs unless a trace was asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from baton.common.clock import Clock
from baton.common.engine.batch import Batch
from baton.common.trace import Args, Recorder


class EngineTrace:
    """Used on the engine thread. `flow_of` names the hand-off that an event or effect is about; "": none."""

    def __init__(self, recorder: Recorder, clock: Clock, flow_of: Callable[[object], str]) -> None:
        self._recorder = recorder
        self._clock = clock
        self._flow_of = flow_of
        self._since_s = 0.0

    def begin(self, now: float) -> None:
        """Here the next slice begins."""
        self._since_s = now

    def passes(self, item: object) -> None:
        """An event comes in, or an effect goes out."""
        flow = self._flow_of(item)
        if flow:
            self._recorder.passage(flow, self._clock.now())

    def planned(self) -> None:
        self._end("plan", {})

    def computed(self, batch: Batch) -> None:
        self._end(_kind(batch), {"rows": batch.num_rows, "tokens": batch.num_tokens})

    def told(self) -> None:
        self._end("outcome", {})

    def _end(self, name: str, args: Args) -> None:
        now = self._clock.now()
        self._recorder.slice(name, self._since_s, now, args)
        self._since_s = now


def _kind(batch: Batch) -> str:
    """A row of one token counts as decode, also when it is the rest of a prompt."""
    single = int(np.count_nonzero(np.diff(batch.q_offsets) == 1))
    return "decode" if single == batch.num_rows else "mixed" if single else "prefill"
