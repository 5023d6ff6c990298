"""The contract of every lane, for `cuda_ipc`, over shared host memory and copies that a test can hold back; and what
only this lane can get wrong: giving pages away under a copy, and reading what a dead process left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from baton.common.config import DigestKind, TransferConfig
from baton.common.errors import ConfigError
from baton.common.kv.layout import Component
from baton.common.messages import LaneAddress
from baton.common.shared_memory import SharedBlock
from baton.transfer.device_ipc import OwnPool
from baton.transfer.link import LaneStatus, LaneView
from baton.transfer.session.effects import (
    FenceSink,
    FenceSource,
    Landed,
    RegionDamaged,
    RegionReady,
    SinkFenced,
    SinkLaneFailed,
    SourceFenced,
    SourceLaneFailed,
)
from baton.transfer.testing import TransportContract, closing_both
from baton.transfer.testing_device import LateDevice, copy_rows_torch
from baton.transfer.testing_ends import (
    FULL_ONLY,
    HYBRID,
    End,
    EndKeys,
    EndSpec,
    HandOff,
    KvSpec,
    RemoteEnd,
    pump,
    small_config,
)
from baton.transfer.testing_ipc import HostIpc
from baton.transfer.transports.base import LinkDown, LinkUp, PullFailed, Rows
from baton.transfer.transports.cuda_ipc import CudaIpcTransport

LANE = "cuda_ipc"
QUIET_S = 0.02
IDS = np.arange(1, 9, dtype=np.int32)


def spec(worker: str, keys: EndKeys, config: TransferConfig, kv: KvSpec = FULL_ONLY) -> EndSpec:
    epoch = {"sink": 7, "source": 8}[worker]
    return EndSpec(worker, epoch, LANE, keys, config, kv, fill=int(worker == "source"))


def late_end(made: EndSpec, device: LateDevice) -> End:
    """What digests are made of comes late from its pools, too."""
    return End(made, copier=lambda memory: device.copier(memory, copy_rows_torch, made.config.region_bytes))


class TestCudaIpc(TransportContract):
    lane = LANE
    staged = False


class TestCudaIpcFromDeviceToDevice(TransportContract):
    lane = LANE
    staged = False
    remote = False  # the lane is tested between processes above

    def make_pair(self, kv: KvSpec = FULL_ONLY) -> tuple[End, End]:
        keys, config = EndKeys.generate(), small_config(LANE)
        sink, source = (late_end(spec(worker, keys, config, kv), LateDevice()) for worker in ("sink", "source"))
        sink.set_peers([source.member])
        return sink, source


@dataclass
class Rig:
    """A hand-off of eight pages in two regions, whose copies end when the test says so."""

    sink: End
    source: End
    sink_device: LateDevice
    source_device: LateDevice

    def __post_init__(self) -> None:
        self.hand_off = HandOff(self.sink, self.source, IDS, IDS + 20)
        self.hand_off.prepare()

    def turn(self) -> None:
        """A while, in which nothing is due to happen."""
        pump([self.sink, self.source], lambda: False, wait_s=QUIET_S)

    def until(self, true: Callable[[], bool]) -> None:
        assert pump([self.sink, self.source], true), "did not come true in time"

    def until_pulling(self, regions: int = 1) -> None:
        """Copies into the pages are under way."""
        self.sink.ipc.running.clear()
        for seq in range(regions):
            self.hand_off.move(seq, slice(4 * seq, 4 * seq + 4))
        self.until(lambda: self.sink.operations() == regions)

    def until_reading(self) -> None:
        """The bytes are there; those that are compared are not on the host yet."""
        self.sink_device.held = True
        self.hand_off.move(0, slice(0, 4))
        self.until(lambda: self.sink_device.under_way == 1)

    def check_everything_is_given_back(self) -> None:
        self.source.execute(FenceSource(self.hand_off.key))
        ends = (self.sink, self.source)
        self.until(lambda: all(end.slots() == ((8, 0, 0), (8, 0, 0)) and not end.operations() for end in ends))


@pytest.fixture(params=["full", "sampled"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    digest: DigestKind = request.param
    keys, config = EndKeys.generate(), replace(small_config(LANE), digest=digest)
    devices = LateDevice(), LateDevice()
    sink, source = (
        late_end(spec(name, keys, config), one) for name, one in zip(("sink", "source"), devices, strict=True)
    )
    sink.set_peers([source.member])
    with closing_both((sink, source)):
        yield Rig(sink, source, *devices)
        sink.ipc.running.set()
        for device in devices:
            device.held = False


# ------------------------------------------------------------------------------------------------------------- fences


def test_a_region_has_not_landed_before_its_pages_are_written_and_compared(rig: Rig) -> None:
    rig.until_pulling()
    rig.turn()
    assert not rig.hand_off.landed()
    assert rig.sink.slots()[0][2] == 1, "its slot is nobody else's"
    rig.sink_device.held = True
    rig.sink.ipc.running.set()
    rig.until(lambda: rig.sink_device.under_way == 1)
    rig.turn()
    assert not rig.hand_off.landed()
    rig.sink_device.held = False
    rig.until(lambda: rig.hand_off.landed() == {0})
    assert np.array_equal(rig.sink.pool[21:25], rig.source.pool[1:5])
    rig.hand_off.close()
    rig.check_everything_is_given_back()


def test_the_fence_of_a_sink_waits_for_the_copy_and_nothing_is_written_after_it(rig: Rig) -> None:
    rig.until_pulling()
    rig.sink.execute(FenceSink(rig.hand_off.key))
    rig.turn()
    assert not rig.hand_off.of(SinkFenced), "fenced, with a write under way"
    assert rig.sink.slots()[0][2] == 1
    rig.sink.ipc.running.set()
    rig.until(lambda: bool(rig.hand_off.of(SinkFenced)))
    assert np.array_equal(rig.sink.pool[21:25], rig.source.pool[1:5]), "fenced before it was written"
    rig.sink.pool[21:25] = 0xAB  # they are somebody else's now
    rig.turn()
    assert (rig.sink.pool[21:25] == 0xAB).all()
    assert not rig.hand_off.of(Landed)
    assert len(rig.hand_off.of(SinkFenced)) == 1
    rig.check_everything_is_given_back()


def test_the_fence_of_a_sink_waits_for_the_last_of_its_copies(rig: Rig) -> None:
    rig.until_pulling(regions=2)
    rig.sink.execute(FenceSink(rig.hand_off.key))
    rig.turn()
    rig.sink.ipc.running.set()
    rig.until(lambda: bool(rig.hand_off.of(SinkFenced)))
    assert np.array_equal(rig.sink.pool[21:29], rig.source.pool[1:9])
    rig.turn()
    assert len(rig.hand_off.of(SinkFenced)) == 1
    rig.check_everything_is_given_back()


def test_the_fence_of_a_sink_waits_for_what_is_being_read_of_its_pages(rig: Rig) -> None:
    rig.until_reading()
    rig.sink.execute(FenceSink(rig.hand_off.key))
    rig.turn()
    assert not rig.hand_off.of(SinkFenced)
    rig.sink_device.held = False
    rig.until(lambda: bool(rig.hand_off.of(SinkFenced)))
    assert not rig.hand_off.of(Landed)
    rig.check_everything_is_given_back()


def test_the_fence_of_another_hand_off_does_not_wait(rig: Rig) -> None:
    rig.until_pulling()
    ids = np.arange(40, 44, dtype=np.int32)
    other = HandOff(rig.sink, rig.source, ids, ids)
    other.prepare()
    other.fence()


def test_the_fence_of_a_source_waits_for_what_is_being_read_of_its_pages(rig: Rig) -> None:
    rig.source_device.held = True
    rig.hand_off.send(0, slice(0, 4))
    rig.until(lambda: rig.source_device.under_way == 1)
    rig.source.execute(FenceSource(rig.hand_off.key))
    rig.turn()
    assert not rig.hand_off.of(SourceFenced), "fenced, with a read under way"
    rig.source_device.held = False
    rig.until(lambda: bool(rig.hand_off.of(SourceFenced)))
    assert not rig.hand_off.of(RegionReady)
    rig.hand_off.fence()
    rig.check_everything_is_given_back()


def test_an_end_that_closes_waits_for_the_copy_and_nothing_is_written_afterwards(rig: Rig) -> None:
    rig.until_pulling()
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(rig.sink.data.close)
        rig.sink.ipc.running.set()
        closed.result()
    assert rig.sink.ipc.mapped == 0
    assert np.array_equal(rig.sink.pool[21:25], rig.source.pool[1:5])


# ---------------------------------------------------------------------------------------------------------- adversity


def test_a_copy_that_fails_ends_the_hand_off_with_the_drivers_reason(rig: Rig) -> None:
    rig.sink.ipc.next_failure = "an illegal address"
    rig.hand_off.move(0, slice(0, 4))
    rig.until(lambda: bool(rig.hand_off.of(SinkLaneFailed)))
    [failed] = rig.hand_off.of(SinkLaneFailed)
    assert "an illegal address" in failed.failure.reason
    assert not failed.peer_lost
    assert not rig.hand_off.landed()
    rig.hand_off.fence()
    rig.check_everything_is_given_back()


def test_pages_that_changed_under_way_are_found_and_asked_for_again(rig: Rig) -> None:
    rig.hand_off.send(0, slice(0, 4))
    ready = rig.hand_off.ready(0)
    good = rig.source.pool[2].copy()
    rig.source.pool[2] ^= 0xFF
    chunk = rig.hand_off.chunk(0, slice(0, 4), ready.nbytes, ready.digest)
    rig.hand_off.land(chunk)
    rig.until(lambda: bool(rig.hand_off.of(RegionDamaged)))
    rig.source.pool[2] = good
    rig.hand_off.land(chunk, tag=rig.hand_off.tag_base + 1000)
    rig.until(lambda: rig.hand_off.landed() == {0})
    assert np.array_equal(rig.sink.pool[21:25], rig.source.pool[1:5])


def test_a_link_that_closes_under_a_copy_keeps_the_pool_open_until_it_ends_and_the_region_has_failed(rig: Rig) -> None:
    rig.until_pulling()
    rig.sink.set_peers([])
    rig.turn()
    assert rig.sink.ipc.mapped == 1
    assert not rig.hand_off.of(SinkLaneFailed), "it is still being written"
    rig.sink.set_peers([rig.source.member])
    rig.until(lambda: rig.sink.is_up(rig.source))
    assert rig.sink.ipc.mapped == 2
    rig.sink.ipc.running.set()
    rig.until(lambda: bool(rig.hand_off.of(SinkLaneFailed)))
    rig.until(lambda: rig.sink.ipc.mapped == 1)
    assert not rig.hand_off.landed()
    rig.hand_off.fence()
    rig.check_everything_is_given_back()


def test_a_successor_on_the_same_worker_is_served_while_a_copy_of_the_one_before_is_under_way(rig: Rig) -> None:
    rig.until_pulling()
    made = replace(rig.source.spec, epoch=9)
    successor = late_end(made, LateDevice())
    try:
        rig.sink.let_in(rig.sink.member, successor.member)
        successor.let_in(rig.sink.member, successor.member)
        rig.sink.set_peers([successor.member])
        other = HandOff(rig.sink, successor, IDS, IDS + 40)
        other.prepare()
        rig.sink.execute(FenceSink(rig.hand_off.key))
        rig.turn()
        assert not rig.hand_off.of(SinkFenced)
        rig.sink.ipc.running.set()
        other.move(0, slice(0, 4))
        assert pump([rig.sink, successor], lambda: other.landed() == {0})
        assert pump([rig.sink], lambda: bool(rig.hand_off.of(SinkFenced)))
        other.close()
    finally:
        successor.close()


def test_a_region_that_is_larger_than_a_slot_is_refused_on_either_side(rig: Rig) -> None:
    rig.hand_off.send(0, slice(0, 8))
    rig.hand_off.land(rig.hand_off.chunk(0, slice(0, 8), 8 * 4096, 0))
    for failed in (SourceLaneFailed, SinkLaneFailed):
        assert "larger than a slot" in rig.hand_off.of(failed)[0].failure.reason
    rig.turn()
    assert not rig.sink.pool.any()
    rig.hand_off.fence()
    rig.check_everything_is_given_back()


def test_a_page_that_is_larger_than_a_slot_stops_the_start() -> None:
    config = replace(small_config(LANE), region_bytes=2048)
    with pytest.raises(ConfigError, match=r"transfer\.region_bytes.*4096 bytes"):
        End(spec("sink", EndKeys.generate(), config))


def test_pages_that_are_not_of_the_pool_are_not_pulled(rig: Rig) -> None:
    rig.hand_off.send(0, slice(0, 4))
    ready = rig.hand_off.ready(0)
    rig.hand_off.units[Component.FULL] = (IDS + 10_000, IDS + 20)  # the source's idea alone
    rig.hand_off.land(rig.hand_off.chunk(0, slice(0, 4), ready.nbytes, ready.digest))
    rig.until(lambda: bool(rig.hand_off.of(SinkLaneFailed)))
    assert "outside of the pool" in rig.hand_off.of(SinkLaneFailed)[0].failure.reason
    assert not rig.sink.pool.any()
    rig.hand_off.fence()
    rig.check_everything_is_given_back()


# -------------------------------------------------------------------------------------------------------------- death


@pytest.fixture
def remote() -> Iterator[tuple[End, RemoteEnd]]:
    keys, config = EndKeys.generate(), small_config(LANE)
    source = RemoteEnd(spec("source", keys, config))
    sink = End(spec("sink", keys, config))
    sink.set_peers([source.member])
    with closing_both((sink, source)):
        yield sink, source
        sink.ipc.running.set()


def test_what_was_read_of_a_process_that_died_meanwhile_does_not_count(remote: tuple[End, RemoteEnd]) -> None:
    sink, source = remote
    hand_off = HandOff(sink, source, IDS, IDS + 20)
    hand_off.prepare()
    sink.ipc.running.clear()
    hand_off.move(0, slice(0, 4))
    assert pump([sink, source], lambda: sink.operations() == 1)
    source.kill()
    sink.execute(FenceSink(hand_off.key))
    pump([sink], lambda: False, wait_s=QUIET_S)
    assert not sink.is_up(source), "its death ends the link"
    assert not hand_off.of(SinkFenced), "fenced, with a write under way"
    assert sink.ipc.mapped == 1
    sink.ipc.running.set()
    assert pump([sink], lambda: bool(hand_off.of(SinkFenced)))
    assert pump([sink], lambda: sink.ipc.mapped == 0)
    assert sink.slots() == ((8, 0, 0), (8, 0, 0))
    assert not hand_off.landed()


def test_a_death_under_a_copy_is_told_with_its_end(remote: tuple[End, RemoteEnd]) -> None:
    sink, source = remote
    hand_off = HandOff(sink, source, IDS, IDS + 20)
    hand_off.prepare()
    sink.ipc.running.clear()
    hand_off.move(0, slice(0, 4))
    assert pump([sink, source], lambda: sink.operations() == 1)
    source.kill()
    sink.ipc.running.set()
    assert pump([sink], lambda: bool(hand_off.of(SinkLaneFailed)))
    [failed] = hand_off.of(SinkLaneFailed)
    assert failed.peer_lost
    assert "its process is gone" in failed.failure.reason
    assert not hand_off.landed()


def test_a_death_that_nobody_has_noticed_yet_is_asked_for_before_and_behind_each_copy(
    remote: tuple[End, RemoteEnd],
) -> None:
    _, source = remote
    block = SharedBlock(64 * 4096)
    device = HostIpc(block)
    lane = CudaIpcTransport(device, {Component.FULL: OwnPool(block.memory.ctypes.data, 64, 4096)})
    lane.open(source.stamp, source.member.lanes[0])
    assert lane.poll() == [LinkUp(source.stamp)]
    rows = Rows(Component.FULL, IDS, 0, 4096)
    device.running.clear()
    pulling = lane.begin_pull(source.stamp, rows, rows)
    assert not isinstance(pulling, PullFailed)
    source.kill()
    device.running.set()
    while not pulling.done():
        pass
    gone = PullFailed("its process is gone", peer_lost=True)
    assert pulling.failed == gone
    assert lane.begin_pull(source.stamp, rows, rows) == gone
    assert lane.poll() == [LinkDown(source.stamp, gone.reason)]
    assert device.mapped == 0
    lane.close()


# ------------------------------------------------------------------------------------------------------------- opening


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def view_of(sink: End, source: End) -> LaneView:
    [view] = sink.data.snapshot(time.monotonic()).lanes[source.stamp.worker]
    return view


def gone_pid() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"host": "elsewhere"}, "another host"),
        ({"pid": gone_pid}, "its process cannot be found"),
        ({"pid": "x"}, "makes no sense"),
        ({"pid": -1}, "its process cannot be found"),
        ({"pid": 2**80}, "its process cannot be found"),
        ({"device": "00" * 16}, "its pool is on device"),
        ({"full_handle": "00" * 64}, "opens nothing"),
        ({"state_handle": "00" * 64}, "opens nothing"),
        ({"state_unit_bytes": 1}, "a unit of its pool has 1 bytes"),
        ({"swa_units": 1 << 20}, "bytes where it announced"),
        ({"swa_offset": None}, "makes no sense"),
        ({"host": None}, "makes no sense"),
        ({"pid": None}, "makes no sense"),
    ],
)
def test_a_peer_that_is_not_proven_is_not_opened_and_nothing_stays_open(
    changes: Mapping[str, Any], reason: str
) -> None:
    keys, config = EndKeys.generate(), small_config(LANE)
    sink, source = (End(spec(name, keys, config, HYBRID)) for name in ("sink", "source"))
    with closing_both((sink, source)):
        [address] = source.member.lanes
        told = address.address | {name: value() if callable(value) else value for name, value in changes.items()}
        told = {name: value for name, value in told.items() if value is not None}
        before = open_descriptors()
        sink.set_peers([structs.replace(source.member, lanes=(LaneAddress(lane=LANE, address=told),))])
        assert pump([sink], lambda: bool(view_of(sink, source).reason))
        assert view_of(sink, source).status is LaneStatus.DOWN
        assert reason in view_of(sink, source).reason
        assert sink.ipc.mapped == 0
        assert open_descriptors() == before


def test_closed_links_leave_no_descriptor_behind() -> None:
    keys, config = EndKeys.generate(), small_config(LANE)
    sink, source = (End(spec(name, keys, config)) for name in ("sink", "source"))
    with closing_both((sink, source)):
        before = open_descriptors()
        for _ in range(5):
            sink.set_peers([source.member])
            assert pump([sink], lambda: sink.is_up(source))
            sink.set_peers([])
        assert open_descriptors() == before
        assert sink.ipc.mapped == 0


def test_an_address_fits_what_a_member_may_say() -> None:
    end = End(spec("source", EndKeys.generate(), small_config(LANE), HYBRID))
    try:
        [address] = end.member.lanes
        assert len(address.address) <= 16
        assert address.address["pid"] == os.getpid()
    finally:
        end.close()
