"""What a sink owes: an oracle beside each endpoint, told of everything that goes in and comes out.

Owns a short account of each sink, made of what others did to it: what was promised, what the data plane has said, who
has ended it. Asserts that the machine answers in the same step, and says what is so. Never: looks into the machine.

- K1  What ends a hand-off is followed by a fence at once, and a fence by the engine's one end, with exactly what has
      landed; who was made an offer is sent Cancel with it, unless it is proven dead.
- K2  What has landed is acknowledged at once, with all the credit there is; or it was the last, and all is committed.
- K3  A region with credit is taken in when it is announced; a damaged one is asked for again, once.
- K4  Who speaks of what is over here is told how it ended.
- K5  Nobody is suspected of breaking the rules: all peers here are honest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

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
from baton.transfer.api import AbortSink, FirstTokenReady, OpenSink, SinkCommitted, SinkFailed
from baton.transfer.session.effects import (
    DataEvent,
    EndpointEffect,
    EngineEvent,
    FenceSink,
    FenceSource,
    Landed,
    LandRegion,
    PrepareSink,
    RegionDamaged,
    SendFrame,
    SendRegion,
    SinkFenced,
    SinkLaneFailed,
    SinkNotPrepared,
    SinkPrepared,
)

Effects = Sequence[EndpointEffect]
MOST_OVER = 4096
"""Ends that are remembered: many more than have frames under way."""


@dataclass(slots=True)
class _Sink:
    command: OpenSink
    peer: Stamp
    deadline_s: float
    units: int  # that were asked for
    full_only: bool  # what has landed of it can be used alone
    credit: int = 0
    offered: bool = False
    peer_dead: bool = False
    fencing: bool = False
    done: Done | None = None
    token_told: bool = False
    landing: dict[int, Chunk] = field(default_factory=dict)
    damaged: dict[int, int] = field(default_factory=dict)  # -> the tag of the second try
    landed: dict[int, Chunk] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def landed_units(self) -> int:
        """Whole ones, from the first on."""
        units = seq = 0
        while (chunk := self.landed.get(seq)) is not None:
            units += chunk.units if chunk.part == chunk.parts - 1 else 0
            seq += 1
        return units


def sent(effects: Effects, kind: type[HandoffBody], key: HandoffKey) -> HandoffBody | None:
    """The frame of that kind among what goes out."""
    for effect in effects:
        if isinstance(effect, SendFrame) and type(effect.body) is kind and effect.body.key == key:
            return effect.body
    return None


def has(effects: Effects, kind: type[LandRegion | FenceSink | FenceSource | SendRegion], key: HandoffKey) -> bool:
    """Whether the data plane is to do such a thing."""
    return any(isinstance(effect, kind) and effect.key == key for effect in effects)


class SinkWatch:
    """All sinks of one process. `name` is for the reader of a failure."""

    def __init__(self, name: str, page_size: int, handoff_ttl_s: float) -> None:
        self._name = name
        self._page_size = page_size
        self._handoff_ttl_s = handoff_ttl_s
        self._live: dict[HandoffKey, _Sink] = {}
        self._over: dict[HandoffKey, bool] = {}  # -> whether it was committed

    def command(self, command: OpenSink | AbortSink, effects: Effects, now: float) -> None:
        key = command.key
        if isinstance(command, OpenSink):
            prepare = next((one for one in effects if isinstance(one, PrepareSink)), None)
            if prepare is not None:
                deadline_s = min(command.deadline_s, now + self._handoff_ttl_s)
                units = sum(span.units for span in prepare.spans)
                full_only = all(span.component is Component.FULL for span in prepare.spans)
                self._live[key] = _Sink(command, prepare.peer, deadline_s, units, full_only)
            else:
                assert self._end_of(effects, key) is not None, f"{self._name}: {key} has neither begun nor ended"
        elif key in self._live:
            self._must_end(key, effects, command)
        self._note(effects)

    def frame(self, body: HandoffBody, peer: Stamp, effects: Effects) -> None:
        key, sink = body.key, self._live.get(body.key)
        if sink is None:
            self._after_the_end(body, effects)
        elif sink.peer == peer and sink.offered and not sink.fencing:
            match body:
                case Refuse() | Failed():
                    self._must_end(key, effects, body)
                case Chunk():
                    self._announced(sink, body, effects)
                case Done():
                    self._done(sink, body, effects)
                case _:
                    assert isinstance(body, Accept | Cancelled), body
        self._note(effects)

    def _after_the_end(self, body: HandoffBody, effects: Effects) -> None:
        if isinstance(body, Accept | Chunk | Done | Failed):  # K4
            committed = self._over.get(body.key, False)
            answered = sent(effects, Cancel, body.key) or (committed and sent(effects, Commit, body.key))
            assert answered or (committed and isinstance(body, Accept)), f"{self._name} has no answer to {body}"

    def _announced(self, sink: _Sink, chunk: Chunk, effects: Effects) -> None:
        key, seq = chunk.key, chunk.seq
        assert not has(effects, FenceSink, key), f"{self._name} distrusts {chunk}"  # K5
        if seq in sink.landed:
            self._acknowledged(sink, key, seq, effects)
        elif seq not in sink.landing and sink.damaged.get(seq, chunk.tag) == chunk.tag:
            assert has(effects, LandRegion, key), f"{self._name} takes no notice of {chunk}"

    def _acknowledged(self, sink: _Sink, key: HandoffKey, seq: int, effects: Effects) -> None:
        ack = sent(effects, Ack, key)
        right = isinstance(ack, Ack) and ack.seq == seq and ack.credit == sink.credit
        assert right, f"{self._name}: region {seq} of {key} is in place, with credit {sink.credit}: {ack}"

    def _done(self, sink: _Sink, done: Done, effects: Effects) -> None:
        assert not has(effects, FenceSink, done.key), f"{self._name} distrusts {done}"
        if sink.done is None:
            sink.done = done
            if sink.command.sample:
                told = any(isinstance(one, EngineEvent) for one in effects)
                assert told, f"{self._name} keeps the first token of {done.key} to itself"
        self._committed_if_complete(sink, done.key, effects)

    def _committed_if_complete(self, sink: _Sink, key: HandoffKey, effects: Effects) -> bool:
        complete = sink.done is not None and len(sink.landed) == sink.done.regions
        end = self._end_of(effects, key)
        assert complete == isinstance(end, SinkCommitted), (
            f"{self._name}: {len(sink.landed)} regions, {sink.done}: {end}"
        )
        return complete

    def data(self, event: DataEvent, effects: Effects) -> None:
        key, sink = event.key, self._live.get(event.key)
        if sink is not None:
            match event:
                case SinkPrepared() if not sink.fencing:
                    offer = sent(effects, Offer, key)
                    assert isinstance(offer, Offer), f"{self._name} makes no offer for {key}"
                    assert offer.credit == event.credit, f"{offer} has not the credit of {event}"
                    sink.credit = event.credit
                case Landed():
                    self._landed(sink, event, effects)
                case RegionDamaged() if not sink.fencing:
                    self._damaged(sink, event, effects)
                case SinkLaneFailed() if not sink.fencing:
                    self._must_end(key, effects, event)
                case SinkFenced() | SinkNotPrepared():
                    self._fenced(sink, key, effects)
                case _:
                    pass
        self._note(effects)

    def _landed(self, sink: _Sink, event: Landed, effects: Effects) -> None:
        sink.landed[event.seq] = sink.landing.pop(event.seq)
        sink.nbytes += event.nbytes
        sink.credit += event.slots
        if not sink.fencing and not self._committed_if_complete(sink, event.key, effects):
            self._acknowledged(sink, event.key, event.seq, effects)

    def _damaged(self, sink: _Sink, event: RegionDamaged, effects: Effects) -> None:
        chunk = sink.landing.pop(event.seq)
        nack = sent(effects, Nack, event.key)
        if event.seq in sink.damaged:
            self._must_end(event.key, effects, event)
        else:
            fresh = isinstance(nack, Nack) and nack.seq == event.seq and nack.tag != chunk.tag
            assert fresh, f"{self._name} does not ask for {event} again: {nack}"
            assert isinstance(nack, Nack)
            sink.damaged[event.seq] = nack.tag

    def _fenced(self, sink: _Sink, key: HandoffKey, effects: Effects) -> None:
        end = self._end_of(effects, key)
        assert isinstance(end, SinkFailed), f"{self._name} says nothing of the end of {key}"
        most = sink.landed_units if sink.full_only else 0
        until = min(len(sink.command.tokens), sink.command.start + most * self._page_size)
        assert (end.landed_until, end.nbytes) == (until, sink.nbytes), f"{end}: it is {until}, of {sink.nbytes} bytes"
        owes = sink.offered and not sink.peer_dead
        assert not owes or sent(effects, Cancel, key), f"{self._name} does not tell {sink.peer} that {key} is over"

    def peers(self, gone: Collection[Stamp], silent: WorkerId | None, effects: Effects) -> None:
        """Some are proven dead, or one says nothing."""
        for key, sink in self._live.items():
            dead = sink.peer in gone
            if (dead or sink.peer.worker == silent) and not sink.fencing:
                self._must_end(key, effects, "the loss of its peer")
            sink.peer_dead = sink.peer_dead or dead
        self._note(effects)

    def timer(self, effects: Effects) -> None:
        self._note(effects)

    def look(self, before_s: float) -> None:
        """What was due before is done by now."""
        for key, sink in self._live.items():
            assert sink.fencing or sink.deadline_s >= before_s, f"{self._name} has forgotten the deadline of {key}"

    def _must_end(self, key: HandoffKey, effects: Effects, why: object) -> None:
        if not self._live[key].fencing:
            assert has(effects, FenceSink, key), f"{self._name} goes on with {key} after {why}"

    def _end_of(self, effects: Effects, key: HandoffKey) -> SinkCommitted | SinkFailed | None:
        ends = [
            one.event
            for one in effects
            if isinstance(one, EngineEvent)
            and isinstance(one.event, SinkCommitted | SinkFailed)
            and one.event.key == key
        ]
        return ends[0] if ends else None

    def _note(self, effects: Effects) -> None:
        """What has come out."""
        for effect in effects:
            match effect:
                case SendFrame(body=Offer(key=key)):
                    self._live[key].offered = True
                case LandRegion(key=key, chunk=chunk):
                    assert chunk.seq < self._live[key].credit, f"{self._name} takes in {chunk} without room"
                    self._live[key].landing[chunk.seq] = chunk
                case FenceSink(key=key):
                    assert not self._live[key].fencing, f"{self._name} fences {key} twice"
                    self._live[key].fencing = True
                case EngineEvent(event=FirstTokenReady(key=key)):
                    assert not self._live[key].token_told, f"{self._name} tells the first token of {key} twice"
                    self._live[key].token_told = True
                case EngineEvent(event=SinkCommitted(key=key) | SinkFailed(key=key) as end):
                    self._note_end(key, end)
                case _:
                    pass

    def _note_end(self, key: HandoffKey, end: SinkCommitted | SinkFailed) -> None:
        assert key not in self._over, f"{self._name}: {end} after an end"
        sink = self._live.pop(key, None)
        committed = isinstance(end, SinkCommitted)
        if committed:
            assert sink is not None
            whole = sink.landed_units == sink.units and sink.nbytes == end.nbytes
            assert whole, f"{end}: {sink.landed_units} of {sink.units} units are in place, {sink.nbytes} bytes"
        self._over[key] = committed
        if len(self._over) > MOST_OVER:
            del self._over[next(iter(self._over))]
