"""Every interleaving of two hand-offs between one prefill and one decode worker, through both real endpoints: two
requests that want the same staging slot, or a request and its retry. Up to so many faults: a frame lost for good, an
abort, a deadline, silence, damage, and the death of one of the two processes, after which another sits in its seat.

As in `test_session_exhaustive` (which has one hand-off of more regions, without endpoints), what was sent once may
arrive at any time and any number of times, also at a successor, or when its hand-off has been forgotten: one tombstone
is kept, so an offer may be taken for a new one when all is over. Each reachable state is checked, and from each the end
must be reachable without a further fault. Time stands still: timers are events that may come at any moment.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import numpy as np
import pytest

from baton.common.config import TransferConfig
from baton.common.engine.core_api import MembershipView
from baton.common.errors import ErrorCode
from baton.common.ids import Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import Failure, Frame, Member, SamplingParams
from baton.transfer.api import (
    AbortSink,
    AbortSource,
    FinishSource,
    OfferReceived,
    OpenSink,
    PrefillResult,
    ShipRegion,
    SinkCommitted,
    SinkFailed,
    SourceAborted,
    SourceReleased,
)
from baton.transfer.endpoint import Endpoint
from baton.transfer.session import sink, source
from baton.transfer.session.book import SessionBook
from baton.transfer.session.effects import (
    PULL_LANES,
    CloseSink,
    EndpointEffect,
    EngineEvent,
    FenceSink,
    FenceSource,
    Landed,
    LandRegion,
    PrepareSink,
    RegionDamaged,
    RegionReady,
    SendFrame,
    SendRegion,
    SinkFenced,
    SinkPrepared,
    SourceFenced,
)
from baton.transfer.session.step import DeadlinePassed, ResendDue

NOW_S = 0.0
DECODE = Stamp(WorkerId("d"), 1, Epoch(1))
PREFILL, SUCCESSOR = Stamp(WorkerId("p"), 1, Epoch(2)), Stamp(WorkerId("p"), 2, Epoch(3))
LAYOUT = KvLayout(2)
CONFIG = TransferConfig(credit_regions=1, handoff_ttl_s=9.0, max_tombstones=1)
FAILURE = Failure(code=ErrorCode.CANCELLED)
RESULT = PrefillResult(5, None, 0.0, 0)
FIRST = HandoffKey(HandoffId(7), 0)
SECONDS = {"requests": HandoffKey(HandoffId(8), 0), "retry": HandoffKey(HandoffId(7), 1)}
SLOTS = 1
"""Of staging: who comes second waits for who came first."""
PAGES = {FIRST: [1], SECONDS["requests"]: [2], SECONDS["retry"]: [1]}


class World(NamedTuple):
    """Everything. `None`: the process is dead. Frames and tags are never withdrawn, operations are those open."""

    decode: Endpoint | None
    prefill: Endpoint | None
    to_decode: frozenset[Frame] = frozenset()
    to_prefill: frozenset[Frame] = frozenset()
    decode_ops: frozenset[object] = frozenset()
    prefill_ops: frozenset[object] = frozenset()
    bytes_sent: frozenset[int] = frozenset()
    slots: frozenset[HandoffKey] = frozenset()  # who has one
    opened: frozenset[HandoffKey] = frozenset()
    offered: frozenset[HandoffKey] = frozenset()  # to the prefill engine
    shipped: frozenset[tuple[HandoffKey, int]] = frozenset()  # commands that it has given for a hand-off
    sink_told: frozenset[tuple[HandoffKey, str]] = frozenset()
    source_told: frozenset[tuple[HandoffKey, str]] = frozenset()
    proven: bool = True  # everybody knows who is dead
    faults_left: int = 0

    def ends_of(self, side: str) -> dict[HandoffKey, str]:
        return dict(self.sink_told if side == "sink" else self.source_told)


def forked(endpoint: Endpoint) -> Endpoint:
    """One that goes on by itself. States of sessions are values; only the tables around them are copied."""
    fork = copy.copy(endpoint)
    fork._members = dict(endpoint._members)
    fork._sinks, fork._sources = _forked(endpoint._sinks), _forked(endpoint._sources)
    return fork


def _forked(book: SessionBook) -> SessionBook:
    fork = copy.copy(book)
    fork._observe = _nobody_looks
    for table in ("_states", "_ended", "_unasked"):
        setattr(fork, table, copy.copy(getattr(book, table)))
    fork._timers = copy.copy(book._timers)
    fork._timers._due, fork._timers._heap = dict(book._timers._due), list(book._timers._heap)
    return fork


def _nobody_looks(*_: object) -> None:
    """Recording costs more than the step."""


def view(*stamps: Stamp) -> MembershipView:
    roles = {"d": "decode", "p": "prefill"}
    members = tuple(Member(stamp=one, role=roles[one.worker], address="") for one in stamps)
    return MembershipView(1, members, frozenset())


class Explorer:
    def __init__(self, lane: str, faults: int, case: str) -> None:
        self.lane, self.case, self.second = lane, case, SECONDS[case]
        self.edges: dict[Hashable, list[Hashable]] = {}  # without a further fault
        self.ends: set[Hashable] = set()
        self.outcomes: set[tuple[str, ...]] = set()
        self.transitions = 0
        decode, prefill = (Endpoint(stamp, CONFIG, LAYOUT, ("zmq", "local")) for stamp in (DECODE, PREFILL))
        for endpoint in (decode, prefill):
            endpoint.on_membership(view(DECODE, PREFILL), NOW_S)
        self.first = World(decode, prefill, faults_left=faults)

    def run(self) -> None:
        first = self.opens(self.first, FIRST)
        frontier, seen = [(first, self.identity(first))], {self.identity(first)}
        while frontier:
            world, name = frontier.pop()
            self.check(world)
            followers: list[Hashable] = []
            for fault, steps in ((False, self.ordinary(world)), (True, self.faults(world))):
                for after in steps:
                    self.transitions += 1
                    identity = self.identity(after)
                    if not fault:
                        followers.append(identity)
                    if identity not in seen:
                        seen.add(identity)
                        frontier.append((after, identity))
            self.edges[name] = followers
            if self.is_end(world):
                self.ends.add(name)
                told = (*world.ends_of("sink").values(), *world.ends_of("source").values())
                self.outcomes.add(tuple(sorted(told)))

    @staticmethod
    def identity(world: World) -> Hashable:
        ends = (_identity(world.decode), _identity(world.prefill))
        return (*ends, *world[2:])

    # ---------------------------------------------------------------------------------------- what may happen

    def ordinary(self, world: World) -> Iterator[World]:
        failed = world.ends_of("sink").get(FIRST) == "SinkFailed"
        if world.decode is not None and self.second not in world.opened and (self.case == "requests" or failed):
            yield self.opens(world, self.second)
        for frame in world.to_decode if world.decode is not None else ():
            yield self.at_decode(world, lambda one, frame=frame: one.on_frame(frame, NOW_S))
        for frame in world.to_prefill if world.prefill is not None else ():
            yield self.at_prefill(world, lambda one, frame=frame: one.on_frame(frame, NOW_S))
        for op in world.decode_ops:
            yield from self.decode_answers(world, op)
        for op in world.prefill_ops:
            yield from self.prefill_answers(world, op)
        yield from self.timers(world, resend=True)
        yield from self.prefill_engine(world)
        if not world.proven:
            yield self.told_of_death(world)

    def opens(self, world: World, key: HandoffKey) -> World:
        tokens = np.arange(2, dtype=np.int32)
        pages = {Component.FULL: np.array(PAGES[key], dtype=np.int32)}
        command = OpenSink(key, WorkerId("p"), RequestId("r"), tokens, 0, pages, True, SamplingParams(), 9.0)
        world = world._replace(opened=world.opened | {key})
        return self.at_decode(world, lambda one: one.command(command, NOW_S))

    def prefill_engine(self, world: World) -> Iterator[World]:
        for key in world.offered - world.ends_of("source").keys() if world.prefill is not None else ():
            commands = [
                ShipRegion(key, 0, 2, np.array(PAGES[key], dtype=np.int32)),
                FinishSource(key, RESULT),
            ]
            done = dict(world.shipped).get(key, 0)
            if done < len(commands):
                after = world._replace(shipped=world.shipped - {(key, done)} | {(key, done + 1)})
                yield self.at_prefill(after, lambda one, command=commands[done]: one.command(command, NOW_S))

    def decode_answers(self, world: World, op: object) -> Iterator[World]:
        after = world._replace(decode_ops=world.decode_ops - {op})
        match op:
            case PrepareSink(key=key):
                if self.lane in PULL_LANES or len(world.slots) < SLOTS:
                    event = SinkPrepared(key, self.lane, 1, (1,))
                    after = after._replace(slots=world.slots | {key})
                    yield self.at_decode(after, lambda one: one.on_data(event, NOW_S))
            case LandRegion(key=key, tag=tag, chunk=chunk):
                if self.lane in PULL_LANES or tag in world.bytes_sent:
                    landed = Landed(key, chunk.seq, 8, 0.0)
                    yield self.at_decode(after, lambda one: one.on_data(landed, NOW_S))
            case FenceSink(key=key):  # whatever is open of it ends with the fence
                rest = frozenset(one for one in after.decode_ops if one.key != key)
                after = after._replace(decode_ops=rest, slots=after.slots - {key})
                yield self.at_decode(after, lambda one: one.on_data(SinkFenced(key), NOW_S))

    def prefill_answers(self, world: World, op: object) -> Iterator[World]:
        after = world._replace(prefill_ops=world.prefill_ops - {op})
        match op:
            case SendRegion(key=key, seq=seq, tag=tag):
                after = after._replace(bytes_sent=after.bytes_sent | {tag})
                yield self.at_prefill(after, lambda one: one.on_data(RegionReady(key, seq, tag, 8, 0), NOW_S))
            case FenceSource(key=key):
                rest = frozenset(one for one in after.prefill_ops if one.key != key)
                after = after._replace(prefill_ops=rest)
                yield self.at_prefill(after, lambda one: one.on_data(SourceFenced(key), NOW_S))

    def timers(self, world: World, *, resend: bool) -> Iterator[World]:
        event = ResendDue() if resend else DeadlinePassed()
        if world.decode is not None:
            for key, state in world.decode._sinks.items():
                if sink.sink_timer(state) is not None and self.may(state, resend, sink.SinkOver):
                    yield self.at_decode(world, lambda one, key=key: one._out(one._sinks.apply(key, event, NOW_S)))
        if world.prefill is not None:
            for key, state in world.prefill._sources.items():
                if source.source_timer(state) is not None and self.may(state, resend, source.SourceOver):
                    yield self.at_prefill(world, lambda one, key=key: one._out(one._sources.apply(key, event, NOW_S)))

    def may(self, state: object, resend: bool, over: type) -> bool:
        """Whether that timer can be the one that is due."""
        due = getattr(state, "resend_at_s", None)
        if isinstance(state, sink.Receiving):
            due = due if state.nacks else None
        if isinstance(state, source.Sending):
            due = due if any(type(one).__name__ == "Announced" for one in state.regions.open) else None
        if resend:
            return due is not None
        alive = isinstance(state, sink.Preparing | sink.Offered | sink.Receiving | source.SourceAlive)
        return alive and not isinstance(state, over)

    def faults(self, world: World) -> Iterator[World]:
        if not world.faults_left:
            return
        world = world._replace(faults_left=world.faults_left - 1)
        for frame in world.to_decode:  # all copies of it are lost: only sending it again helps
            yield world._replace(to_decode=world.to_decode - {frame})
        for frame in world.to_prefill:
            yield world._replace(to_prefill=world.to_prefill - {frame})
        yield from self.timers(world, resend=False)
        if world.decode is not None:
            for key in world.opened - world.ends_of("sink").keys():
                yield self.at_decode(world, lambda one, key=key: one.command(AbortSink(key, FAILURE), NOW_S))
            yield self.at_decode(world, lambda one: one.on_peer_silent(WorkerId("p"), NOW_S))
            for op in world.decode_ops:
                if isinstance(op, LandRegion) and (self.lane in PULL_LANES or op.tag in world.bytes_sent):
                    after = world._replace(decode_ops=world.decode_ops - {op})
                    damaged = RegionDamaged(op.key, op.chunk.seq)
                    yield self.at_decode(after, lambda one, damaged=damaged: one.on_data(damaged, NOW_S))
        if world.prefill is not None:
            for key in world.offered - world.ends_of("source").keys():
                yield self.at_prefill(world, lambda one, key=key: one.command(AbortSource(key, FAILURE), NOW_S))
            yield self.at_prefill(world, lambda one: one.on_peer_silent(WorkerId("d"), NOW_S))
        if world.decode is not None and world.prefill is not None:
            yield world._replace(prefill=None, prefill_ops=frozenset(), proven=False)
            yield world._replace(decode=None, decode_ops=frozenset(), slots=frozenset(), proven=False)

    def told_of_death(self, world: World) -> World:
        """A dead prefill worker has a successor by then; a decode worker that is gone stays gone."""
        world = world._replace(proven=True)
        if world.decode is None:
            return self.at_prefill(world, lambda one: one.on_membership(view(PREFILL), NOW_S))
        successor = Endpoint(SUCCESSOR, CONFIG, LAYOUT, ("zmq", "local"))
        successor.on_membership(view(DECODE, SUCCESSOR), NOW_S)
        world = world._replace(prefill=successor, offered=frozenset(), shipped=frozenset(), source_told=frozenset())
        return self.at_decode(world, lambda one: one.on_membership(view(DECODE, SUCCESSOR), NOW_S))

    # ------------------------------------------------------------------------------------------- transitions

    def at_decode(self, world: World, act: object) -> World:
        endpoint = forked(world.decode)
        world = world._replace(decode=endpoint)
        for effect in act(endpoint):
            world = self.decode_effect(world, effect)
        return world

    def decode_effect(self, world: World, effect: EndpointEffect) -> World:
        match effect:
            case SendFrame(dst_epoch=epoch, body=body):
                return world._replace(to_prefill=world.to_prefill | {Frame(DECODE, Epoch(epoch), body)})
            case EngineEvent(SinkCommitted(key=key) | SinkFailed(key=key) as event):
                assert key not in world.ends_of("sink"), f"{type(event).__name__} after an end"
                assert not any(one.key == key for one in world.decode_ops), "the engine has pages that are written"
                return world._replace(sink_told=world.sink_told | {(key, type(event).__name__)})
            case EngineEvent():
                return world
            case CloseSink(key=key):
                assert not any(one.key == key for one in world.decode_ops), "closed with operations open"
                return world._replace(slots=world.slots - {key})
        assert effect not in world.decode_ops, "the same operation twice"
        return world._replace(decode_ops=world.decode_ops | {effect})

    def at_prefill(self, world: World, act: object) -> World:
        endpoint = forked(world.prefill)
        world = world._replace(prefill=endpoint)
        for effect in act(endpoint):
            world = self.prefill_effect(world, effect)
        return world

    def prefill_effect(self, world: World, effect: EndpointEffect) -> World:
        stamp = world.prefill._stamp
        match effect:
            case SendFrame(dst_epoch=epoch, body=body):
                return world._replace(to_decode=world.to_decode | {Frame(stamp, Epoch(epoch), body)})
            case EngineEvent(OfferReceived(key=key)):
                told = world.ends_of("source")
                assert key not in world.offered or key in told, "the engine was offered it twice"
                again = (
                    world.shipped - {(key, dict(world.shipped).get(key, 0))},
                    world.source_told - {(key, told.get(key))},
                )
                return world._replace(offered=world.offered | {key}, shipped=again[0], source_told=again[1])
            case EngineEvent(SourceReleased(key=key) | SourceAborted(key=key) as event):
                assert key not in world.ends_of("source"), f"{type(event).__name__} after an end"
                assert not any(one.key == key for one in world.prefill_ops), "a gather is still open"
                if isinstance(event, SourceReleased) and world.decode is not None:
                    assert world.ends_of("sink").get(key) == "SinkCommitted", "released what was not committed"
                return world._replace(source_told=world.source_told | {(key, type(event).__name__)})
            case EngineEvent():
                return world
        assert effect not in world.prefill_ops, "the same operation twice"
        return world._replace(prefill_ops=world.prefill_ops | {effect})

    # --------------------------------------------------------------------------------------------- invariants

    def check(self, world: World) -> None:
        landing = [one for one in world.decode_ops if isinstance(one, LandRegion)]
        writers = [page for one in landing for page in PAGES[one.key]]
        assert len(writers) == len(set(writers)), "two hand-offs write one page"
        for one in landing:
            assert one.key not in world.ends_of("sink"), "the engine has its pages, and they are still written"
            if self.lane in PULL_LANES and one.peer == PREFILL and world.prefill is not None:
                assert one.key not in world.ends_of("source"), "the engine has its pages, and they are still read"
        if world.decode is not None:
            assert world.decode.live_sinks == len(world.opened - world.ends_of("sink").keys())
        if world.prefill is not None:
            assert world.prefill.live_sources == len(world.offered - world.ends_of("source").keys())
        for endpoint in (world.decode, world.prefill):
            if endpoint is not None:  # of each side: the living, what ended, and what frames alone have created
                assert len(endpoint.sessions()) <= 2 + 2 * 2 * CONFIG.max_tombstones

    def is_end(self, world: World) -> bool:
        if not world.proven:
            return False
        sinks = world.decode is None or world.opened == world.ends_of("sink").keys()
        sources = world.prefill is None or world.offered == world.ends_of("source").keys()
        wanted = self.case == "retry" or self.second in world.opened or world.decode is None
        return sinks and sources and wanted

    def stuck(self) -> int:
        """States from which no end can be reached without a further fault."""
        backwards: defaultdict[Hashable, list[Hashable]] = defaultdict(list)
        for name, followers in self.edges.items():
            for after in followers:
                backwards[after].append(name)
        good, frontier = set(self.ends), list(self.ends)
        while frontier:
            for before in backwards[frontier.pop()]:
                if before not in good:
                    good.add(before)
                    frontier.append(before)
        return len(self.edges) - len(good)


def _identity(endpoint: Endpoint | None) -> Hashable:
    if endpoint is None:
        return None
    books = (
        (frozenset(book._states.items()), tuple(book._ended), tuple(book._unasked), book._forgotten)
        for book in (endpoint._sinks, endpoint._sources)
    )
    return (endpoint._stamp, endpoint._tags_used, frozenset(endpoint._members.values()), *books)


@pytest.mark.parametrize(
    ("case", "lane", "faults"),
    [
        ("requests", "zmq", 0),
        pytest.param("requests", "local", 0, marks=pytest.mark.slow),
        pytest.param("retry", "local", 1, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param("requests", "zmq", 1, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param("requests", "local", 1, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param("retry", "zmq", 2, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param("retry", "local", 2, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_no_interleaving_of_two_breaks_ownership_or_gets_stuck(case: str, lane: str, faults: int) -> None:
    explorer = Explorer(lane, faults, case)
    explorer.run()
    print(f"{case}, lane {lane}, {faults} faults: {len(explorer.edges)} states, {explorer.transitions} transitions")
    assert explorer.stuck() == 0
    both = ("SinkCommitted", "SinkCommitted", "SourceReleased", "SourceReleased")
    if case == "requests":
        assert both in explorer.outcomes
        assert faults or {told[:2] for told in explorer.outcomes} == {both[:2]}
    else:
        assert ("SinkCommitted", "SinkFailed", "SourceAborted", "SourceReleased") in explorer.outcomes
