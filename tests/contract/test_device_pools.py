"""The contract of staged lanes where both pools lie on a device, and what a fence waits for there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from baton.transfer.session.effects import FenceSink, FenceSource, Landed, RegionReady, SinkFenced, SourceFenced
from baton.transfer.testing import TransportContract, closing_both
from baton.transfer.testing_device import LateDevice, copy_rows_torch
from baton.transfer.testing_ends import FULL_ONLY, End, EndKeys, EndSpec, HandOff, KvSpec, pump, small_config
from baton.transfer.transports.inproc import InprocHub

QUIET_S = 0.02


def make_end(worker: str, epoch: int, lane: str, keys: EndKeys, hub: InprocHub, device: LateDevice, kv: KvSpec) -> End:
    config = small_config(lane)
    spec = EndSpec(worker, epoch, lane, keys, config, kv, fill=int(worker == "source"))
    return End(spec, hub, lambda memory: device.copier(memory, copy_rows_torch, config.region_bytes))


def make_pair(lane: str, devices: tuple[LateDevice, LateDevice], kv: KvSpec = FULL_ONLY) -> tuple[End, End]:
    keys, hub = EndKeys.generate(), InprocHub()
    sink = make_end("sink", 7, lane, keys, hub, devices[0], kv)
    source = make_end("source", 8, lane, keys, hub, devices[1], kv)
    sink.set_peers([source.member])
    return sink, source


class DevicePools(TransportContract):
    remote = False  # the lane is tested between processes elsewhere

    def make_pair(self, kv: KvSpec = FULL_ONLY) -> tuple[End, End]:
        return make_pair(self.lane, (LateDevice(), LateDevice()), kv)


class TestInprocFromDeviceToDevice(DevicePools):
    lane = "inproc"


class TestZmqFromDeviceToDevice(DevicePools):
    lane = "zmq"  # whose bytes arrive outside of the slots


class Rig:
    """A hand-off of eight pages in two slots, whose copies end when the test says so."""

    def __init__(self, sink: End, source: End, sink_device: LateDevice, source_device: LateDevice) -> None:
        self.sink, self.source = sink, source
        self.sink_device, self.source_device = sink_device, source_device
        ids = np.arange(1, 9, dtype=np.int32)
        self.hand_off = HandOff(sink, source, ids, ids + 20)
        self.hand_off.prepare()

    def turn(self) -> None:
        """A while, in which nothing is due to happen."""
        pump([self.sink, self.source], lambda: False, wait_s=QUIET_S)

    def until_scattering(self) -> None:
        """The region is in its slot, right, and on its way into the pages."""
        self.sink_device.held = True
        self.hand_off.move(0, slice(0, 4))
        assert pump([self.sink, self.source], lambda: self.sink_device.under_way == 1)

    def all_slots_are_free(self) -> bool:
        ends = (self.sink, self.source)
        return all(end.slots() == ((8, 0, 0), (8, 0, 0)) and not end.operations() for end in ends)


@pytest.fixture(params=["inproc", "zmq"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    devices = LateDevice(), LateDevice()
    with closing_both(make_pair(request.param, devices)) as (sink, source):
        yield Rig(sink, source, *devices)
        for device in devices:
            device.held = False


def test_a_region_has_not_landed_before_its_pages_are_written(rig: Rig) -> None:
    rig.until_scattering()
    rig.turn()
    assert not rig.hand_off.landed()
    assert rig.sink.slots()[0][2] == 1, "its slot is still being read"
    rig.sink_device.held = False
    assert pump([rig.sink, rig.source], lambda: rig.hand_off.landed() == {0})
    assert np.array_equal(rig.sink.pool[21:25], rig.source.pool[1:5])
    rig.hand_off.close()
    assert pump([rig.sink, rig.source], rig.all_slots_are_free)


def test_the_fence_of_a_sink_waits_for_the_scatter_and_nothing_is_written_after_it(rig: Rig) -> None:
    rig.until_scattering()
    rig.sink.execute(FenceSink(rig.hand_off.key))
    rig.turn()
    assert not rig.hand_off.of(SinkFenced), "fenced, with a write under way"
    assert rig.sink.slots()[0][2] == 1
    rig.sink_device.held = False
    assert pump([rig.sink, rig.source], lambda: bool(rig.hand_off.of(SinkFenced)))
    rig.sink.pool[21:25] = 0xAB  # they are somebody else's now
    rig.turn()
    assert (rig.sink.pool[21:25] == 0xAB).all()
    assert not rig.hand_off.of(Landed)
    assert len(rig.hand_off.of(SinkFenced)) == 1
    rig.source.execute(FenceSource(rig.hand_off.key))
    assert pump([rig.sink, rig.source], rig.all_slots_are_free)


def test_the_fence_of_a_sink_waits_for_the_last_of_its_scatters(rig: Rig) -> None:
    rig.until_scattering()
    rig.hand_off.move(1, slice(4, 8))
    assert pump([rig.sink, rig.source], lambda: rig.sink_device.under_way == 2)
    rig.sink.execute(FenceSink(rig.hand_off.key))
    rig.sink_device.held = False
    assert pump([rig.sink, rig.source], lambda: bool(rig.hand_off.of(SinkFenced)))
    assert rig.sink_device.under_way == 0
    rig.turn()
    assert len(rig.hand_off.of(SinkFenced)) == 1


def test_the_fence_of_another_hand_off_does_not_wait(rig: Rig) -> None:
    rig.until_scattering()
    ids = np.arange(40, 44, dtype=np.int32)
    other = HandOff(rig.sink, rig.source, ids, ids)
    other.prepare()
    other.fence()


def test_the_fence_of_a_source_waits_for_the_gather_and_nothing_is_sent(rig: Rig) -> None:
    rig.source_device.held = True
    rig.hand_off.send(0, slice(0, 4))
    assert pump([rig.source], lambda: rig.source_device.under_way == 1)
    rig.source.execute(FenceSource(rig.hand_off.key))
    rig.turn()
    assert not rig.hand_off.of(SourceFenced), "fenced, with a read under way"
    assert rig.source.slots()[1][2] == 1
    rig.source_device.held = False
    assert pump([rig.source], lambda: bool(rig.hand_off.of(SourceFenced)))
    assert not rig.hand_off.of(RegionReady)
    rig.hand_off.fence()
    rig.turn()
    assert len(rig.hand_off.of(SourceFenced)) == 1
    assert pump([rig.sink, rig.source], rig.all_slots_are_free)


def test_what_was_gathered_is_what_is_announced(rig: Rig) -> None:
    rig.source_device.held = True
    rig.hand_off.send(0, slice(0, 4))
    rig.turn()
    assert not rig.hand_off.of(RegionReady)
    rig.source_device.held = False
    ready = rig.hand_off.ready(0)
    rig.hand_off.land(rig.hand_off.chunk(0, slice(0, 4), ready.nbytes, ready.digest))
    assert pump([rig.sink, rig.source], lambda: rig.hand_off.landed() == {0})
    assert np.array_equal(rig.sink.pool[21:25], rig.source.pool[1:5])


def test_ends_that_close_with_copies_under_way_touch_nothing_afterwards() -> None:
    devices = LateDevice(), LateDevice()
    with closing_both(make_pair("inproc", devices)) as (sink, source):
        Rig(sink, source, *devices).until_scattering()
    assert devices[0].under_way == devices[1].under_way == 0
    assert not devices[0].pinned
    assert not devices[1].pinned
