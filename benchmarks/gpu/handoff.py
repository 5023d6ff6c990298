"""Pages of one process's pool, read by another one on the same GPU: over CUDA IPC, straight into its own pages.

What lies under the lane `cuda_ipc` (docs/adr/0041): the source shares a handle of its pool, the receiver opens it after
the proofs of `device_ipc.py` and copies rows. Every byte is compared. On the host, in `--interpret`, shared memory of
the host stands in for the device's. What cannot be done raises: `gpu_check` calls that wrong.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import torch

from baton.common.shared_memory import SharedBlock
from baton.transfer.cuda_ipc import CudaIpc
from baton.transfer.device_ipc import IpcAddress, IpcDevice, OwnPool, PeerPool, share_pool
from baton.transfer.testing_ipc import HostIpc
from benchmarks.gpu.rig import Bench, Line

PAGE_BYTES = 64 << 10
DEADLINE_S = 120.0
ROUNDS = 5


def _pool(pages: int, page_bytes: int, place: torch.device) -> tuple[torch.Tensor, IpcDevice]:
    """Zeros [pages, page_bytes] on `place`, and the driver that knows them."""
    if place.type == "cpu":
        block = SharedBlock(pages * page_bytes)
        return torch.from_numpy(block.memory).view(pages, page_bytes), HostIpc(block)
    pool = torch.zeros(pages, page_bytes, dtype=torch.uint8, device=place)
    torch.cuda.synchronize(place)
    return pool, CudaIpc(place.index or 0)


def _content(pages: int, page_bytes: int) -> torch.Tensor:
    """Which page it is, and which byte of it, in every byte."""
    page, byte = torch.arange(pages)[:, None], torch.arange(page_bytes)[None, :]
    return ((page * 131 + byte * 7 + byte // 256) % 251).to(torch.uint8)


def _source(pipe: Connection, pages: int, page_bytes: int, place: str) -> None:
    """The other process."""
    pool, device = _pool(pages, page_bytes, torch.device(place))
    pool.copy_(_content(pages, page_bytes))
    if place != "cpu":
        torch.cuda.synchronize()
    pipe.send(share_pool(device, OwnPool(pool.data_ptr(), pages, page_bytes)))
    pipe.poll(DEADLINE_S)


def over_ipc(bench: Bench) -> Iterator[Line]:
    nbytes, place = bench.sizes.copied_bytes, bench.device.place
    page_bytes = min(PAGE_BYTES, nbytes // 4)
    pages = nbytes // page_bytes
    context = get_context("spawn")
    pipe, far_end = context.Pipe()
    process = context.Process(target=_source, args=(far_end, pages, page_bytes, str(place)), daemon=True)
    began = time.perf_counter()
    process.start()
    far_end.close()
    try:
        if not pipe.poll(DEADLINE_S):
            raise TimeoutError(f"the other process shared no pool in {DEADLINE_S:.0f} s")
        found, right = _copied(pipe.recv(), pages, page_bytes, place)
        waited_s = time.perf_counter() - began
    finally:
        pipe.close()
        process.join(DEADLINE_S)
    how = "shared host memory" if place.type == "cpu" else "cuda_ipc"
    what = f"scattered pages of {page_bytes >> 10} KiB over {how}, {waited_s:.1f} s with the other process's start"
    yield Line("hand-off", what, found, right)


def _copied(address: IpcAddress, pages: int, page_bytes: int, place: torch.device) -> tuple[str, bool]:
    """All of the other pool, page for page into others of ours; the mapping is closed at the end."""
    pool, device = _pool(pages, page_bytes, place)
    theirs = PeerPool(device, address, OwnPool(pool.data_ptr(), pages, page_bytes))
    ours = np.random.default_rng(1).permutation(pages).astype(np.int32)
    best_s, failures = float("inf"), ""
    try:
        for _ in range(ROUNDS):
            started = time.perf_counter()
            copy = theirs.copy(ours[::-1].copy(), ours, 0, page_bytes)
            copy.wait()
            best_s = min(best_s, time.perf_counter() - started)
            failures = failures or copy.failure
    finally:
        theirs.close()
    right = torch.equal(pool.cpu()[ours], _content(pages, page_bytes)[ours[::-1].copy()])
    return failures or f"{pool.numel() / best_s / 1e9:.1f} GB/s", right and not failures
