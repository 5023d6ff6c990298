"""Pages of one process's pool, read by another one on the same GPU: over CUDA IPC, straight into its own pages.

What a lane between processes of a host would do (docs/adr/0036 says that there is none yet): the source shares its
pool's memory, the receiver maps it and copies rows by the same kernel. On the host, in `--interpret`, torch shares
memory of the host by the same call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.multiprocessing as processes

from benchmarks.gpu.rig import Bench, Line

PAGE_BYTES = 64 << 10
DEADLINE_S = 120.0


def _source(pools: processes.Queue, done: processes.Event, pages: int, page_bytes: int, place: str) -> None:
    """The other process: a pool whose every page says which one it is."""
    pool = torch.arange(pages, device=place).to(torch.uint8)[:, None].expand(pages, page_bytes).contiguous()
    if place != "cpu":
        torch.cuda.synchronize()
    pools.put(pool)
    done.wait(DEADLINE_S)


def over_ipc(bench: Bench) -> Iterator[Line]:
    nbytes, place = bench.sizes.copied_bytes, bench.device.place
    page_bytes = min(PAGE_BYTES, nbytes // 4)
    pages = nbytes // page_bytes
    context = processes.get_context("spawn")
    pools, done = context.Queue(), context.Event()
    process = context.Process(target=_source, args=(pools, done, pages, page_bytes, str(place)), daemon=True)
    process.start()
    try:
        began = time.perf_counter()
        found, right = _copied(bench, pools.get(timeout=DEADLINE_S))
        waited_s = time.perf_counter() - began
    finally:
        done.set()
        process.join(DEADLINE_S)
    how = "shared host memory" if place.type == "cpu" else "cuda_ipc"
    what = f"scattered pages of {page_bytes >> 10} KiB over {how}, {waited_s:.1f} s with the other process's start"
    yield Line("hand-off", what, found, right)


def _copied(bench: Bench, theirs: torch.Tensor) -> tuple[str, bool]:
    """All of the other pool, page for page into others of ours; their memory is let go at the end."""
    pages, place = len(theirs), bench.device.place
    ours = torch.zeros_like(theirs)
    ids = torch.from_numpy(np.random.default_rng(1).permutation(pages).astype(np.int32)).to(place)
    seconds = bench.seconds(lambda: bench.copy_rows(ours, ids, theirs, ids.flip(0)))
    expected = (torch.arange(pages, device=place) % 256).to(torch.uint8)[ids.flip(0).long()]
    right = torch.equal(ours[ids.long()], expected[:, None].expand(theirs.shape))
    return f"{theirs.numel() / seconds / 1e9:.1f} GB/s", right
