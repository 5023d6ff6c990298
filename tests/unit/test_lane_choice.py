"""Lanes are measured when they come up, the fastest is taken, and what landed on one that broke is not sent again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from io_rig import (
    FULL_KV,
    PAGE_BYTES,
    PAGE_SIZE,
    WAIT_S,
    StandInController,
    Worker,
    expected_pages,
    io_config,
    open_sink,
)

from baton.common.config import ClusterConfig, LaneCapsConfig
from baton.common.engine.batch import KvMemory
from baton.common.engine.core_api import MembershipView
from baton.common.errors import ErrorCode
from baton.common.ids import Stamp
from baton.common.kv.layout import Component
from baton.transfer import io, stalls
from baton.transfer.api import SinkCommitted, SinkFailed
from baton.transfer.lanes import Lanes
from baton.transfer.link import CLEARLY_FASTER, Chosen, LaneStatus, LaneView, choose_lane
from baton.transfer.mesh import Mesh
from baton.transfer.transports.base import Bytes, Ended
from baton.transfer.transports.inproc import InprocHub, InprocTransport

UP = LaneStatus.UP


@pytest.fixture
def controller() -> Iterator[StandInController]:
    running = StandInController(True)
    yield running
    running.close()


def chosen(*lanes: tuple[str, float], current: str = "") -> str:
    choice = choose_lane([LaneView(lane, UP, gbps=gbps) for lane, gbps in lanes], current)
    assert isinstance(choice, Chosen)
    return choice.lane


def test_a_lane_must_be_clearly_faster_to_come_before_the_order_and_then_stays() -> None:
    assert chosen(("a", 1.0), ("b", CLEARLY_FASTER * 0.99)) == "a"
    assert chosen(("a", 1.0), ("b", CLEARLY_FASTER * 1.01)) == "b"
    assert chosen(("a", 1.0), ("b", 1.1), current="b") == "b"
    assert chosen(("a", 1.0), ("b", 0.9), current="b") == "a"
    assert chosen(("a", 1.0), ("b", 2.0), ("c", 3.0)) == "c"


def test_an_unknown_speed_changes_no_order() -> None:
    assert chosen(("a", 0.0), ("b", 9.0)) == "a"
    assert chosen(("a", 1.0), ("b", 0.0)) == "a"


def test_the_reason_has_the_numbers() -> None:
    choice = choose_lane([LaneView("a", UP, gbps=1.0), LaneView("b", UP, gbps=2.5)])
    assert choice == Chosen("b", "faster, in GB/s: a 1.00, b 2.50; passed over: none")


def test_a_fast_lane_that_just_failed_is_avoided() -> None:
    choice = choose_lane([LaneView("a", UP, gbps=1.0), LaneView("b", UP, avoided=True, gbps=9.0)])
    assert isinstance(choice, Chosen)
    assert choice.lane == "a"


def wait_until(done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def start(config: ClusterConfig, controller: StandInController, **more: object) -> tuple[Worker, Worker]:
    decode = Worker("decode-0", "decode", 11, config, controller.door, kv=FULL_KV, **more)  # type: ignore[arg-type]
    prefill = Worker("prefill-0", "prefill", 22, config, controller.door, kv=FULL_KV, fill=5, **more)  # type: ignore[arg-type]
    decode.events.wait_view(lambda view: isinstance(view, MembershipView) and len(view.members) == 2)
    return decode, prefill


def speeds(worker: Worker) -> dict[str, float]:
    data = worker.io.snapshot().data
    assert data is not None
    return {view.lane: view.gbps for views in data.lanes.values() for view in views}


def test_every_lane_that_comes_up_is_measured_and_no_slot_is_lost(controller: StandInController) -> None:
    decode, prefill = start(io_config("local", "tcp", "zmq"), controller)
    try:
        assert wait_until(lambda: len(speeds(decode)) == 3 and all(speeds(decode).values())), speeds(decode)
        for worker in (decode, prefill):
            data = worker.io.snapshot().data
            assert data is not None
            assert data.receive_slots == data.send_slots == (16, 0, 0)
    finally:
        decode.close()
        prefill.close()


def test_a_lane_that_is_capped_far_below_another_one_is_not_taken(controller: StandInController) -> None:
    config = io_config("tcp", "zmq")
    caps = LaneCapsConfig(tcp=0.00001)
    decode, prefill = start(replace(config, transfer=replace(config.transfer, lane_max_gbps=caps)), controller)
    try:
        assert wait_until(lambda: len(speeds(decode)) == 2 and all(speeds(decode).values())), speeds(decode)
        open_sink(decode, "prefill-0", 40, 1)
        assert decode.events.wait(SinkCommitted)[0].lane == "zmq"
    finally:
        decode.close()
        prefill.close()


def test_nothing_is_measured_where_the_order_decides(controller: StandInController) -> None:
    config = io_config("tcp", "zmq")
    decode, prefill = start(replace(config, transfer=replace(config.transfer, lane_choice="order")), controller)
    try:
        open_sink(decode, "prefill-0", 40, 1)
        assert decode.events.wait(SinkCommitted)[0].lane == "tcp"
        assert not any(speeds(decode).values())
    finally:
        decode.close()
        prefill.close()


class FirstLane(InprocTransport):
    lane = "first"


class CutLane(FirstLane):
    """Breaks at its second region."""

    received = 0

    def receive(self, op: int, peer: Stamp, tag: int, slot: Bytes) -> None:
        self.received += 1
        if self.received < 2:
            super().receive(op, peer, tag, slot)
        else:
            with self._hub.lock:
                self.report(Ended(op, "cut", peer_lost=False))


class SecondLane(InprocTransport):
    lane = "second"


def test_what_landed_on_a_lane_that_broke_is_kept_and_the_rest_takes_another(controller: StandInController) -> None:
    hubs = InprocHub(), InprocHub()

    def lanes(stamp: Stamp, config: ClusterConfig, mesh: Mesh, memory: KvMemory) -> Lanes:
        kind = CutLane if stamp.worker == "decode-0" else FirstLane
        return Lanes((kind(stamp, hubs[0], mesh), SecondLane(stamp, hubs[1], mesh)))

    config = io_config("first", "second")
    config = replace(config, transfer=replace(config.transfer, lane_choice="order"))
    decode, prefill = start(config, controller, lanes=lanes)
    try:
        tokens = 16 * PAGE_SIZE
        first = open_sink(decode, "prefill-0", tokens, 1)
        [failed] = decode.events.wait(SinkFailed)
        assert (failed.lane, failed.peer_lost, failed.landed_until) == ("first", False, 4 * PAGE_SIZE)
        landed = failed.landed_until // PAGE_SIZE
        rest = open_sink(decode, "prefill-0", tokens, 2, start=failed.landed_until, first_page=100 - landed)
        [committed] = decode.events.wait(SinkCommitted)
        assert (committed.lane, committed.nbytes) == ("second", (16 - landed) * PAGE_BYTES)
        pages = np.concatenate([first.pages[Component.FULL][:landed], rest.pages[Component.FULL]])
        assert np.array_equal(decode.pool[pages], expected_pages(first))
    finally:
        decode.close()
        prefill.close()


@pytest.mark.parametrize(
    ("dead_after_s", "code", "ttl_s"),
    [(1.5, ErrorCode.INTERNAL, WAIT_S), (30.0, ErrorCode.DEADLINE_EXCEEDED, 1.0)],
)
def test_a_lane_on_which_nothing_comes_is_given_up_and_avoided(
    dead_after_s: float, code: ErrorCode, ttl_s: float, controller: StandInController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(stalls, "SUSPICIOUS_S", 0.3)
    monkeypatch.setattr(io, "BEHIND_SILENCE_S", 0.0)
    hubs = InprocHub(), InprocHub()

    def lanes(stamp: Stamp, config: ClusterConfig, mesh: Mesh, memory: KvMemory) -> Lanes:
        return Lanes((FirstLane(stamp, hubs[0], mesh), SecondLane(stamp, hubs[1], mesh)))

    config = io_config("first", "second", dead_after_s=dead_after_s)
    config = replace(config, transfer=replace(config.transfer, lane_choice="order"))
    decode, prefill = start(config, controller, lanes=lanes)
    try:
        hubs[0].hold()
        open_sink(decode, "prefill-0", 40, 1, ttl_s=ttl_s)
        [failed] = decode.events.wait(SinkFailed)
        assert (failed.lane, failed.peer_lost, failed.failure.code) == ("first", False, code)
        open_sink(decode, "prefill-0", 40, 2, first_page=60)
        assert decode.events.wait(SinkCommitted)[0].lane == "second"
    finally:
        decode.close()
        prefill.close()


def test_a_cap_bounds_what_really_moves(controller: StandInController) -> None:
    config = io_config("tcp")
    gbps, nbytes = 0.0005, 64 * PAGE_BYTES
    decode, prefill = start(replace(config, transfer=replace(config.transfer, max_gbps=gbps)), controller)
    try:
        began = time.monotonic()
        open_sink(decode, "prefill-0", 64 * PAGE_SIZE, 1)
        decode.events.wait(SinkCommitted)
        took_s, least_s = time.monotonic() - began, nbytes / gbps / 1e9
        assert 0.8 * least_s < took_s < 3 * least_s + 3
    finally:
        decode.close()
        prefill.close()
