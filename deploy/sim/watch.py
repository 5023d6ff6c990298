"""What the two ends of a hand-off owe each other, asked after each step of an endpoint: an oracle of the simulator.

A lost word is said again, a lost worker is replaced, a lost hand-off is prefilled elsewhere: so a system that forgets a
rule of its protocol still gives the right answers, later. Here each input is compared with what must come of it *in the
same step* (`watch_sinks`, `watch_sources`), and:

- W1  Frames of processes that are not listed, or for another epoch, have no effect. Nothing goes to the unlisted.
- W2  Nobody repeats himself sooner than `resend_after_s`; where nothing is lost or late, nobody has to (but for what
      the other side takes its time with).
- W3  After each view, who waits for the dead waits for nothing but fences.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.common.config import TransferConfig
from baton.common.engine.core_api import MembershipView
from baton.common.ids import HandoffKey, Stamp, WorkerId
from baton.common.messages import Ack, Cancel, Commit, Failed, Frame, HandoffBody, Nack, Offer
from baton.deploy.sim.watch_sinks import Effects, SinkWatch
from baton.deploy.sim.watch_sources import SourceWatch
from baton.transfer.api import AbortSink, OpenSink, SinkCommand, SourceCommand
from baton.transfer.session.effects import (
    DataEvent,
    Landed,
    RegionDamaged,
    SendFrame,
    SinkFenced,
    SinkLaneFailed,
    SinkNotPrepared,
    SinkPrepared,
)

TO_SOURCES = Offer | Ack | Nack | Commit | Cancel
OF_SINKS = SinkPrepared | SinkNotPrepared | Landed | RegionDamaged | SinkLaneFailed | SinkFenced
ANSWERED_AT_ONCE = Offer | Cancel | Failed | Nack
"""Whoever gets one of these answers without waiting for an engine, or for more than a fence or one region."""
MOST_SAID = 4096
ROUNDING_S = 1e-6


class HandoffWatch:
    """Of one endpoint. `is_prompt`: no frame has been lost or late yet, and everybody lives."""

    def __init__(
        self, stamp: Stamp, page_size: int, state_pieces: int, config: TransferConfig, is_prompt: Callable[[], bool]
    ) -> None:
        self._stamp = stamp
        self._config = config
        self._is_prompt = is_prompt
        name = str(stamp.worker)
        self._sinks = SinkWatch(name, page_size, config.handoff_ttl_s)
        self._sources = SourceWatch(name, state_pieces, config)
        self._members: dict[WorkerId, Stamp] = {}
        self._said_s: dict[tuple[type[HandoffBody], HandoffKey, int, int], float] = {}
        self._looked_s = 0.0

    def command(self, command: SinkCommand | SourceCommand, effects: Effects, now: float) -> None:
        if isinstance(command, OpenSink | AbortSink):
            self._sinks.command(command, effects, now)
        else:
            self._sources.command(command, effects, now)
        self._to_members(effects)

    def frame(self, frame: Frame, effects: Effects, now: float) -> None:
        body, peer = frame.body, frame.src
        assert isinstance(body, HandoffBody), body
        if frame.dst_epoch != self._stamp.epoch or self._members.get(peer.worker) != peer:
            assert not effects, f"{self._stamp.worker} acts on {body} of {peer}: {effects}"
        elif isinstance(body, TO_SOURCES):
            credit = body.credit if isinstance(body, Offer | Ack) else 0
            self._sources.frame(body, peer, credit, effects, now)
        else:
            self._sinks.frame(body, peer, effects)
        self._to_members(effects)

    def data(self, event: DataEvent, effects: Effects, now: float) -> None:
        if isinstance(event, OF_SINKS):
            self._sinks.data(event, effects)
        else:
            self._sources.data(event, effects, now)
        self._to_members(effects)

    def silent(self, worker: WorkerId, effects: Effects, now: float) -> None:
        self._sinks.peers((), worker, effects)
        self._sources.peers((), worker, effects, now)
        self._to_members(effects)

    def membership(self, view: MembershipView, effects: Effects, now: float) -> None:
        before = self._members.values()
        self._members = {member.stamp.worker: member.stamp for member in view.members}
        gone = {stamp for stamp in before if self._members.get(stamp.worker) != stamp}
        self._sinks.peers(gone, None, effects)
        self._sources.peers(gone, None, effects, now)
        self._to_members(effects)

    def timer(self, effects: Effects, now: float) -> None:
        self._sinks.timer(effects)
        self._sources.timer(effects, now)
        self._to_members(effects)
        for effect in effects:
            if isinstance(effect, SendFrame) and isinstance(effect.body, HandoffBody):
                self._repeated(effect.body, now)

    def _repeated(self, body: HandoffBody, now: float) -> None:
        """W2"""
        what = type(body), body.key, getattr(body, "seq", 0), getattr(body, "tag", 0)
        said_s = self._said_s.pop(what, None)
        again = said_s is not None or not isinstance(body, Failed)  # which the deadline lets it say for the first time
        late = again and isinstance(body, ANSWERED_AT_ONCE) and self._is_prompt()
        assert not late, f"{self._stamp.worker} has to say {body} again, where nothing is lost"
        soon = said_s is not None and now - said_s < self._config.resend_after_s - ROUNDING_S
        assert not soon, f"{self._stamp.worker} repeats {body} after {now - (said_s or 0.0):.3f} s"
        self._said_s[what] = now
        if len(self._said_s) > MOST_SAID:
            del self._said_s[next(iter(self._said_s))]

    def look(self, now: float) -> None:
        """Now and then: what was due when it was last looked is done by now, also by who was stopped meanwhile."""
        self._sinks.look(self._looked_s)
        self._sources.look(self._looked_s)
        self._looked_s = now

    def _to_members(self, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, SendFrame):
                member = self._members.get(effect.worker)
                listed = member is not None and member.epoch == effect.dst_epoch
                assert listed, f"{self._stamp.worker} writes to nobody: {effect}"
