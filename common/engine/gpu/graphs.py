"""Decode steps as CUDA graphs: one for each of a few numbers of rows, captured when a step first needs it.

A step of fewer rows is padded (`staging.py`, G2). Owns: the graphs, and the memory of their steps' arrays. Never:
decides what a step computes. A capture that fails is told once, and its size is computed without a graph from then on.
"""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import torch

from baton.common.engine.batch import Batch, tell_nobody
from baton.common.engine.gpu.device import CaptureFailed, EngineDevice, Graph
from baton.common.engine.gpu.staging import StepSizes, StepStaging
from baton.common.engine.module_forward import ModuleForward, StepTensors
from baton.common.log import EventLog

_log = EventLog("baton.engine")


def buckets(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8 and then every eighth number up to `max_rows`: padding costs a step an eighth of a large batch."""
    small = tuple(takewhile(lambda rows: rows < max_rows, (1, 2, 4)))
    return (*small, *range(8, max_rows, 8), max_rows)


class DecodeGraphs:
    """Of one model, for steps of up to `sizes.rows` rows."""

    def __init__(self, device: EngineDevice, modules: ModuleForward, sizes: StepSizes) -> None:
        self.max_rows = sizes.rows
        self._device = device
        self._modules = modules
        self._staging = StepStaging(device, sizes)
        self._buckets = buckets(sizes.rows)
        self._graphs: dict[int, Graph | None] = {}  # by rows; None: cannot be captured

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Logits [rows, vocabulary], good until the next step; None: compute it without a graph."""
        if not self._takes(batch):
            return None
        rows = next(bucket for bucket in self._buckets if bucket >= batch.num_rows)
        if rows in self._graphs and self._graphs[rows] is None:
            return None
        step = self._staging.place(batch, np.arange(rows), rows)
        if rows not in self._graphs:
            self._graphs[rows] = self._capture(step, rows)
        graph = self._graphs[rows]
        return None if graph is None else graph.replay()[: batch.num_rows]

    @property
    def captured(self) -> tuple[int, ...]:
        """The numbers of rows that have a graph."""
        return tuple(rows for rows, graph in sorted(self._graphs.items()) if graph is not None)

    def _takes(self, batch: Batch) -> bool:
        single = batch.num_tokens == batch.num_rows <= self.max_rows
        pages = max(len(table.page_ids) for table in (batch.main, batch.swa) if table is not None)
        plain = not batch.report_after and not batch.scorings and batch.state_slots is None
        return single and plain and pages + self.max_rows <= self._staging.sizes.pages

    def _capture(self, step: StepTensors, rows: int) -> Graph | None:
        def work() -> torch.Tensor:
            logits = self._modules.compute(step, {}, tell_nobody)
            assert logits is not None
            return logits

        try:
            graph = self._device.capture(work)
        except CaptureFailed as error:
            _log.warning("graph_failed", rows=rows, reason=str(error), advice="these steps run without a graph")
            return None
        _log.info("graph_captured", rows=rows)
        return graph
