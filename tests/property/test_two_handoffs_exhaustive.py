"""Every interleaving of two hand-offs between one prefill and one decode worker, through both real endpoints: two
requests that want the same staging slot, or a request and its retry. Up to so many faults: a frame lost for good, an
abort, a deadline, silence, damage, and the death of one of the two processes, after which another sits in its seat.

As in `test_session_exhaustive` (which has one hand-off of more regions, without endpoints), what was sent once may
arrive at any time and any number of times, also at a successor, or when its hand-off has been forgotten: one tombstone
is kept, so an offer may be taken for a new one when all is over. Each reachable state is checked, and from each the end
must be reachable without a further fault. Time stands still: timers are events that may come at any moment.

There are many worlds, and few states of one process: each of these is kept once, and so is what follows from each event
in it. A world is a tuple of small numbers then.
"""

from __future__ import annotations

import copy
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator
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
MOST_STATES = 1_000_000
"""A larger world is not explored to its end: what is nearest to the beginning comes first."""

Told = tuple[str, str]
"""By hand-off: how its end was told to the engine, "" if it was not yet."""
NOBODY_TOLD = ("", "")


class Outcome(NamedTuple):
    """What a step of a process has brought about. Sets are masks of what `Explorer.numbered` has numbered."""

    after: Process
    frames: int
    ops: int
    closed: int  # of the two hand-offs
    events: tuple[object, ...]


class Process:
    """One state of an endpoint: equal ones are the same object, and a step from it is taken once."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.steps: dict[Hashable, Outcome] = {}
        sinks, sources = endpoint._sinks.items(), endpoint._sources.items()
        self.live_sinks, self.live_sources = endpoint.live_sinks, endpoint.live_sources
        # of each side: the living, what ended, and what frames alone have created
        assert len(endpoint.sessions()) <= 2 + 2 * 2 * CONFIG.max_tombstones
        timed = [(True, key, state) for key, state in sinks if sink.sink_timer(state) is not None]
        timed += [(False, key, state) for key, state in sources if source.source_timer(state) is not None]
        self.resends = [(is_sink, key) for is_sink, key, state in timed if resends(state)]
        alive = sink.Preparing | sink.Offered | sink.Receiving | source.SourceAlive
        self.deadlines = [(is_sink, key) for is_sink, key, state in timed if isinstance(state, alive)]


def resends(state: object) -> bool:
    """Whether a timer of that state may be one that says something again."""
    if isinstance(state, sink.Receiving):
        return bool(state.nacks)
    if isinstance(state, source.Sending):
        return any(type(one).__name__ == "Announced" for one in state.regions.open)
    return hasattr(state, "resend_at_s")


class World(NamedTuple):
    """Everything. `None`: the process is dead. Frames and tags are never withdrawn, operations are those open. Sets are
    masks: of what is numbered, or of the two hand-offs."""

    decode: Process | None
    prefill: Process | None
    to_decode: int = 0
    to_prefill: int = 0
    decode_ops: int = 0
    prefill_ops: int = 0
    bytes_sent: int = 0
    slots: int = 0  # who has one
    opened: int = 0
    offered: int = 0  # to the prefill engine
    shipped: tuple[int, int] = (0, 0)  # commands that it has given for a hand-off
    sink_told: Told = NOBODY_TOLD
    source_told: Told = NOBODY_TOLD
    proven: bool = True  # everybody knows who is dead
    faults_left: int = 0


def forked(endpoint: Endpoint) -> Endpoint:
    """One that goes on by itself. States of sessions are values; only the tables around them are copied."""
    fork = copy.copy(endpoint)
    fork._members = dict(endpoint._members)
    fork._tickets = copy.copy(endpoint._tickets)
    fork._tickets._issued, fork._tickets._used = dict(endpoint._tickets._issued), dict(endpoint._tickets._used)
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


def members_of(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def put(told: Told, number: int, name: str) -> Told:
    return (name, told[1]) if number == 0 else (told[0], name)


class Explorer:
    """Worlds are numbered as they are found. `edges` holds pairs of numbers: what follows without a further fault."""

    def __init__(self, lane: str, faults: int, case: str, most_states: int = MOST_STATES) -> None:
        self.lane, self.case, self.most_states = lane, case, most_states
        self.keys = (FIRST, SECONDS[case])
        self.numbers: dict[object, int] = {}  # of frames and operations
        self.numbered: list[object] = []
        self.processes: dict[Hashable, Process] = {}
        self.worlds: dict[World, int] = {}
        self.befores, self.afters = array("I"), array("I")
        self.ends: list[int] = []
        self.outcomes: set[tuple[str, ...]] = set()
        self.transitions = self.explored = 0
        self.landings = 0  # which operations are
        self.ops_of = [0, 0]  # and whose
        decode, prefill = (Endpoint(stamp, CONFIG, LAYOUT, ("zmq", "local")) for stamp in (DECODE, PREFILL))
        for endpoint in (decode, prefill):
            endpoint.on_membership(view(DECODE, PREFILL), NOW_S)
        self.first = self.opens(World(self.process(decode), self.process(prefill), faults_left=faults), 0)

    def run(self) -> None:
        frontier, worlds = deque([self.first]), self.worlds
        worlds[self.first] = 0
        while frontier and len(worlds) < self.most_states:
            world = frontier.popleft()
            self.check(world)
            if self.is_end(world):
                self.ends.append(self.explored)
                self.outcomes.add(tuple(sorted(name for name in world.sink_told + world.source_told if name)))
            for fault, steps in ((False, self.ordinary(world)), (True, self.faults(world))):
                for after in steps:
                    self.transitions += 1
                    number = worlds.get(after)
                    if number is None:
                        number = worlds[after] = len(worlds)
                        frontier.append(after)
                    if not fault and number != self.explored:
                        self.befores.append(self.explored)
                        self.afters.append(number)
            self.explored += 1

    def number(self, thing: object) -> int:
        found = self.numbers.get(thing)
        if found is None:
            found = self.numbers[thing] = len(self.numbered)
            self.numbered.append(thing)
            if not isinstance(thing, Frame | int):
                self.ops_of[self.keys.index(thing.key)] |= 1 << found
                self.landings |= isinstance(thing, LandRegion) << found
        return found

    def process(self, endpoint: Endpoint) -> Process:
        name = _identity(endpoint)
        found = self.processes.get(name)
        if found is None:
            found = self.processes[name] = Process(endpoint)
        return found

    # ---------------------------------------------------------------------------------------- what may happen

    def ordinary(self, world: World) -> Iterator[World]:
        failed = world.sink_told[0] == "SinkFailed"
        if world.decode is not None and not world.opened & 2 and (self.case == "requests" or failed):
            yield self.opens(world, 1)
        for number in members_of(world.to_decode) if world.decode is not None else ():
            yield self.at_decode(world, number, lambda one, number=number: one.on_frame(self.numbered[number], NOW_S))
        for number in members_of(world.to_prefill) if world.prefill is not None else ():
            yield self.at_prefill(world, number, lambda one, number=number: one.on_frame(self.numbered[number], NOW_S))
        for number in members_of(world.decode_ops):
            yield from self.decode_answers(world, number)
        for number in members_of(world.prefill_ops):
            yield self.prefill_answers(world, number)
        yield from self.timers(world, resend=True)
        yield from self.prefill_engine(world)
        if not world.proven:
            yield self.told_of_death(world)

    def opens(self, world: World, which: int) -> World:
        key = self.keys[which]
        tokens = np.arange(2, dtype=np.int32)
        pages = {Component.FULL: np.array(PAGES[key], dtype=np.int32)}
        command = OpenSink(key, WorkerId("p"), RequestId("r"), tokens, 0, pages, True, SamplingParams(), 9.0)
        world = world._replace(opened=world.opened | 1 << which)
        return self.at_decode(world, ("open", which), lambda one: one.command(command, NOW_S))

    def prefill_engine(self, world: World) -> Iterator[World]:
        for which, key in enumerate(self.keys) if world.prefill is not None else ():
            done = world.shipped[which]
            if world.offered >> which & 1 and not world.source_told[which] and done < 2:
                pages = np.array(PAGES[key], dtype=np.int32)
                command = ShipRegion(key, 0, 2, pages) if done == 0 else FinishSource(key, RESULT)
                shipped = (done + 1, world.shipped[1]) if which == 0 else (world.shipped[0], done + 1)
                name = "ship", which, done
                yield self.at_prefill(
                    world._replace(shipped=shipped), name, lambda one, command=command: one.command(command, NOW_S)
                )

    def data(self, event: object) -> Callable[[Endpoint], list[EndpointEffect]]:
        return lambda one: one.on_data(event, NOW_S)

    def decode_answers(self, world: World, number: int) -> Iterator[World]:
        op = self.numbered[number]
        which = self.keys.index(op.key)
        rest = world.decode_ops & ~(1 << number)
        match op:
            case PrepareSink(key=key):
                if self.lane in PULL_LANES or world.slots.bit_count() < SLOTS:
                    event = SinkPrepared(key, self.lane, 1, (1,))
                    after = world._replace(decode_ops=rest, slots=world.slots | 1 << which)
                    yield self.at_decode(after, ("prepared", which), self.data(event))
            case LandRegion(key=key, tag=tag, chunk=chunk):
                if self.lane in PULL_LANES or world.bytes_sent >> self.number(tag) & 1:
                    after = world._replace(decode_ops=rest)
                    yield self.at_decode(after, ("landed", which, chunk.seq), self.data(Landed(key, chunk.seq, 8, 0.0)))
            case FenceSink(key=key):  # whatever is open of it ends with the fence
                after = world._replace(decode_ops=rest & ~self.ops_of[which], slots=world.slots & ~(1 << which))
                yield self.at_decode(after, ("fenced", which), self.data(SinkFenced(key)))

    def prefill_answers(self, world: World, number: int) -> World:
        op = self.numbered[number]
        which = self.keys.index(op.key)
        rest = world.prefill_ops & ~(1 << number)
        match op:
            case SendRegion(key=key, seq=seq, tag=tag):
                after = world._replace(prefill_ops=rest, bytes_sent=world.bytes_sent | 1 << self.number(tag))
                return self.at_prefill(after, ("ready", which, seq, tag), self.data(RegionReady(key, seq, tag, 8, 0)))
            case FenceSource(key=key):
                after = world._replace(prefill_ops=rest & ~self.ops_of[which])
                return self.at_prefill(after, ("fenced", which), self.data(SourceFenced(key)))
        raise AssertionError(op)

    def timers(self, world: World, *, resend: bool) -> Iterator[World]:
        event = ResendDue() if resend else DeadlinePassed()
        for is_sink, process, at in ((True, world.decode, self.at_decode), (False, world.prefill, self.at_prefill)):
            for of_sink, key in () if process is None else process.resends if resend else process.deadlines:
                if of_sink == is_sink:

                    def act(one: Endpoint, key: HandoffKey = key, is_sink: bool = is_sink) -> list[EndpointEffect]:
                        return one._out((one._sinks if is_sink else one._sources).apply(key, event, NOW_S))

                    yield at(world, (type(event), key), act)

    def faults(self, world: World) -> Iterator[World]:
        if not world.faults_left:
            return
        world = world._replace(faults_left=world.faults_left - 1)
        for number in members_of(world.to_decode):  # all copies of it are lost: only sending it again helps
            yield world._replace(to_decode=world.to_decode & ~(1 << number))
        for number in members_of(world.to_prefill):
            yield world._replace(to_prefill=world.to_prefill & ~(1 << number))
        yield from self.timers(world, resend=False)
        if world.decode is not None:
            yield from self.faults_of_decode(world)
        if world.prefill is not None:
            for which, key in enumerate(self.keys):
                if world.offered >> which & 1 and not world.source_told[which]:
                    command = AbortSource(key, FAILURE)
                    yield self.at_prefill(
                        world, ("abort", which), lambda one, command=command: one.command(command, NOW_S)
                    )
            yield self.at_prefill(world, "silent", lambda one: one.on_peer_silent(WorkerId("d"), NOW_S))
        if world.decode is not None and world.prefill is not None:
            yield world._replace(prefill=None, prefill_ops=0, proven=False)
            yield world._replace(decode=None, decode_ops=0, slots=0, proven=False)

    def faults_of_decode(self, world: World) -> Iterator[World]:
        for which, key in enumerate(self.keys):
            if world.opened >> which & 1 and not world.sink_told[which]:
                command = AbortSink(key, FAILURE)
                yield self.at_decode(world, ("abort", which), lambda one, command=command: one.command(command, NOW_S))
        yield self.at_decode(world, "silent", lambda one: one.on_peer_silent(WorkerId("p"), NOW_S))
        for number in members_of(world.decode_ops & self.landings):
            op = self.numbered[number]
            if self.lane in PULL_LANES or world.bytes_sent >> self.number(op.tag) & 1:
                after = world._replace(decode_ops=world.decode_ops & ~(1 << number))
                name = "damaged", op.key, op.chunk.seq
                yield self.at_decode(after, name, self.data(RegionDamaged(op.key, op.chunk.seq)))

    def told_of_death(self, world: World) -> World:
        """A dead prefill worker has a successor by then; a decode worker that is gone stays gone."""
        world = world._replace(proven=True)
        if world.decode is None:
            return self.at_prefill(world, "told", lambda one: one.on_membership(view(PREFILL), NOW_S))
        successor = Endpoint(SUCCESSOR, CONFIG, LAYOUT, ("zmq", "local"))
        successor.on_membership(view(DECODE, SUCCESSOR), NOW_S)
        world = world._replace(prefill=self.process(successor), offered=0, shipped=(0, 0), source_told=NOBODY_TOLD)
        return self.at_decode(world, "told", lambda one: one.on_membership(view(DECODE, SUCCESSOR), NOW_S))

    # ------------------------------------------------------------------------------------------- transitions

    def step(self, process: Process, name: Hashable, act: Callable[[Endpoint], list[EndpointEffect]]) -> Outcome:
        """`name` stands for what `act` does."""
        found = process.steps.get(name)
        if found is None:
            endpoint = forked(process.endpoint)
            frames = ops = closed = 0
            events: list[object] = []
            for effect in act(endpoint):
                match effect:
                    case SendFrame(dst_epoch=epoch, body=body):
                        frames |= 1 << self.number(Frame(endpoint._stamp, Epoch(epoch), body))
                    case EngineEvent(event=event):
                        events.append(event)
                    case CloseSink(key=key):
                        closed |= 1 << self.keys.index(key)
                    case _:
                        ops |= 1 << self.number(effect)
            found = process.steps[name] = Outcome(self.process(endpoint), frames, ops, closed, tuple(events))
        return found

    def at_decode(self, world: World, name: Hashable, act: Callable[[Endpoint], list[EndpointEffect]]) -> World:
        after, frames, ops, closed, events = self.step(world.decode, name, act)
        assert not ops & world.decode_ops, "the same operation twice"
        ops |= world.decode_ops
        world = world._replace(decode=after, to_prefill=world.to_prefill | frames, decode_ops=ops)
        for which in members_of(closed):
            assert not ops & self.ops_of[which], "closed with operations open"
            world = world._replace(slots=world.slots & ~(1 << which))
        for event in events:
            if isinstance(event, SinkCommitted | SinkFailed):
                which, name = self.keys.index(event.key), type(event).__name__
                assert not world.sink_told[which], f"{name} after an end"
                assert not ops & self.ops_of[which], "the engine has pages that are written"
                world = world._replace(sink_told=put(world.sink_told, which, name))
        return world

    def at_prefill(self, world: World, name: Hashable, act: Callable[[Endpoint], list[EndpointEffect]]) -> World:
        after, frames, ops, _, events = self.step(world.prefill, name, act)
        assert not ops & world.prefill_ops, "the same operation twice"
        ops |= world.prefill_ops
        world = world._replace(prefill=after, to_decode=world.to_decode | frames, prefill_ops=ops)
        for event in events:
            which, name = self.keys.index(event.key), type(event).__name__
            told, known = world.source_told[which], world.offered >> which & 1
            match event:
                case OfferReceived():
                    assert told or not known, "the engine was offered it twice"
                    shipped = (0, world.shipped[1]) if which == 0 else (world.shipped[0], 0)
                    offered = world.offered | 1 << which
                    again = put(world.source_told, which, "")
                    world = world._replace(offered=offered, shipped=shipped, source_told=again)
                case SourceReleased() | SourceAborted():
                    assert not told, f"{name} after an end"
                    assert not ops & self.ops_of[which], "a gather is still open"
                    if isinstance(event, SourceReleased) and world.decode is not None:
                        assert world.sink_told[which] == "SinkCommitted", "released what was not committed"
                    world = world._replace(source_told=put(world.source_told, which, name))
        return world

    # --------------------------------------------------------------------------------------------- invariants

    def check(self, world: World) -> None:
        landing = [self.numbered[number] for number in members_of(world.decode_ops & self.landings)]
        writers = [page for one in landing for page in PAGES[one.key]]
        assert len(writers) == len(set(writers)), "two hand-offs write one page"
        for one in landing:
            which = self.keys.index(one.key)
            assert not world.sink_told[which], "the engine has its pages, and they are still written"
            if self.lane in PULL_LANES and one.peer == PREFILL and world.prefill is not None:
                assert not world.source_told[which], "the engine has its pages, and they are still read"
        if world.decode is not None:
            assert world.decode.live_sinks == world.opened.bit_count() - sum(map(bool, world.sink_told))
        if world.prefill is not None:
            assert world.prefill.live_sources == world.offered.bit_count() - sum(map(bool, world.source_told))

    def is_end(self, world: World) -> bool:
        if not world.proven:
            return False
        sinks = world.decode is None or world.decode.live_sinks == 0
        sources = world.prefill is None or world.prefill.live_sources == 0
        return sinks and sources and (self.case == "retry" or world.opened & 2 > 0 or world.decode is None)

    def stuck(self) -> int:
        """Worlds from which no end can be reached without a further fault, nor one that was not explored."""
        afters = np.frombuffer(self.afters, dtype=np.uint32)
        order = np.argsort(afters, kind="stable")
        befores, places = np.frombuffer(self.befores, dtype=np.uint32)[order], np.arange(len(self.worlds) + 1)
        first = np.searchsorted(afters[order], places)
        good = places[:-1] >= self.explored
        good[self.ends] = True
        frontier = np.flatnonzero(good)
        while len(frontier):
            counts = first[frontier + 1] - first[frontier]
            begins = np.repeat(first[frontier] - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
            found = np.unique(befores[begins + np.arange(counts.sum())])
            frontier = found[~good[found]]
            good[frontier] = True
        return int((~good).sum())


def _identity(endpoint: Endpoint | None) -> Hashable:
    if endpoint is None:
        return None
    books = (
        (frozenset(book._states.items()), tuple(book._ended), tuple(book._unasked), book._forgotten)
        for book in (endpoint._sinks, endpoint._sources)
    )
    tickets = (frozenset(table.items()) for table in (endpoint._tickets._issued, endpoint._tickets._used))
    return (endpoint._stamp, endpoint._tags_used, frozenset(endpoint._members.values()), *tickets, *books)


SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("case", "lane", "faults"),
    [
        ("requests", "zmq", 0),
        ("requests", "local", 0),
        ("retry", "local", 1),
        pytest.param("requests", "zmq", 1, marks=SLOW),
        pytest.param("requests", "local", 1, marks=SLOW),
        pytest.param("retry", "zmq", 2, marks=SLOW),
        pytest.param("retry", "local", 2, marks=SLOW),
    ],
)
def test_no_interleaving_of_two_breaks_ownership_or_gets_stuck(case: str, lane: str, faults: int) -> None:
    explorer = Explorer(lane, faults, case)
    explorer.run()
    visited = f"{explorer.explored} of {len(explorer.worlds)} states, {explorer.transitions} transitions"
    print(f"{case}, lane {lane}, {faults} faults: {visited}, {len(explorer.processes)} states of a process")
    assert explorer.stuck() == 0
    if explorer.explored < len(explorer.worlds):
        return  # some ends are farther away
    both = ("SinkCommitted", "SinkCommitted", "SourceReleased", "SourceReleased")
    if case == "requests":
        assert both in explorer.outcomes
        assert faults or {told[:2] for told in explorer.outcomes} == {both[:2]}
    else:
        assert ("SinkCommitted", "SinkFailed", "SourceAborted", "SourceReleased") in explorer.outcomes
