"""Everything of a cluster that listens, in one process without Ray: a controller, a gateway with its HTTP, a prefill
and a decode worker of the fake model, their lanes, and their KV events. What a malicious peer is let loose on.

The loops, cores and sockets are the product's own. Only what the controller would ask of Ray is done by hand: honest
processes are started here, mad ones are told to start themselves (`MayStart`), and whoever is to be killed is dead at
once. An honest process that is to be killed is a find.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import queue
import random
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from baton.common.config import (
    ClusterConfig,
    DecodeConfig,
    GatewayConfig,
    JobsConfig,
    KvConfig,
    LivenessConfig,
    ModelConfig,
    PrefillConfig,
    TransferConfig,
)
from baton.common.ids import WorkerId
from baton.common.kv.layout import Component
from baton.common.routing_config import KvEventsConfig, RoutingConfig
from baton.common.trace import ProcessTrace
from baton.decode.actor import DecodeActor
from baton.deploy.cluster_plan import ClusterPlan, Place, PlannedSeat
from baton.deploy.controller import ControllerLoop
from baton.deploy.controller_core import ControllerCore
from baton.deploy.controller_seats import SeatSpec
from baton.deploy.gateway import GatewayProcess
from baton.deploy.gateway_shell import UnknownWorkers
from baton.prefill.actor import PrefillActor
from baton.transfer.io import IoThread
from baton.transfer.keys import ControllerDoor, KeyPair
from baton.transfer.process import ProcessSpec, die_with_parent
from baton.transfer.reports import WorkerMetrics, WorkerStatus
from baton.transfer.worker import WorkerProcess

MAX_LEN = 512
HONEST = {"gateway-0": "gateway", "prefill-0": "prefill", "decode-0": "decode"}
MAD = {"gateway-1": "gateway", "prefill-1": "prefill", "decode-1": "decode"}
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Arena:
    """What a run is held with."""

    lanes: tuple[str, ...]
    kv_port: int
    replay_port: int


@dataclass(frozen=True, slots=True)
class Up:
    """All honest processes are members."""

    controller: ControllerDoor
    url: str
    config: ClusterConfig


@dataclass(frozen=True, slots=True)
class MayStart:
    """A mad process may take its seat as this incarnation."""

    worker: str
    incarnation: int
    guest: KeyPair


@dataclass(frozen=True, slots=True)
class Find:
    """Something broke."""

    what: str


@dataclass(frozen=True, slots=True)
class Account:
    """How the process stands. `counters`: by process, "what" -> how often; `open`: what is not at rest."""

    rss_bytes: int
    objects: int
    descriptors: int
    counters: Mapping[str, Mapping[str, int]]
    open: Mapping[str, int]
    handoffs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    """Answered with an `Account`."""


@dataclass(frozen=True, slots=True)
class Quit:
    """Close and end."""


def free_ports() -> tuple[int, int]:
    """Two ports with another free one behind each, below those that the kernel hands out."""
    while True:
        one, other = random.SystemRandom().sample(range(20_000, 32_000, 2), 2)
        try:
            with contextlib.ExitStack() as taken:
                for port in (one, one + 1, other, other + 1):
                    taken.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            continue
        return one, other


def config_of(arena: Arena, folder: str) -> ClusterConfig:
    """Small tables, so that they are full after the warm-up."""
    return ClusterConfig(
        cluster="fuzz",
        prefill=2,
        decode=2,
        gateways=2,
        pin_cores=False,
        model=ModelConfig(model="fake", max_model_len=MAX_LEN),
        kv=KvConfig(num_pages=256),
        prefill_worker=PrefillConfig(chunk_tokens=128, max_queued_requests=32, grace_s=0.5),
        decode_worker=DecodeConfig(
            num_reserved_decode_tokens=16, max_queued_requests=64, max_sessions=8, session_ttl_s=2.0
        ),
        transfer=TransferConfig(
            lanes=arena.lanes,
            digest="full",
            staging_ring_bytes=4 << 20,
            region_bytes=1 << 18,
            direct_region_bytes=1 << 18,
            resend_after_s=0.1,
            handoff_ttl_s=5.0,
            tombstone_ttl_s=2.0,
            max_tombstones=256,
        ),
        liveness=LivenessConfig(
            heartbeat_interval_s=0.1,
            dead_after_s=10.0,  # who attacks has other things to do, too
            restart_backoff_s=0.05,
            restart_forgiven_after_s=0.5,
            max_restarts_per_minute=10_000,
            drain_deadline_s=1e6,
        ),
        gateway=GatewayConfig(port=0, max_inflight_requests=64, max_sessions=32),
        routing=RoutingConfig(max_indexed_pages=4096),
        kv_events=KvEventsConfig(
            publish=True, port=arena.kv_port, replay_port=arena.replay_port, topic="kv@{worker}", buffer_batches=64
        ),
        jobs=JobsConfig(database=str(Path(folder, "jobs.sqlite")), poll_s=3600.0),
    )


class RaylessController(ControllerLoop):
    """The real loop, core and socket."""

    def __init__(self, plan: ClusterPlan, pipe: _Pipe) -> None:
        super().__init__(plan)
        self._pipe = pipe
        self.guests: queue.SimpleQueue[tuple[WorkerId, KeyPair]] = queue.SimpleQueue()  # of the honest ones

    def door(self, guest: KeyPair | None = None) -> ControllerDoor:
        return ControllerDoor(self._mesh.address, self._keys.public, guest)

    def frames(self) -> dict[str, int]:
        return _named(self._mesh.counters)

    def _rebuild(self) -> None:
        specs = (seat.spec for seat in self._plan.seats)
        self._core = ControllerCore(specs, self._config.liveness, int(time.time() * 1000), self._clock.now())

    def _start_process(self, spec: SeatSpec, incarnation: int, guest: KeyPair) -> None:
        if spec.worker in MAD:
            self._pipe.send(MayStart(spec.worker, incarnation, guest))
        else:
            self.guests.put((spec.worker, guest))
            assert incarnation == 1, f"{spec.worker} has died"

    def _leave_nodes_that_go(self) -> None:
        """There are none."""

    def _drain(self, worker: WorkerId, incarnation: int, timeout_s: float) -> None:
        """Who said that it leaves never does."""

    def _prove_dead(self, worker: WorkerId, incarnation: int, reason: str) -> None:
        if worker in HONEST and incarnation == 1:
            self._pipe.send(Find(f"{worker} is to be killed: {reason}"))
        self._post(lambda now: self._live_core.on_dead(worker, incarnation, now, reason))


class _Pipe:
    """To the attackers. From any thread."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, item: object) -> None:
        with self._lock:
            self._pipe.send(item)


class _Neighbours(UnknownWorkers):
    """The workers that the gateway asks for their metrics: those of this process."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerProcess] = {}

    async def metrics(self) -> Mapping[str, WorkerMetrics]:
        return {name: worker.metrics() for name, worker in self.workers.items()}

    async def page_owner(self, worker: str, page: int, component: Component | None) -> str:
        return self.workers[worker].page_owner(page, component)

    async def record(self, seconds: float) -> list[ProcessTrace]:
        return []


class Victims:
    """Made, started and closed on one thread."""

    def __init__(self, pipe: Connection, arena: Arena, folder: str) -> None:
        self._pipe = _Pipe(pipe)
        self._config = config_of(arena, folder)
        seats = tuple(
            PlannedSeat(spec=SeatSpec(WorkerId(name), role), cores=(), place=Place())
            for name, role in (HONEST | MAD).items()
        )
        plan = ClusterPlan(config=self._config, run_dir=folder, seats=seats, class_paths={}, launched_at_ms=0)
        self.controller = RaylessController(plan, self._pipe)
        self._ios: dict[str, IoThread] = {}
        self._neighbours = _Neighbours()
        self._folder = folder

    def start(self) -> None:
        self.controller.start()
        self._guests = dict(self.controller.guests.get(timeout=START_S) for _ in HONEST)
        gateway = GatewayProcess(self._spec("gateway-0"), KeyPair.generate(), lambda io: self._neighbours)
        self._start("gateway-0", gateway)
        for name, actor in (("prefill-0", PrefillActor), ("decode-0", DecodeActor)):
            bare = object.__new__(actor)  # without what Ray wants of an actor
            worker = bare.make_process(self._spec(name), KeyPair.generate())
            self._neighbours.workers[name] = worker
            self._start(name, worker)
        for io in self._ios.values():
            io.wait_admitted(START_S)
        assert gateway._server is not None
        self._pipe.send(Up(self.controller.door(), gateway._server.url, self._config))

    def _spec(self, name: str) -> ProcessSpec:
        return ProcessSpec(
            worker=WorkerId(name),
            role=HONEST[name],
            incarnation=1,
            controller=self.controller.door(self._guests[WorkerId(name)]),
            config=self._config,
            cores=(),
            run_dir=self._folder,
        )

    def _start(self, name: str, process: GatewayProcess | WorkerProcess) -> None:
        io = self._ios[name] = process.load(lambda step: None)
        process.serve()
        io.start()

    def account(self) -> Account:
        counters: dict[str, Mapping[str, int]] = {"controller": self.controller.frames()}
        still: dict[str, int] = {}
        handoffs: list[str] = []
        for name, io in self._ios.items():
            asked_s = time.monotonic()
            while (snapshot := io.snapshot()).at_s < asked_s:
                time.sleep(0.01)
            counters[name] = _named(snapshot.mesh) | dict(snapshot.dropped)
            handoffs += [one.handoff for one in io.handoff_times().result(10.0) if one.outcome == "open"]
        for name, worker in self._neighbours.workers.items():
            status = _status_of(worker)
            counters[name] = {**counters[name], **status.counters, **worker.metrics().refused}
            census = status.census
            still[f"{name} hand-offs"] = status.hand_offs
            still[f"{name} pages"] = census["total"] - census["free"] - census["cached"]
            still[f"{name} requests"] = status.load.running + status.load.queued
        gc.collect()
        return Account(
            rss_bytes=_rss_bytes(),
            objects=len(gc.get_objects()),
            descriptors=len(os.listdir("/proc/self/fd")),
            counters=counters,
            open=still,
            handoffs=tuple(handoffs),
        )


def _status_of(worker: WorkerProcess) -> WorkerStatus:
    """On a machine that has much else to do a step may take long; whoever asked gives up if it takes for ever."""
    while True:
        with contextlib.suppress(TimeoutError):
            return worker.status()


def _named(counters: object) -> dict[str, int]:
    return {f"mesh.{name}": getattr(counters, name) for name in counters.__slots__}


def _rss_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_victims(pipe: Connection, arena: Arena, log: str) -> None:
    """In a process of its own, whose standard error goes to the file `log`."""
    die_with_parent()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig()
    logging.getLogger("baton").setLevel(logging.ERROR)  # damage is the order of the day; bugs are heard of
    threading.excepthook = lambda found: pipe.send(Find(f"a thread ended: {found.exc_value!r}"))
    with tempfile.TemporaryDirectory() as folder:
        victims = Victims(pipe, arena, folder)
        victims.start()
        while True:
            match pipe.recv():
                case Tell():
                    victims._pipe.send(victims.account())
                case Quit():
                    os._exit(0)
