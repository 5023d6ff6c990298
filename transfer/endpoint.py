"""One worker's hand-offs: routes commands, frames, data-plane answers, timers and news of peers to their sessions.

Owns: which session an event is for, which frames are believed, the tags, and the counts of what was ignored. Never:
does I/O, reads a clock, or decides what a hand-off does (that is `session/sink.py` and `session/source.py`).

Rules:
- E1  A session belongs to one peer *process* (stamp). Frames of another epoch of that worker are stale, and so is any
      frame of a process that the membership does not list: a dead one cannot start anything.
- E2  Frames create state in three cases only: an Offer (at most `max_live_sources`), its refusal, and a Cancel before
      its Offer (the last two bounded apart from all else, so that a flood of them pushes out nothing but itself).
- E3  What ended is remembered for `tombstone_ttl_s` and at most `max_tombstones` per side. Forgetting is safe: every
      sink that ended was fenced, so a source that still asks is answered with Cancel, and that is true.
- E4  An Offer without a good ticket is refused, and nothing is remembered of it. A ticket is good for one hand-off,
      also when that was forgotten: so no Offer, however late or often it comes, begins anything twice.
- E5  A command for a key that was never known is a bug and raises. A command that crosses the end of its session is
      legal and ignored: the engine has the event that gives its pages back, or is about to get it. That holds for
      AbortSink, ShipRegion, FinishSource and AbortSource, also when the session has been forgotten by then; OpenSink
      needs a key that was never used.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from baton.common.compat import NO_GROUP
from baton.common.config import TransferConfig
from baton.common.deadlines import earliest
from baton.common.engine.core_api import MembershipView
from baton.common.errors import ErrorCode
from baton.common.ids import Epoch, HandoffKey, Stamp, WorkerId
from baton.common.kv.layout import Component, KvLayout
from baton.common.messages import (
    Accept,
    Ack,
    Cancel,
    Cancelled,
    Chunk,
    Commit,
    Done,
    Failed,
    Failure,
    Frame,
    HandoffBody,
    Nack,
    Offer,
    Refuse,
    Ticket,
    pack_tokens,
    unpack_tokens,
)
from baton.transfer.api import (
    AbortSink,
    AbortSource,
    FinishSource,
    OfferReceived,
    OpenSink,
    ShipRegion,
    SinkCommand,
    SinkFailed,
    SourceCommand,
)
from baton.transfer.membership import SPEAKS_TO
from baton.transfer.plan import NO_LAYERS, Segment, Span, segments_of, unit_ids
from baton.transfer.session import sink, source
from baton.transfer.session.book import HISTORY_LENGTH, Machine, SessionBook, Transition
from baton.transfer.session.effects import (
    DataEvent,
    EndpointEffect,
    EngineEvent,
    Landed,
    RegionDamaged,
    RegionReady,
    SendFrame,
    SinkFenced,
    SinkLaneFailed,
    SinkNotPrepared,
    SinkPrepared,
    SourceFenced,
    SourceLaneFailed,
)
from baton.transfer.session.ledger import Ledger
from baton.transfer.session.step import PeerDead, PeerSilent, SessionRules, Step, Verdict
from baton.transfer.session.tickets import SecretWith, TicketFault, Tickets, everybody

MAX_LIVE_SOURCES = 1024
TAG_BITS = 40
"""Of a tag, for the count of this process; a part of its epoch is above them."""
TAGS_BEFORE_REUSE = 1 << 39
"""The count begins again there; no hand-off takes as many as are left then."""

SINK: Machine[sink.SinkState, sink.SinkInput, sink.SinkOutput] = Machine(
    "sink",
    sink.sink_step,
    sink.sink_timer,
    sink.sink_clockwork,
    lambda state: isinstance(state, sink.SinkOver),
    sink.sink_peer,
)
SOURCE: Machine[source.SourceState, source.SourceInput, source.SourceOutput] = Machine(
    "source",
    source.source_step,
    source.source_timer,
    source.source_clockwork,
    lambda state: isinstance(state, source.SourceOver),
    source.source_peer,
)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One session, for people and for checks. `owned`: the engine's pages are still the hand-off's."""

    side: str  # "sink" | "source"
    key: HandoffKey
    peer: Stamp
    state: str
    owned: bool


class Endpoint:
    """Every method takes the time and returns what to do, in order. `lanes` are those this process can send on; a state
    travels in `state_pieces` units, a unit of another component has `layers`. All peers have the same layout: hand-offs
    are made within a group."""

    def __init__(
        self,
        stamp: Stamp,
        config: TransferConfig,
        layout: KvLayout,
        lanes: Iterable[str],
        *,
        state_pieces: int = 1,
        layers: Mapping[Component, int] = NO_LAYERS,
        max_live_sources: int = MAX_LIVE_SOURCES,
        secret_with: SecretWith = everybody,
    ) -> None:
        self._stamp = stamp
        self._config = config
        self._layout = layout
        self._lanes = frozenset(lanes)
        self._max_live_sources = max_live_sources
        self._listed: dict[WorkerId, Stamp] = {}
        self._members: dict[WorkerId, Stamp] = {}  # those of them that hand-offs are made with
        # Tags are unique in this process, and almost surely over restarts on the same address.
        self._first_tag = (stamp.epoch % (1 << (63 - TAG_BITS))) << TAG_BITS
        self._tags_used = 0
        self._tickets = Tickets(stamp, secret_with)
        self._counters: Counter[str] = Counter()
        self._history: deque[Transition] = deque(maxlen=HISTORY_LENGTH)
        self._rules = SessionRules(layout.page_size, config.resend_after_s, state_pieces, layers)
        bounds = (self._rules, config.tombstone_ttl_s, config.max_tombstones, self._counters, self._history)
        self.ledger = Ledger()
        self._sinks = SessionBook(SINK, *bounds, self.ledger.on_sink)
        self._sources = SessionBook(SOURCE, *bounds, self.ledger.on_source)

    # ------------------------------------------------------------------------------------------- inputs

    def command(self, command: SinkCommand | SourceCommand, now: float) -> list[EndpointEffect]:
        """What the engine asks for. Raises for a key that was never known (E5)."""
        match command:
            case OpenSink():
                return self._out(self._open_sink(command, now))
            case AbortSink():
                return self._out(self._sinks.command(command.key, command, now))
            case ShipRegion() | FinishSource() | AbortSource():
                return self._out(self._sources.command(command.key, command, now))
            case _:
                assert_never(command)

    def on_frame(self, frame: Frame, now: float) -> list[EndpointEffect]:
        """A hand-off frame of a peer. Never raises for anything that a peer can send."""
        if frame.dst_epoch != self._stamp.epoch:
            return self._ignored("frame.for_another_epoch")
        if self._members.get(frame.src.worker) != frame.src:
            return self._ignored("frame.of_unlisted_process")
        body, peer = frame.body, frame.src
        match body:
            case Offer():
                return self._out(self._on_offer(body, peer, now))
            case Ack() | Nack() | Commit() | Cancel():
                return self._out(self._to_source(body, peer, now))
            case Accept() | Refuse() | Chunk() | Done() | Failed() | Cancelled():
                return self._out(self._to_sink(body, peer, now))
            case _:
                raise TypeError(f"{type(body).__name__} is not a frame between source and sink")

    def on_data(self, event: DataEvent, now: float) -> list[EndpointEffect]:
        """An answer of the data plane. One that comes after its session was forgotten is counted and ignored."""
        match event:
            case SinkPrepared() | SinkNotPrepared() | Landed() | RegionDamaged() | SinkLaneFailed() | SinkFenced():
                if self._sinks.get(event.key) is None:
                    return self._ignored("data.of_unknown_sink")
                return self._out(self._sinks.apply(event.key, event, now))
            case RegionReady() | SourceLaneFailed() | SourceFenced():
                if self._sources.get(event.key) is None:
                    return self._ignored("data.of_unknown_source")
                return self._out(self._sources.apply(event.key, event, now))
            case _:
                assert_never(event)

    def on_peer_silent(self, worker: WorkerId, now: float) -> list[EndpointEffect]:
        """Nothing was heard of `worker` for `dead_after_s`: its hand-offs end, as far as that needs no proof. To be
        called again (say, with each heartbeat) while it stays silent: a hand-off may begin meanwhile."""

        def is_it(peer: Stamp) -> bool:
            return peer.worker == worker

        effects: list[EndpointEffect] = []
        effects += self._sinks.apply_to_peers(is_it, PeerSilent(), now, ended_too=False)
        effects += self._sources.apply_to_peers(is_it, PeerSilent(), now, ended_too=False)
        return self._out(effects)

    def on_membership(self, view: MembershipView, now: float) -> list[EndpointEffect]:
        """The whole view, views in order. A process that it does not list is proven dead: it reads nothing any more."""
        before = self._listed.values()
        self._listed = {member.stamp.worker: member.stamp for member in view.members}
        dead = {stamp for stamp in before if self._listed.get(stamp.worker) != stamp}
        self._tickets.forget(dead)
        # A seat may have a process of the other role by now, and an engine that has not heard of it asks it for pages.
        own = next((member for member in view.members if member.stamp == self._stamp), None)
        partners = None if own is None else SPEAKS_TO.get(own.role)
        group = NO_GROUP if own is None else own.group
        self._members = {
            member.stamp.worker: member.stamp
            for member in view.members
            if (partners is None or member.role in partners) and member.group == group
        }
        effects: list[EndpointEffect] = []
        effects += self._sinks.apply_to_peers(dead.__contains__, PeerDead(), now, ended_too=True)
        effects += self._sources.apply_to_peers(dead.__contains__, PeerDead(), now, ended_too=True)
        return self._out(effects)

    def on_timer(self, now: float) -> list[EndpointEffect]:
        return self._out([*self._sinks.run_timers(now), *self._sources.run_timers(now)])

    # ------------------------------------------------------------------------------------------ questions

    def next_deadline(self) -> float | None:
        """When `on_timer` is wanted next; None: not before something else happens."""
        return earliest(self._sinks.next_deadline(), self._sources.next_deadline())

    @property
    def live_sinks(self) -> int:
        """Hand-offs that hold destination pages here."""
        return self._sinks.live

    @property
    def live_sources(self) -> int:
        """Hand-offs that hold source pages here."""
        return self._sources.live

    def partners(self) -> list[WorkerId]:
        """With whom hand-offs can be made."""
        return list(self._members)

    def peers(self) -> list[Stamp]:
        """With whom there are hand-offs that hold pages, here or perhaps there."""
        return list(dict.fromkeys((*self._sinks.peers(), *self._sources.peers())))

    @property
    def counters(self) -> Mapping[str, int]:
        """ "side.State.Event.verdict" -> how often it was ignored; and what was dropped before any session."""
        return self._counters

    @property
    def history(self) -> Sequence[Transition]:
        """The last transitions, oldest first."""
        return tuple(self._history)

    def sessions(self) -> list[SessionInfo]:
        sinks = [
            SessionInfo("sink", key, sink.sink_peer(state), type(state).__name__, not isinstance(state, sink.SinkOver))
            for key, state in self._sinks.items()
        ]
        return sinks + [
            SessionInfo(
                "source",
                key,
                source.source_peer(state),
                type(state).__name__,
                not isinstance(state, source.SourceOver),
            )
            for key, state in self._sources.items()
        ]

    # --------------------------------------------------------------------------------------------- sinks

    def _open_sink(self, command: OpenSink, now: float) -> tuple[sink.SinkOutput, ...]:
        peer = self._members.get(command.peer)
        segments = self._segments(command.start, len(command.tokens))
        given = {component for component, pages in command.pages.items() if len(pages)}
        assert given == {one.component for one in segments}, f"pages of {given} for {segments}"
        spans = tuple(
            Span(one.component, 0, unit_ids(one.component, command.pages[one.component], self._rules.state_pieces))
            for one in segments
        )
        tag_base = self._first_tag + self._tags_used
        order = sink.SinkOrder(
            key=command.key,
            peer=peer or Stamp(command.peer, 0, Epoch(0)),
            request_id=command.request_id,
            tokens=pack_tokens(command.tokens),
            start=command.start,
            segments=segments,
            spans=spans,
            sample=command.sample,
            sampling=command.sampling,
            deadline_s=min(command.deadline_s, now + self._config.handoff_ttl_s),
            tag_base=tag_base,
            priority=command.priority,
            trace=command.trace,
            ticket=Ticket() if peer is None else self._tickets.issue(peer, command.key, tag_base),
        )
        if peer is None:  # it left while the command was on its way
            failure = Failure(code=ErrorCode.NO_WORKER, reason=f"{command.peer} is not in the cluster")
            failed = SinkFailed(command.key, command.peer, failure, command.start, 0, "", peer_lost=True)
            first: sink.SinkStep = Step(sink.Closed(order, failure), Verdict.MOVE, (EngineEvent(failed),))
        else:
            first = sink.open_sink(order, self._rules)
            self._tags_used = (self._tags_used + order.tag_count) % TAGS_BEFORE_REUSE
        return self._sinks.open(command.key, first, now)

    def _to_sink(self, body: sink.SinkFrame, peer: Stamp, now: float) -> Sequence[sink.SinkOutput]:
        state = self._sinks.get(body.key)
        if state is not None:
            if sink.sink_peer(state) != peer:
                return self._ignored_by("sink", "of_another_peer")
            return self._sinks.apply(body.key, body, now)
        self._counters[f"sink.unknown.{type(body).__name__}"] += 1
        match body:
            case Accept() | Chunk() | Done() | Failed():
                failure = Failure(code=ErrorCode.CANCELLED, reason="no such hand-off here, or no longer")
                return (_frame_to(peer, Cancel(key=body.key, failure=failure)),)
            case Refuse() | Cancelled():
                return ()
            case _:
                assert_never(body)

    # ------------------------------------------------------------------------------------------- sources

    def _on_offer(self, offer: Offer, peer: Stamp, now: float) -> Sequence[source.SourceOutput]:
        state = self._sources.get(offer.key)
        fault = self._tickets.take(offer, peer)
        if fault is not None and (state is None or fault is TicketFault.FORGED):
            self._counters[f"ticket.{fault}"] += 1
            if state is not None:
                return ()
            failure = Failure(code=ErrorCode.TICKET_REFUSED, reason=f"the ticket of this offer is {fault}")
            return (_frame_to(peer, Refuse(key=offer.key, failure=failure)),)
        if state is not None:
            if source.source_peer(state) != peer:
                failure = Failure(code=ErrorCode.INTERNAL, reason="this hand-off id is another worker's")
                return (_frame_to(peer, Refuse(key=offer.key, failure=failure)),)
            return self._sources.apply(offer.key, offer, now)
        tokens = unpack_tokens(offer.tokens)
        segments = self._segments_of_offer(offer.start, len(tokens))
        refusal = self._refusal(offer, segments)
        if refusal is not None:
            self._sources.bury_unasked(offer.key, source.Refused(peer, refusal), now)
            return (_frame_to(peer, refusal),)
        terms = source.SourceTerms(
            key=offer.key,
            peer=peer,
            lane=offer.lane,
            total=len(tokens),
            segments=segments,
            sample=offer.sample,
            region_units=offer.region_units,
            tag_base=offer.tag_base,
            deadline_s=now + min(offer.ttl_s, self._config.handoff_ttl_s),
            priority=offer.priority,
        )
        received = OfferReceived(
            offer.key,
            peer,
            offer.request_id,
            tokens,
            offer.start,
            offer.sample,
            offer.sampling,
            terms.deadline_s,
            priority=offer.priority,
            lane_gbps=offer.lane_gbps,
            trace=offer.trace,
        )
        return self._sources.open(offer.key, source.accept_offer(terms, offer.credit, received), now)

    def _segments_of_offer(self, start: int, total: int) -> tuple[Segment, ...]:
        """None of them when that is no range to hand over."""
        if not 0 <= start < total or start % self._layout.page_size:
            return ()
        return self._segments(start, total)

    def _segments(self, start: int, total: int) -> tuple[Segment, ...]:
        return segments_of(self._layout, start, total, self._rules.state_pieces, self._rules.layers)

    def _refusal(self, offer: Offer, segments: Sequence[Segment]) -> Refuse | None:
        reason = ""
        if offer.lane not in self._lanes:
            reason = f"lane {offer.lane!r} is not served here, only {', '.join(sorted(self._lanes))}"
        elif not segments:
            reason = f"cannot start at token {offer.start} of {len(offer.tokens) // 4}"
        elif len(offer.region_units) != len(segments):
            reason = f"an offer of {len(offer.region_units)} segments, where {len(segments)} are to be sent"
        elif offer.credit < 1:
            reason = "an offer without credit"
        if reason:
            return Refuse(key=offer.key, failure=Failure(code=ErrorCode.INTERNAL, reason=reason))
        if self._sources.live >= self._max_live_sources:
            failure = Failure(code=ErrorCode.OVERLOADED, reason=f"{self._sources.live} hand-offs are open here")
            return Refuse(key=offer.key, failure=failure)
        return None

    def _to_source(self, body: Ack | Nack | Commit | Cancel, peer: Stamp, now: float) -> Sequence[source.SourceOutput]:
        state = self._sources.get(body.key)
        if state is not None:
            if source.source_peer(state) != peer:
                return self._ignored_by("source", "of_another_peer")
            return self._sources.apply(body.key, body, now)
        self._counters[f"source.unknown.{type(body).__name__}"] += 1
        if not isinstance(body, Cancel):
            return ()
        self._sources.bury_unasked(body.key, source.Closed(body.key, peer), now)
        return (_frame_to(peer, Cancelled(key=body.key)),)

    # --------------------------------------------------------------------------------------------- helpers

    def _out(self, effects: Sequence[EndpointEffect]) -> list[EndpointEffect]:
        """Frames to a process that is proven dead have no reader."""
        kept = [effect for effect in effects if not self._is_to_the_dead(effect)]
        if len(kept) < len(effects):
            self._counters["frame.to_unlisted_process"] += len(effects) - len(kept)
        return kept

    def _is_to_the_dead(self, effect: EndpointEffect) -> bool:
        if not isinstance(effect, SendFrame):
            return False
        stamp = self._members.get(effect.worker)
        return stamp is None or stamp.epoch != effect.dst_epoch

    def _ignored(self, counter: str) -> list[EndpointEffect]:
        self._counters[counter] += 1
        return []

    def _ignored_by(self, side: str, reason: str) -> tuple[()]:
        self._counters[f"{side}.frame.{reason}"] += 1
        return ()


def _frame_to(peer: Stamp, body: HandoffBody) -> SendFrame:
    return SendFrame(peer.worker, peer.epoch, body)
