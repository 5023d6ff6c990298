"""Who is in the cluster, and who has fallen silent. Pure: told the time, what was heard and what the controller says.

Owns: the current view, when each member was last heard, and when this process must speak next. Never: a socket, or a
conclusion beyond silence: a silent member proves nothing, only a membership without its stamp does.

A process that was stopped itself (SIGSTOP, or starved of its core) has not *heard* anybody either. It must not blame
the others: when more than STALL_S passes between two calls of `on_timer`, the gap counts for nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.common.config import LivenessConfig
from baton.common.engine.core_api import MembershipView
from baton.common.ids import Stamp, WorkerId
from baton.common.messages import Member, Membership


@dataclass(frozen=True, slots=True)
class Changes:
    """What came of an input. `view` is set when the engine must be told; `fell_silent` and `came_back` are news."""

    view: MembershipView | None = None
    joined: tuple[Member, ...] = ()
    left: tuple[Member, ...] = ()
    fell_silent: tuple[WorkerId, ...] = ()
    came_back: tuple[WorkerId, ...] = ()


NO_CHANGE = Changes()


class Roster:
    """One process's knowledge of the others. `members` never contains the process itself."""

    def __init__(self, stamp: Stamp, liveness: LivenessConfig, now: float) -> None:
        self._stamp = stamp
        self._liveness = liveness
        self._latest: Membership | None = None
        self._listed = False
        self._source: tuple[int, int] = (-1, -1)  # (controller incarnation, version) of `_latest`
        self._members: dict[WorkerId, Member] = {}
        self._heard_s: dict[WorkerId, float] = {}
        self._silent: set[WorkerId] = set()
        self._look_at_s = now  # before that nobody can have been silent for long enough
        self._speak_at_s = now
        self._ticked_s = now

    # ------------------------------------------------------------------------------------------ inputs

    def on_membership(self, controller: Stamp, membership: Membership, now: float) -> Changes:
        """The whole view, from a controller. Older ones, and those of an earlier controller, change nothing."""
        source = (controller.incarnation, membership.version)
        if source <= self._source:
            return NO_CHANGE
        self._source, self._latest = source, membership
        self._listed = any(member.stamp == self._stamp for member in membership.members)
        old = self._members
        self._members = {
            member.stamp.worker: member for member in membership.members if member.stamp.worker != self._stamp.worker
        }
        joined = tuple(m for w, m in self._members.items() if w not in old or old[w].stamp != m.stamp)
        left = tuple(m for w, m in old.items() if w not in self._members or self._members[w].stamp != m.stamp)
        for member in left:
            self._heard_s.pop(member.stamp.worker, None)
            self._silent.discard(member.stamp.worker)
        for member in joined:
            self._heard_s[member.stamp.worker] = now  # it has until `dead_after_s` to be heard
        return Changes(self.view, joined=joined, left=left)

    def on_heard(self, sender: Stamp, now: float) -> Changes | None:
        """Any frame of a member shows that it lives. None: the sender is no member."""
        worker = sender.worker
        member = self._members.get(worker)
        if member is None or member.stamp != sender:
            return None
        self._heard_s[worker] = now
        if worker not in self._silent:
            return NO_CHANGE
        self._silent.discard(worker)
        return Changes(self.view, came_back=(worker,))

    def on_timer(self, now: float) -> Changes:
        """To be called at least once per heartbeat interval: that is how a stall of this process is noticed."""
        gap_s, self._ticked_s = now - self._ticked_s, now
        if gap_s > self.stall_s:
            for worker, heard_s in self._heard_s.items():
                self._heard_s[worker] = min(now, heard_s + gap_s)
        if now < self._look_at_s:
            return NO_CHANGE
        fell_silent = tuple(
            worker
            for worker, heard_s in self._heard_s.items()
            if now - heard_s > self._liveness.dead_after_s and worker not in self._silent
        )
        self._silent.update(fell_silent)
        waiting = (heard_s for worker, heard_s in self._heard_s.items() if worker not in self._silent)
        self._look_at_s = min(waiting, default=now) + self._liveness.dead_after_s
        return Changes(self.view, fell_silent=fell_silent) if fell_silent else NO_CHANGE

    def speak(self, now: float) -> bool:
        """True once per heartbeat interval: time to send heartbeats, and Hello where not `listed`."""
        if now < self._speak_at_s:
            return False
        self._speak_at_s = now + self._liveness.heartbeat_interval_s
        return True

    # --------------------------------------------------------------------------------------- questions

    @property
    def next_deadline(self) -> float:
        return self._speak_at_s

    @property
    def stall_s(self) -> float:
        """A longer gap between two timers was a stall of this process, not silence of the others."""
        return 2 * self._liveness.heartbeat_interval_s

    @property
    def listed(self) -> bool:
        """The controller counts this very process among the members."""
        return self._listed

    def lists(self, stamp: Stamp) -> bool:
        """The very process `stamp` is a member."""
        member = self._members.get(stamp.worker)
        return member is not None and member.stamp == stamp

    @property
    def latest(self) -> Membership | None:
        """As the controller sent it."""
        return self._latest

    @property
    def members(self) -> dict[WorkerId, Member]:
        return dict(self._members)

    @property
    def silent(self) -> frozenset[WorkerId]:
        return frozenset(self._silent)

    @property
    def view(self) -> MembershipView:
        """For the engine: everybody, itself included."""
        members = self._latest.members if self._latest is not None else ()
        return MembershipView(max(self._source[1], 0), members, self.silent)
