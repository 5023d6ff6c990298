"""What the sections of `gpu_check` share: the device, how much is done, a model on it, and lines of the table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from baton.common.engine.backends import AttentionChoice, DeviceBackends, choose_device_backends
from baton.common.engine.batch import Batch, BatchRow, pack_batch
from baton.common.engine.gpu.device import EngineDevice
from baton.common.engine.gpu.runner import DeviceRunner
from baton.common.engine.paged_attention import TorchPagedAttention
from baton.common.kv.layout import Component
from baton.common.messages import SamplingParams
from baton.common.model.loading import load_model, model_info
from baton.common.units import pages_for_tokens
from baton.transfer.device_copier import Device, RowCopy

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Line:
    """One of the table. `ok` None: a number that nothing is compared with."""

    section: str
    what: str
    found: str
    ok: bool | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done."""

    prompts: int  # of the stored references
    new_tokens: int
    copied_bytes: int
    prefill_tokens: int
    context_tokens: int
    decode_rows: tuple[int, ...]
    steps: int


FULL = Sizes(40, 32, 1 << 28, 2048, 1024, (1, 8, 32, 64), 50)
TINY = Sizes(2, 3, 1 << 14, 20, 20, (1, 2), 1)


@dataclass(frozen=True, slots=True)
class Bench:
    """`interpret`: no GPU; the host is the device, and kernels run in Triton's interpreter."""

    device: EngineDevice
    copies: Device  # of the transfer plane, on the same device
    copy_rows: RowCopy
    model: str
    sizes: Sizes
    interpret: bool

    def runner(
        self, dtype: Literal["float32", "bfloat16"], attention: AttentionChoice, *, pages: int, graph_rows: int
    ) -> DeviceRunner:
        info = model_info(self.model)
        with self.device.stream():
            backends = choose_device_backends(attention, info.head_dim, getattr(torch, dtype), self.device.place)
        if self.interpret:  # which would take minutes for a model's steps
            backends = DeviceBackends(TorchPagedAttention(), TorchPagedAttention())
        return DeviceRunner(
            load_model(self.model, dtype),
            info,
            self.device,
            backends,
            dtype=dtype,
            num_pages={Component.FULL: pages},
            page_size=PAGE_SIZE,
            max_graph_rows=graph_rows,
        )

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one run of `work` on the device's stream, the best of five after one that warms up."""
        best = float("inf")
        with self.device.stream():
            work()
            for _ in range(1 if self.interpret else 5):
                self.device.event().wait()
                started = time.perf_counter()
                work()
                self.device.event().wait()
                best = min(best, time.perf_counter() - started)
        return best


def generate(runner: DeviceRunner, prompts: list[list[int]], new_tokens: int, stop: frozenset[int]) -> list[list[int]]:
    """Greedy, all of them together: their prompts in one step, then steps of decode."""
    outputs: list[list[int]] = [[] for _ in prompts]
    most = [pages_for_tokens(len(prompt) + new_tokens, PAGE_SIZE) for prompt in prompts]
    begins = np.cumsum([1, *most])
    alive = list(range(len(prompts)))
    while alive:
        rows = []
        for one in alive:
            kv_len = len(prompts[one]) + len(outputs[one])
            pages = np.arange(begins[one], begins[one] + pages_for_tokens(kv_len, PAGE_SIZE), dtype=np.int32)
            fresh = outputs[one][-1:] or prompts[one]
            rows.append(BatchRow(one, np.array(fresh, np.int32), kv_len, pages, SamplingParams()))
        result = runner.collect(runner.launch(pack_batch(rows, PAGE_SIZE)))
        for one, token in zip(list(alive), result.tokens, strict=True):
            outputs[one].append(token)
            if token in stop or len(outputs[one]) == new_tokens:
                alive.remove(one)
    return outputs


def steps_of(rows: int, queries: int, context: int) -> Iterator[Batch]:
    """The same step over and over: rows of so many queries at the end of so many tokens."""
    pages = pages_for_tokens(context, PAGE_SIZE)
    held = [np.arange(1 + row * pages, 1 + (row + 1) * pages, dtype=np.int32) for row in range(rows)]
    ids = np.ones(queries, np.int32)
    batch = pack_batch([BatchRow(row, ids, context, held[row], SamplingParams()) for row in range(rows)], PAGE_SIZE)
    while True:
        yield batch


def pages_of(rows: int, context: int) -> int:
    """Of a pool for `steps_of`."""
    return 1 + rows * pages_for_tokens(context, PAGE_SIZE)
