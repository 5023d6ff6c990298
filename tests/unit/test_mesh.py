"""The control plane's sockets: who gets in, what gets through, and what is dropped without harm."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from baton.common.errors import ConfigError
from baton.common.ids import Epoch, RequestId, Stamp, WorkerId
from baton.common.messages import MAX_FRAME_BYTES, Frame, Heartbeat, Load, SamplingParams, Submit, encode_frame
from baton.transfer.mesh import HIGH_WATER_FRAMES, ClusterKeys, Mesh

A = Stamp(WorkerId("a"), 0, Epoch(11))
B = Stamp(WorkerId("b"), 0, Epoch(22))
KEYS = ClusterKeys.generate()
WAIT_S = 10.0


@pytest.fixture
def pair() -> Iterator[tuple[Mesh, Mesh]]:
    a, b = Mesh(A, "127.0.0.1", KEYS), Mesh(B, "127.0.0.1", KEYS)
    a.connect(B.worker, b.address)
    b.connect(A.worker, a.address)
    yield a, b
    a.close()
    b.close()


def poll_until(meshes: list[Mesh], done: Callable[[list[Frame]], bool], wait_s: float = WAIT_S) -> list[Frame]:
    frames: list[Frame] = []
    end = time.monotonic() + wait_s
    while not done(frames) and time.monotonic() < end:
        for mesh in meshes:
            frames += mesh.poll(0.005)
    return frames


def raw_dealer(address: str, keys: ClusterKeys | None) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    if keys is not None:
        socket.curve_serverkey = keys.server_public.encode()
        socket.curve_publickey = keys.client_public.encode()
        socket.curve_secretkey = keys.client_secret.encode()
    socket.connect(address)
    return context, socket


def test_frames_arrive_in_order_with_their_sender(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    for index in range(100):
        assert a.send(B.worker, B.epoch, Heartbeat(load=Load(steps=index)))
    frames = poll_until([a, b], lambda got: len(got) == 100)
    assert [frame.body.load.steps for frame in frames] == list(range(100))  # type: ignore[union-attr]
    assert {frame.src for frame in frames} == {A}
    assert b.counters.admitted >= 1
    assert b.counters.denied == 0


def test_a_frame_for_an_earlier_process_is_dropped(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    a.send(B.worker, Epoch(21), Heartbeat())
    a.send(B.worker, Epoch(0), Heartbeat())
    frames = poll_until([a, b], lambda got: len(got) == 1)
    assert [frame.dst_epoch for frame in frames] == [0]
    assert b.counters.foreign_epoch == 1


def test_an_unknown_worker_is_a_counted_no(pair: tuple[Mesh, Mesh]) -> None:
    a, _ = pair
    assert not a.send(WorkerId("nobody"), Epoch(0), Heartbeat())
    a.disconnect(B.worker)
    a.disconnect(B.worker)
    assert not a.send(B.worker, Epoch(0), Heartbeat())
    assert a.counters.dropped_unknown == 2


def test_the_queue_to_a_dead_peer_is_bounded() -> None:
    a = Mesh(A, "127.0.0.1", KEYS)
    try:
        a.connect(B.worker, "tcp://127.0.0.1:1")
        sent = sum(a.send(B.worker, Epoch(0), Heartbeat()) for _ in range(3 * HIGH_WATER_FRAMES))
        assert sent <= HIGH_WATER_FRAMES
        assert a.counters.dropped_full == 3 * HIGH_WATER_FRAMES - sent
    finally:
        a.close()


def test_a_successor_at_the_same_seat_is_reached_after_reconnecting(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    successor = Mesh(Stamp(B.worker, 1, Epoch(23)), "127.0.0.1", KEYS)
    try:
        a.connect(B.worker, successor.address)
        a.send(B.worker, Epoch(23), Heartbeat())
        assert len(poll_until([a, b, successor], lambda got: len(got) == 1)) == 1
        assert successor.counters.received == 1
        assert b.counters.received == 0
    finally:
        successor.close()


@pytest.mark.parametrize("keys", [None, ClusterKeys.generate()], ids=["no keys", "keys of another cluster"])
def test_an_outsider_gets_nothing_in_and_nothing_out(pair: tuple[Mesh, Mesh], keys: ClusterKeys | None) -> None:
    a, b = pair
    context, outsider = raw_dealer(b.address, keys)
    try:
        outsider.send(encode_frame(Frame(A, Epoch(0), Heartbeat(load=Load(steps=666)))))
        a.send(B.worker, Epoch(0), Heartbeat(load=Load(steps=1)))
        frames = poll_until([a, b], lambda got: len(got) >= 1)
        frames += poll_until([b], lambda got: False, wait_s=0.3)
        assert [frame.body.load.steps for frame in frames] == [1]  # type: ignore[union-attr]
        assert not outsider.poll(0)
    finally:
        context.destroy(linger=0)


def test_a_client_with_the_servers_public_key_only_is_denied(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    other = ClusterKeys.generate()
    stranger = ClusterKeys(KEYS.server_public, "", other.client_public, other.client_secret, "")
    context, outsider = raw_dealer(b.address, stranger)
    try:
        outsider.send(encode_frame(Frame(A, Epoch(0), Heartbeat())))
        assert poll_until([a, b], lambda got: b.counters.denied > 0) == []
        assert b.counters.denied >= 1
    finally:
        context.destroy(linger=0)


def test_garbage_is_counted_and_the_loop_lives(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    good = encode_frame(Frame(A, Epoch(0), Heartbeat()))
    context, member = raw_dealer(b.address, KEYS)
    try:
        member.send(b"")
        member.send(b"\xc1 never valid")
        member.send(good[:-1])
        member.send(good + b"\0")
        member.send_multipart([good, good])
        member.send(good)
        assert len(poll_until([a, b], lambda got: len(got) == 1)) == 1
        assert b.counters.malformed == 5
    finally:
        context.destroy(linger=0)


def test_an_oversized_frame_is_refused_on_both_sides(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    huge = Submit(
        request_id=RequestId("r"), placement=0, prompt=bytes(MAX_FRAME_BYTES), sampling=SamplingParams(), ttl_s=1.0
    )
    assert not a.send(B.worker, Epoch(0), huge)
    assert a.counters.dropped_too_big == 1
    context, member = raw_dealer(b.address, KEYS)
    try:
        member.send(bytes(MAX_FRAME_BYTES + 1))
        a.send(B.worker, Epoch(0), Heartbeat())
        assert len(poll_until([a, b], lambda got: len(got) == 1)) == 1
        assert b.counters.received == 1
    finally:
        context.destroy(linger=0)


def test_wake_ends_a_wait_from_another_thread() -> None:
    mesh = Mesh(A, "127.0.0.1", KEYS)
    waker = threading.Timer(0.05, mesh.wake)
    waker.start()
    started = time.monotonic()
    assert mesh.poll(WAIT_S) == []
    assert time.monotonic() - started < WAIT_S / 2
    waker.join()
    mesh.close()
    mesh.wake()  # harmless


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "", "203.0.113.7"])
def test_only_a_named_local_interface_is_bound(host: str) -> None:
    with pytest.raises(ConfigError, match="bind_host"):
        Mesh(A, host, KEYS)


def test_a_port_that_is_taken_is_a_config_error(pair: tuple[Mesh, Mesh]) -> None:
    port = int(pair[0].address.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match="cannot listen"):
        Mesh(B, "127.0.0.1", KEYS, port=port)


def test_secrets_are_not_printed() -> None:
    shown = repr(KEYS)
    assert KEYS.server_secret not in shown
    assert KEYS.client_secret not in shown
    assert KEYS.data_secret not in shown


@pytest.mark.parametrize("address", ["", "garbage", "tcp://\0:1", "ipc:///tmp/x", "inproc://zeromq.zap.01"])
def test_an_address_that_makes_no_sense_ends_nobody(address: str) -> None:
    mesh = Mesh(Stamp(WorkerId("a"), 1, Epoch(1)), "127.0.0.1", ClusterKeys.generate())
    try:
        mesh.connect(WorkerId("b"), address)
        assert not mesh.send(WorkerId("b"), Epoch(1), Heartbeat())
        assert (mesh.counters.bad_address, mesh.counters.dropped_unknown) == (1, 1)
    finally:
        mesh.close()


def test_who_wakes_it_while_it_wakes_up_does_not_keep_the_next_one_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh, read = Mesh(A, "127.0.0.1", KEYS), os.eventfd_read

    def read_late(descriptor: int) -> int:
        mesh.wake()  # as another thread may, at that moment
        return read(descriptor)

    monkeypatch.setattr(os, "eventfd_read", read_late)
    mesh.wake()
    mesh.poll(WAIT_S)
    monkeypatch.undo()
    mesh.wake()
    began = time.monotonic()
    mesh.poll(WAIT_S)
    took_s = time.monotonic() - began
    mesh.close()
    assert took_s < WAIT_S / 2
