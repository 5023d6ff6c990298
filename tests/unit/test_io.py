"""Whole hand-offs between two I/O threads, in one process and in two, on every lane; and what happens when one dies."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np
import pytest
from io_rig import (
    FULL_KV,
    HYBRID_KV,
    NUM_PAGES,
    PAGE_BYTES,
    PAGE_SIZE,
    WAIT_S,
    OpenDoor,
    PrefillProcess,
    StandInController,
    Worker,
    expected_pages,
    io_config,
    open_sink,
    wait_until,
)

from baton.common.config import ClusterConfig
from baton.common.engine.batch import KvMemory
from baton.common.engine.core_api import FromPeer, MembershipView, SendTo
from baton.common.errors import ConfigError, ErrorCode
from baton.common.ids import Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import (
    PROTOCOL_VERSION,
    Body,
    CancelRequest,
    Failure,
    Frame,
    Heartbeat,
    Member,
    Membership,
    Reject,
)
from baton.common.trace import Interval, Recorder, Slice
from baton.transfer.api import AbortSink, SinkCommitted, SinkFailed, SourceAborted, SourceReleased, return_key
from baton.transfer.io import IoThread, NotAdmitted
from baton.transfer.keys import NOWHERE, ControllerDoor, KeyPair
from baton.transfer.lanes import Lanes
from baton.transfer.mesh import Mesh
from baton.transfer.testing_ends import KvSpec, random_pool
from baton.transfer.transports.inproc import InprocHub, InprocTransport
from baton.transfer.transports.ucx import why_unavailable

LANES = [
    "inproc",
    "local",
    "tcp",
    "zmq",
    pytest.param("ucx", marks=pytest.mark.skipif(bool(why_unavailable()), reason="ucx")),
]
PROCESS_LANES = LANES[1:]


@pytest.fixture
def controller() -> Iterator[StandInController]:
    running = StandInController(True)
    yield running
    running.close()


def start_pair(lane: str, controller: StandInController, kv: KvSpec = FULL_KV) -> tuple[Worker, Worker]:
    hub = InprocHub()

    def inproc(stamp: Stamp, config: ClusterConfig, mesh: Mesh, memory: KvMemory) -> Lanes:
        return Lanes((InprocTransport(stamp, hub, mesh),))

    config = io_config(lane)
    more = {"lanes": inproc} if lane == "inproc" else {}
    decode = Worker("decode-0", "decode", 11, config, controller.door, kv=kv, **more)
    prefill = Worker("prefill-0", "prefill", 22, config, controller.door, kv=kv, fill=5, **more)
    wait_for_peer(decode)
    return decode, prefill


def wait_for_peer(worker: Worker) -> None:
    worker.io.wait_admitted(WAIT_S)
    worker.events.wait_view(lambda view: len(view.members) == 2)


@pytest.mark.parametrize("lane", LANES)
def test_hand_offs_arrive_whole_and_both_sides_are_told(lane: str, controller: StandInController) -> None:
    decode, prefill = start_pair(lane, controller)
    try:
        commands = [
            open_sink(decode, "prefill-0", tokens, handoff, start, first_page=first)
            for handoff, (tokens, start, first) in enumerate(
                [(1, 0, 101), (4, 0, 102), (50, 8, 120), (157, 0, 100)], start=1
            )
        ]
        committed = decode.events.wait(SinkCommitted, 4)
        assert {event.key for event in committed} == {command.key for command in commands}
        assert {event.lane for event in committed} == {lane}
        assert {event.result.first_token for event in committed} == {77}
        for command in commands:
            assert np.array_equal(decode.pool[command.pages[Component.FULL]], expected_pages(command))
        largest = commands[-1]
        moved = sum(len(command.pages[Component.FULL]) for command in commands)
        assert sum(event.nbytes for event in committed) == moved * PAGE_BYTES
        prefill.events.wait(SourceReleased, 4)
        decode.pool[:] = 0
        again = open_sink(decode, "prefill-0", len(largest.tokens), 99)
        decode.events.wait(SinkCommitted, 5)
        assert np.array_equal(decode.pool[again.pages[Component.FULL]], expected_pages(again))
        assert not decode.pool[np.setdiff1d(np.arange(NUM_PAGES), again.pages[Component.FULL])].any()
        assert not decode.events.of(SinkFailed)
        check_counters(decode, prefill, lane)
    finally:
        decode.close()
        prefill.close()


def check_counters(decode: Worker, prefill: Worker, lane: str) -> None:
    """What one side sent the other received, and nothing is under way any more."""

    def agree() -> bool:
        ours, theirs = decode.io.snapshot().data, prefill.io.snapshot().data
        assert ours is not None
        assert theirs is not None
        idle = ours.open_sinks == ours.open_operations == theirs.open_operations == 0
        [received], [sent] = (worker.io.flows().result(WAIT_S) for worker in (decode, prefill))
        assert (received.peer, sent.peer) == ("prefill-0", "decode-0")
        assert received.lane == sent.lane == lane
        return idle and received.nbytes == sent.nbytes > 0 and received.handoff.count == sent.handoff.count

    wait_until(agree)


def test_a_recorded_thread_tells_of_each_copy_and_of_each_region_on_its_way(controller: StandInController) -> None:
    decode, prefill = start_pair("zmq", controller)
    taken, given = Recorder(), Recorder()
    try:
        for worker, recorder in ((decode, taken), (prefill, given)):
            worker.io.trace(recorder).result(WAIT_S)
        open_sink(decode, "prefill-0", 60, 1)
        decode.events.wait(SinkCommitted)
        prefill.events.wait(SourceReleased)
        for worker in (decode, prefill):
            worker.io.trace(None).result(WAIT_S)
        open_sink(decode, "prefill-0", 60, 2)
        decode.events.wait(SinkCommitted, 2)
    finally:
        decode.close()
        prefill.close()
    recorded = [item for recorder in (taken, given) for item in recorder.take().items]
    by_kind: dict[str, set[tuple[object, object]]] = {}
    for item in recorded:
        if isinstance(item, Slice):
            by_kind.setdefault(item.name, set()).add((item.args["handoff"], item.args["seq"]))
        elif isinstance(item, Interval) and item.track == "wire zmq":
            by_kind.setdefault("wire", set()).add((item.args["handoff"], item.args["seq"]))
    assert by_kind["gather"] == by_kind["wire"] == by_kind["scatter"]
    assert len(by_kind["wire"]) >= 3
    assert len({handoff for handoff, _ in by_kind["wire"]}) == 1, "nothing after the end"
    began_s = {
        str(item.args["seq"]): item.begin_s for item in recorded if isinstance(item, Interval) and "seq" in item.args
    }
    for item in recorded:
        if isinstance(item, Slice) and item.name == "scatter":
            assert item.end_s >= item.begin_s >= began_s[str(item.args["seq"])]


@pytest.mark.parametrize("lane", LANES)
def test_a_return_goes_the_other_way_at_the_same_time(lane: str, controller: StandInController) -> None:
    """A prefill worker asks a decode worker back, under the key of the hand-off that is open between them."""
    decode, prefill = start_pair(lane, controller)
    try:
        wait_for_peer(prefill)
        decode.pool[1:60] = random_pool(NUM_PAGES, PAGE_BYTES, 6)[1:60]
        handed = open_sink(decode, "prefill-0", 157, 1, start=80)
        returned = open_sink(prefill, "decode-0", 80, 1, start=20, key=return_key(handed.key))
        (there,), (back,) = (worker.events.wait(SinkCommitted) for worker in (decode, prefill))
        assert (there.key, back.key) == (handed.key, return_key(handed.key))
        assert back.lane == there.lane == lane
        assert np.array_equal(decode.pool[handed.pages[Component.FULL]], expected_pages(handed))
        assert np.array_equal(prefill.pool[returned.pages[Component.FULL]], expected_pages(returned, seed=6))
        assert decode.events.wait(SourceReleased) == [SourceReleased(returned.key)]
        assert prefill.events.wait(SourceReleased) == [SourceReleased(handed.key)]
    finally:
        decode.close()
        prefill.close()


@pytest.mark.parametrize("lane", LANES)
def test_every_component_arrives_or_nothing_counts(lane: str, controller: StandInController) -> None:
    decode, prefill = start_pair(lane, controller, HYBRID_KV)
    try:
        command = open_sink(decode, "prefill-0", 201, 1)
        [event] = decode.events.wait(SinkCommitted)
        assert event.nbytes == 51 * PAGE_BYTES + 11 * 1536 + 40000  # the window of [160, 201)
        prefill.events.wait(SourceReleased)
        for component, ours in command.pages.items():
            expected = np.zeros_like(decode.pools[component])
            expected[ours] = prefill.pools[component][1 : 1 + len(ours)]
            assert np.array_equal(decode.pools[component], expected), component
        wait_until(lambda: bytes_in(decode, lane) == event.nbytes)
        prefill.hold_regions.set()
        open_sink(decode, "prefill-0", 201, 2)
        wait_until(lambda: bytes_in(decode, lane) > event.nbytes)
        decode.io.post(AbortSink(HandoffKey(HandoffId(2), 1), Failure(code=ErrorCode.CANCELLED)))
        [failed] = decode.events.wait(SinkFailed)
        assert (failed.landed_until, failed.nbytes > 0) == (0, True)
        prefill.events.wait(SourceAborted)
        wait_until(lambda: slots_free(decode))
    finally:
        decode.close()
        prefill.close()


def test_a_page_larger_than_a_staging_slot_is_found_at_the_start() -> None:
    large = KvSpec(KvLayout(PAGE_SIZE, window=8), ((NUM_PAGES, PAGE_BYTES), (8, 16384 + 8)))
    with pytest.raises(ConfigError, match=r"transfer\.region_bytes = 16384: a page of swa KV has 16392 bytes"):
        Worker("decode-0", "decode", 11, io_config("local", "zmq"), NOWHERE, kv=large)
    Worker("decode-0", "decode", 11, io_config("local"), NOWHERE, kv=large).close()  # nothing is staged there


@pytest.mark.parametrize("lane", PROCESS_LANES)
def test_a_hand_off_between_processes_and_a_death_in_the_next(lane: str, controller: StandInController) -> None:
    config = io_config(lane)
    prefill = PrefillProcess(config, controller.door)
    decode = Worker("decode-0", "decode", 11, config, controller.door)
    try:
        wait_for_peer(decode)
        command = open_sink(decode, "prefill-0", 301, 1)
        [event] = decode.events.wait(SinkCommitted)
        assert (event.lane, event.nbytes) == (lane, len(command.pages[Component.FULL]) * PAGE_BYTES)
        assert np.array_equal(decode.pool[command.pages[Component.FULL]], expected_pages(command))
        prefill.kill()
        controller.remove("prefill-0")
        decode.events.wait_view(lambda view: len(view.members) == 1)
        lost = open_sink(decode, "prefill-0", 301, 2)
        [failed] = decode.events.wait(SinkFailed)
        assert (failed.key, failed.peer_lost, failed.landed_until) == (lost.key, True, 0)
    finally:
        decode.close()
        prefill.close()


@pytest.mark.parametrize("lane", ["local", "zmq"])
def test_a_source_killed_midway_fails_the_sink_with_what_had_landed(lane: str, controller: StandInController) -> None:
    config = io_config(lane)
    prefill = PrefillProcess(config, controller.door, hold=True)
    decode = Worker("decode-0", "decode", 11, config, controller.door)
    try:
        wait_for_peer(decode)
        command = open_sink(decode, "prefill-0", 200, 1)
        wait_until(lambda: bytes_in(decode, lane) == 5 * PAGE_BYTES)
        prefill.kill()
        controller.remove("prefill-0")
        [failed] = decode.events.wait(SinkFailed)
        assert (failed.peer_lost, failed.landed_until) == (True, 20)
        assert np.array_equal(decode.pool[command.pages[Component.FULL][:5]], expected_pages(command)[:5])
        assert not decode.pool[command.pages[Component.FULL][5:]].any()
        wait_until(lambda: slots_free(decode))
    finally:
        decode.close()
        prefill.close()


def test_a_stopped_source_is_silent_and_heard_again(controller: StandInController) -> None:
    config = io_config("zmq", dead_after_s=0.8)
    prefill = PrefillProcess(config, controller.door, hold=True)
    decode = Worker("decode-0", "decode", 11, config, controller.door)
    try:
        wait_for_peer(decode)
        open_sink(decode, "prefill-0", 200, 1)
        wait_until(lambda: bytes_in(decode, "zmq") > 0)
        prefill.signal(signal.SIGSTOP)
        [failed] = decode.events.wait(SinkFailed)
        assert failed.peer_lost
        assert decode.events.wait_view(lambda view: bool(view.silent)).silent == {WorkerId("prefill-0")}
        prefill.signal(signal.SIGCONT)
        wait_until(lambda: not decode.io.snapshot().silent)
        assert not decode.events.of(MembershipView)[-1].silent
    finally:
        decode.close()
        prefill.close()


def test_a_dead_sink_gives_the_source_its_pages_back(controller: StandInController) -> None:
    decode, prefill = start_pair("local", controller)
    try:
        prefill.hold_regions.set()
        open_sink(decode, "prefill-0", 200, 1)
        wait_until(lambda: bytes_in(decode, "local") > 0)
        decode.close()
        controller.remove("decode-0")
        prefill.events.wait(SourceAborted)
    finally:
        prefill.close()


def test_an_abandoned_deadline_fails_the_sink_in_time(controller: StandInController) -> None:
    decode, prefill = start_pair("zmq", controller)
    try:
        prefill.hold_regions.set()
        open_sink(decode, "prefill-0", 200, 1, ttl_s=0.5)
        [failed] = decode.events.wait(SinkFailed, wait_s=10.0)
        assert failed.landed_until <= 20
        prefill.events.wait(SourceAborted)
        wait_until(lambda: slots_free(decode))
    finally:
        decode.close()
        prefill.close()


# ------------------------------------------------------------------------------------- everything but hand-offs


def test_messages_between_members_arrive_with_their_sender(controller: StandInController) -> None:
    decode, prefill = start_pair("zmq", controller)
    try:
        body = CancelRequest(request_id=RequestId("r"), placement=0)
        prefill.events.wait_view(lambda view: len(view.members) == 2)
        decode.io.post(SendTo(WorkerId("prefill-0"), prefill.stamp.epoch, body))
        assert prefill.events.wait(FromPeer) == [FromPeer(decode.stamp, body)]
        decode.io.post(SendTo(WorkerId("prefill-0"), prefill.stamp.epoch - 1, body))  # for an earlier process
        decode.io.post(SendTo(WorkerId("nobody"), 0, body))
        wait_until(lambda: prefill.io.snapshot().mesh.foreign_epoch == 1)
        assert len(prefill.events.of(FromPeer)) == 1
    finally:
        decode.close()
        prefill.close()


def test_a_process_that_nobody_lists_is_not_heard(controller: StandInController) -> None:
    decode, prefill = start_pair("zmq", controller)
    earlier = Stamp(WorkerId("prefill-0"), 0, Epoch(21))
    stranger = Mesh(earlier, "127.0.0.1", prefill.keys)  # a member, in the name of the one before
    try:
        prefill.events.wait_view(lambda view: len(view.members) == 2)
        stranger.connect(WorkerId("decode-0"), decode.io.member.address, decode.io.member.key)
        stranger.send(WorkerId("decode-0"), Epoch(0), CancelRequest(request_id=RequestId("r"), placement=0))
        stranger.send(WorkerId("decode-0"), Epoch(0), Heartbeat())
        wait_until(lambda: decode.io.snapshot().mesh.foreign_key >= 2)
        assert not decode.events.of(FromPeer)
    finally:
        stranger.close()
        decode.close()
        prefill.close()


def test_a_gateway_hears_loads_and_needs_no_pool(controller: StandInController) -> None:
    heard: list[object] = []
    config = io_config("zmq")
    stamp = Stamp(WorkerId("gateway-0"), 1, Epoch(5))
    gateway = IoThread(stamp, "gateway", config, None, KeyPair.generate(), heard.append, controller=controller.door)
    gateway.start()
    decode = Worker("decode-0", "decode", 11, config, controller.door)
    try:
        gateway.wait_admitted(WAIT_S)
        wait_until(lambda: any(isinstance(e, FromPeer) and isinstance(e.body, Heartbeat) for e in list(heard)))
        loads = [e.body.load for e in list(heard) if isinstance(e, FromPeer) and isinstance(e.body, Heartbeat)]
        assert loads[0].running == 3
    finally:
        assert gateway.stop(WAIT_S)
        decode.close()


def test_a_rejection_says_which_fields_differ() -> None:
    def refuse(member: Member) -> Body:
        differences = {"page_size": f"{member.fingerprint['page_size']} != 16"}
        return Reject(protocol_version=PROTOCOL_VERSION, reason="layouts differ", differences=differences)

    controller = StandInController(True, refuse)
    decode = Worker("decode-0", "decode", 11, io_config("zmq"), controller.door)
    try:
        with pytest.raises(NotAdmitted, match=r"^layouts differ \(page_size: 4 != 16\)$"):
            decode.io.wait_admitted(WAIT_S)
        assert not decode.fatal.is_set()
    finally:
        decode.close()
        controller.close()


def test_a_process_whose_seat_was_given_to_another_ends(controller: StandInController) -> None:
    decode = Worker("decode-0", "decode", 11, io_config("zmq"), controller.door)
    successor = Mesh(Stamp(WorkerId("controller"), 2, Epoch(3)), "127.0.0.1", controller.keys)
    try:
        decode.io.wait_admitted(WAIT_S)
        successor.connect(decode.stamp.worker, decode.io.member.address, decode.io.member.key)
        refusal = Reject(protocol_version=PROTOCOL_VERSION, reason="superseded", differences={})
        successor.send(decode.stamp.worker, decode.stamp.epoch, refusal)
        assert decode.fatal.wait(WAIT_S)
    finally:
        successor.close()
        decode.close()


def test_a_controller_that_moved_is_told_and_believed(controller: StandInController) -> None:
    decode, prefill = start_pair("zmq", controller)
    keys = KeyPair.generate()
    moved = Mesh(Stamp(WorkerId("controller"), 2, Epoch(3)), "127.0.0.1", keys)
    moved.allow = OpenDoor()
    try:
        decode.io.set_controller(ControllerDoor(moved.address, keys.public))
        heard: list[Frame] = []
        wait_until(lambda: heard.extend(moved.poll(0.01)) or bool(heard))
        assert {(frame.src, type(frame.body)) for frame in heard} == {(decode.stamp, Heartbeat)}
        moved.connect(decode.stamp.worker, decode.io.member.address, decode.io.member.key)
        moved.send(decode.stamp.worker, decode.stamp.epoch, Membership(version=7, members=(decode.io.member,)))
        decode.events.wait_view(lambda view: view.version == 7)
        # the earlier controller still talks; nobody listens
        decode.io.wait_admitted(WAIT_S)
        assert len(decode.events.of(MembershipView)[-1].members) == 1
    finally:
        moved.close()
        decode.close()
        prefill.close()


def test_a_bug_in_the_thread_is_reported_once_and_ends_it(controller: StandInController) -> None:
    worker = Worker("decode-0", "decode", 11, io_config("zmq"), controller.door)
    worker.io.post("no command at all")
    assert worker.fatal.wait(WAIT_S)
    assert worker.io.stop(WAIT_S)


def test_an_address_that_is_not_ours_is_a_config_error() -> None:
    config = ClusterConfig(bind_host="203.0.113.7")
    with pytest.raises(ConfigError, match="bind_host"):
        IoThread(Stamp(WorkerId("x"), 1, Epoch(2)), "decode", config, None, None, print)


def bytes_in(worker: Worker, lane: str) -> int:
    flows = worker.io.flows().result(WAIT_S)
    return sum(flow.nbytes for flow in flows if (flow.peer, flow.lane, flow.direction) == ("prefill-0", lane, "in"))


def slots_free(worker: Worker) -> bool:
    data = worker.io.snapshot().data
    assert data is not None
    return data.receive_slots == (16, 0, 0)
