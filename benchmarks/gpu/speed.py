"""How fast a device copies, computes prompts and decodes; with graphs and without."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from baton.common.engine.gpu.runner import DeviceRunner
from baton.common.kv.layout import Component
from baton.transfer.device_copier import DeviceCopier
from baton.transfer.pool_copier import Copying
from baton.transfer.transports.base import Rows
from benchmarks.gpu.rig import Bench, Line, pages_of, steps_of

PAGE_BYTES = 64 << 10
REGION_BYTES = 4 << 20
SLOTS = 4


def bandwidth(bench: Bench) -> Iterator[Line]:
    nbytes, place = bench.sizes.copied_bytes, bench.device.place
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=place) for _ in range(2))
    host = bench.device.pinned(nbytes, torch.uint8)
    whole = {
        "device to device (read and written)": (lambda: target.copy_(source), 2),
        "host to device, pinned": (lambda: target.copy_(host, non_blocking=True), 1),
        "device to host, pinned": (lambda: host.copy_(source, non_blocking=True), 1),
    }
    for what, (work, times) in whole.items():
        yield _rate(what, times * nbytes, bench.seconds(work))
    page_bytes = min(PAGE_BYTES, nbytes // 4)
    pages = nbytes // page_bytes
    ids = torch.from_numpy(np.random.default_rng(0).permutation(pages).astype(np.int32)).to(place)
    rows, flat = source.view(pages, page_bytes), target.view(pages, page_bytes)
    rows.copy_(torch.randint(0, 256, (pages, page_bytes), dtype=torch.uint8, device=place))
    gather = bench.seconds(lambda: bench.copy_rows(flat, None, rows, ids))
    right = torch.equal(flat, rows[ids.long()])
    yield _rate(f"gather of pages of {page_bytes >> 10} KiB (read and written)", 2 * nbytes, gather, right)
    scatter = bench.seconds(lambda: bench.copy_rows(rows, ids, flat, None))
    yield _rate("scatter (read and written)", 2 * nbytes, scatter, torch.equal(rows[ids.long()], flat))
    yield from _through_the_copier(bench, rows)


def _through_the_copier(bench: Bench, pool: torch.Tensor) -> Iterator[Line]:
    """As hand-offs do: between pages and slots in pinned host memory, several copies under way."""
    region = min(REGION_BYTES, pool.numel() // 4) // pool.shape[1] * pool.shape[1]
    copier = DeviceCopier({Component.FULL: pool}, bench.copy_rows, bench.copies, region)
    slots = np.zeros((SLOTS, region), np.uint8)
    copier.use_staging(slots.reshape(-1))
    count, regions = region // pool.shape[1], pool.numel() // region
    units = [np.arange(number * count, (number + 1) * count, dtype=np.int32) for number in range(regions)]
    for what, ask in (("gather", copier.gather), ("scatter", copier.scatter)):
        started, under_way = time.perf_counter(), deque[Copying]()
        for number, ids in enumerate(units):
            if len(under_way) == SLOTS:
                _wait(under_way.popleft())
            under_way.append(ask(Rows(Component.FULL, ids, 0, pool.shape[1]), slots[number % SLOTS]))
        for copy in under_way:
            _wait(copy)
        seconds, there = time.perf_counter() - started, pool.cpu().numpy()
        looked_at = range(regions - SLOTS, regions) if what == "gather" else range(regions)  # slots are used again
        right = all(np.array_equal(slots[one % SLOTS], there[units[one]].reshape(-1)) for one in looked_at)
        yield _rate(f"{what} of regions through the copier", regions * region, seconds, right)
    copier.close()


def _wait(copy: Copying) -> None:
    while not copy.done():
        time.sleep(0)


def _rate(what: str, nbytes: int, seconds: float, right: bool | None = None) -> Line:
    return Line("bandwidth", what, f"{nbytes / seconds / 1e9:.1f} GB/s", right)


def model(bench: Bench) -> Iterator[Line]:
    """Tokens per second in bfloat16."""
    sizes, most = bench.sizes, max(bench.sizes.decode_rows)
    context = max(sizes.context_tokens, sizes.prefill_tokens)
    pages = max(pages_of(most, sizes.context_tokens), pages_of(1, context))
    with_graphs = bench.runner("bfloat16", "auto", pages=pages, graph_rows=most)
    yield _prefill(bench, with_graphs)
    without = bench.runner("bfloat16", "auto", pages=pages, graph_rows=0)
    for rows in sizes.decode_rows:
        on, off = (_decode_step_s(bench, runner, rows) for runner in (with_graphs, without))
        what = f"{rows} rows at {sizes.context_tokens} tokens"
        yield Line("decode", what, f"{rows / on:,.0f} tokens/s; {rows / off:,.0f} without graphs ({off / on:.2f}x)")


def _prefill(bench: Bench, runner: DeviceRunner) -> Line:
    tokens = bench.sizes.prefill_tokens
    seconds = _step_s(bench, runner, 1, tokens, tokens)
    return Line("prefill", f"{tokens} tokens, {runner.forward_path}", f"{tokens / seconds:,.0f} tokens/s")


def _decode_step_s(bench: Bench, runner: DeviceRunner, rows: int) -> float:
    return _step_s(bench, runner, rows, 1, bench.sizes.context_tokens)


def _step_s(bench: Bench, runner: DeviceRunner, rows: int, queries: int, context: int) -> float:
    """Of launch and collect, the median; the first two compile and capture."""
    steps, taken = steps_of(rows, queries, context), list[float]()
    for number in range(2 + (bench.sizes.steps if queries == 1 else min(5, bench.sizes.steps))):
        started = time.perf_counter()
        runner.collect(runner.launch(next(steps)))
        if number > 1:
            taken.append(time.perf_counter() - started)
    return float(np.median(taken))
