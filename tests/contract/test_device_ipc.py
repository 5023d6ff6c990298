"""Pools of devices that another process opens: over shared memory of a real other process, with copies that end when a
test lets them. The driver's own calls need a GPU (`make gpu-check`)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import get_ident

import numpy as np
import pytest

from baton.common.shared_memory import SharedBlock
from baton.transfer import cuda_ipc
from baton.transfer.cuda_ipc import CudaIpc
from baton.transfer.device_ipc import IpcAddress, IpcCopy, IpcRefused, OwnPool, PeerPool, share_pool
from baton.transfer.testing_ends import random_pool
from baton.transfer.testing_ipc import HostIpc

PAGES, PAGE_BYTES, OFFSET = 16, 4096, 3 * 4096  # the pool begins within its allocation
DEADLINE_S = 60.0
THEIRS = random_pool(PAGES, PAGE_BYTES, 5)


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def _source(pipe: Connection) -> None:
    """The other process: says where its pool is, then at the end whether anybody has written to it."""
    block = SharedBlock(OFFSET + PAGES * PAGE_BYTES)
    pool = block.memory[OFFSET:].reshape(PAGES, PAGE_BYTES)
    pool[:] = THEIRS
    pipe.send(share_pool(HostIpc(block), OwnPool(pool.ctypes.data, PAGES, PAGE_BYTES)))
    if pipe.poll(DEADLINE_S):
        pipe.send(bool(np.array_equal(pool, THEIRS)))


class Source:
    def __init__(self) -> None:
        context = get_context("spawn")
        self.pipe, far_end = context.Pipe()
        self.process: BaseProcess = context.Process(target=_source, args=(far_end,), daemon=True)
        self.process.start()
        far_end.close()
        assert self.pipe.poll(DEADLINE_S)
        self.address: IpcAddress = self.pipe.recv()

    def is_untouched(self) -> bool:
        self.pipe.send("?")
        assert self.pipe.poll(DEADLINE_S)
        return bool(self.pipe.recv())

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    other = Source()
    yield other
    assert other.is_untouched()
    other.kill()


class Sink:
    def __init__(self, pages: int = PAGES, page_bytes: int = PAGE_BYTES, name: bytes = b"host") -> None:
        block = SharedBlock(pages * page_bytes)
        self.pages = block.memory.reshape(pages, page_bytes)
        self.device = HostIpc(block, name=name)
        self.pool = OwnPool(self.pages.ctypes.data, pages, page_bytes)

    def open(self, address: IpcAddress) -> PeerPool:
        return PeerPool(self.device, address, self.pool)


@pytest.fixture
def sink() -> Iterator[Sink]:
    side = Sink()
    yield side
    side.device.running.set()


def over(copy: IpcCopy) -> str:
    copy.wait()
    assert copy.ended()
    return copy.failure


def test_pages_go_where_they_should_and_nowhere_else(source: Source, sink: Sink) -> None:
    theirs, ours = ids(3, 4, 5, 9, 0), ids(7, 8, 9, 1, 15)
    peer = sink.open(source.address)
    assert over(peer.copy(theirs, ours, 0, PAGE_BYTES)) == ""
    expected = np.zeros_like(sink.pages)
    expected[ours] = THEIRS[theirs]
    assert np.array_equal(sink.pages, expected)
    assert sink.device.copies == 3, "pages that follow one another on both sides are one copy"
    peer.close()
    assert sink.device.mapped == 0


def test_some_layers_of_pages_leave_the_others_alone(source: Source, sink: Sink) -> None:
    peer = sink.open(source.address)
    assert over(peer.copy(ids(3, 4), ids(5, 6), 1024, 2048)) == ""
    expected = np.zeros_like(sink.pages)
    expected[[5, 6], 1024:2048] = THEIRS[[3, 4], 1024:2048]
    assert np.array_equal(sink.pages, expected)
    peer.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"host": "elsewhere"}, "another host"),
        ({"device": "00" * 16}, "on device 0000"),
        ({"device": "00"}, "makes no sense"),
        ({"handle": "00" * 63}, "makes no sense"),
        ({"handle": "00" * 65}, "makes no sense"),
        ({"handle": "zz"}, "makes no sense"),
        ({"handle": "00" * 64}, "opens nothing"),
        ({"offset": -1}, "makes no sense"),
        ({"offset": OFFSET + 1}, "bytes where it announced"),
        ({"offset": 2**80}, "bytes where it announced"),
        ({"units": PAGES + 1}, "bytes where it announced"),
        ({"units": 0}, "makes no sense"),
        ({"units": "x"}, "makes no sense"),
        ({"unit_bytes": 8192}, "has 8192 bytes"),
    ],
)
def test_a_pool_that_is_not_proven_is_not_opened(source: Source, sink: Sink, changes: IpcAddress, reason: str) -> None:
    with pytest.raises(IpcRefused, match=reason):
        sink.open({**source.address, **changes})
    assert sink.device.mapped == 0


@pytest.mark.parametrize("missing", ["host", "pid", "device", "handle", "offset", "units", "unit_bytes"])
def test_an_address_that_lacks_something_makes_no_sense(source: Source, sink: Sink, missing: str) -> None:
    with pytest.raises(IpcRefused, match="makes no sense"):
        sink.open({key: value for key, value in source.address.items() if key != missing})


def test_another_device_of_the_same_host_is_refused(source: Source) -> None:
    with pytest.raises(IpcRefused, match="its pool is on device"):
        Sink(name=b"second").open(source.address)


@pytest.mark.parametrize("page", [-1, PAGES, 2**31 - 1])
def test_a_page_outside_of_either_pool_is_never_touched(source: Source, sink: Sink, page: int) -> None:
    peer = sink.open(source.address)
    for theirs, ours in ((ids(1, page), ids(1, 2)), (ids(1, 2), ids(1, page))):
        with pytest.raises(IpcRefused, match="outside"):
            peer.copy(theirs, ours, 0, PAGE_BYTES)
    for begin, end in ((0, PAGE_BYTES + 1), (-1, 10), (5, 5)):
        with pytest.raises(IpcRefused, match="of a unit of"):
            peer.copy(ids(1), ids(1), begin, end)
    with pytest.raises(IpcRefused, match="2 units for 1"):
        peer.copy(ids(1, 2), ids(1), 0, PAGE_BYTES)
    assert sink.device.copies == 0
    assert not sink.pages.any()
    peer.close()


def test_a_mapping_is_not_closed_under_a_copy(source: Source, sink: Sink) -> None:
    peer = sink.open(source.address)
    sink.device.running.clear()
    first, second = (peer.copy(ids(page), ids(page), 0, PAGE_BYTES) for page in (1, 2))
    assert not peer.begin_close()
    assert not first.ended()
    assert not second.ended()
    assert sink.device.mapped == 1
    with pytest.raises(IpcRefused, match="not open"):
        peer.copy(ids(3), ids(3), 0, PAGE_BYTES)
    sink.device.running.set()
    assert over(first) == over(second) == ""
    assert peer.begin_close()
    assert peer.begin_close()
    assert sink.device.mapped == 0
    assert np.array_equal(sink.pages[[1, 2]], THEIRS[[1, 2]])


def test_a_copy_that_fails_says_so_when_it_has_ended(source: Source, sink: Sink) -> None:
    peer = sink.open(source.address)
    sink.device.next_failure = "an illegal address"
    assert over(peer.copy(ids(1, 3), ids(1, 3), 0, PAGE_BYTES)) == "an illegal address"
    assert over(peer.copy(ids(1, 3), ids(1, 3), 0, PAGE_BYTES)) == ""
    assert np.array_equal(sink.pages[[1, 3]], THEIRS[[1, 3]])
    peer.close()


def test_a_copy_under_way_outlives_its_source_and_its_handle_opens_nothing_afterwards(sink: Sink) -> None:
    other = Source()
    peer = sink.open(other.address)
    sink.device.running.clear()
    copy = peer.copy(ids(6), ids(2), 0, PAGE_BYTES)
    other.kill()
    assert not peer.begin_close()
    sink.device.running.set()
    assert over(copy) == ""
    assert np.array_equal(sink.pages[2], THEIRS[6])
    peer.close()
    with pytest.raises(IpcRefused, match="opens nothing"):
        sink.open(other.address)
    successor = Source()
    assert successor.address["handle"] != other.address["handle"]
    with pytest.raises(IpcRefused, match="opens nothing"):
        sink.open({**successor.address, "handle": other.address["handle"]})
    successor.kill()


def test_memory_that_is_no_allocation_is_not_shared(sink: Sink) -> None:
    memory = ctypes.create_string_buffer(64)
    with pytest.raises(IpcRefused, match="no handle"):
        share_pool(sink.device, OwnPool(ctypes.addressof(memory), 1, 64))


def test_without_a_driver_it_says_so() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(IpcRefused, match="no CUDA driver here"):
            CudaIpc(0)
    else:
        pytest.skip("there is a driver: make gpu-check")


class Driver:
    """The driver's calls, as (thread, name); all of them go well."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.calls.append((get_ident(), name))
            return 0

        return call

    def take(self) -> list[tuple[int, str]]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(cuda_ipc, "_load", lambda: made)
    return made


def test_each_thread_that_calls_the_driver_has_its_context(driver: Driver) -> None:
    device, here = CudaIpc(0), get_ident()
    names = [name for _, name in driver.take()]
    assert names.index("cuCtxSetCurrent") < names.index("cuStreamCreate")
    with ThreadPoolExecutor(1) as pool:  # as the I/O thread, which is not the one that loads
        there = pool.submit(get_ident).result()
        for _ in range(2):
            pool.submit(lambda: device.copy([(0, 0, 1)]).ended()).result()
    calls = driver.take()
    assert {thread for thread, _ in calls} == {there}
    assert [name for _, name in calls].count("cuCtxSetCurrent") == 1
    assert calls[0] == (there, "cuCtxSetCurrent")
    device.copy([(0, 0, 1)]).wait()
    assert driver.take()[0] == (here, "cuCtxSetCurrent")


def test_a_handle_of_this_process_is_not_opened(driver: Driver) -> None:
    device = CudaIpc(0)
    driver.take()
    with pytest.raises(IpcRefused, match="this process itself"):
        device.open(bytes(64), os.getpid())
    assert not driver.take()
