"""What every lane must do, as tests that each lane's test file inherits; and two ends of a data plane to run them on.

Owns: `End` (one process's data plane, driven by hand), `RemoteEnd` (the same in a child process that can be killed),
`HandOff` (a made-up hand-off with random content) and `TransportContract`. Never used outside of tests and benchmarks.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol, TypeVar

import numpy as np

from baton.common.config import TransferConfig
from baton.common.ids import Epoch, HandoffId, HandoffKey, Stamp, WorkerId
from baton.common.kv.buffers import NumpyKvBuffer
from baton.common.messages import Chunk, Member, pack_tokens
from baton.transfer.data_plane import DataPlane
from baton.transfer.mesh import ClusterKeys, Mesh
from baton.transfer.session.effects import (
    CloseSink,
    DataEffect,
    DataEvent,
    FenceSink,
    FenceSource,
    Landed,
    LandRegion,
    PrepareSink,
    RegionDamaged,
    RegionReady,
    SendRegion,
    SinkFenced,
    SinkLaneFailed,
    SinkNotPrepared,
    SinkPrepared,
    SourceFenced,
)
from baton.transfer.staging import digest_of
from baton.transfer.transports.base import Bytes, PageIds, PullTransport, StagedTransport
from baton.transfer.transports.inproc import InprocHub, InprocTransport
from baton.transfer.transports.local import LocalTransport
from baton.transfer.transports.ucx import UcxTransport
from baton.transfer.transports.zmq import ZmqTransport

WAIT_S = 20.0
EventT = TypeVar("EventT", bound=DataEvent)


@dataclass(frozen=True, slots=True)
class EndSpec:
    """Everything a child process needs to build its end."""

    worker: str
    epoch: int
    lane: str
    keys: ClusterKeys | None
    config: TransferConfig
    num_pages: int = 64
    page_bytes: int = 4096
    page_size: int = 4
    fill: int = 0  # seed of the pool's content; 0: zeros


def small_config(lane: str) -> TransferConfig:
    """Slots of four pages of `EndSpec`'s default size, eight of them."""
    return TransferConfig(lanes=(lane,), staging_ring_bytes=8 * 16384, region_bytes=16384, credit_regions=2)


def random_pool(num_pages: int, page_bytes: int, seed: int) -> Bytes:
    """What a pool is filled with for `EndSpec.fill`."""
    return np.random.default_rng(seed).integers(0, 256, (num_pages, page_bytes), dtype=np.uint8)


class End:
    """One data plane with its mesh, driven by hand from one thread."""

    def __init__(self, spec: EndSpec, hub: InprocHub | None = None) -> None:
        self.spec = spec
        self.stamp = Stamp(WorkerId(spec.worker), 0, Epoch(spec.epoch))
        self.mesh = Mesh(self.stamp, "127.0.0.1", spec.keys)
        self.buffer = NumpyKvBuffer(spec.num_pages, spec.page_bytes, spec.page_size)
        self.pool = self.buffer.as_bytes()
        if spec.fill:
            self.pool[:] = random_pool(spec.num_pages, spec.page_bytes, spec.fill)
        staged: list[StagedTransport] = []
        pull: list[PullTransport] = []
        match spec.lane:
            case "local":
                pull = [LocalTransport(self.pool)]
            case "zmq":
                staged = [ZmqTransport(self.stamp, self.mesh, "127.0.0.1", spec.config.region_bytes)]
            case "ucx":
                secret = spec.keys.data_secret if spec.keys else ""
                staged = [UcxTransport(self.stamp, self.mesh, "127.0.0.1", secret)]
            case _:
                assert hub is not None
                staged = [InprocTransport(self.stamp, hub, self.mesh)]
        self.data = DataPlane(spec.config, self.buffer, staged, pull)
        self.events: list[DataEvent] = []

    @property
    def member(self) -> Member:
        return Member(stamp=self.stamp, role="x", address=self.mesh.address, lanes=self.data.addresses())

    def execute(self, effect: DataEffect) -> None:
        self.events += self.data.execute(effect, time.monotonic())

    def set_peers(self, peers: Iterable[Member]) -> None:
        self.data.set_peers(list(peers), time.monotonic())

    def step(self, wait_s: float = 0.002) -> None:
        """One turn, as an I/O thread would take it."""
        limit_s = self.data.wait_s(time.monotonic())
        self.mesh.poll(wait_s if limit_s is None else min(wait_s, limit_s))
        self.events += self.data.poll(time.monotonic())

    def slots(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        snapshot = self.data.snapshot(time.monotonic())
        return snapshot.receive_slots, snapshot.send_slots

    def close(self) -> None:
        self.data.close()
        self.mesh.close()


class SourceEnd(Protocol):
    """What a test needs of the source: an `End` here, or one in a child process."""

    @property
    def stamp(self) -> Stamp: ...

    @property
    def member(self) -> Member: ...

    events: list[DataEvent]

    def execute(self, effect: DataEffect) -> None: ...

    def step(self, wait_s: float = 0.002) -> None: ...

    def close(self) -> None: ...


def die_with_parent() -> None:
    """A child that outlives a killed test would keep ports and cores."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _serve_end(connection: Connection, spec: EndSpec) -> None:
    die_with_parent()
    end = End(spec)
    connection.send(end.member)
    end.mesh.register(connection.fileno())
    while True:
        while connection.poll():
            command = connection.recv()
            if command is None:
                end.close()
                connection.send(None)
                return
            end.execute(command)
        end.step(0.05)
        if end.events:
            connection.send(end.events)
            end.events = []


class RemoteEnd:
    """An `End` in a child process, which a test can stop and kill."""

    def __init__(self, spec: EndSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve_end, args=(theirs, spec), daemon=True)
        self._process.start()
        theirs.close()
        self.events: list[DataEvent] = []
        self.member: Member = self._connection.recv()
        self.stamp = self.member.stamp

    def execute(self, effect: DataEffect) -> None:
        self._connection.send(effect)

    def step(self, wait_s: float = 0.002) -> None:
        while self._connection.poll(wait_s):
            self.events += self._connection.recv()
            wait_s = 0.0

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(WAIT_S)

    def stop(self) -> None:
        """SIGSTOP: alive, and silent."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        if self._process.is_alive():
            self._connection.send(None)
            self._process.join(WAIT_S)
            if self._process.is_alive():
                self.kill()
        self._connection.close()


def pump(ends: Iterable[End | SourceEnd], done: Callable[[], bool], wait_s: float = WAIT_S) -> bool:
    """Turns all ends until `done`. False: it did not come true in time."""
    ends = list(ends)
    deadline = time.monotonic() + wait_s
    while not done():
        if time.monotonic() > deadline:
            return False
        for end in ends:
            end.step()
    return True


class HandOff:
    """One made-up hand-off from `source` to `sink`: tokens [start, start + n), scattered pages on both sides."""

    _next_id = 1

    def __init__(self, sink: End, source: SourceEnd, source_pages: PageIds, sink_pages: PageIds) -> None:
        self.key = HandoffKey(HandoffId(HandOff._next_id), 1)
        self.tag_base = HandOff._next_id << 32
        HandOff._next_id += 1
        self.sink, self.source = sink, source
        self.source_pages, self.sink_pages = source_pages, sink_pages
        self.page_size = sink.spec.page_size
        self.prepared: SinkPrepared | None = None
        self.chunks: dict[int, Chunk] = {}

    def prepare(self) -> SinkPrepared:
        """Starts and waits until slots are reserved."""
        self.ask_to_prepare()
        assert pump([self.sink, self.source], lambda: self.prepared_now() is not None), "not prepared in time"
        prepared = self.prepared_now()
        assert prepared is not None
        return prepared

    def ask_to_prepare(self) -> None:
        self.sink.execute(
            PrepareSink(
                key=self.key,
                peer=self.source.stamp,
                start=0,
                total_tokens=len(self.sink_pages) * self.page_size,
                pages=pack_tokens(self.sink_pages),
                tag_base=self.tag_base,
                tag_count=1 << 16,
            )
        )

    def prepared_now(self) -> SinkPrepared | None:
        return next((event for event in self.of(SinkPrepared)), None)

    def of(self, kind: type[EventT]) -> list[EventT]:
        """The sink's and the source's events of this hand-off."""
        return [e for e in [*self.sink.events, *self.source.events] if isinstance(e, kind) and e.key == self.key]

    def send(self, seq: int, pages: slice, tag: int | None = None) -> None:
        """Asks the source to send `pages` of this hand-off as region `seq`."""
        ids = self.source_pages[pages]
        self.source.execute(
            SendRegion(
                key=self.key,
                peer=self.sink.stamp,
                lane=self.sink.spec.lane,
                seq=seq,
                tag=self.tag_base + seq if tag is None else tag,
                first_token=(pages.start or 0) * self.page_size,
                tokens=len(ids) * self.page_size,
                pages=pack_tokens(ids),
            )
        )

    def ready(self, seq: int) -> RegionReady:
        """Waits until the source has announced region `seq`."""

        def found() -> list[RegionReady]:
            return [event for event in self.of(RegionReady) if event.seq == seq]

        assert pump([self.source, self.sink], lambda: bool(found())), f"region {seq} was not gathered in time"
        return found()[-1]

    def chunk(self, seq: int, pages: slice, nbytes: int, digest: int) -> Chunk:
        ids = self.source_pages[pages]
        return Chunk(
            key=self.key,
            seq=seq,
            tag=self.tag_base + seq,
            first_token=(pages.start or 0) * self.page_size,
            tokens=len(ids) * self.page_size,
            nbytes=nbytes,
            digest=digest,
            source_pages=pack_tokens(ids) if self.sink.spec.lane == "local" else b"",
        )

    def land(self, chunk: Chunk, tag: int | None = None) -> None:
        self.sink.execute(
            LandRegion(
                key=self.key,
                peer=self.source.stamp,
                lane=self.sink.spec.lane,
                tag=self.tag_base + chunk.seq if tag is None else tag,
                chunk=chunk,
            )
        )

    def move(self, seq: int, pages: slice) -> None:
        """Sends and lands one region, as an endpoint would."""
        self.send(seq, pages)
        ready = self.ready(seq)
        self.land(self.chunk(seq, pages, ready.nbytes, ready.digest))

    def landed(self) -> set[int]:
        return {event.seq for event in self.of(Landed)}

    def close(self) -> None:
        """Well ended."""
        self.sink.execute(CloseSink(self.key))
        self.source.execute(FenceSource(self.key))

    def fence(self) -> None:
        self.sink.execute(FenceSink(self.key))
        assert self.of(SinkFenced), "a sink's fence is immediate"


class TransportContract:
    """Inherited by one test class per lane, which names the lane. `remote`: whether it reaches other processes."""

    lane = ""
    remote = True

    def make_pair(self) -> tuple[End, End]:
        hub = InprocHub()
        keys = ClusterKeys.generate()
        config = small_config(self.lane)
        sink = End(EndSpec("sink", 7, self.lane, keys, config), hub)
        source = End(EndSpec("source", 8, self.lane, keys, config, fill=1), hub)
        sink.set_peers([source.member])
        return sink, source

    def make_remote_pair(self) -> tuple[End, RemoteEnd]:
        keys = ClusterKeys.generate()
        config = small_config(self.lane)
        source = RemoteEnd(EndSpec("source", 8, self.lane, keys, config, fill=1))
        sink = End(EndSpec("sink", 7, self.lane, keys, config))
        sink.set_peers([source.member])
        return sink, source

    # ----------------------------------------------------------------------------------------- content

    def test_regions_of_every_size_arrive_in_their_pages_and_nowhere_else(self) -> None:
        sink, source = self.make_pair()
        rng = np.random.default_rng(3)
        try:
            for count in (1, 2, 4, 7):
                sink.pool[:] = 0
                hand_off = self._hand_off(sink, source, rng, count)
                region_pages = hand_off.prepare().region_pages
                assert region_pages == 4
                for seq, first in enumerate(range(0, count, region_pages)):
                    hand_off.move(seq, slice(first, min(count, first + region_pages)))
                    assert pump([sink, source], lambda: seq in hand_off.landed()), "not landed in time"  # noqa: B023
                self._check_content(hand_off)
                hand_off.close()
            self._check_all_slots_return(sink, source)
        finally:
            sink.close()
            source.close()

    def test_many_hand_offs_at_once_do_not_mix(self) -> None:
        sink, source = self.make_pair()
        try:
            ids = np.random.default_rng(4).permutation(np.arange(1, 64, dtype=np.int32))
            hand_offs = [HandOff(sink, source, ids[i : i + 6][::-1], ids[i : i + 6]) for i in range(0, 24, 6)]
            for hand_off in hand_offs:
                hand_off.prepare()
            for seq, pages in enumerate((slice(0, 4), slice(4, 6))):
                for hand_off in hand_offs:
                    hand_off.send(seq, pages)
                for hand_off in reversed(hand_offs):
                    ready = hand_off.ready(seq)
                    hand_off.land(hand_off.chunk(seq, pages, ready.nbytes, ready.digest))
            assert pump([sink, source], lambda: all(h.landed() == {0, 1} for h in hand_offs))
            for hand_off in hand_offs:
                self._check_pages(hand_off)
                hand_off.close()
            self._check_all_slots_return(sink, source)
        finally:
            sink.close()
            source.close()

    def test_asking_first_and_sending_first_are_both_fine(self) -> None:
        sink, source = self.make_pair()
        try:
            hand_off = self._hand_off(sink, source, np.random.default_rng(5), 4)
            hand_off.prepare()
            data = source.pool[hand_off.source_pages].reshape(-1)
            hand_off.land(hand_off.chunk(0, slice(0, 4), len(data), digest_of(data)))
            pump([sink, source], lambda: False, wait_s=0.05)
            hand_off.send(0, slice(0, 4))
            assert pump([sink, source], lambda: hand_off.landed() == {0})
            self._check_content(hand_off)
        finally:
            sink.close()
            source.close()

    def test_between_two_processes(self) -> None:
        if not self.remote:
            return
        sink, source = self.make_remote_pair()
        try:
            ids = np.random.default_rng(6).permutation(np.arange(1, 64, dtype=np.int32))
            hand_off = HandOff(sink, source, ids[:11], ids[20:31])
            hand_off.prepare()
            for seq, first in enumerate(range(0, 11, 4)):
                hand_off.move(seq, slice(first, min(11, first + 4)))
            assert pump([sink, source], lambda: hand_off.landed() == {0, 1, 2})
            expected = np.zeros_like(sink.pool)
            expected[hand_off.sink_pages] = random_pool(64, 4096, 1)[hand_off.source_pages]
            assert np.array_equal(sink.pool, expected)
        finally:
            sink.close()
            source.close()

    # ---------------------------------------------------------------------------------------- adversity

    def test_damage_is_found_and_a_second_try_succeeds(self) -> None:
        sink, source = self.make_pair()
        try:
            hand_off = self._hand_off(sink, source, np.random.default_rng(7), 4)
            hand_off.prepare()
            hand_off.send(0, slice(0, 4))
            ready = hand_off.ready(0)
            hand_off.land(hand_off.chunk(0, slice(0, 4), ready.nbytes, ready.digest ^ 1))
            assert pump([sink, source], lambda: bool(hand_off.of(RegionDamaged)))
            assert not hand_off.landed()
            if self.lane != "local":
                assert not sink.pool.any(), "a damaged region touched a page"
            fresh = hand_off.tag_base + 1000
            hand_off.send(0, slice(0, 4), tag=fresh)
            assert pump([sink, source], lambda: len(hand_off.of(RegionReady)) == 2)
            hand_off.land(hand_off.chunk(0, slice(0, 4), ready.nbytes, ready.digest), tag=fresh)
            assert pump([sink, source], lambda: hand_off.landed() == {0})
            self._check_content(hand_off)
        finally:
            sink.close()
            source.close()

    def test_what_comes_after_a_fence_lands_nowhere_and_every_slot_returns(self) -> None:
        sink, source = self.make_pair()
        try:
            hand_off = self._hand_off(sink, source, np.random.default_rng(8), 8)
            hand_off.prepare()
            data = source.pool[hand_off.source_pages].reshape(-1)
            if self.lane != "local":  # ask for regions that nobody has sent yet
                for seq, pages in enumerate((slice(0, 4), slice(4, 8))):
                    part = data.reshape(8, -1)[pages].reshape(-1)
                    hand_off.land(hand_off.chunk(seq, pages, len(part), digest_of(part)))
            pump([sink, source], lambda: False, wait_s=0.05)
            hand_off.fence()
            hand_off.send(0, slice(0, 4))  # the source has not heard of it yet
            hand_off.send(1, slice(4, 8))
            pump([sink, source], lambda: len(hand_off.of(RegionReady)) == 2)
            pump([sink, source], lambda: False, wait_s=0.1)
            assert not sink.pool.any(), "late bytes reached a page"
            source.execute(FenceSource(hand_off.key))
            assert hand_off.of(SourceFenced)
            self._check_all_slots_return(sink, source)
            assert not hand_off.of(Landed)
        finally:
            sink.close()
            source.close()

    def test_a_source_that_gives_up_frees_its_slots_before_anybody_asks(self) -> None:
        sink, source = self.make_pair()
        try:
            hand_off = self._hand_off(sink, source, np.random.default_rng(9), 4)
            hand_off.prepare()
            hand_off.send(0, slice(0, 4))
            ready = hand_off.ready(0)
            source.execute(FenceSource(hand_off.key))
            assert pump([source], lambda: source.slots()[1] == (8, 0, 0)), "a cancelled send must end"
            if self.lane != "local":
                hand_off.land(hand_off.chunk(0, slice(0, 4), ready.nbytes, ready.digest))
                pump([sink, source], lambda: False, wait_s=0.05)
                assert not hand_off.landed()
            hand_off.fence()
            self._check_all_slots_return(sink, source)
        finally:
            sink.close()
            source.close()

    def test_an_announced_size_that_is_wrong_touches_no_page(self) -> None:
        sink, source = self.make_pair()
        try:
            hand_off = self._hand_off(sink, source, np.random.default_rng(10), 4)
            hand_off.prepare()
            hand_off.send(0, slice(0, 4))
            ready = hand_off.ready(0)
            hand_off.land(hand_off.chunk(0, slice(0, 4), ready.nbytes // 2, ready.digest))
            over = (RegionDamaged, SinkLaneFailed)
            assert pump([sink, source], lambda: any(hand_off.of(kind) for kind in over))
            assert not hand_off.landed()
            if self.lane != "local":
                assert not sink.pool.any()
            hand_off.fence()
            source.execute(FenceSource(hand_off.key))
            self._check_all_slots_return(sink, source)
        finally:
            sink.close()
            source.close()

    def test_a_region_that_was_not_agreed_on_is_refused(self) -> None:
        sink, source = self.make_pair()
        try:
            hand_off = self._hand_off(sink, source, np.random.default_rng(11), 4)
            hand_off.prepare()
            hand_off.send(0, slice(0, 4))
            ready = hand_off.ready(0)
            chunk = hand_off.chunk(0, slice(0, 4), ready.nbytes, ready.digest)
            hand_off.land(replace_chunk(chunk, first_token=4))
            assert pump([sink, source], lambda: bool(hand_off.of(SinkLaneFailed)))
            assert not sink.pool.any()
        finally:
            sink.close()
            source.close()

    def test_hand_offs_wait_for_slots_in_order_of_arrival(self) -> None:
        if self.lane == "local":
            return  # takes no slots
        sink, source = self.make_pair()
        try:
            rng = np.random.default_rng(12)
            first = [self._hand_off(sink, source, rng, 8) for _ in range(4)]  # 2 slots each: all eight
            for hand_off in first:
                hand_off.prepare()
            late = [self._hand_off(sink, source, rng, 8) for _ in range(2)]
            for hand_off in late:
                hand_off.ask_to_prepare()
            pump([sink, source], lambda: False, wait_s=0.05)
            assert not any(hand_off.prepared_now() for hand_off in late), "overcommitted"
            first[2].close()
            assert late[0].prepared_now()
            assert not late[1].prepared_now()
            late[0].fence()
            assert late[1].prepared_now()
        finally:
            sink.close()
            source.close()

    def test_a_killed_source_ends_everything_at_the_sink(self) -> None:
        if not self.remote:
            return
        sink, source = self.make_remote_pair()
        try:
            ids = np.arange(1, 9, dtype=np.int32)
            hand_off = HandOff(sink, source, ids, ids + 20)
            hand_off.prepare()
            hand_off.send(0, slice(0, 4))
            ready = hand_off.ready(0)
            if self.lane != "local":
                data = random_pool(64, 4096, 1)[ids[4:]].reshape(-1)
                hand_off.land(hand_off.chunk(1, slice(4, 8), len(data), digest_of(data)))
            pump([sink, source], lambda: False, wait_s=0.05)
            source.kill()
            hand_off.land(hand_off.chunk(0, slice(0, 4), ready.nbytes, ready.digest))
            assert pump([sink], lambda: bool(hand_off.of(SinkLaneFailed))), "the death was not noticed"
            hand_off.fence()
            assert pump([sink], lambda: sink.slots()[0] == (8, 0, 0)), "a slot is stuck"
            assert not sink.pool[25:].any(), "the region that was never sent landed"
        finally:
            sink.close()
            source.close()

    def test_a_stopped_source_keeps_no_slot_and_its_late_bytes_land_nowhere(self) -> None:
        if not self.remote:
            return
        sink, source = self.make_remote_pair()
        try:
            ids = np.arange(1, 9, dtype=np.int32)
            hand_off = HandOff(sink, source, ids, ids + 20)
            hand_off.prepare()
            hand_off.send(0, slice(0, 4))
            ready = hand_off.ready(0)
            source.stop()
            if self.lane != "local":
                hand_off.land(hand_off.chunk(0, slice(0, 4), ready.nbytes, ready.digest))
                pump([sink], lambda: False, wait_s=0.1)
            hand_off.fence()
            assert pump([sink], lambda: sink.slots()[0] == (8, 0, 0)), "a slot is stuck"
            source.resume()
            pump([sink, source], lambda: False, wait_s=0.2)
            assert not sink.pool.any(), "late bytes reached a page"
            second = self._until_prepared(sink, source, ids, ids + 30)  # its silence is not held against it for ever
            second.move(0, slice(0, 4))
            assert pump([sink, source], lambda: second.landed() == {0})
        finally:
            sink.close()
            source.close()

    # ------------------------------------------------------------------------------------------ helpers

    def _hand_off(self, sink: End, source: SourceEnd, rng: np.random.Generator, pages: int) -> HandOff:
        def some() -> PageIds:
            return rng.permutation(np.arange(1, 64, dtype=np.int32))[:pages]

        return HandOff(sink, source, some(), some())

    def _until_prepared(self, sink: End, source: SourceEnd, theirs: PageIds, ours: PageIds) -> HandOff:
        """Attempt after attempt, as a decode worker makes them, until there is a lane again."""
        attempts = [HandOff(sink, source, theirs, ours)]
        attempts[-1].ask_to_prepare()

        def prepared() -> bool:
            if attempts[-1].of(SinkNotPrepared):
                attempts.append(HandOff(sink, source, theirs, ours))
                attempts[-1].ask_to_prepare()
            return attempts[-1].prepared_now() is not None

        assert pump([sink, source], prepared), "the lane did not come back"
        return attempts[-1]

    def _check_pages(self, hand_off: HandOff) -> None:
        assert isinstance(hand_off.source, End)
        sent = hand_off.source.pool[hand_off.source_pages]
        assert np.array_equal(hand_off.sink.pool[hand_off.sink_pages], sent)

    def _check_content(self, hand_off: HandOff) -> None:
        """The pages, and that nothing else was touched."""
        self._check_pages(hand_off)
        others = np.setdiff1d(np.arange(len(hand_off.sink.pool)), hand_off.sink_pages)
        assert not hand_off.sink.pool[others].any(), "a page outside of the hand-off was written"

    def _check_all_slots_return(self, sink: End, source: End) -> None:
        def all_free() -> bool:
            return sink.slots()[0] == (8, 0, 0) and source.slots()[1] == (8, 0, 0)

        assert pump([sink, source], all_free), f"slots are stuck: {sink.slots()} {source.slots()}"


def replace_chunk(chunk: Chunk, **changes: int) -> Chunk:
    """`chunk` with other numbers."""
    fields = {name: getattr(chunk, name) for name in chunk.__struct_fields__}
    return Chunk(**{**fields, **changes})
