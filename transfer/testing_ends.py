"""Two ends of a data plane, to run any lane on: in this process, or one of them in a child that can be killed.

Owns: `End` (one process's data plane, driven by hand), `RemoteEnd` (the same in a child process) and `HandOff` (a
made-up hand-off). Never used outside of tests and benchmarks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol, TypeVar

import numpy as np

from baton.common.config import TransferConfig
from baton.common.engine.batch import KvMemory
from baton.common.ids import Epoch, HandoffId, HandoffKey, Stamp, WorkerId
from baton.common.kv.buffers import NumpyKvBuffer
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import Chunk, Member, pack_tokens
from baton.transfer.allow_list import PairSecrets
from baton.transfer.data_plane import DataPlane
from baton.transfer.device_ipc import OwnPool
from baton.transfer.keys import KeyPair
from baton.transfer.link import LaneStatus
from baton.transfer.mesh import Mesh
from baton.transfer.plan import Span
from baton.transfer.pool_copier import PoolCopier
from baton.transfer.process import die_with_parent
from baton.transfer.session.effects import (
    PULL_LANES,
    CloseSink,
    DataEffect,
    DataEvent,
    FenceSink,
    FenceSource,
    Landed,
    LandRegion,
    PrepareSink,
    RegionReady,
    SendRegion,
    SinkFenced,
    SinkPrepared,
)
from baton.transfer.staging import unit_rows
from baton.transfer.testing_ipc import HostIpc
from baton.transfer.transports.base import (
    Bytes,
    DirectTransport,
    LatePullTransport,
    PullTransport,
    StagedTransport,
    UnitIds,
)
from baton.transfer.transports.cuda_ipc import CudaIpcTransport
from baton.transfer.transports.inproc import InprocHub, InprocTransport
from baton.transfer.transports.local import LocalTransport
from baton.transfer.transports.tcp import TcpTransport
from baton.transfer.transports.ucx import UcxTransport
from baton.transfer.transports.zmq import ZmqTransport

WAIT_S = 20.0
EventT = TypeVar("EventT", bound=DataEvent)


@dataclass(frozen=True, slots=True)
class KvSpec:
    """The KV memory of an end: (pages, bytes of one) for each component of `layout`, in order."""

    layout: KvLayout
    pools: tuple[tuple[int, int], ...]
    layers: int = 1  # of a page

    def build(self, fill: int) -> KvMemory:
        """`fill`: seed of the content of `random_pool`; 0: zeros."""
        buffers = {}
        for component, (num_pages, page_bytes) in zip(self.layout.components, self.pools, strict=True):
            layers = 1 if component is Component.STATE else self.layers
            buffer = NumpyKvBuffer(num_pages, page_bytes, self.layout.page_size, layers=layers, shared=True)
            if fill:
                buffer.as_bytes()[:] = random_pool(num_pages, page_bytes, fill)
            buffers[component] = buffer
        return KvMemory(self.layout, buffers)


FULL_ONLY = KvSpec(KvLayout(4), ((64, 4096),), layers=4)
HYBRID = KvSpec(KvLayout(4, window=9, state=True), ((64, 4096), (32, 1536), (8, 40000)))
"""Pages of unlike sizes, and a state larger than a slot of `small_config`."""


EPOCHS = {"sink": 7, "source": 8}


@dataclass(frozen=True, slots=True)
class EndKeys:
    """A key pair for each end. Who is at the other one is known beforehand."""

    pairs: Mapping[str, KeyPair]

    @staticmethod
    def generate() -> EndKeys:
        return EndKeys({worker: KeyPair.generate() for worker in EPOCHS})

    def of(self, worker: str) -> KeyPair:
        return self.pairs[worker]

    def members(self) -> list[Member]:
        return [
            Member(stamp=Stamp(WorkerId(worker), 0, Epoch(EPOCHS[worker])), role="x", address="", key=keys.public)
            for worker, keys in self.pairs.items()
        ]


@dataclass(frozen=True, slots=True)
class EndSpec:
    """Everything a child process needs to build its end."""

    worker: str
    epoch: int
    lane: str
    keys: EndKeys | None
    config: TransferConfig
    kv: KvSpec = FULL_ONLY
    fill: int = 0  # seed of the pools' content; 0: zeros


def small_config(lane: str) -> TransferConfig:
    """Slots of four pages of `FULL_ONLY`, eight of them."""
    return TransferConfig(
        digest="full",
        lanes=(lane,),
        staging_ring_bytes=8 * 16384,
        region_bytes=16384,
        direct_region_bytes=16384,
        credit_regions=2,
    )


def random_pool(num_pages: int, page_bytes: int, seed: int) -> Bytes:
    """What a pool is filled with for a seed."""
    return np.random.default_rng(seed).integers(0, 256, (num_pages, page_bytes), dtype=np.uint8)


def _own_pools(memory: KvMemory) -> dict[Component, OwnPool]:
    return {name: OwnPool(rows.ctypes.data, *rows.shape) for name, rows in unit_rows(memory).items()}


class End:
    """One data plane with its mesh, driven by hand from one thread."""

    def __init__(
        self,
        spec: EndSpec,
        hub: InprocHub | None = None,
        copier: Callable[[KvMemory], PoolCopier] | None = None,
    ) -> None:
        self.spec = spec
        self.stamp = Stamp(WorkerId(spec.worker), 0, Epoch(spec.epoch))
        self.keys = spec.keys.of(spec.worker) if spec.keys else None
        self.mesh = Mesh(self.stamp, "127.0.0.1", self.keys)
        if spec.keys is not None:
            self.let_in(*spec.keys.members())
        memory = spec.kv.build(spec.fill)
        self.pools = unit_rows(memory)
        self.pool = self.pools[Component.FULL]
        self.ipc = HostIpc(*(buffer.block for buffer in memory.buffers.values() if buffer.block is not None))
        """Of the lane "cuda_ipc": copies into here can be held back."""
        staged: list[StagedTransport] = []
        pull: list[PullTransport] = []
        direct: list[DirectTransport] = []
        late: list[LatePullTransport] = []
        secrets = PairSecrets(self.keys, self.mesh.allow)
        match spec.lane:
            case "local":
                pull = [LocalTransport(memory)]
            case "cuda_ipc":
                late = [CudaIpcTransport(self.ipc, _own_pools(memory))]
            case "tcp":
                streams = spec.config.tcp_streams
                direct = [TcpTransport(self.stamp, self.mesh, "127.0.0.1", secrets.of("tcp"), self.pools, streams)]
            case "zmq":
                staged = [ZmqTransport(self.stamp, self.mesh, "127.0.0.1", spec.config.region_bytes)]
            case "ucx":
                staged = [UcxTransport(self.stamp, self.mesh, "127.0.0.1", secrets.of("ucx"))]
            case _:
                assert hub is not None
                staged = [InprocTransport(self.stamp, hub, self.mesh)]
        own = copier(memory) if copier else None
        self.data = DataPlane(spec.config, memory, staged, pull, direct, own, late=late)
        self.events: list[DataEvent] = []

    @property
    def member(self) -> Member:
        key = self.keys.public if self.keys else ""
        return Member(stamp=self.stamp, role="x", address=self.mesh.address, key=key, lanes=self.data.addresses())

    def execute(self, effect: DataEffect) -> None:
        self.events += self.data.execute(effect, time.monotonic())

    def let_in(self, *members: Member) -> None:
        """These may ask here, and nobody else."""
        self.mesh.allow.set_members(members)

    def set_peers(self, peers: Iterable[Member]) -> None:
        self.data.set_peers(list(peers), time.monotonic())

    def is_up(self, peer: SourceEnd) -> bool:
        """Its own lane to the peer."""
        lanes = self.data.snapshot(time.monotonic()).lanes.get(peer.stamp.worker, [])
        return any(view.lane == self.spec.lane and view.status is LaneStatus.UP for view in lanes)

    def step(self, wait_s: float = 0.002) -> None:
        """One turn, as an I/O thread would take it."""
        limit_s = self.data.wait_s(time.monotonic())
        self.mesh.poll(wait_s if limit_s is None else min(wait_s, limit_s))
        self.events += self.data.poll(time.monotonic())

    def slots(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        snapshot = self.data.snapshot(time.monotonic())
        return snapshot.receive_slots, snapshot.send_slots

    def operations(self) -> int:
        """Regions whose memory a transport may still touch, or has not said that it does not."""
        return self.data.snapshot(time.monotonic()).open_operations

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

    def set_peers(self, peers: Iterable[Member]) -> None: ...

    def step(self, wait_s: float = 0.002) -> None: ...

    def close(self) -> None: ...


def _serve_end(connection: Connection, spec: EndSpec) -> None:
    die_with_parent()  # a child that outlives a killed test would keep ports and cores
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
            if isinstance(command, list):
                end.set_peers(command)
            else:
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
        self.spec = spec
        self.events: list[DataEvent] = []
        self.member: Member = self._connection.recv()
        self.stamp = self.member.stamp

    def execute(self, effect: DataEffect) -> None:
        self._connection.send(effect)

    def set_peers(self, peers: Iterable[Member]) -> None:
        self._connection.send(list(peers))

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


WHOLE = (0, 1)
"""The part of a unit that is all of it, and of how many."""


class HandOff:
    """One made-up hand-off from `source` to `sink`, scattered units on both sides. `more`: (source's, sink's) units of
    components other than FULL."""

    _next_id = 1

    def __init__(
        self,
        sink: End | RemoteEnd,
        source: SourceEnd,
        source_pages: UnitIds,
        sink_pages: UnitIds,
        more: Mapping[Component, tuple[UnitIds, UnitIds]] | None = None,
    ) -> None:
        self.key = HandoffKey(HandoffId(HandOff._next_id), 1)
        self.tag_base = HandOff._next_id << 32
        HandOff._next_id += 1
        self.sink, self.source = sink, source
        self.source_pages, self.sink_pages = source_pages, sink_pages
        self.units = {Component.FULL: (source_pages, sink_pages), **(more or {})}
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
                spans=tuple(Span(component, 0, pack_tokens(ours)) for component, (_, ours) in self.units.items()),
                tag_base=self.tag_base,
                tag_count=1 << 16,
            )
        )

    def prepared_now(self) -> SinkPrepared | None:
        return next((event for event in self.of(SinkPrepared)), None)

    def of(self, kind: type[EventT]) -> list[EventT]:
        """The sink's and the source's events of this hand-off."""
        return [e for e in [*self.sink.events, *self.source.events] if isinstance(e, kind) and e.key == self.key]

    def send(
        self,
        seq: int,
        units: slice,
        tag: int | None = None,
        component: Component = Component.FULL,
        part: tuple[int, int] = WHOLE,
    ) -> None:
        """Asks the source to send `units` of a segment, or a part of their layers, as region `seq`."""
        ids = self.units[component][0][units]
        self.source.execute(
            SendRegion(
                key=self.key,
                peer=self.sink.stamp,
                lane=self.sink.spec.lane,
                seq=seq,
                tag=self.tag_base + seq if tag is None else tag,
                span=Span(component, units.start or 0, pack_tokens(ids), *part),
            )
        )

    def ready(self, seq: int) -> RegionReady:
        """Waits until the source has announced region `seq`."""

        def found() -> list[RegionReady]:
            return [event for event in self.of(RegionReady) if event.seq == seq]

        assert pump([self.source, self.sink], lambda: bool(found())), f"region {seq} was not gathered in time"
        return found()[-1]

    def chunk(
        self,
        seq: int,
        units: slice,
        nbytes: int,
        digest: int,
        component: Component = Component.FULL,
        part: tuple[int, int] = WHOLE,
    ) -> Chunk:
        ids = self.units[component][0][units]
        return Chunk(
            key=self.key,
            seq=seq,
            tag=self.tag_base + seq,
            component=component,
            first_unit=units.start or 0,
            units=len(ids),
            part=part[0],
            parts=part[1],
            nbytes=nbytes,
            digest=digest,
            source_pages=pack_tokens(ids) if self.sink.spec.lane in PULL_LANES else b"",
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

    def move(
        self, seq: int, units: slice, component: Component = Component.FULL, part: tuple[int, int] = WHOLE
    ) -> None:
        """Sends and lands one region, as an endpoint would."""
        self.send(seq, units, component=component, part=part)
        ready = self.ready(seq)
        self.land(self.chunk(seq, units, ready.nbytes, ready.digest, component, part))

    def landed(self) -> set[int]:
        return {event.seq for event in self.of(Landed)}

    def close(self) -> None:
        """Well ended."""
        self.sink.execute(CloseSink(self.key))
        self.source.execute(FenceSource(self.key))

    def fence(self) -> None:
        self.sink.execute(FenceSink(self.key))
        assert self.of(SinkFenced), "a sink's fence is immediate"
