"""Every interleaving of one hand-off of three regions: two machines, a network and a data plane that do their worst.
The regions are of one component, or of three: full attention, a window and a state; or the layers of a page, in parts.

What was sent once may arrive at any time, and any number of times. On top of that come a bounded number of faults per
run (all copies of a frame lost, damage, abort, deadline, broken lane, silence, death). Each reachable state is checked,
and from each of them the end must be reachable without a further fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from baton.common.errors import ErrorCode
from baton.common.ids import Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import Cancel, Cancelled, Failure, Offer, SamplingParams, pack_tokens, unpack_tokens
from baton.transfer.api import (
    AbortSink,
    AbortSource,
    FinishSource,
    FirstTokenReady,
    OfferReceived,
    PrefillResult,
    ShipRegion,
    SinkCommitted,
    SinkFailed,
    SourceAborted,
    SourceReleased,
    SourceStopping,
)
from baton.transfer.plan import NO_LAYERS, Span, segments_of
from baton.transfer.session import sink, source, table
from baton.transfer.session.effects import (
    PULL_LANES,
    CloseSink,
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
    SinkLaneFailed,
    SinkNotPrepared,
    SinkPrepared,
    SourceFenced,
    SourceLaneFailed,
)
from baton.transfer.session.step import DeadlinePassed, PeerDead, PeerSilent, ResendDue, SessionRules, Step

KEY = HandoffKey(HandoffId(7), 1)
DECODE, PREFILL = Stamp(WorkerId("d"), 1, Epoch(1)), Stamp(WorkerId("p"), 1, Epoch(2))
RULES = SessionRules(page_size=2, resend_after_s=1.0)
FAILURE = Failure(code=ErrorCode.CANCELLED)
RESULT = PrefillResult(5, None, 0.0, 0)


class Case(NamedTuple):
    """What is handed over, and how the prefill engine ships it. A region has at most one unit."""

    layout: KvLayout
    tokens: bytes
    spans: tuple[Span, ...]
    shipments: tuple[ShipRegion, ...]
    layers: Mapping[Component, int] = NO_LAYERS

    @property
    def order(self) -> sink.SinkOrder:
        return sink.SinkOrder(
            key=KEY,
            peer=PREFILL,
            request_id=RequestId("r"),
            tokens=self.tokens,
            start=0,
            segments=segments_of(self.layout, 0, len(self.tokens) // 4, layers=self.layers),
            spans=self.spans,
            sample=True,
            sampling=SamplingParams(),
            deadline_s=9.0,
            tag_base=100,
        )


def span(component: Component, pages: list[int]) -> Span:
    return Span(component, 0, pack_tokens(pages))


def shipment(first_token: int, tokens: int, pages: list[int], component: Component = Component.FULL) -> ShipRegion:
    return ShipRegion(KEY, first_token, tokens, np.array(pages, dtype=np.int32), component)


CASES = {
    "full": Case(
        KvLayout(RULES.page_size),
        pack_tokens([1, 2, 3, 4, 5]),  # three pages, the last one half full
        (span(Component.FULL, [1, 2, 3]),),
        (shipment(0, 4, [1, 2]), shipment(4, 1, [3])),
    ),
    "hybrid": Case(
        KvLayout(RULES.page_size, window=1, state=True),
        pack_tokens([1]),
        tuple(span(component, [1]) for component in Component),
        tuple(shipment(0, 1, [1], component) for component in Component),
    ),
}
CASES["layers"] = Case(
    KvLayout(RULES.page_size),
    pack_tokens([1, 2, 3]),  # a page, and half of one that comes in two parts
    (span(Component.FULL, [1, 2]),),
    (
        shipment(0, 2, [1]),
        replace(shipment(2, 1, [2]), part=0, parts=2),
        replace(shipment(2, 1, [2]), part=1, parts=2),
    ),
    layers={Component.FULL: 2},
)
TIME_S = 0.0  # stands still: timers are events that may come at any moment


class Ref:
    """A value that compares by identity: equal ones are the same (`Explorer.ref`), so that worlds hash fast."""

    __slots__ = ("it",)

    def __init__(self, it: object) -> None:
        self.it = it


class World(NamedTuple):
    """Everything about one hand-off. States, operations and frames are kept as Refs."""

    sink: Ref | None  # None: the decode process is dead
    source: Ref | None  # None: prefill has heard of nothing
    sink_ops: frozenset[Ref] = frozenset()
    source_ops: frozenset[Ref] = frozenset()
    to_sink: frozenset[Ref] = frozenset()  # sent at least once; never withdrawn
    to_source: frozenset[Ref] = frozenset()
    bytes_sent: frozenset[int] = frozenset()  # tags
    shipped: int = 0  # commands that the prefill engine has given; the last one is FinishSource
    sink_told: str = ""
    source_told: str = ""
    source_dead: bool = False
    faults_left: int = 0


class Explorer:
    def __init__(self, lane: str, faults: int, credit: int, case: Case) -> None:
        self.lane, self.credit, self.case, self.order = lane, credit, case, case.order
        self.edges: dict[World, list[World]] = {}  # without a further fault
        self.observed: defaultdict[tuple[str, str, str], set[table.Outcome]] = defaultdict(set)
        self._refs: dict[object, Ref] = {}
        self._memo: dict[tuple[Ref, Ref], tuple[Ref, tuple[object, ...]]] = {}
        opened = sink.open_sink(self.order, RULES)
        self.first = self._sink_effects(World(self.ref(opened.state), None, faults_left=faults), opened.effects)

    @property
    def region_units(self) -> tuple[int, ...]:
        return (1,) * len(self.order.segments)

    def ref(self, value: object) -> Ref:
        known = self._refs.get(value)
        if known is None:
            known = self._refs[value] = Ref(value)
        return known

    def run(self) -> None:
        seen, frontier = {self.first}, [self.first]
        while frontier:
            world = frontier.pop()
            self.check(world)
            ordinary = list(dict.fromkeys(self.ordinary(world)))
            self.edges[world] = ordinary
            faulty = list(self.faults(world)) if world.faults_left else []
            for after in [*ordinary, *faulty]:
                if after not in seen:
                    seen.add(after)
                    frontier.append(after)

    # ---------------------------------------------------------------------------------------- what may happen

    def ordinary(self, world: World) -> Iterator[World]:
        for frame in world.to_sink:
            if world.sink is not None:
                yield self.sink_event(world, frame.it)
        for frame in world.to_source:
            if not world.source_dead:
                yield self.source_frame(world, frame.it)
        for op in world.sink_ops:
            yield from self.sink_answers(world._replace(sink_ops=world.sink_ops - {op}), op.it)
        for op in world.source_ops:
            yield self.source_answer(world._replace(source_ops=world.source_ops - {op}), op.it)
        if world.sink is not None and sink.sink_timer(world.sink.it) == RULES.resend_after_s:
            yield self.sink_event(world, ResendDue())
        if world.source is not None and not world.source_dead:
            if source.source_timer(world.source.it) == RULES.resend_after_s:
                yield self.source_event(world, ResendDue())
            yield from self.prefill_engine(world)
        # A death is found out sooner or later.
        if world.sink is None and world.source is not None and not world.source_dead:
            yield self.source_event(world, PeerDead())
        if world.source_dead and world.sink is not None:
            yield self.sink_event(world, PeerDead())

    def prefill_engine(self, world: World) -> Iterator[World]:
        """It ships and finishes at its own pace; after a bad end it may have one command on its way."""
        if isinstance(world.source.it, source.Closed) and world.shipped == 0:
            return  # as far as it knows there never was an offer
        if world.shipped < len(self.case.shipments):
            yield self.source_event(world._replace(shipped=world.shipped + 1), self.case.shipments[world.shipped])
        elif world.shipped == len(self.case.shipments):
            yield self.source_event(world._replace(shipped=world.shipped + 1), FinishSource(KEY, RESULT))

    def sink_answers(self, world: World, op: object) -> Iterator[World]:
        match op:
            case PrepareSink():
                yield self.sink_event(world, SinkPrepared(KEY, self.lane, self.credit, self.region_units))
            case LandRegion(tag=tag, chunk=chunk):
                if self.lane in PULL_LANES or tag in world.bytes_sent:
                    yield self.sink_event(world, Landed(KEY, chunk.seq, 8, 0.0))
                    if self.spare_slots(world) > 0:  # another hand-off waits for it
                        yield self.sink_event(world, Landed(KEY, chunk.seq, 8, 0.0, slots=0))
            case FenceSink():  # whatever is open ends with the fence
                yield self.sink_event(world._replace(sink_ops=frozenset()), SinkFenced(KEY))

    def spare_slots(self, world: World) -> int:
        """Slots that the hand-off could do without when a region lands."""
        match world.sink.it:
            case sink.Receiving() as receiving:
                return receiving.credit - receiving.arrivals.landed - 1
        return 0

    def source_answer(self, world: World, op: object) -> World:
        match op:
            case SendRegion(seq=seq, tag=tag):
                sent = world._replace(bytes_sent=world.bytes_sent | {tag})
                return self.source_event(sent, RegionReady(KEY, seq, tag, 8, 0))
            case FenceSource():
                return self.source_event(world._replace(source_ops=frozenset()), SourceFenced(KEY))
        raise AssertionError(op)

    def faults(self, world: World) -> Iterator[World]:
        world = world._replace(faults_left=world.faults_left - 1)
        for frame in world.to_sink:  # all copies of it are lost: only sending it again helps
            yield world._replace(to_sink=world.to_sink - {frame})
        for frame in world.to_source:
            yield world._replace(to_source=world.to_source - {frame})
        if world.sink is not None:
            yield self.sink_event(world, PeerSilent())
            yield world._replace(sink=None, sink_ops=frozenset())  # the decode process dies
            if not world.sink_told:
                yield self.sink_event(world, AbortSink(KEY, FAILURE))
            if isinstance(world.sink.it, sink.Preparing | sink.Offered | sink.Receiving):
                yield self.sink_event(world, DeadlinePassed())
            if isinstance(world.sink.it, sink.Offered | sink.Receiving):
                yield self.sink_event(world, SinkLaneFailed(KEY, FAILURE, peer_lost=False))
            for ref in world.sink_ops:
                op, rest = ref.it, world._replace(sink_ops=world.sink_ops - {ref})
                if isinstance(op, LandRegion) and (self.lane in PULL_LANES or op.tag in world.bytes_sent):
                    yield self.sink_event(rest, RegionDamaged(KEY, op.chunk.seq))
                if isinstance(op, PrepareSink):
                    yield self.sink_event(rest, SinkNotPrepared(KEY, FAILURE, peer_lost=False))
        if not world.source_dead:
            yield world._replace(source_dead=True, source_ops=frozenset())
            if world.source is not None and isinstance(world.source.it, source.SourceAlive):
                yield self.source_event(world, AbortSource(KEY, FAILURE))
                yield self.source_event(world, DeadlinePassed())
                yield self.source_event(world, SourceLaneFailed(KEY, FAILURE))
            if world.source is not None and not world.source_told:
                yield self.source_event(world, PeerSilent())

    # ------------------------------------------------------------------------------------------- transitions

    def sink_event(self, world: World, event: sink.SinkInput) -> World:
        assert world.sink is not None
        step = self._memo.get((world.sink, self.ref(event)))
        if step is None:
            result = sink.sink_step(world.sink.it, event, TIME_S, RULES)
            self.observe("sink", world.sink.it, event, result)
            step = self._memo[world.sink, self.ref(event)] = (self.ref(result.state), result.effects)
        return self._sink_effects(world._replace(sink=step[0]), step[1])

    def _sink_effects(self, world: World, effects: tuple[object, ...]) -> World:
        for effect in effects:
            match effect:
                case SendFrame(body=body):
                    assert not world.sink_ops or not isinstance(body, Cancel), "Cancel before the fence"
                    world = world._replace(to_source=world.to_source | {self.ref(body)})
                case EngineEvent(SinkCommitted() | SinkFailed() as event):
                    assert not world.sink_told, f"{type(event).__name__} after {world.sink_told}"
                    world = world._replace(sink_told=type(event).__name__)
                case EngineEvent(FirstTokenReady()):
                    assert not world.sink_told, "a first token after the end"
                case CloseSink():
                    assert not world.sink_ops, "closed with operations open"
                case _:
                    assert self.ref(effect) not in world.sink_ops, "the same operation twice"
                    world = world._replace(sink_ops=world.sink_ops | {self.ref(effect)})
        return world

    def source_frame(self, world: World, frame: object) -> World:
        if world.source is not None:
            return self.source_event(world, frame)
        match frame:  # as the endpoint does for an unknown key
            case Offer():
                tokens = unpack_tokens(frame.tokens)
                segments, units = self.order.segments, frame.region_units
                terms = source.SourceTerms(
                    KEY, DECODE, frame.lane, len(tokens), segments, True, units, frame.tag_base, 9.0
                )
                received = OfferReceived(KEY, DECODE, frame.request_id, tokens, 0, True, frame.sampling, 9.0)
                step = source.accept_offer(terms, frame.credit, received)
                return self._source_effects(world._replace(source=self.ref(step.state)), step.effects)
            case Cancel():
                after = world._replace(source=self.ref(source.Closed(KEY, DECODE)))
                return after._replace(to_sink=world.to_sink | {self.ref(Cancelled(key=KEY))})
        return world

    def source_event(self, world: World, event: source.SourceInput) -> World:
        assert world.source is not None
        # A shipment holds an array, which does not hash: its place stands for it.
        memo_key = (
            world.source,
            self.ref((event.component, event.first_token, event.part) if isinstance(event, ShipRegion) else event),
        )
        step = self._memo.get(memo_key)
        if step is None:
            result = source.source_step(world.source.it, event, TIME_S, RULES)
            self.observe("source", world.source.it, event, result)
            step = self._memo[memo_key] = (self.ref(result.state), result.effects)
        return self._source_effects(world._replace(source=step[0]), step[1])

    def _source_effects(self, world: World, effects: tuple[object, ...]) -> World:
        for effect in effects:
            match effect:
                case SendFrame(body=body):
                    world = world._replace(to_sink=world.to_sink | {self.ref(body)})
                case EngineEvent(SourceReleased() | SourceAborted() as event):
                    assert not world.source_told, f"{type(event).__name__} after {world.source_told}"
                    world = world._replace(source_told=type(event).__name__)
                    self.pages_come_back(world)
                case EngineEvent(SourceStopping()):
                    assert not world.source_told
                case EngineEvent(OfferReceived()):
                    pass
                case _:
                    assert self.ref(effect) not in world.source_ops, "the same operation twice"
                    world = world._replace(source_ops=world.source_ops | {self.ref(effect)})
        return world

    def observe(self, side: str, before: object, event: object, step: Step) -> None:
        effects = tuple(table.effect_name(effect) for effect in step.effects)
        outcome = table.Outcome(type(step.state).__name__, step.verdict, effects)
        self.observed[side, type(before).__name__, type(event).__name__].add(outcome)

    # --------------------------------------------------------------------------------------------- invariants

    def pages_come_back(self, world: World) -> None:
        """Nobody reads the source's pages at the moment when they go back to the prefill engine."""
        assert not world.source_ops, "a gather is still open"
        if self.lane in PULL_LANES:
            assert not landing(world), "the receiver is still pulling"
        if world.source_told == "SourceReleased":
            assert world.sink is None or world.sink_told == "SinkCommitted", "released what was not committed"

    def check(self, world: World) -> None:
        open_ops = landing(world)
        assert len(open_ops) <= self.credit, "more regions open than slots reserved"
        assert len({op.chunk.seq for op in open_ops}) == len(open_ops), "two operations for one region"
        if world.sink_told:
            assert not world.sink_ops, "the engine has its pages, and they are still written"
        if world.source_told and self.lane in PULL_LANES:
            assert not open_ops, "the engine has its pages, and they are still read"
        if world.sink is not None:
            assert bool(world.sink_told) == isinstance(world.sink.it, sink.SinkOver)
        if world.source is not None and not world.source_dead:
            over = isinstance(world.source.it, source.SourceOver)
            never_known = isinstance(world.source.it, source.Closed) and world.shipped == 0
            assert bool(world.source_told) == over or never_known

    def is_end(self, world: World) -> bool:
        sink_ended = world.sink is None or isinstance(world.sink.it, sink.SinkOver)
        source_ended = world.source_dead or world.source is None or isinstance(world.source.it, source.SourceOver)
        return sink_ended and source_ended

    def stuck(self) -> list[World]:
        """States from which no end can be reached without a further fault."""
        backwards: defaultdict[World, list[World]] = defaultdict(list)
        for world, followers in self.edges.items():
            for after in followers:
                backwards[after].append(world)
        good = {world for world in self.edges if self.is_end(world)}
        frontier = list(good)
        while frontier:
            for before in backwards[frontier.pop()]:
                if before not in good:
                    good.add(before)
                    frontier.append(before)
        return [world for world in self.edges if world not in good]


def landing(world: World) -> list[LandRegion]:
    return [ref.it for ref in world.sink_ops if isinstance(ref.it, LandRegion)]


def explore(lane: str, faults: int, credit: int, case: str = "full") -> Explorer:
    explorer = Explorer(lane, faults, credit, CASES[case])
    explorer.run()
    print(f"{case}, lane {lane}, {faults} faults, credit {credit}: {len(explorer.edges)} states")
    return explorer


SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("case", "lane", "faults", "credit"),
    [
        ("full", "zmq", 0, 2),
        ("full", "local", 0, 2),
        ("full", "zmq", 1, 2),
        ("full", "local", 2, 1),
        ("layers", "zmq", 0, 2),
        ("layers", "local", 1, 2),
        ("hybrid", "zmq", 0, 3),
        ("hybrid", "local", 1, 1),
        pytest.param("full", "zmq", 2, 1, marks=SLOW),
        pytest.param("full", "local", 2, 2, marks=SLOW),
        pytest.param("layers", "zmq", 1, 2, marks=SLOW),
        pytest.param("layers", "local", 2, 1, marks=SLOW),
        pytest.param("hybrid", "local", 2, 1, marks=SLOW),
        pytest.param("hybrid", "zmq", 1, 3, marks=SLOW),
    ],
)
def test_no_interleaving_breaks_ownership_or_gets_stuck(case: str, lane: str, faults: int, credit: int) -> None:
    explorer = explore(lane, faults, credit, case)
    assert explorer.stuck() == []
    ends = {(world.sink_told, world.source_told) for world in explorer.edges if explorer.is_end(world)}
    assert ("SinkCommitted", "SourceReleased") in ends
    if faults == 0:
        assert ends == {("SinkCommitted", "SourceReleased")}
    else:
        assert ("SinkFailed", "SourceAborted") in ends


def test_the_published_table_holds_everything_that_was_observed() -> None:
    published = {("sink", key): outcomes for key, outcomes in table.sink_cells().items()}
    published |= {("source", key): outcomes for key, outcomes in table.source_cells().items()}
    for lane in ("zmq", "local"):
        for (side, state, event), outcomes in explore(lane, 1, 1).observed.items():
            missing = {short(outcome) for outcome in outcomes} - {
                short(outcome) for outcome in published[side, (state, event)]
            }
            assert not missing, f"{side} {state} {event}: {missing}"


def short(outcome: table.Outcome) -> table.Outcome:
    """As printed: several effects of one sort are named once."""
    return table.Outcome(outcome.after, outcome.verdict, tuple(dict.fromkeys(outcome.effects)))
