"""Two I/O threads and a stand-in for the controller, for tests of whole hand-offs without engines."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from baton.common.config import ClusterConfig, KvConfig, LivenessConfig, TransferConfig
from baton.common.engine.core_api import MembershipView
from baton.common.ids import Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import Body, Frame, Hello, Load, Member, Membership, SamplingParams
from baton.transfer.allow_list import AllowList
from baton.transfer.api import FinishSource, OfferReceived, OpenSink, PrefillResult, ShipRegion
from baton.transfer.io import IoThread
from baton.transfer.keys import ControllerDoor, KeyPair
from baton.transfer.lanes import LaneFactory, build_lanes
from baton.transfer.mesh import Mesh
from baton.transfer.plan import segments_of
from baton.transfer.process import die_with_parent
from baton.transfer.testing_ends import KvSpec, random_pool

PAGE_SIZE = 4
PAGE_BYTES = 4096
NUM_PAGES = 128
WAIT_S = 30.0
FULL_KV = KvSpec(KvLayout(PAGE_SIZE), ((NUM_PAGES, PAGE_BYTES),))
HYBRID_KV = KvSpec(KvLayout(PAGE_SIZE, window=41, state=True), ((NUM_PAGES, PAGE_BYTES), (64, 1536), (4, 40000)))
CONTROLLER = Stamp(WorkerId("controller"), 1, Epoch(1))


def wait_until(true: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    """Snapshots are published once per heartbeat; nothing wakes us when they change."""
    deadline = time.monotonic() + wait_s
    while not true():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.01)


def io_config(*lanes: str, dead_after_s: float = 3.0) -> ClusterConfig:
    return ClusterConfig(
        kv=KvConfig(page_size=PAGE_SIZE),
        transfer=TransferConfig(
            lanes=lanes,
            staging_ring_bytes=16 * 16384,
            region_bytes=16384,
            direct_region_bytes=16384,
            credit_regions=2,
            resend_after_s=0.2,
        ),
        liveness=LivenessConfig(
            heartbeat_interval_s=0.1, republish_interval_s=dead_after_s / 2, dead_after_s=dead_after_s
        ),
    )


class Events:
    """What an I/O thread delivered. Thread-safe."""

    def __init__(self) -> None:
        self._items: list[object] = []
        self._came = threading.Condition()

    def __call__(self, event: object) -> None:
        with self._came:
            self._items.append(event)
            self._came.notify_all()

    def of(self, kind: type) -> list:
        with self._came:
            return [item for item in self._items if isinstance(item, kind)]

    def wait(self, kind: type, count: int = 1, wait_s: float = WAIT_S) -> list:
        """The first `count` events of a kind, as soon as they are there."""
        with self._came:
            there = self._came.wait_for(lambda: len(self.of_locked(kind)) >= count, wait_s)
            assert there, f"{kind.__name__} did not come; there are {self._items}"
            return self.of_locked(kind)[:count]

    def of_locked(self, kind: type) -> list:
        return [item for item in self._items if isinstance(item, kind)]

    def wait_view(self, good: Callable[[MembershipView], bool]) -> MembershipView:
        with self._came:
            views: list[MembershipView] = []

            def found() -> bool:
                views[:] = [view for view in self.of_locked(MembershipView) if good(view)]
                return bool(views)

            assert self._came.wait_for(found, WAIT_S), self.of_locked(MembershipView)
            return views[-1]


class OpenDoor(AllowList):
    """A controller's that invites everybody."""

    def knows(self, key: str) -> bool:
        return bool(key)

    def believes(self, key: str, frame: Frame) -> bool:
        return bool(key)


class StandInController:
    """Admits everybody who says Hello, and publishes whatever members a test wants. Runs on its own thread."""

    def __init__(self, encrypted: bool, answer: Callable[[Member], Body | None] = lambda member: None) -> None:
        self.keys = KeyPair.generate() if encrypted else None
        self._mesh = Mesh(CONTROLLER, "127.0.0.1", self.keys)
        self._mesh.allow = OpenDoor()
        self.door = ControllerDoor(self._mesh.address, self.keys.public if self.keys is not None else "")
        self._answer = answer
        self._members: dict[WorkerId, Member] = {}
        self._removed: set[Stamp] = set()
        self._version = 0
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def remove(self, worker: str) -> None:
        """Publishes a membership without `worker`: its process is proven dead."""
        with self._lock:
            self._removed.add(self._members.pop(WorkerId(worker)).stamp)
            self._version += 1
        self._mesh.wake()

    def members(self) -> dict[WorkerId, Stamp]:
        with self._lock:
            return {worker: member.stamp for worker, member in self._members.items()}

    def close(self) -> None:
        self._stopping = True
        self._mesh.wake()
        self._thread.join(WAIT_S)
        self._mesh.close()

    def _run(self) -> None:
        published, beat_at_s = 0, 0.0
        while not self._stopping:
            frames = self._mesh.poll(0.05)
            with self._lock:
                for frame in frames:
                    if isinstance(frame.body, Hello):
                        self._on_hello(frame.body.member)
                if self._version > published or time.monotonic() > beat_at_s:
                    published, beat_at_s = self._version, time.monotonic() + 0.2
                    membership = Membership(version=self._version, members=tuple(self._members.values()))
                    for worker, member in self._members.items():
                        self._mesh.connect(worker, member.address, member.key)
                        self._mesh.send(worker, member.stamp.epoch, membership)

    def _on_hello(self, member: Member) -> None:
        worker = member.stamp.worker
        answer = self._answer(member)
        if answer is not None:
            self._mesh.connect(worker, member.address, member.key)
            self._mesh.send(worker, member.stamp.epoch, answer)
        elif member.stamp not in self._removed and self._members.get(worker) != member:
            self._members[worker] = member
            self._version += 1


class Worker:
    """An I/O thread with numpy pools and the events it delivered. A prefill worker serves offers by itself."""

    def __init__(
        self,
        worker: str,
        role: str,
        epoch: int,
        config: ClusterConfig,
        controller: ControllerDoor,
        lanes: LaneFactory = build_lanes,
        kv: KvSpec = FULL_KV,
        fill: int = 0,
    ) -> None:
        self.stamp = Stamp(WorkerId(worker), 1, Epoch(epoch))
        self.memory = kv.build(fill)
        self.pools = {component: buffer.as_bytes() for component, buffer in self.memory.buffers.items()}
        self.pool = self.pools[Component.FULL]
        self.events = Events()
        self.keys = KeyPair.generate() if controller.key else None
        self.fatal = threading.Event()
        self.hold_regions = threading.Event()  # set: a prefill worker stops after its first region
        self.io = IoThread(
            self.stamp,
            role,
            config,
            self.memory,
            self.keys,
            self._deliver,
            controller=controller,
            load=lambda: Load(running=3),
            on_fatal=self.fatal.set,
            lanes=lanes,
        )
        self.io.start()

    def close(self) -> None:
        assert self.io.stop(WAIT_S)

    def _deliver(self, event: object) -> None:
        self.events(event)
        if isinstance(event, OfferReceived):
            self._prefill(event)

    def _prefill(self, offer: OfferReceived) -> None:
        """Ships the pages in chunks of five, as if each had just been computed; then what other components keep, in
        the first pages of their pools."""
        first_page, pages = offer.start // PAGE_SIZE, -(-len(offer.tokens) // PAGE_SIZE)
        chunk = 5
        for page in range(first_page, pages, chunk):
            first, end = page * PAGE_SIZE, min((page + chunk) * PAGE_SIZE, len(offer.tokens))
            ids = np.arange(page + 1, min(page + chunk, pages) + 1, dtype=np.int32)
            self.io.post(ShipRegion(offer.key, first, end - first, ids))
            if self.hold_regions.is_set():
                return
        for one in segments_of(self.memory.layout, offer.start, len(offer.tokens))[1:]:
            ids = np.arange(1, 1 + one.units, dtype=np.int32)
            tokens = one.end_token - one.first_token
            self.io.post(ShipRegion(offer.key, one.first_token, tokens, ids, one.component))
        self.io.post(FinishSource(offer.key, PrefillResult(77, None, 0.5, 0)))


def open_sink(
    sink: Worker,
    peer: str,
    tokens: int,
    handoff: int,
    start: int = 0,
    ttl_s: float = WAIT_S,
    first_page: int = 100,
    key: HandoffKey | None = None,
) -> OpenSink:
    """Asks for `tokens` tokens; destination pages descend, so that they differ from the source's: from `first_page`
    of full attention, from 50 of a window, and state slot 3."""
    first = {Component.FULL: first_page, Component.SWA: 50, Component.STATE: 3}
    pages = {
        one.component: np.arange(first[one.component], first[one.component] - one.units, -1, dtype=np.int32)
        for one in segments_of(sink.memory.layout, start, tokens)
    }
    command = OpenSink(
        key=key or HandoffKey(HandoffId(handoff), 1),
        peer=WorkerId(peer),
        request_id=RequestId(f"r{handoff}"),
        tokens=np.arange(tokens, dtype=np.int32),
        start=start,
        pages=pages,
        sample=True,
        sampling=SamplingParams(),
        deadline_s=time.monotonic() + ttl_s,
    )
    sink.io.post(command)
    return command


def expected_pages(command: OpenSink, seed: int = 5) -> np.ndarray:
    first = command.start // PAGE_SIZE
    return random_pool(NUM_PAGES, PAGE_BYTES, seed)[1 + first : 1 + first + len(command.pages[Component.FULL])]


def _run_prefill(pipe: Connection, config: ClusterConfig, controller: ControllerDoor, hold: bool) -> None:
    die_with_parent()
    worker = Worker("prefill-0", "prefill", 22, config, controller, fill=5)
    if hold:
        worker.hold_regions.set()
    worker.io.wait_admitted(WAIT_S)
    pipe.send(os.getpid())
    pipe.recv()
    worker.close()
    pipe.send(None)


class PrefillProcess:
    """A prefill `Worker` in a child process."""

    def __init__(self, config: ClusterConfig, controller: ControllerDoor, hold: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run_prefill, args=(theirs, config, controller, hold), daemon=True)
        self._process.start()
        theirs.close()
        self.pid: int = self._pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join(WAIT_S)

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._pipe.recv()
            self._process.join(WAIT_S)
        self._pipe.close()
