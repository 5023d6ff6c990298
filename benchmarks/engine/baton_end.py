"""Baton's engine as a worker runs it: the decode core, the runner, and nothing left out but thread and sockets.

A step is what `EngineLoop` does in a turn: plan, compute, sample, tell. What is spent outside of the runner is told
apart (`overhead_s`). A decode's contexts are not computed: the pool is filled with noise, and the runner skips the
prompts, so that 32 contexts of 4,096 tokens are there at once.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from baton.common.config import DecodeConfig, KvConfig, PrefillConfig, TransferConfig
from baton.common.engine.batch import Batch, StepResult
from baton.common.engine.core_api import FromPeer
from baton.common.engine.torch_runner import TorchRunner
from baton.common.ids import Epoch, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component
from baton.common.kv.pool import KvPool
from baton.common.kv.sizing import Load, size_pools
from baton.common.messages import SamplingParams, Submit, pack_tokens
from baton.common.model.loading import model_info
from baton.decode.core import DecodeCore
from benchmarks.engine.cases import STEPS, Case, prompt_ids
from benchmarks.engine.child import Step, main

CHUNK_TOKENS = PrefillConfig().chunk_tokens
PAGE_SIZE = KvConfig().page_size
GATEWAY = Stamp(WorkerId("gateway-0"), 1, Epoch(1))
DECODE = Stamp(WorkerId("decode-0"), 1, Epoch(2))
NOISE_BYTES = 32 << 20


class Baton:
    def __init__(self, spec: Mapping[str, Any]) -> None:
        cases = [Case(**case) for case in spec["cases"]]
        info = model_info(spec["model"])
        self._layout = info.layout(PAGE_SIZE)
        bytes_of = {one: info.component_bytes(one, spec["dtype"]) for one in self._layout.components}
        self._page_bytes = {one: PAGE_SIZE * nbytes for one, nbytes in bytes_of.items()}
        counts = [self._counts(case) for case in cases]
        self._runner = TorchRunner.load(
            spec["model"],
            dtype=spec["dtype"],
            num_pages={one: max(count[one] for count in counts) for one in self._layout.components},
            page_size=PAGE_SIZE,
            threads=len(spec["cores"]),
            forward_path=spec["path"],
            weights=spec["weights"],
        )
        self._noise = torch.randn(NOISE_BYTES // 4).to(getattr(torch, spec["dtype"])).view(torch.uint8).numpy()
        self._core: DecodeCore | None = None
        self._overheads_s: list[float] = []
        self._began_part_s: dict[str, float] = {}
        self._case: Case | None = None
        self.about = f"chunks of {CHUNK_TOKENS} tokens, pages of {PAGE_SIZE}"

    def _counts(self, case: Case) -> dict[Component, int]:
        """Pages of each component for a case, the null page among them."""
        pages = case.rows * (-(-case.longest // PAGE_SIZE) + 1)
        load = Load(case.rows, _chunk_tokens(case), case.longest)
        kv = KvConfig(num_pages=pages, prefix_cache="chunk")
        return {one: count + 1 for one, count in size_pools(self._layout, self._page_bytes, kv, load).items()}

    def prepare(self, case: Case) -> Step:
        counts = self._counts(case)
        if case.kind == "decode":
            for component, buffer in self._runner.memory.buffers.items():
                _fill(buffer.as_bytes()[1 : counts[component]], self._noise)
        pool = KvPool(self._layout, counts, case.rows, case.longest, "chunk", None, _chunk_tokens(case))
        config = DecodeConfig(
            max_running_requests=case.rows, num_reserved_decode_tokens=0, chunk_tokens=_chunk_tokens(case)
        )
        core = DecodeCore(DECODE, pool, config, TransferConfig(), case.longest, self._runner.vocab_size)
        wanted = STEPS + 2 if case.kind == "decode" else 1
        for row in range(case.rows):
            submit = Submit(
                request_id=RequestId(f"r{row}"),
                placement=0,
                prompt=pack_tokens(prompt_ids(row, case.tokens)),
                sampling=SamplingParams(max_tokens=wanted),
                ttl_s=1e6,
            )
            core.handle(FromPeer(GATEWAY, submit), 0.0)
        self._core, self._case = core, case
        self._overheads_s, self._began_part_s = [], self._runner.part_s()
        if case.kind == "prefill":
            return self._all_turns
        prompts = core.next_batch(0.0)
        core.on_step(_made_up(prompts), 0.0)
        first = core.next_batch(0.0)
        assert first is not None
        assert first.num_rows == first.num_tokens == case.rows, "each row decodes"
        core.on_step(_made_up(first), 0.0)
        return self._turn

    def _turn(self) -> bool:
        """As `EngineLoop`'s. False: there was nothing to do."""
        assert self._core is not None
        began_s = time.perf_counter()
        batch = self._core.next_batch(0.0)
        if batch is None:
            return False
        planned_s = time.perf_counter()
        result = self._runner.collect(self._runner.launch(batch))
        computed_s = time.perf_counter()
        self._core.on_step(result, 0.0)
        self._overheads_s.append(time.perf_counter() - computed_s + planned_s - began_s)
        return True

    def _all_turns(self) -> None:
        while self._turn():
            pass

    @property
    def extra(self) -> dict[str, Any]:
        """`part_s`: of a decode step, the first one included, or of a whole prefill."""
        assert self._case is not None
        turns = len(self._overheads_s) if self._case.kind == "decode" else 1
        parts = {name: (now - self._began_part_s[name]) / turns for name, now in self._runner.part_s().items()}
        return {"overhead_s": statistics.median(self._overheads_s), "part_s": parts}

    def drop(self) -> None:
        """The pool's memory goes back to the system: other engines want it."""
        self._core = None
        for buffer in self._runner.memory.buffers.values():
            _give_back(buffer.as_bytes())


def _chunk_tokens(case: Case) -> int:
    """A decode's prompts go in one step, so that no row has begun its answer before another."""
    return CHUNK_TOKENS if case.kind == "prefill" else case.rows * case.tokens


def _made_up(batch: Batch | None) -> StepResult:
    """As if it had been computed."""
    assert batch is not None
    tokens = tuple(-1 if one is None else 100 + row for row, one in enumerate(batch.sampling))
    return StepResult(batch.keys, tokens, (None,) * batch.num_rows, 0.0)


def _fill(pages: np.ndarray, noise: np.ndarray) -> None:
    """Untouched memory is one page of zeros, which every read would find in the cache."""
    flat = pages.reshape(-1)
    for start in range(0, len(flat), len(noise)):
        part = flat[start : start + len(noise)]
        part[:] = noise[: len(part)]


def _give_back(memory: np.ndarray) -> None:
    start = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    length = memory.ctypes.data + memory.nbytes - start
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), "madvise")


if __name__ == "__main__":
    main(Baton)
