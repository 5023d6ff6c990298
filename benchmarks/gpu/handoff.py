"""Pages of one process's pool, read by another one on the same GPU: over CUDA IPC, straight into its own pages.

What lies under the lane `cuda_ipc` (docs/adr/0041): the source shares a handle of its pool, the receiver opens it after
the proofs of `device_ipc.py` and copies rows. Then a region by the lane itself, on another thread than the one that
made it, as in a worker, with the digests that both ends take of it. Every byte is compared. On the host, in
`--interpret`, shared memory of the host stands in for the device's. What cannot be done raises: `gpu_check` calls that
wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import torch

from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.kv.layout import Component
from baton.common.messages import LaneAddress
from baton.common.shared_memory import SharedBlock
from baton.transfer.cuda_device import CudaDevice
from baton.transfer.cuda_ipc import CudaIpc
from baton.transfer.device_copier import DeviceCopier
from baton.transfer.device_ipc import IpcAddress, IpcDevice, IpcRefused, OwnPool, PeerPool, share_pool
from baton.transfer.digest import RegionDigest
from baton.transfer.staging import StagingHandler
from baton.transfer.testing_device import LateDevice
from baton.transfer.testing_ipc import HostIpc
from baton.transfer.transports.base import LinkUp, PullFailed, Rows
from baton.transfer.transports.cuda_ipc import CudaIpcTransport
from baton.transfer.triton_rows import copy_rows_on_device
from benchmarks.gpu.rig import Bench, Line

PAGE_BYTES = 64 << 10
REGION_PAGES = 64
SEQ = 3  # of the region: says which lines are the sample
PEER = Stamp(WorkerId("source"), 1, Epoch(1))
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
    own = OwnPool(pool.data_ptr(), pages, page_bytes)
    pipe.send((share_pool(device, own), CudaIpcTransport(device, {Component.FULL: own}).address()))
    pipe.send(_digest(pool, _region(pool)))
    pipe.poll(DEADLINE_S)


def _region(pool: torch.Tensor) -> Rows:
    """Scattered pages of the source."""
    pages, page_bytes = pool.shape
    return Rows(Component.FULL, np.arange(1, pages, 2, dtype=np.int32)[:REGION_PAGES], 0, page_bytes)


def _digest(pool: torch.Tensor, region: Rows) -> int:
    """As a data plane takes it."""
    copies = LateDevice(1) if pool.device.type == "cpu" else CudaDevice(pool.device)
    copier = DeviceCopier({Component.FULL: pool}, copy_rows_on_device, copies, region.nbytes)
    slot = np.zeros(region.nbytes, np.uint8)
    copier.use_staging(slot)
    try:
        reading = StagingHandler(copier, RegionDigest("sampled")).read_for_digest(region, SEQ, slot)
        _until(reading.copying.done)
        return reading.digest()
    finally:
        copier.close()


def _until(done: Callable[[], bool]) -> None:
    deadline = time.perf_counter() + DEADLINE_S
    while not done():
        if time.perf_counter() > deadline:
            raise TimeoutError(f"a copy did not end in {DEADLINE_S:.0f} s")


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
        address, lane_address = pipe.recv()
        found, right = _copied(address, pages, page_bytes, place)
        waited_s = time.perf_counter() - began
        same, whole = _by_the_lane(lane_address, pipe.recv(), pages, page_bytes, place)
    finally:
        pipe.close()
        process.join(DEADLINE_S)
    how = "shared host memory" if place.type == "cpu" else "cuda_ipc"
    what = f"scattered pages of {page_bytes >> 10} KiB over {how}, {waited_s:.1f} s with the other process's start"
    yield Line("hand-off", what, found, right)
    digests = f"digests {'agree' if same else 'differ'}"
    yield Line("hand-off", "a region by the lane, from another thread", digests, same and whole)


def _by_the_lane(
    address: LaneAddress, digest: int, pages: int, page_bytes: int, place: torch.device
) -> tuple[bool, bool]:
    """Whether the digest is the source's, and every page is there and no other one."""
    pool, device = _pool(pages, page_bytes, place)
    lane = CudaIpcTransport(device, {Component.FULL: OwnPool(pool.data_ptr(), pages, page_bytes)})
    theirs = _region(pool)
    ours = replace(theirs, units=theirs.units[::-1].copy())

    def pull() -> None:
        lane.open(PEER, address)
        [event] = lane.poll()
        if event != LinkUp(PEER):
            raise IpcRefused(str(event))
        pulling = lane.begin_pull(PEER, theirs, ours)
        if isinstance(pulling, PullFailed):
            raise IpcRefused(pulling.reason)
        _until(pulling.done)
        if pulling.failed is not None:
            raise IpcRefused(pulling.failed.reason)

    with ThreadPoolExecutor(1) as io_thread:
        try:
            io_thread.submit(pull).result()
        finally:
            io_thread.submit(lane.close).result()
    expected = torch.zeros(pages, page_bytes, dtype=torch.uint8)
    expected[ours.units] = _content(pages, page_bytes)[theirs.units]
    return _digest(pool, ours) == digest, torch.equal(pool.cpu(), expected)


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
