"""What fuzzing has found, each by itself: a member that has gone mad must not be able to do it again."""

from __future__ import annotations

import socket
import time

import msgspec
import numpy as np
import pytest
import zmq
from core_rig import GATEWAY, PREFILL, Rig, prompt_of, view
from core_rig import member as core_member
from test_controller_core import D0, hello, live_core, member

from baton.common.errors import ConfigError
from baton.common.ids import Epoch, RequestId, Stamp, WorkerId
from baton.common.log import EventLog
from baton.common.messages import (
    CancelRequest,
    FinishAck,
    Frame,
    Heartbeat,
    KvSnapshot,
    LaneAddress,
    Load,
    MalformedFrame,
    Output,
    Resume,
    SamplingParams,
    Submit,
    decode_frame,
    pack_tokens,
)
from baton.common.routing_config import KvEventsConfig, RoutingConfig
from baton.deploy.controller_seats import KillWorker, Reply
from baton.deploy.routing.index import PrefixIndex
from baton.deploy.routing.router import Router
from baton.transfer.keys import KeyPair
from baton.transfer.kv_publisher import MAX_REQUEST_BYTES, KvPublisher
from baton.transfer.mesh import Mesh
from baton.transfer.transports.base import LinkDown
from baton.transfer.transports.ucx import UcxTransport, why_unavailable
from baton.transfer.transports.ucx_parts import Hello as UcxHello
from baton.transfer.transports.ucx_parts import Welcome as UcxWelcome

OTHER = Stamp(WorkerId("gateway-1"), 1, Epoch(99))
R = RequestId("r")


def submit(placement: int) -> Submit:
    sampling = SamplingParams(max_tokens=8)
    return Submit(request_id=R, placement=placement, prompt=pack_tokens(prompt_of(9)), sampling=sampling, ttl_s=50.0)


def test_no_gateway_speaks_for_anothers_requests() -> None:
    rig = Rig()
    rig.gateway.acknowledge = False
    hear = rig.gateway.hear
    rig.gateway.hear = lambda effect: hear(effect) if effect.worker == GATEWAY.worker else []  # type: ignore[method-assign]
    rig.tell(CancelRequest(request_id=R, placement=0), OTHER)  # before it is there: buried for OTHER alone
    rig.submit("r", prompt_of(6))
    for word in (CancelRequest(request_id=R, placement=0), Resume(request_id=R, placement=0, next_index=0), submit(0)):
        rig.tell(word, OTHER)
    rig.tell(submit(1), OTHER)  # "a later placement"
    rig.settle()
    final = rig.gateway.finals["r"]
    assert final.failure is None
    rig.tell(FinishAck(request_id=R, placement=0), OTHER)
    rig.gateway.said.clear()
    rig.resume("r", 0)
    said = rig.gateway.said[-1].body
    assert isinstance(said, Output)
    assert said.failure is None, "the answer was forgotten for somebody else"
    assert rig.decode.core.stray_messages == 4
    for placement in (0, 1):
        for gateway in (GATEWAY, OTHER):
            rig.tell(FinishAck(request_id=R, placement=placement), gateway)
    rig.assert_clean()


def test_who_claims_a_live_seat_has_nobody_killed() -> None:
    effects = hello(live_core(), member(D0, 1, epoch=4711), 0.2)
    assert [type(effect) for effect in effects] == [Reply]
    assert [type(effect) for effect in hello(live_core(), member(D0, 9), 0.2)] == [Reply, KillWorker]


@pytest.mark.parametrize(
    "load",
    [{"queued": (1 << 61) + 1}, {"running": (1 << 64) - 1}, {"free_pages": -1}, {"step_age_s": float("nan")},
     {"tokens_per_s": float("inf")}, {"queued_tokens": 1 << 63}],
)  # fmt: skip
def test_loads_that_no_worker_has_are_no_frames(load: dict[str, float]) -> None:
    tree = [["decode-0", 1, 2], 3, {"type": "Heartbeat", "load": load}]
    with pytest.raises(MalformedFrame):
        decode_frame(msgspec.msgpack.encode(tree))


def test_the_largest_load_that_there_is_can_be_routed_by() -> None:
    router = Router(RoutingConfig(policy="prefix_aware"), 4, 0.5)
    router.on_view(view(1, core_member(PREFILL, "prefill")))
    huge = 1 << 61
    beat = Heartbeat(load=Load(queued=huge, running=huge, free_pages=huge, queued_tokens=huge, kv_seq=huge))
    frame = decode_frame(msgspec.msgpack.encode(Frame(PREFILL, Epoch(0), beat)))
    assert isinstance(frame.body, Heartbeat)
    router.heard(PREFILL, frame.body.load, 0.0)
    placed = router.place("prefill", np.arange(9, dtype=np.int32), 1)
    assert placed is not None
    assert placed.stamp == PREFILL


def test_a_snapshot_that_never_ends_fills_no_memory() -> None:
    index = PrefixIndex(100, 0.5)
    index.alive([PREFILL])
    names = bytes(8 * (1 << 16))
    for part in range(50):
        index.on_snapshot(PREFILL, KvSnapshot(seq=7, part=part, parts=1 << 16, names=names), 0.0)
    assert index.refused_pages >= 48 * (1 << 16)
    for part in (1, 2, 9):  # of one: there are no more
        index.on_snapshot(PREFILL, KvSnapshot(seq=8, part=part, parts=1, names=names), 0.0)
    assert index.pages == 0
    index.on_snapshot(PREFILL, KvSnapshot(seq=8, part=0, parts=1, names=names[:16]), 0.0)
    assert index.pages == 1


@pytest.mark.parametrize("tag", [-1, 1 << 64])
def test_a_tag_that_ucx_does_not_have_is_no_message(tag: int) -> None:
    hello = [["prefill-0", 1, 2], 3, b"", 0, tag, b""]
    welcome = [["prefill-0", 1, 2], b"", tag]
    for said, kind in ((hello, UcxHello), (welcome, UcxWelcome)):
        with pytest.raises((msgspec.ValidationError, OverflowError)):
            msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=kind)


def publisher() -> tuple[KvPublisher, KvEventsConfig]:
    for _ in range(20):
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            ports = one.getsockname()[1], other.getsockname()[1]
        config = KvEventsConfig(publish=True, port=ports[0], replay_port=ports[1])
        try:
            return KvPublisher(WorkerId("prefill-0"), "fake", config, 4, lambda: 0.0, lambda: None), config
        except ConfigError:
            continue
    raise AssertionError("no port is free")


def test_what_is_no_request_for_a_replay_is_counted_and_never_large() -> None:
    made, config = publisher()
    made.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asker = context.socket(zmq.DEALER)
    asker.linger = 0
    asker.connect(f"tcp://{config.host}:{config.replay_port}")
    try:
        for odd in ([b""], [b"", b"1"], [b"", bytes(9)], [b"x"] * 40):
            asker.send_multipart(odd)
        asker.send_multipart([b"", bytes(8)])
        assert asker.poll(10_000)
        assert asker.recv_multipart()[1] == (-1).to_bytes(8, "big", signed=True)
        assert made.refused == 4
        asker.send_multipart([b"", bytes(MAX_REQUEST_BYTES + 1)])  # ends the connection
        assert not asker.poll(300)
        another = context.socket(zmq.DEALER)
        another.linger = 0
        another.connect(f"tcp://{config.host}:{config.replay_port}")
        another.send_multipart([b"", bytes(8)])
        assert another.poll(10_000), "who came after it is not served"
        assert made.refused == 4
    finally:
        context.destroy(linger=0)
        assert made.stop(10.0)


class _NoWatcher:
    def register(self, source: object) -> None:
        pass

    unregister = register


@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())
def test_a_damaged_address_never_reaches_ucx() -> None:
    """It would end the process."""
    me = Stamp(WorkerId("decode-0"), 1, Epoch(5))
    lane = UcxTransport(me, _NoWatcher(), "127.0.0.1", lambda peer: b"x" * 32)
    try:
        good = lane.address().address
        worker = str(good["worker"])
        odd = [worker[:-2], worker[: len(worker) // 4 * 2], "", "04", worker + "00", "f" + worker[1:], "xx", 5]
        addresses = [good | {"worker": one} for one in odd]
        addresses += [good | {"door": door} for door in (-1, 1 << 64, "x")] + [good | {"digest": 7}, {}]
        for address in addresses:
            lane.open(PREFILL, LaneAddress(lane="ucx", address=address))
            (down,) = lane.poll()
            assert isinstance(down, LinkDown)
        assert lane.stray == len(addresses)
    finally:
        lane.close()


def test_who_proves_nothing_at_the_control_socket_is_counted() -> None:
    mesh = Mesh(PREFILL, "127.0.0.1", KeyPair.generate())
    port = int(mesh.address.rpartition(":")[2])
    greeting = b"\xff" + bytes(8) + b"\x7f\x03" + b"NULL".ljust(20, b"\0") + bytes(32)
    try:
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(greeting)
                stranger.recv(1)
        until_s = time.monotonic() + 10.0
        while mesh.counters.failed_handshakes < 5:
            assert time.monotonic() < until_s, mesh.counters
            assert mesh.poll(0.1) == []
    finally:
        mesh.close()


def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog("baton.test")
    for number in range(100):
        log.seldom("stranger", number=number)
        log.seldom("another")
    assert [record.getMessage() for record in caplog.records] == ["stranger", "another"]
