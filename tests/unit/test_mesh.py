"""The control plane's sockets: who gets in, what gets through, and what is dropped without harm."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from baton.common.errors import ConfigError
from baton.common.ids import CONTROLLER, Epoch, RequestId, Stamp, WorkerId
from baton.common.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Frame,
    Heartbeat,
    Hello,
    Load,
    Member,
    SamplingParams,
    Submit,
    encode_frame,
)
from baton.transfer import mesh as mesh_module
from baton.transfer.keys import ControllerDoor, KeyPair
from baton.transfer.mesh import HIGH_WATER_FRAMES, Mesh

A = Stamp(WorkerId("a"), 0, Epoch(11))
B = Stamp(WorkerId("b"), 0, Epoch(22))
KEYS_A, KEYS_B = KeyPair.generate(), KeyPair.generate()
WAIT_S = 10.0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is on no list is sent away sooner."""
    monkeypatch.setattr(mesh_module, "EARLY_S", 0.1)


def member(stamp: Stamp, keys: KeyPair, address: str = "") -> Member:
    return Member(stamp=stamp, role="decode", address=address, key=keys.public)


@pytest.fixture
def pair() -> Iterator[tuple[Mesh, Mesh]]:
    """They know each other."""
    a, b = Mesh(A, "127.0.0.1", KEYS_A), Mesh(B, "127.0.0.1", KEYS_B)
    a.allow.set_members([member(B, KEYS_B)])
    b.allow.set_members([member(A, KEYS_A)])
    a.connect(B.worker, b.address, KEYS_B.public)
    b.connect(A.worker, a.address, KEYS_A.public)
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


def raw_dealer(
    address: str, keys: KeyPair | None, server: KeyPair = KEYS_B
) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    if keys is not None:
        socket.curve_serverkey = server.public.encode()
        socket.curve_publickey = keys.public.encode()
        socket.curve_secretkey = keys.secret.encode()
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
    a = Mesh(A, "127.0.0.1", KEYS_A)
    try:
        a.connect(B.worker, "tcp://127.0.0.1:1", KEYS_B.public)
        sent = sum(a.send(B.worker, Epoch(0), Heartbeat()) for _ in range(3 * HIGH_WATER_FRAMES))
        assert sent <= HIGH_WATER_FRAMES
        assert a.counters.dropped_full == 3 * HIGH_WATER_FRAMES - sent
    finally:
        a.close()


def test_a_successor_at_the_same_seat_is_reached_after_reconnecting(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    keys = KeyPair.generate()
    successor = Mesh(Stamp(B.worker, 1, Epoch(23)), "127.0.0.1", keys)
    successor.allow.set_members([member(A, KEYS_A)])
    try:
        a.connect(B.worker, successor.address, keys.public)
        a.send(B.worker, Epoch(23), Heartbeat())
        assert len(poll_until([a, b, successor], lambda got: len(got) == 1)) == 1
        assert successor.counters.received == 1
        assert b.counters.received == 0
    finally:
        successor.close()


@pytest.mark.parametrize(
    ("keys", "server"),
    [(None, KEYS_B), (KeyPair.generate(), KeyPair.generate()), (KeyPair.generate(), KEYS_B)],
    ids=["no keys", "does not know whom it calls", "a good key that is on no list"],
)
def test_an_outsider_gets_nothing_in_and_nothing_out(
    pair: tuple[Mesh, Mesh], impatient: None, keys: KeyPair | None, server: KeyPair
) -> None:
    a, b = pair
    context, outsider = raw_dealer(b.address, keys, server)
    try:
        outsider.send(encode_frame(Frame(A, Epoch(0), Heartbeat(load=Load(steps=666)))))
        a.send(B.worker, B.epoch, Heartbeat(load=Load(steps=1)))
        frames = poll_until([a, b], lambda got: len(got) >= 1)
        frames += poll_until([b], lambda got: b.counters.denied > 0, wait_s=0.5)
        assert [frame.body.load.steps for frame in frames] == [1]  # type: ignore[union-attr]
        assert not outsider.poll(0)
        assert (b.counters.denied > 0) is (keys is not None and server is KEYS_B)
    finally:
        context.destroy(linger=0)


def test_a_member_speaks_in_no_other_name(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    for name in (Stamp(WorkerId("c"), 0, Epoch(33)), Stamp(A.worker, 1, A.epoch), Stamp(CONTROLLER, 1, A.epoch), B):
        a.stamp = name
        a.send(B.worker, B.epoch, Heartbeat(load=Load(steps=666)))
    a.stamp = A
    a.send(B.worker, B.epoch, Heartbeat())
    assert [frame.src for frame in poll_until([a, b], lambda got: len(got) == 1)] == [A]
    assert b.counters.foreign_key == 4


def test_who_is_taken_off_the_list_is_not_heard_any_more_and_cannot_come_again(
    pair: tuple[Mesh, Mesh], impatient: None
) -> None:
    a, b = pair
    a.send(B.worker, B.epoch, Heartbeat())
    poll_until([a, b], lambda got: len(got) == 1)
    b.allow.set_members([])
    a.send(B.worker, B.epoch, Heartbeat())  # over the connection that it has
    assert poll_until([a, b], lambda got: b.counters.foreign_key > 0) == []
    admitted = b.counters.admitted
    a.disconnect(B.worker)
    a.connect(B.worker, b.address, KEYS_B.public)
    a.send(B.worker, B.epoch, Heartbeat())
    assert poll_until([a, b], lambda got: b.counters.denied > 0) == []
    assert (b.counters.foreign_key, b.counters.admitted) == (1, admitted)


@pytest.mark.parametrize("early_s", [0.05, WAIT_S], ids=["comes again", "waits"])
def test_who_comes_before_the_list_knows_it_gets_in_soon_after(
    pair: tuple[Mesh, Mesh], early_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_module, "EARLY_S", early_s)
    _, b = pair
    early, keys = Stamp(WorkerId("c"), 1, Epoch(33)), KeyPair.generate()
    c = Mesh(early, "127.0.0.1", keys)
    try:
        c.connect(B.worker, b.address, KEYS_B.public)
        c.send(B.worker, B.epoch, Heartbeat())
        poll_until([b, c], lambda got: b.counters.denied > 0, wait_s=0.5)
        b.allow.set_members([member(A, KEYS_A), member(early, keys)])
        assert [frame.src for frame in poll_until([b, c], lambda got: len(got) == 1, wait_s=3.0)] == [early]
    finally:
        c.close()


def test_a_guest_introduces_one_process_and_nothing_else(pair: tuple[Mesh, Mesh]) -> None:
    _, controller = pair
    guest, keys, stamp = KeyPair.generate(), KeyPair.generate(), Stamp(WorkerId("c"), 3, Epoch(33))
    controller.allow.invite(guest.public, stamp.worker, stamp.incarnation)
    c = Mesh(stamp, "127.0.0.1", keys)

    def heard_of(name: Stamp, body: Heartbeat | Hello) -> int:
        """How many of two such frames are heard."""
        c.stamp, before = name, controller.counters
        for _ in range(2):
            assert c.send(B.worker, B.epoch, body)
        frames = poll_until(
            [controller, c], lambda got: len(got) + controller.counters.foreign_key - before.foreign_key == 2
        )
        return len(frames)

    def hello(name: Stamp, key: str) -> Hello:
        introduced = Member(stamp=name, role="decode", address=c.address, key=key)
        return Hello(protocol_version=PROTOCOL_VERSION, member=introduced)

    try:
        c.connect(B.worker, controller.address, KEYS_B.public, guest)
        other = Stamp(stamp.worker, 2, stamp.epoch)
        assert heard_of(stamp, Heartbeat()) == 0
        assert heard_of(other, hello(other, keys.public)) == 0, "it is invited for this incarnation only"
        assert heard_of(A, hello(A, keys.public)) == 0
        for taken in (KEYS_A.public, KEYS_B.public, "", "no key", "0" * 40, guest.public[:-1]):
            assert heard_of(stamp, hello(stamp, taken)) == 0, taken
        assert heard_of(stamp, hello(stamp, keys.public)) == 2
        assert heard_of(stamp, hello(stamp, KeyPair.generate().public)) == 0, "it was used for another key"
        second = Stamp(stamp.worker, stamp.incarnation, Epoch(34))
        assert heard_of(second, hello(second, keys.public)) == 0, "it was used by another process"
        controller.allow.withdraw(stamp.worker, 2)  # of another incarnation
        assert heard_of(stamp, hello(stamp, keys.public)) == 2
        controller.allow.withdraw(stamp.worker, stamp.incarnation)
        assert heard_of(stamp, hello(stamp, keys.public)) == 0
    finally:
        c.close()


def test_nobody_else_is_taken_for_whom_this_process_calls(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    impostor = Mesh(B, "127.0.0.1", KeyPair.generate())
    impostor.allow.set_members([member(A, KEYS_A)])
    try:
        a.connect(B.worker, impostor.address, KEYS_B.public)
        a.send(B.worker, B.epoch, Heartbeat())
        assert poll_until([a, b, impostor], lambda got: False, wait_s=0.3) == []
        assert impostor.counters.received == 0
    finally:
        impostor.close()


def test_garbage_is_counted_and_the_loop_lives(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    good = encode_frame(Frame(A, Epoch(0), Heartbeat()))
    context, member = raw_dealer(b.address, KEYS_A)
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
    context, member = raw_dealer(b.address, KEYS_A)
    try:
        member.send(bytes(MAX_FRAME_BYTES + 1))
        a.send(B.worker, Epoch(0), Heartbeat())
        assert len(poll_until([a, b], lambda got: len(got) == 1)) == 1
        assert b.counters.received == 1
    finally:
        context.destroy(linger=0)


def test_wake_ends_a_wait_from_another_thread() -> None:
    mesh = Mesh(A, "127.0.0.1", KEYS_A)
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
        Mesh(A, host, KEYS_A)


def test_a_port_that_is_taken_is_a_config_error(pair: tuple[Mesh, Mesh]) -> None:
    port = int(pair[0].address.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match="cannot listen"):
        Mesh(B, "127.0.0.1", KEYS_B, port=port)


def test_secrets_are_not_printed() -> None:
    assert KEYS_A.secret not in repr(ControllerDoor("tcp://127.0.0.1:1", KEYS_B.public, KEYS_A))


@pytest.mark.parametrize("address", ["", "garbage", "tcp://\0:1", "ipc:///tmp/x", "inproc://zeromq.zap.01"])
def test_an_address_that_makes_no_sense_ends_nobody(address: str) -> None:
    mesh = Mesh(Stamp(WorkerId("a"), 1, Epoch(1)), "127.0.0.1", KEYS_A)
    try:
        mesh.connect(WorkerId("b"), address, KEYS_B.public)
        assert not mesh.send(WorkerId("b"), Epoch(1), Heartbeat())
        assert (mesh.counters.bad_address, mesh.counters.dropped_unknown) == (1, 1)
    finally:
        mesh.close()


@pytest.mark.parametrize("key", ["", "no key", "\xe9" * 40, KEYS_A.public[:-1]])
def test_a_key_that_makes_no_sense_ends_nobody(key: str) -> None:
    mesh = Mesh(A, "127.0.0.1", KEYS_A)
    try:
        mesh.connect(WorkerId("b"), "tcp://127.0.0.1:1", key)
        assert not mesh.send(WorkerId("b"), Epoch(1), Heartbeat())
        assert (mesh.counters.bad_address, mesh.counters.dropped_unknown) == (1, 1)
    finally:
        mesh.close()


def test_who_wakes_it_while_it_wakes_up_does_not_keep_the_next_one_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh, read = Mesh(A, "127.0.0.1", KEYS_A), os.eventfd_read

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
