"""What a source owes: an oracle beside each endpoint, told of everything that goes in and comes out.

Owns a short account of each source, as `watch_sinks` does of sinks. Asserts that the machine answers in the same step.

- O1  An engine hears of an offer once, however late it comes again, and of none that was cancelled before; each one of
      what goes on is answered.
- O2  Nothing waits that may go: what was shipped is sent as far as the most credit that was ever given.
- O3  What is gathered is announced at once, and the end when all is; what was damaged is sent again.
- O4  What ends a hand-off is followed by a fence at once, and the fence by the engine's end; but where a receiver
      pulls, and has been shown a region, only with its proof. Who asks for the end is told when it has come.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from baton.common.config import TransferConfig
from baton.common.ids import HandoffKey, Stamp, WorkerId
from baton.common.kv.layout import Component
from baton.common.messages import (
    Accept,
    Ack,
    Cancel,
    Cancelled,
    Chunk,
    Commit,
    Done,
    Failed,
    HandoffBody,
    Nack,
    Offer,
    Refuse,
)
from baton.deploy.sim.watch_sinks import MOST_OVER, Effects, has, sent
from baton.transfer.api import (
    AbortSource,
    FinishSource,
    OfferReceived,
    ShipRegion,
    SourceAborted,
    SourceCommand,
    SourceReleased,
)
from baton.transfer.session.effects import (
    PULL_LANES,
    DataEvent,
    EngineEvent,
    FenceSource,
    RegionReady,
    SendFrame,
    SendRegion,
    SourceFenced,
)


@dataclass(slots=True)
class _Source:
    peer: Stamp
    pulled: bool
    credit: int
    deadline_s: float
    sample: bool
    shipped: int = 0  # units, parts counted
    sent: int = 0  # of them
    first_tag: dict[int, int] = field(default_factory=dict)
    gathering: dict[int, int] = field(default_factory=dict)  # -> tag
    announced: dict[int, int] = field(default_factory=dict)  # -> tag; not acknowledged
    finished: bool = False
    all_announced: bool = False
    shown: bool = False  # the receiver knows of a region
    fencing: bool = False
    fenced: bool = False
    released: bool = False  # by a Commit
    proven: bool = False  # the receiver reads nothing any more
    cancelled: bool = False  # the receiver wants to hear the end


@dataclass(frozen=True, slots=True)
class _Unasked:
    """Cancelled before it was offered: remembered at least until then, and while not so many more are."""

    until_s: float
    number: int


class SourceWatch:
    """All sources of one process."""

    def __init__(self, name: str, state_pieces: int, config: TransferConfig) -> None:
        self._name = name
        self._state_pieces = state_pieces
        self._config = config
        self._live: dict[HandoffKey, _Source] = {}
        self._over: dict[HandoffKey, None] = {}  # the last ones
        self._begun_ever: set[HandoffKey] = set()  # for each there was one ticket, good once
        self._unasked: dict[HandoffKey, _Unasked] = {}
        self._unasked_ever = 0

    def command(self, command: SourceCommand, effects: Effects, now: float) -> None:
        key, source = command.key, self._live.get(command.key)
        if source is not None and not source.fencing:
            match command:
                case ShipRegion():
                    pieces = self._state_pieces if command.component is Component.STATE else 1
                    source.shipped += len(command.pages) * pieces
                case FinishSource():
                    source.finished = True
                    told = sent(effects, Done, key) is not None
                    assert told or not source.sample, f"{self._name} keeps the first token of {key} to itself"
                case AbortSource():
                    self._must_fail(key, effects, command)
        self._note(key, effects, now)

    def frame(self, body: HandoffBody, peer: Stamp, credit: int, effects: Effects, now: float) -> None:
        """`credit`: of an Offer or Ack."""
        key, source = body.key, self._live.get(body.key)
        if source is None:
            self._of_none(body, peer, effects, now)
        elif source.peer == peer:
            self._of_peer(source, body, credit, effects)
        self._note(key, effects, now)

    def _of_none(self, body: HandoffBody, peer: Stamp, effects: Effects, now: float) -> None:
        key = body.key
        if isinstance(body, Cancel):
            assert sent(effects, Cancelled, key), f"{self._name} does not answer {body}"
            self._remember(key)
            self._unasked_ever += 1
            if key not in self._begun_ever:
                until_s = now + self._config.tombstone_ttl_s
                self._unasked.setdefault(key, _Unasked(until_s, self._unasked_ever))
                if len(self._unasked) > MOST_OVER:
                    del self._unasked[next(iter(self._unasked))]
        elif isinstance(body, Offer):
            received = [one.event for one in effects if isinstance(one, EngineEvent)]
            if not received:
                answered = any(isinstance(one, SendFrame) for one in effects)
                assert answered or key in self._over, f"{self._name} has no answer to an offer of {key}"
                if sent(effects, Refuse, key):
                    self._remember(key)
                    self._unasked_ever += 1
                return
            self._begun(body, peer, effects, now)

    def _begun(self, offer: Offer, peer: Stamp, effects: Effects, now: float) -> None:
        key = offer.key
        assert key not in self._begun_ever, f"{self._name} begins {key} again, which is over"
        self._begun_ever.add(key)
        unasked = self._unasked.pop(key, None)
        if unasked is not None:
            since = self._unasked_ever - unasked.number
            forgotten = now >= unasked.until_s or since >= self._config.max_tombstones
            assert forgotten, f"{self._name} begins {key}, which was cancelled before it was offered"
        assert sent(effects, Accept, key), f"{self._name} does not accept {key}"
        [received] = [one.event for one in effects if isinstance(one, EngineEvent)]
        assert isinstance(received, OfferReceived), received
        most_s = now + min(offer.ttl_s, self._config.handoff_ttl_s)
        assert received.deadline_s <= most_s, f"{received} lasts longer than {most_s}"
        self._live[key] = _Source(peer, offer.lane in PULL_LANES, offer.credit, received.deadline_s, offer.sample)

    def _of_peer(self, source: _Source, body: HandoffBody, credit: int, effects: Effects) -> None:
        key = body.key
        match body:
            case Offer():
                if not source.fencing and not source.all_announced:
                    assert sent(effects, Accept, key), f"{self._name} does not answer an offer of {key} again"
            case Ack():
                source.announced.pop(body.seq, None)
                source.credit = max(source.credit, credit)
            case Nack():
                tag = source.announced.get(body.seq)
                if tag is not None and tag != body.tag and not source.fencing:
                    assert has(effects, SendRegion, key), f"{self._name} does not send {body} again"
            case Commit() | Cancel():
                self._must_end(key, effects, body)
                asks = isinstance(body, Cancel) and not source.released
                source.proven, source.cancelled = True, source.cancelled or asks
                if not source.fencing:
                    source.released = isinstance(body, Commit) and source.all_announced
                if source.fenced:
                    self._must_be_told(source, key, effects)
            case _:
                raise AssertionError(body)

    def data(self, event: DataEvent, effects: Effects, now: float) -> None:
        key, source = event.key, self._live.get(event.key)
        if source is not None:
            match event:
                case RegionReady() if not source.fencing:
                    chunk = sent(effects, Chunk, key)
                    right = isinstance(chunk, Chunk) and (chunk.seq, chunk.tag) == (event.seq, event.tag)
                    assert right, f"{self._name} does not announce {event}: {chunk}"
                case SourceFenced():
                    source.fenced = True
                    if source.proven or not (source.pulled and source.shown):
                        self._must_be_told(source, key, effects)
                case _:
                    pass
        self._note(key, effects, now)

    def _must_be_told(self, source: _Source, key: HandoffKey, effects: Effects) -> None:
        wanted = SourceReleased if source.released else SourceAborted
        told = any(isinstance(one, EngineEvent) and isinstance(one.event, wanted) for one in effects)
        assert told, f"{self._name} keeps the end of {key} to itself: {effects}"
        assert not source.cancelled or sent(effects, Cancelled, key), (
            f"{self._name} leaves a Cancel of {key} unanswered"
        )

    def peers(self, gone: Collection[Stamp], silent: WorkerId | None, effects: Effects, now: float) -> None:
        for key, source in list(self._live.items()):
            if source.peer in gone:
                source.proven, source.cancelled = True, False
                self._must_end(key, effects, "the death of its peer")
                told = any(isinstance(one, EngineEvent) and one.event.key == key for one in effects)
                assert told or not source.fenced, f"{self._name} waits for the word of a dead reader of {key}"
            elif source.peer.worker == silent:
                self._must_end(key, effects, "the silence of its peer")
            self._note(key, effects, now)

    def timer(self, effects: Effects, now: float) -> None:
        for key in {_key_of(effect) for effect in effects}:
            if key is not None:
                self._note(key, effects, now)

    def look(self, before_s: float) -> None:
        """What was due before is done by now."""
        for key, source in self._live.items():
            assert source.fencing or source.deadline_s >= before_s, f"{self._name} has forgotten the deadline of {key}"

    def _must_end(self, key: HandoffKey, effects: Effects, why: object) -> None:
        ends = self._live[key].fencing or has(effects, FenceSource, key)
        assert ends, f"{self._name} goes on with {key} after {why}"

    def _must_fail(self, key: HandoffKey, effects: Effects, why: object) -> None:
        self._must_end(key, effects, why)
        listed = sent(effects, Failed, key)
        assert listed, f"{self._name} does not tell anybody that {key} fails"

    def _note(self, key: HandoffKey, effects: Effects, now: float) -> None:
        """What has come out of this one."""
        source = self._live.get(key)
        if source is None:
            return
        for effect in effects:
            if _key_of(effect) == key:
                self._note_one(source, key, effect, now)
        if key in self._live and not source.fencing:
            waits = source.sent < source.shipped and len(source.first_tag) < source.credit
            assert not waits, f"{self._name}: {source.credit} regions may go of {key}, {len(source.first_tag)} have"
            idle = source.finished and source.sent == source.shipped and not source.gathering
            if idle and not source.all_announced:
                source.all_announced = True
                done = sent(effects, Done, key)
                right = isinstance(done, Done) and done.regions == len(source.first_tag)
                assert right, f"{self._name} does not say that all of {key} is on its way: {done}"

    def _note_one(self, source: _Source, key: HandoffKey, effect: object, now: float) -> None:
        match effect:
            case SendRegion(seq=seq, tag=tag, span=span):
                assert seq < source.credit, f"{self._name} sends region {seq} of {key} without credit"
                if seq not in source.first_tag:
                    source.first_tag[seq] = tag
                    source.sent += span.units
                source.announced.pop(seq, None)
                source.gathering[seq] = tag
            case SendFrame(body=Chunk(seq=seq, tag=tag)):
                source.shown = True
                if source.gathering.get(seq) == tag:
                    del source.gathering[seq]
                    source.announced[seq] = tag
            case FenceSource():
                assert not source.fencing, f"{self._name} fences {key} twice"
                source.fencing = True
            case EngineEvent(event=SourceReleased() | SourceAborted() as end):
                reads = source.pulled and source.shown and not source.proven
                proven = source.fenced and not reads
                assert proven, f"{self._name}: {end}, and nobody has proven it"
                del self._live[key]
                self._remember(key)
            case _:
                pass

    def _remember(self, key: HandoffKey) -> None:
        self._over[key] = None
        if len(self._over) > MOST_OVER:
            del self._over[next(iter(self._over))]


def _key_of(effect: object) -> HandoffKey | None:
    match effect:
        case SendFrame(body=body):
            return body.key if isinstance(body, HandoffBody) else None
        case EngineEvent(event=event):
            return event.key
        case SendRegion(key=key) | FenceSource(key=key):
            return key
        case _:
            return None
