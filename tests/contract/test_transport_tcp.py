"""The contract of every lane, for `tcp`, and what only this lane can get wrong: half of a region, and who is let in."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import zmq

from baton.common.config import TransferConfig
from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import LaneAddress
from baton.transfer.session.effects import FenceSource, SinkLaneFailed, SourceFenced
from baton.transfer.testing import TransportContract
from baton.transfer.testing_ends import FULL_ONLY, End, EndKeys, EndSpec, HandOff, KvSpec, pump, random_pool
from baton.transfer.transports import tcp, tcp_source
from baton.transfer.transports.base import Ended, LinkDown, LinkUp, Placed, Rows, Sent, TransportEvent, WakeSource
from baton.transfer.transports.tcp import TcpTransport
from baton.transfer.transports.tcp_parts import (
    ASK,
    DATA,
    DROP,
    END,
    FRAME_BYTES,
    PROOF_BYTES,
    SPOILED,
    WHOLE,
    Gone,
    Prover,
    RegionMemory,
    TcpFrame,
    region_out,
    region_spoiled,
)

SECRET, OTHER_SECRET = b"a" * 32, b"b" * 32
SINK, SOURCE = Stamp(WorkerId("sink"), 0, Epoch(7)), Stamp(WorkerId("source"), 1, Epoch(8))
PAGES, PAGE_BYTES = 80, 65536
LARGE = np.arange(1, 65, dtype=np.int32)  # 4 MiB: more than a connection swallows at once
SMALL = np.array([70, 72, 73], dtype=np.int32)


class TestTcp(TransportContract):
    lane = "tcp"
    staged = False
    slotted = False


class TestTcpStreams(TransportContract):
    """Regions take turns on three connections."""

    lane = "tcp"
    staged = False
    slotted = False
    remote = False

    def make_pair(self, kv: KvSpec = FULL_ONLY) -> tuple[End, End]:
        sink, source = super().make_pair(kv)
        sink.close()
        config = replace(sink.spec.config, tcp_streams=3)
        sink = End(replace(sink.spec, config=config))
        sink.set_peers([source.member])
        return sink, source


class _Poller:
    """Polls when a source is readable, as the mesh does."""

    def __init__(self) -> None:
        self.sources: list[WakeSource] = []

    def register(self, source: WakeSource) -> None:
        self.sources.append(source)

    def unregister(self, source: WakeSource) -> None:
        self.sources.remove(source)

    def wait(self, wait_s: float) -> None:
        poller = zmq.Poller()
        for source in self.sources:
            poller.register(source, zmq.POLLIN)
        poller.poll(wait_s * 1000)


class Side:
    """One transport with its pool and what it has reported."""

    def __init__(self, stamp: Stamp, fill: int = 0, secret: bytes = SECRET, streams: int = 1) -> None:
        self.stamp = stamp
        self.pool = random_pool(PAGES, PAGE_BYTES, fill) if fill else np.zeros((PAGES, PAGE_BYTES), np.uint8)
        self.waiter = _Poller()
        pools = {Component.FULL: self.pool}
        self.lane = TcpTransport(stamp, self.waiter, "127.0.0.1", lambda peer: secret, pools, streams)
        self.events: list[TransportEvent] = []

    def turn(self) -> None:
        self.waiter.wait(0.0 if self.lane.busy else 0.002)
        self.events += self.lane.poll()


def until(done: Callable[[], bool], *sides: Side) -> bool:
    deadline = time.monotonic() + 10
    while not done():
        if time.monotonic() > deadline:
            return False
        for side in sides:
            side.turn()
    return True


def rows(units: np.ndarray, begin: int = 0, end: int = PAGE_BYTES) -> Rows:
    return Rows(Component.FULL, units, begin, end)


@pytest.fixture
def sink() -> Iterator[Side]:
    side = Side(SINK)
    yield side
    side.lane.close()


@pytest.fixture
def source() -> Iterator[Side]:
    side = Side(SOURCE, fill=3)
    yield side
    side.lane.close()


class RawSource:
    """The source's side of a connection, played by hand."""

    def __init__(self, sink: Side) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        address = LaneAddress(lane="tcp", address={"host": "127.0.0.1", "port": self._listener.getsockname()[1]})
        sink.lane.open(SOURCE, address)
        self.socket, _ = self._listener.accept()
        self.sink = sink

    def another(self) -> RawSource:
        """The next connection of the same link."""
        other = copy(self)
        other.socket, _ = self._listener.accept()
        return other

    def welcome(self, secret: bytes = SECRET) -> None:
        self._hello = self.hear(PROOF_BYTES)
        self._welcome = Prover(SOURCE, lambda peer: secret).welcome(SINK, self._hello)
        self.socket.sendall(self._welcome)

    def prove(self) -> RawSource:
        self.welcome()
        Prover(SOURCE, lambda peer: SECRET).check_proof(SINK, self._hello, self._welcome, self.hear(PROOF_BYTES))
        assert until(lambda: LinkUp(SOURCE) in self.sink.events, self.sink)
        return self

    def hear(self, nbytes: int) -> bytes:
        self.socket.setblocking(False)
        heard = b""

        def all_there() -> bool:
            nonlocal heard
            try:
                heard += self.socket.recv(nbytes - len(heard))
            except BlockingIOError:
                return False
            return len(heard) == nbytes

        assert until(all_there, self.sink)
        self.socket.setblocking(True)
        return heard

    def say(self, *parts: TcpFrame | bytes) -> None:
        self.socket.settimeout(5)
        self.socket.sendall(b"".join(part.pack() if isinstance(part, TcpFrame) else part for part in parts))

    def close(self) -> None:
        self.socket.close()
        self._listener.close()


class RawSink:
    """The receiver's side of a connection, played by hand: it reads when the test says so."""

    def __init__(self, source: Side, stamp: Stamp = SINK, secret: bytes = SECRET) -> None:
        address = source.lane.address().address
        self.socket = socket.create_connection((str(address["host"]), int(address["port"])))
        self.source = source
        self.prover = Prover(stamp, lambda peer: secret)
        self.hello = self.prover.hello(source.stamp, 0)

    def prove(self) -> RawSink:
        self.socket.sendall(self.hello)
        welcome = self.hear(PROOF_BYTES)
        self.proof = self.prover.proof(SOURCE, self.hello, welcome)
        self.socket.sendall(self.proof)
        return self

    def hear(self, nbytes: int) -> bytes:
        """b"" at the end: the source has closed the connection."""
        self.socket.setblocking(False)
        heard, over = b"", False

        def all_there() -> bool:
            nonlocal heard, over
            try:
                more = self.socket.recv(nbytes - len(heard))
            except BlockingIOError:
                return False
            except ConnectionResetError:
                more = b""
            heard, over = heard + more, not more
            return over or len(heard) == nbytes

        assert until(all_there, self.source)
        self.socket.setblocking(True)
        return b"" if over else heard

    def ask(self, tag: int) -> None:
        self.socket.sendall(TcpFrame(ASK, tag, 0).pack())


def connect(sink: Side, source: Side) -> None:
    sink.events.clear()
    sink.lane.open(SOURCE, source.lane.address())
    assert until(lambda: LinkUp(SOURCE) in sink.events, sink, source)


def move(sink: Side, source: Side, op: int, units: np.ndarray = SMALL) -> None:
    """One more region arrives whole."""
    sink.pool[units] = 0
    source.lane.send(op, SINK, op, rows(units))
    sink.lane.receive(op + 1, SOURCE, op, rows(units))
    assert until(lambda: Placed(op + 1) in sink.events and Sent(op) in source.events, sink, source)
    assert np.array_equal(sink.pool[units], source.pool[units])


# ----------------------------------------------------------------------------------------------- what travels


def test_parts_of_pages_arrive_in_their_place_and_nowhere_else(sink: Side, source: Side) -> None:
    connect(sink, source)
    theirs, ours = np.array([5, 6, 9], np.int32), np.array([40, 3, 4], np.int32)
    source.lane.send(1, SINK, 1, rows(theirs, 100, 5000))
    sink.lane.receive(2, SOURCE, 1, rows(ours, 100, 5000))
    assert until(lambda: Placed(2) in sink.events, sink, source)
    expected = np.zeros_like(sink.pool)
    expected[ours, 100:5000] = source.pool[theirs, 100:5000]
    assert np.array_equal(sink.pool, expected)


def test_neighbouring_pages_on_one_side_only_arrive_in_order(sink: Side, source: Side) -> None:
    connect(sink, source)
    theirs, ours = np.arange(10, 50, dtype=np.int32), np.arange(70, 30, -1, dtype=np.int32)
    source.lane.send(1, SINK, 1, rows(theirs))
    sink.lane.receive(2, SOURCE, 1, rows(ours))
    assert until(lambda: Placed(2) in sink.events, sink, source)
    assert np.array_equal(sink.pool[ours], source.pool[theirs])


@pytest.mark.parametrize(("units", "begin", "end"), [([-1], 0, 8), ([9], 0, 8), ([1], 8, 65), ([1], -1, 8)])
def test_memory_outside_of_the_pool_is_never_touched(units: list[int], begin: int, end: int) -> None:
    memory = RegionMemory(np.zeros((9, 64), np.uint8))
    with pytest.raises(AssertionError):
        memory.pieces(rows(np.array(units, np.int32), begin, end))


def test_a_poll_ends_when_its_time_is_over(sink: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = RawSource(sink).prove()
    sink.lane.receive(1, SOURCE, 11, rows(SMALL))
    monkeypatch.setattr(tcp, "TURN_S", 0.0)
    assert raw.hear(FRAME_BYTES) == TcpFrame(ASK, 11, 0).pack()
    raw.say(TcpFrame(DATA, 11, 3 * PAGE_BYTES), b"\1" * 3 * PAGE_BYTES, TcpFrame(END, 11, WHOLE))
    sink.turn()
    assert not sink.pool.any(), "more than a portion in one turn"
    assert until(lambda: Placed(1) in sink.events, sink)
    raw.close()


def test_regions_are_spread_over_streams_once_all_of_them_are_proven() -> None:
    sink = Side(SINK, streams=3)
    first = RawSource(sink)
    streams = [first, first.another(), first.another()]
    for raw in streams[:2]:
        raw.welcome()
        raw.hear(PROOF_BYTES)
    assert not sink.events, "up too early"
    streams[2].prove()
    for op in (1, 2, 3):
        sink.lane.receive(op, SOURCE, op, rows(LARGE))
    assert {raw.hear(FRAME_BYTES) for raw in streams} == {TcpFrame(ASK, op, 0).pack() for op in (1, 2, 3)}
    streams[1].close()
    assert until(lambda: isinstance(sink.events[-1], LinkDown), sink)
    assert {event.op for event in sink.events if isinstance(event, Ended) and event.peer_lost} == {1, 2, 3}
    assert sink.events.count(LinkUp(SOURCE)) == 1
    sink.lane.close()


def test_what_is_no_longer_asked_for_is_not_sent(source: Side) -> None:
    raw = RawSink(source).prove()
    raw.ask(11)
    raw.socket.sendall(TcpFrame(DROP, 11, 0).pack() + TcpFrame(ASK, 12, 0).pack())
    source.lane.send(1, SINK, 12, rows(SMALL[:1]))
    raw.hear(PAGE_BYTES + 2 * FRAME_BYTES)
    source.lane.send(2, SINK, 11, rows(SMALL))
    source.lane.send(3, SINK, 13, rows(SMALL))
    raw.ask(13)
    assert TcpFrame.unpack(raw.hear(FRAME_BYTES)).tag == 13


# ---------------------------------------------------------------------------------------------- half of a region


def test_what_comes_after_a_cancel_touches_no_page_and_the_next_region_is_whole(sink: Side) -> None:
    raw = RawSource(sink).prove()
    sink.lane.receive(1, SOURCE, 11, rows(LARGE))
    sink.lane.receive(2, SOURCE, 12, rows(SMALL))
    nbytes = len(LARGE) * PAGE_BYTES
    raw.say(TcpFrame(DATA, 11, nbytes), b"\1" * (nbytes // 8))
    assert until(lambda: bool(sink.pool[2].all()), sink)
    sink.lane.cancel(1)
    sink.pool[:] = 0  # somebody else's now
    for _ in range(7):
        raw.say(b"\1" * (nbytes // 8))
        for _ in range(20):
            sink.turn()
    raw.say(TcpFrame(END, 11, WHOLE), TcpFrame(DATA, 12, 3 * PAGE_BYTES), b"\2" * 3 * PAGE_BYTES)
    raw.say(TcpFrame(END, 12, WHOLE))
    assert until(lambda: Placed(2) in sink.events, sink)
    assert (sink.pool[SMALL] == 2).all()
    assert not sink.pool[LARGE].any()
    assert Ended(1, "cancelled", peer_lost=False) in sink.events
    raw.close()


def test_a_region_given_up_on_its_way_is_told_from_a_whole_one_and_the_next_is_whole(source: Side) -> None:
    raw = RawSink(source).prove()
    source.lane.send(1, SINK, 11, rows(LARGE))
    source.lane.send(2, SINK, 12, rows(SMALL))
    before = source.pool.copy()
    raw.ask(11)
    raw.ask(12)
    nbytes = len(LARGE) * PAGE_BYTES
    first = raw.hear(FRAME_BYTES + nbytes // 16)
    source.lane.cancel(1)
    source.pool[LARGE] = 255  # somebody else's now
    body = first[FRAME_BYTES:] + raw.hear(nbytes - len(first) + FRAME_BYTES)
    assert TcpFrame.unpack(first[:FRAME_BYTES]) == TcpFrame(DATA, 11, nbytes)
    assert TcpFrame.unpack(raw.hear(FRAME_BYTES)) == TcpFrame(END, 11, SPOILED)
    came = np.frombuffer(body, np.uint8)
    same = came == before[LARGE].reshape(-1)
    assert not came[int(np.argmin(same)) :].any(), "pages were read after the cancel"
    assert TcpFrame.unpack(raw.hear(FRAME_BYTES)) == TcpFrame(DATA, 12, 3 * PAGE_BYTES)
    assert raw.hear(3 * PAGE_BYTES) == before[SMALL].tobytes()
    assert TcpFrame.unpack(raw.hear(FRAME_BYTES)) == TcpFrame(END, 12, WHOLE)
    assert {Ended(1, "cancelled", peer_lost=False), Sent(2)} <= set(source.events)
    raw.socket.close()


@pytest.mark.parametrize("heard", [1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 3 * PAGE_BYTES + FRAME_BYTES + 4])
def test_padding_fits_wherever_a_region_is_given_up(heard: int) -> None:
    pieces = [memoryview(b"\7" * PAGE_BYTES)] * 3
    region = region_out(5, pieces)
    wire = b"".join(region.next())
    region.done = heard
    rest = region_spoiled(5, region)
    padded = wire[:heard]
    while rest.left:
        part = b"".join(rest.next())
        padded, rest.done = padded + part, rest.done + len(part)
    assert len(padded) == len(wire)
    assert TcpFrame.unpack(padded[:FRAME_BYTES]) == TcpFrame(DATA, 5, 3 * PAGE_BYTES)
    assert not padded[max(heard, FRAME_BYTES) : -FRAME_BYTES].strip(b"\0")
    end = TcpFrame.unpack(padded[-FRAME_BYTES:])
    assert (end.kind, end.tag) == (END, 5)
    assert end.number == SPOILED or heard > 3 * PAGE_BYTES + FRAME_BYTES


def test_a_spoiled_region_is_no_success(sink: Side) -> None:
    raw = RawSource(sink).prove()
    sink.lane.receive(1, SOURCE, 11, rows(SMALL))
    raw.say(TcpFrame(DATA, 11, 3 * PAGE_BYTES), bytes(3 * PAGE_BYTES), TcpFrame(END, 11, SPOILED))
    assert until(lambda: len(sink.events) == 2, sink)
    assert sink.events[1] == Ended(1, "the source gave the region up", peer_lost=False)
    raw.close()


def test_a_region_of_another_size_touches_no_page_and_ends_the_link(sink: Side, source: Side) -> None:
    """One damaged bit in a length, and nobody knows where the next region begins: the connection must not go on."""
    for op, units in ((1, SMALL[:2]), (3, LARGE)):
        connect(sink, source)
        source.lane.send(op, SINK, op, rows(units))
        sink.lane.receive(op + 1, SOURCE, op, rows(SMALL))
        assert until(lambda: isinstance(sink.events[-1], LinkDown), sink, source)
        assert any(isinstance(event, Ended) and event.op == op + 1 for event in sink.events)
        assert not sink.pool.any()
    connect(sink, source)
    move(sink, source, 10)


def test_what_nobody_asked_for_touches_no_page_and_the_next_region_is_whole(sink: Side) -> None:
    raw = RawSource(sink).prove()
    sink.lane.receive(1, SOURCE, 11, rows(SMALL))
    for tag in (99, 11):
        raw.say(TcpFrame(DATA, tag, 3 * PAGE_BYTES), b"\1" * (3 * PAGE_BYTES))
        raw.say(TcpFrame(END, tag, WHOLE))
    assert until(lambda: Placed(1) in sink.events, sink)
    assert sink.lane.stray == 1
    assert not np.delete(sink.pool, SMALL, axis=0).any()
    raw.close()


def test_a_connection_cut_in_the_middle_ends_its_regions_and_the_link(sink: Side) -> None:
    raw = RawSource(sink).prove()
    sink.lane.receive(1, SOURCE, 11, rows(SMALL))
    sink.lane.receive(2, SOURCE, 12, rows(LARGE))
    raw.say(TcpFrame(DATA, 11, 3 * PAGE_BYTES), bytes(PAGE_BYTES))
    raw.close()
    assert until(lambda: isinstance(sink.events[-1], LinkDown), sink)
    assert [(event.op, event.peer_lost) for event in sink.events if isinstance(event, Ended)] == [(1, True), (2, True)]
    sink.lane.receive(3, SOURCE, 13, rows(SMALL))
    assert until(lambda: sink.events[-1] == Ended(3, "the link is not open", peer_lost=False), sink)


def test_a_receiver_that_goes_ends_what_was_on_its_way_to_it_and_may_come_back(sink: Side, source: Side) -> None:
    raw = RawSink(source).prove()
    source.lane.send(1, SINK, 11, rows(LARGE))
    source.lane.send(2, SINK, 12, rows(LARGE))
    source.lane.send(3, SINK, 13, rows(SMALL))
    raw.ask(11)
    raw.ask(12)
    raw.hear(PAGE_BYTES)
    raw.socket.close()
    assert until(lambda: len(source.events) == 2, source)
    assert [(event.op, event.peer_lost) for event in source.events if isinstance(event, Ended)] == [
        (1, True),
        (2, True),
    ]
    connect(sink, source)
    sink.lane.receive(1, SOURCE, 13, rows(SMALL))  # what it had not asked for is there still
    assert until(lambda: Placed(1) in sink.events, sink, source)


def test_forgetting_a_peer_ends_everything_with_it(sink: Side, source: Side) -> None:
    connect(sink, source)
    sink.lane.receive(1, SOURCE, 11, rows(SMALL))
    source.lane.send(2, SINK, 12, rows(SMALL))
    source.lane.shut_out(SINK)
    assert until(lambda: isinstance(sink.events[-1], LinkDown) and bool(source.events), sink, source)
    assert source.events == [Ended(2, "shut out", peer_lost=False)]
    assert [(event.op, event.peer_lost) for event in sink.events if isinstance(event, Ended)] == [(1, True)]
    source.lane.cancel(2)  # has ended
    sink.lane.cancel(1)
    connect(sink, source)
    move(sink, source, 20)


def test_a_link_that_is_opened_again_replaces_the_one_before(sink: Side, source: Side) -> None:
    connect(sink, source)
    sink.lane.receive(1, SOURCE, 11, rows(SMALL))
    connect(sink, source)
    assert Ended(1, "opened again", peer_lost=False) in sink.events
    move(sink, source, 20)


# ------------------------------------------------------------------------------------ fences of the data plane


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    """Regions that are larger than what a connection swallows at once."""
    keys, kv = EndKeys.generate(), KvSpec(KvLayout(4), ((PAGES, PAGE_BYTES),))
    config = TransferConfig(digest="full", lanes=("tcp",), credit_regions=2)
    sink = End(EndSpec("sink", 7, "tcp", keys, config, kv))
    source = End(EndSpec("source", 8, "tcp", keys, config, kv, fill=1))
    sink.set_peers([source.member])
    yield sink, source
    sink.close()
    source.close()


def half_way(sink: End, source: End) -> HandOff:
    """A hand-off of one region, of which some pages have arrived and others have not."""
    hand_off = HandOff(sink, source, LARGE, LARGE[::-1])
    hand_off.prepare()
    hand_off.move(0, slice(0, len(LARGE)))
    assert pump([source, sink], lambda: bool(sink.pool[LARGE[-1]].any()))
    assert not sink.pool[LARGE[0]].any()
    return hand_off


def test_a_fence_gives_the_sinks_pages_back_at_once(ends: tuple[End, End]) -> None:
    sink, source = ends
    hand_off = half_way(sink, source)
    hand_off.fence()
    sink.pool[:] = 9  # another request's
    second = HandOff(sink, source, LARGE[:4], SMALL[:1].repeat(4) + np.arange(4, dtype=np.int32))
    second.prepare()
    second.move(0, slice(0, 4))
    assert pump([sink, source], lambda: second.landed() == {0}), "the link did not survive"
    assert (sink.pool[: SMALL[0]] == 9).all(), "late bytes reached a page"
    assert np.array_equal(sink.pool[second.sink_pages], source.pool[second.source_pages])
    assert not hand_off.landed()
    assert not sink.operations()


def test_a_fence_gives_the_sources_pages_back_at_once(ends: tuple[End, End]) -> None:
    sink, source = ends
    hand_off = half_way(sink, source)
    source.execute(FenceSource(hand_off.key))
    assert hand_off.of(SourceFenced)
    source.pool[:] = 9  # another request's
    assert pump([sink, source], lambda: bool(hand_off.of(SinkLaneFailed)))
    assert not (sink.pool == 9).all(axis=1).any(), "pages were read after the fence"
    assert not hand_off.landed()
    assert not source.operations()
    hand_off.fence()
    second = HandOff(sink, source, LARGE[:4], LARGE[:4])
    second.prepare()
    second.move(0, slice(0, 4))
    assert pump([sink, source], lambda: second.landed() == {0}), "the link did not survive"


# -------------------------------------------------------------------------------------------------- who is let in


def refused(source: Side, raw: RawSink) -> bool:
    return raw.hear(1) == b"" and source.lane.stray > 0


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n".ljust(PROOF_BYTES), b"\0" * PROOF_BYTES, b"\xff" * 4096])
def test_garbage_is_turned_away_and_the_lane_lives(first: bytes, sink: Side, source: Side) -> None:
    raw = RawSink(source)
    raw.socket.sendall(first)
    assert refused(source, raw)
    connect(sink, source)
    move(sink, source, 1)


def test_without_the_secret_neither_side_is_believed(source: Side) -> None:
    raw = RawSink(source, secret=OTHER_SECRET)
    raw.socket.sendall(raw.hello)
    assert refused(source, raw)
    stranger = Side(SINK, secret=OTHER_SECRET)
    stranger.lane.open(SOURCE, source.lane.address())
    assert until(lambda: bool(stranger.events), stranger, source)
    assert all(isinstance(event, LinkDown) for event in stranger.events)
    stranger.lane.close()


def test_a_source_without_the_secret_is_not_believed(sink: Side) -> None:
    raw = RawSource(sink)
    raw.welcome(OTHER_SECRET)
    assert until(lambda: bool(sink.events), sink)
    assert sink.events == [LinkDown(SOURCE, "the peer could not prove who it is")]
    raw.close()


def test_a_recorded_conversation_opens_no_door(source: Side) -> None:
    heard = RawSink(source).prove()
    again = RawSink(source)
    again.socket.sendall(heard.hello)
    assert len(again.hear(PROOF_BYTES)) == PROOF_BYTES
    again.socket.sendall(heard.proof)
    assert refused(source, again)
    source.lane.send(1, SINK, 11, rows(SMALL))
    heard.ask(11)
    assert TcpFrame.unpack(heard.hear(FRAME_BYTES)) == TcpFrame(DATA, 11, 3 * PAGE_BYTES)


def test_who_proves_to_be_back_takes_the_place_of_the_connection_before(source: Side) -> None:
    before, after = RawSink(source).prove(), RawSink(source).prove()
    assert before.hear(1) == b""
    source.lane.send(1, SINK, 11, rows(SMALL))
    after.ask(11)
    assert TcpFrame.unpack(after.hear(FRAME_BYTES)).tag == 11


def test_a_welcome_meant_for_another_connection_is_not_believed() -> None:
    prover, other = Prover(SINK, lambda peer: SECRET), Prover(SOURCE, lambda peer: SECRET)
    one, two = prover.hello(SOURCE, 0), prover.hello(SOURCE, 0)
    with pytest.raises(Gone):
        prover.proof(SOURCE, one, other.welcome(SINK, two))
    with pytest.raises(Gone):
        prover.proof(SOURCE, one, Prover(successor_of(SOURCE), lambda peer: SECRET).welcome(SINK, one))


def successor_of(stamp: Stamp) -> Stamp:
    return Stamp(stamp.worker, stamp.incarnation, Epoch(stamp.epoch + 1))


def test_a_link_to_an_earlier_process_at_the_address_does_not_come_up(sink: Side, source: Side) -> None:
    sink.lane.open(successor_of(SOURCE), source.lane.address())
    assert until(lambda: bool(sink.events), sink, source)
    assert sink.events == [LinkDown(successor_of(SOURCE), "connection closed")]


@pytest.mark.parametrize("said", [b"", b"\0" * 100])
def test_who_proves_nothing_is_turned_away_in_time(said: bytes, source: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_source, "PROVE_WITHIN_S", 0.05)
    monkeypatch.setattr(tcp_source, "LATE_CHECK_S", 0.05)
    source.lane._source._late_check_s = 0.0  # not in a second
    raw = RawSink(source)
    raw.socket.sendall(said)
    assert refused(source, raw)


def test_callers_that_prove_nothing_push_each_other_out_and_nobody_else(
    sink: Side, source: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_source, "MAX_UNPROVEN", 3)
    connect(sink, source)
    callers = [RawSink(source) for _ in range(6)]
    assert until(lambda: source.lane.stray == 3, source)
    assert [refused(source, raw) for raw in callers[:3]] == [True] * 3
    move(sink, source, 1)


@pytest.mark.parametrize(
    "frame",
    [
        TcpFrame(77, 11, 0),
        TcpFrame(END, 11, WHOLE),
        TcpFrame(ASK, 11, 0),
    ],
)
def test_a_source_that_talks_nonsense_loses_the_link(frame: TcpFrame, sink: Side) -> None:
    raw = RawSource(sink).prove()
    sink.lane.receive(1, SOURCE, 11, rows(SMALL))
    raw.say(frame)
    assert until(lambda: isinstance(sink.events[-1], LinkDown), sink)
    assert sink.events[-2].op == 1
    raw.close()


@pytest.mark.parametrize("frames", [[TcpFrame(DATA, 1, 4)], [TcpFrame(ASK, 1, 0)] * 2, [TcpFrame(0, 0, 0)]])
def test_a_receiver_that_talks_nonsense_is_hung_up_on(frames: list[TcpFrame], source: Side) -> None:
    raw = RawSink(source).prove()
    raw.socket.sendall(b"".join(frame.pack() for frame in frames))
    assert raw.hear(1) == b""


def test_a_receiver_that_asks_for_too_much_is_hung_up_on(source: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_source, "MAX_ASKED", 100)
    raw = RawSink(source).prove()
    raw.socket.sendall(b"".join(TcpFrame(ASK, tag, 0).pack() for tag in range(101)))
    assert raw.hear(1) == b""


@pytest.mark.parametrize(
    "address",
    [
        {},
        {"host": "example.org", "port": 1},
        {"host": "127.0.0.1", "port": "x"},
        {"host": "127.0.0.1", "port": 1 << 20},
    ],
)
def test_an_address_that_makes_no_sense_is_a_link_that_is_down(address: dict[str, str | int], sink: Side) -> None:
    sink.lane.open(SOURCE, LaneAddress(lane="tcp", address=address))
    assert until(lambda: bool(sink.events), sink)
    assert isinstance(sink.events[0], LinkDown)


def test_nobody_listening_is_a_link_that_is_down(sink: Side) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    sink.lane.open(SOURCE, LaneAddress(lane="tcp", address={"host": "127.0.0.1", "port": port}))
    assert until(lambda: bool(sink.events), sink)
    assert isinstance(sink.events[0], LinkDown)
    assert "refused" in sink.events[0].reason
