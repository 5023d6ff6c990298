"""A worker without a model, in a process of its own: a real I/O thread, real lanes, a real pool, and an engine that
does nothing but keep an exact account of its pages.

A sink keeps a number of hand-offs open; a source fills pages, ships them in pieces of all kinds, and now and then gives
up. Both report every end, and complain of wrong bytes, of events that come late or twice, and of pages that were
written after they had been given back.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

import numpy as np
from chaos_mesh import NO_FAULTS, ChaosMesh, FrameFaults
from chaos_pages import Lent, Pages
from msgspec import structs

from baton.common.config import ClusterConfig
from baton.common.engine.batch import KvMemory
from baton.common.engine.core_api import FromPeer, MembershipView
from baton.common.errors import ErrorCode
from baton.common.ids import HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import Body, Failure, SamplingParams
from baton.transfer.api import (
    AbortSink,
    AbortSource,
    FinishSource,
    FirstTokenReady,
    OfferReceived,
    OpenSink,
    PrefillResult,
    ShipRegion,
    SinkCommitted,
    SinkFailed,
    SourceAborted,
    SourceReleased,
    SourceStopping,
)
from baton.transfer.io import IoThread
from baton.transfer.keys import ControllerDoor, KeyPair
from baton.transfer.lanes import Lanes, build_lanes
from baton.transfer.link import LaneStatus
from baton.transfer.mesh import Mesh
from baton.transfer.plan import Segment
from baton.transfer.process import die_with_parent
from baton.transfer.testing_ends import KvSpec
from baton.transfer.transports.base import PullFailed, Rows
from baton.transfer.transports.local import LocalTransport

PAGE_SIZE, WINDOW, LAYERS = 4, 41, 4
MOST_PAGES = 40
FIRST_TOKEN = 7
SHUN_S = 0.1
"""So long a sink asks nothing of a source that could not be reached."""
SINK_KV = KvSpec(KvLayout(PAGE_SIZE, window=WINDOW, state=True), ((641, 4096), (193, 1536), (17, 40000)), LAYERS)
SOURCE_KV = KvSpec(SINK_KV.layout, ((2049, 4096), (513, 1536), (49, 40000)), LAYERS)
MARGIN_S = 1.5
"""An outcome may come so long after its deadline, besides the time for which its own process did not run."""
FATAL = 70
TURN_S = 0.01
STALL_S = 0.05
ENDS_PER_REPORT = 50


@dataclass(frozen=True, slots=True)
class Trap:
    """When the `nth` frame of this kind is about to be sent ("send"), has been ("sent"), or was received and not yet
    looked at ("got"), the process signals itself. "pull": half of the `nth` region is copied."""

    where: str
    kind: str
    nth: int
    number: int


@dataclass(frozen=True, slots=True)
class PeerSpec:
    stamp: Stamp
    role: str
    config: ClusterConfig
    controller: ControllerDoor
    seed: int
    faults: FrameFaults = NO_FAULTS
    trap: Trap | None = None
    piece_delay_s: float = 0.0  # a source waits so long between two pieces, at most
    give_up: float = 0.0  # this share of its hand-offs it ends itself
    hold_first: bool = False  # a source never finishes its first hand-off


# ------------------------------------------------------------------------------------------ commands, reports


@dataclass(frozen=True, slots=True)
class Pace:
    """A sink shall have so many hand-offs open, of its own choice."""

    open: int


@dataclass(frozen=True, slots=True)
class OpenOne:
    """This one, as soon as a lane to the source is up; aborted `abort_after_s` later."""

    peer: WorkerId
    tokens: int
    ttl_s: float
    abort_after_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class Calm:
    """No more faults of frames, and nothing is given up."""


@dataclass(frozen=True, slots=True)
class CheckUp:
    """Answered with an `Account`."""


@dataclass(frozen=True, slots=True)
class Quit:
    """Close and end."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The process runs."""


@dataclass(frozen=True, slots=True)
class End:
    """What became of one hand-off, on one side. `code` "" for those that went well."""

    side: str
    key: tuple[int, int]
    peer: str
    code: str
    reason: str
    lane: str
    nbytes: int
    wrong_bytes: int
    late_s: float  # beyond deadline, margin and own stalls; 0: in time


@dataclass(frozen=True, slots=True)
class Account:
    """Everything that must be back when nothing is open."""

    open: int
    lent_pages: int
    written_after_return: int
    sessions: int
    operations: int
    slots_out: int
    waiting: int
    frames: dict[str, int]
    rss_bytes: int

    @property
    def clean(self) -> bool:
        return not any((self.open, self.lent_pages, self.sessions, self.operations, self.slots_out, self.waiting))


# ------------------------------------------------------------------------------------------------- processes


@dataclass(slots=True)
class _Held:
    """One open hand-off: its pages, and by when the engine must have heard of it."""

    key: HandoffKey
    start: int
    total: int
    peer: str
    lent: Lent
    deadline_s: float
    stalled_before_s: float
    abort_at_s: float = float("inf")
    aborted: bool = False
    pieces: deque[ShipRegion | FinishSource] = field(default_factory=deque)  # a source's
    next_piece_s: float = 0.0
    early_token: int = -1
    told: bool = False  # SourceStopping has come, or FirstTokenReady


class _Peer:
    """What sources and sinks have in common."""

    side = ""
    kv = SINK_KV

    def __init__(self, pipe: Connection, spec: PeerSpec) -> None:
        self.spec = spec
        self.random = random.Random(spec.seed)
        self.memory = self.kv.build(0)
        self.pages = Pages(self.memory)
        self.held: dict[HandoffKey, _Held] = {}
        self.give_up = spec.give_up
        self._pipe = pipe
        self._inbox: queue.SimpleQueue[tuple[object, float, float]] = queue.SimpleQueue()  # when; stalls until then
        self._ends: list[End] = []
        self._stalled_s, self._turned_s = 0.0, time.monotonic()
        self._came_s, self._stalled_before_s = 0.0, 0.0  # when what is being looked at was told
        self._trap = _Sprung(spec.trap)
        self._mesh: ChaosMesh | None = None
        self.io = IoThread(
            spec.stamp,
            spec.role,
            spec.config,
            self.memory,
            KeyPair.generate() if spec.controller.key else None,
            self._deliver,
            controller=spec.controller,
            on_fatal=lambda: os._exit(FATAL),
            mesh=self._make_mesh,
            lanes=self._make_lanes,
        )

    def serve(self) -> None:
        self.io.start()
        threading.Thread(target=self._hear, daemon=True).start()
        self._pipe.send(Ready())
        while True:
            try:
                item, self._came_s, self._stalled_before_s = self._inbox.get(timeout=TURN_S)
            except queue.Empty:
                item, self._came_s, self._stalled_before_s = None, time.monotonic(), self._stalled_s
            now = time.monotonic()
            gap_s, self._turned_s = now - self._turned_s, now
            self._stalled_s += gap_s if gap_s > STALL_S else 0.0
            match item:
                case None:
                    pass
                case Quit():
                    assert self.io.stop(20.0)
                    return
                case Calm():
                    self.give_up = 0.0
                    assert self._mesh is not None
                    self._mesh.faults = NO_FAULTS
                case CheckUp():
                    self._flush()
                    self._pipe.send(self._account())
                case _:
                    self.on_item(item, now)
            self.on_turn(now)
            if len(self._ends) >= ENDS_PER_REPORT or item is None:
                self._flush()

    def on_item(self, item: object, now: float) -> None:
        raise NotImplementedError

    def on_turn(self, now: float) -> None:
        raise NotImplementedError

    def hold(self, key: HandoffKey, peer: str, start: int, total: int, deadline_s: float) -> _Held | None:
        assert key not in self.held, f"{key} is open already"
        lent = self.pages.lend(start, total)
        if lent is None:
            return None
        held = self.held[key] = _Held(key, start, total, peer, lent, deadline_s, self._stalled_before_s)
        return held

    def late_s(self, held: _Held) -> float:
        """Of what is being looked at. How long it then waited in line here is this peer's own affair."""
        stalled_s = self._stalled_s - held.stalled_before_s
        return max(0.0, self._came_s - held.deadline_s - stalled_s - MARGIN_S)

    def ended(self, held: _Held, failure: Failure | None, lane: str, nbytes: int, wrong: int, late_s: float) -> None:
        del self.held[held.key]
        self.pages.take_back(held.lent)
        code, reason = (failure.code, failure.reason) if failure else ("", "")
        key = (held.key.handoff, held.key.attempt)
        self._ends.append(End(self.side, key, held.peer, code, reason, lane, nbytes, wrong, late_s))

    def segments(self, held: _Held) -> tuple[Segment, ...]:
        return self.pages.segments(held.start, held.total)

    def _make_mesh(self, stamp: Stamp, bind_host: str, keys: KeyPair | None) -> Mesh:
        self._mesh = ChaosMesh(stamp, bind_host, keys, self.spec.faults, self.spec.seed, self._trap.saw)
        return self._mesh

    def _make_lanes(self, stamp: Stamp, config: ClusterConfig, mesh: Mesh, memory: KvMemory) -> Lanes:
        lanes = build_lanes(stamp, config, mesh, memory)
        if self.spec.trap is None or self.spec.trap.where != "pull":
            return lanes
        pull = tuple(_HalfPull(memory, self._trap) for _ in lanes.pull)
        return Lanes(lanes.staged, pull, lanes.direct)

    def _deliver(self, item: object) -> None:
        self._inbox.put((item, time.monotonic(), self._stalled_s))

    def _hear(self) -> None:
        while True:
            try:
                self._deliver(self._pipe.recv())
            except (EOFError, OSError):
                os._exit(0)

    def _flush(self) -> None:
        if self._ends:
            self._pipe.send(self._ends)
            self._ends = []

    def _account(self) -> Account:
        asked_s = time.monotonic()
        while (snapshot := self.io.snapshot()).at_s < asked_s and time.monotonic() < asked_s + 5.0:
            time.sleep(TURN_S)
        data = snapshot.data
        assert data is not None
        assert self._mesh is not None
        return Account(
            open=len(self.held),
            lent_pages=self.pages.lent,
            written_after_return=self.pages.written_after_return(),
            sessions=snapshot.hand_offs,
            operations=data.open_operations,
            slots_out=sum(data.receive_slots[1:]) + sum(data.send_slots[1:]),
            waiting=data.waiting_sinks + data.open_sinks,
            frames=dict(self._mesh.counts) | {"malformed": snapshot.mesh.malformed},
            rss_bytes=_rss_bytes(),
        )


class Sink(_Peer):
    side, kv = "sink", SINK_KV

    def __init__(self, pipe: Connection, spec: PeerSpec) -> None:
        super().__init__(pipe, spec)
        self._sources: list[WorkerId] = []
        self._pace = 0
        self._shunned_until_s: dict[WorkerId, float] = {}
        self._orders: list[OpenOne] = []
        self._again: deque[tuple[HandoffKey, int, int]] = deque()

    def on_item(self, item: object, now: float) -> None:
        match item:
            case Pace(count):
                self._pace = count
            case OpenOne():
                self._orders.append(item)
            case MembershipView():
                self._sources = [
                    member.stamp.worker
                    for member in item.members
                    if member.role == "prefill" and member.stamp.worker not in item.silent
                ]
            case FromPeer():
                pass  # of a peer that is mad
            case FirstTokenReady():
                held = self.held[item.key]
                assert not held.told, "told twice"
                held.told, held.early_token = True, item.first_token
            case SinkCommitted():
                held = self.held[item.key]
                wrong = sum(self.pages.wrong(held.key, one, held.lent) for one in self.segments(held))
                wrong += not {item.result.first_token, held.early_token} <= {FIRST_TOKEN, -1}
                self.ended(held, None, item.lane, item.nbytes, wrong, self.late_s(held))
            case SinkFailed():
                held = self.held[item.key]
                landed = item.landed_until - held.start
                assert landed == 0, "of a model with a state nothing is of use alone"
                self.ended(held, item.failure, item.lane, item.nbytes, 0, self.late_s(held))
                if item.failure.code == ErrorCode.NO_WORKER:
                    self._shunned_until_s[item.peer] = now + SHUN_S
                if held.key.attempt < 3 and self.random.random() < 0.5:
                    self._again.append((HandoffKey(held.key.handoff, held.key.attempt + 1), held.start, held.total))
            case _:
                raise AssertionError(f"nobody expects {item}")

    def on_turn(self, now: float) -> None:
        for order in [order for order in self._orders if self._reaches(order.peer)]:
            self._orders.remove(order)
            held = self._open(order.peer, self._new_key(), 0, order.tokens, now + order.ttl_s)
            assert held is not None, "no pages for it"
            held.abort_at_s = now + order.abort_after_s
        sources = [source for source in self._sources if self._shunned_until_s.get(source, 0.0) <= now]
        while len(self.held) < self._pace and sources:
            dice = self.random
            if self._again:
                key, start, total = self._again.popleft()
            else:
                pages = min(MOST_PAGES, int(dice.paretovariate(0.7)))
                total = pages * PAGE_SIZE - dice.randrange(PAGE_SIZE)
                start = dice.randrange(pages) * PAGE_SIZE if dice.random() < 0.3 else 0
                key = self._new_key()
            ttl_s = dice.choice((0.3, 1.0, 2.0, 4.0))
            held = self._open(dice.choice(sources), key, start, total, now + ttl_s)
            if held is None:
                break
            if dice.random() < self.give_up:
                held.abort_at_s = now + dice.uniform(0, 0.2)
        for held in self.held.values():
            if held.abort_at_s <= now and not held.aborted:
                held.aborted = True
                self.io.post(AbortSink(held.key, Failure(code=ErrorCode.CANCELLED, reason="the client is gone")))

    def _reaches(self, peer: WorkerId) -> bool:
        data = self.io.snapshot().data
        assert data is not None
        return peer in self._sources and any(view.status is LaneStatus.UP for view in data.lanes.get(peer, ()))

    def _open(self, peer: WorkerId, key: HandoffKey, start: int, total: int, deadline_s: float) -> _Held | None:
        held = self.hold(key, peer, start, total, deadline_s)
        if held is not None:
            self.io.post(
                OpenSink(
                    key=key,
                    peer=peer,
                    request_id=RequestId(str(key.handoff)),
                    tokens=np.zeros(total, dtype=np.int32),
                    start=start,
                    pages=dict(held.lent),
                    sample=self.random.random() < 0.5,
                    sampling=SamplingParams(),
                    deadline_s=deadline_s,
                    priority=self.random.choice((-5, 0, 0, 0, 5)),
                )
            )
        return held

    def _new_key(self) -> HandoffKey:
        return HandoffKey(HandoffId(self.random.getrandbits(62)), 1)


class Source(_Peer):
    side, kv = "source", SOURCE_KV

    def __init__(self, pipe: Connection, spec: PeerSpec) -> None:
        super().__init__(pipe, spec)
        self._holds = spec.hold_first

    def on_item(self, item: object, now: float) -> None:
        match item:
            case OfferReceived():
                self._prefill(item, now)
            case SourceReleased():
                held = self.held[item.key]
                assert not held.pieces, "committed before it was shipped"
                self.ended(held, None, "", 0, 0, 0.0)
            case SourceAborted():
                held = self.held.get(item.key)
                if held is None:
                    return  # refused for want of pages
                late_s = 0.0 if held.told or held.aborted else self.late_s(held)
                self.ended(held, item.failure, "", 0, 0, late_s)
            case SourceStopping():
                held = self.held[item.key]
                assert not held.told, "told twice"
                held.told = True
                held.pieces.clear()
                late_s = self.late_s(held)
                assert late_s == 0.0, f"heard of the end {late_s} s late"
            case MembershipView() | FromPeer():
                pass
            case _:
                raise AssertionError(f"nobody expects {item}")

    def on_turn(self, now: float) -> None:
        for held in self.held.values():
            if held.abort_at_s <= now and not held.aborted and not held.told:
                held.aborted = True
                held.pieces.clear()
                self.io.post(AbortSource(held.key, Failure(code=ErrorCode.DRAINING, reason="gives up")))
            while held.pieces and held.next_piece_s <= now:
                self.io.post(held.pieces.popleft())
                if self.spec.piece_delay_s and self.random.random() < 0.5:
                    held.next_piece_s = now + self.random.uniform(0, self.spec.piece_delay_s)

    def _prefill(self, offer: OfferReceived, now: float) -> None:
        held = self.hold(offer.key, offer.peer.worker, offer.start, len(offer.tokens), offer.deadline_s)
        if held is None:
            reason = Failure(code=ErrorCode.OUT_OF_PAGES, reason="more hand-offs than pages")
            self.io.post(AbortSource(offer.key, reason))
            return
        for segment in self.segments(held):
            self.pages.fill(held.key, segment, held.lent)
            held.pieces.extend(self._cut(held, segment))
        if self._holds:
            self._holds = False
            return
        held.pieces.append(FinishSource(held.key, PrefillResult(FIRST_TOKEN if offer.sample else -1, None, 0.1, 0)))
        if self.random.random() < self.give_up:
            held.abort_at_s = now + self.random.uniform(0, 0.2)

    def _cut(self, held: _Held, segment: Segment) -> Iterator[ShipRegion]:
        """In one piece or several, the last one perhaps by layers."""
        pages = held.lent[segment.component]
        whole = segment.component is Component.STATE
        step = len(pages) if whole or self.random.random() < 0.5 else self.random.randint(1, len(pages))
        for at in range(0, len(pages), step):
            end = min(at + step, len(pages))
            first = segment.first_token + at * PAGE_SIZE
            until = segment.end_token if end == len(pages) else segment.first_token + end * PAGE_SIZE
            piece = ShipRegion(held.key, first, until - first, pages[at:end], segment.component)
            parts = self.random.choice((1, 1, 2, LAYERS)) if end == len(pages) and not whole else 1
            yield from (structs.replace(piece, part=part, parts=parts) for part in range(parts))


class _Sprung:
    """Counts what passes, and springs the trap."""

    def __init__(self, trap: Trap | None) -> None:
        self._trap = trap
        self._seen: Counter[tuple[str, str]] = Counter()

    def saw(self, where: str, body: Body) -> None:
        self.step(where, type(body).__name__)

    def step(self, where: str, kind: str) -> None:
        trap = self._trap
        if trap is not None and (where, kind) == (trap.where, trap.kind):
            self._seen[where, kind] += 1
            if self._seen[where, kind] == trap.nth:
                os.kill(os.getpid(), trap.number)
                if trap.number == signal.SIGKILL:
                    time.sleep(60)  # not one step further


class _HalfPull(LocalTransport):
    """Copies each region in two halves, with a trap in between."""

    def __init__(self, memory: KvMemory, trap: _Sprung) -> None:
        super().__init__(memory)
        self._trap = trap

    def pull(self, peer: Stamp, source: Rows, target: Rows) -> PullFailed | None:
        half = len(source.units) // 2
        if len(source.units) != len(target.units) or not half:
            return super().pull(peer, source, target)
        first = super().pull(
            peer, replace(source, units=source.units[:half]), replace(target, units=target.units[:half])
        )
        self._trap.step("pull", "")
        rest = replace(source, units=source.units[half:]), replace(target, units=target.units[half:])
        return first or super().pull(peer, *rest)


def _rss_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_peer(pipe: Connection, spec: PeerSpec) -> None:
    die_with_parent()
    logging.getLogger("baton").setLevel(logging.CRITICAL)  # damage is the order of the day; bugs are heard of
    make: Callable[[Connection, PeerSpec], _Peer] = Source if spec.role == "prefill" else Sink
    make(pipe, spec).serve()
