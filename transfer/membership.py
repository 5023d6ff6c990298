"""Who is in the cluster, and who has fallen silent. Pure: told the time, what was heard and what the controller says.

Owns: the current view, to whom this process says that it lives and when, and when each that it listens to was last
heard. Never: a socket, or a conclusion beyond silence: a silent member proves nothing, only a membership without its
stamp does.

A thousand workers that all told each other that they live would do nothing else. A process listens to those on whom
it depends: by role (`LISTENS_TO`), and to the peers of its hand-offs, for as long as there is one. It asks those to
answer, and who is asked answers, whatever it knows of a hand-off. A peer that has fallen silent is asked until it is
heard again.

A process that was stopped itself (SIGSTOP, or starved of its core) has not *heard* anybody either. It must not blame
the others: when more than STALL_S passes between two calls of `on_timer`, the gap counts for nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from baton.common.config import LivenessConfig
from baton.common.engine.core_api import MembershipView
from baton.common.ids import Stamp, WorkerId
from baton.common.messages import Member, Membership

LISTENS_TO: Mapping[str, frozenset[str]] = {
    "gateway": frozenset({"decode", "prefill"}),  # their loads, and whether they can be given anything
    "decode": frozenset({"gateway"}),  # whose requests end with it
    "prefill": frozenset(),
}
"""By role: whose silence always counts."""
SPEAKS_TO: Mapping[str, frozenset[str]] = {
    "gateway": frozenset({"decode", "prefill"}),  # to the latter only of what they have cached
    "decode": frozenset({"gateway", "prefill"}),
    "prefill": frozenset({"gateway", "decode"}),
}
"""By role: to whom there is ever anything to say."""


class Audience(NamedTuple):
    """Whom to tell that this process lives: just so, and with the question whether they do."""

    told: dict[WorkerId, Member]
    asked: dict[WorkerId, Member]


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

    def __init__(self, stamp: Stamp, role: str, liveness: LivenessConfig, now: float) -> None:
        self._stamp = stamp
        self._role = role
        self._liveness = liveness
        self._latest: Membership | None = None
        self._listed = False
        self._source: tuple[int, int] = (-1, -1)  # (controller incarnation, version) of `_latest`
        self._members: dict[WorkerId, Member] = {}
        self._listeners: dict[WorkerId, Member] = {}  # those who listen to this role
        self._heard_s: dict[WorkerId, float] = {}  # of those who are listened to
        self._partners: set[WorkerId] = set()  # those among them because of a hand-off
        self._askers: set[WorkerId] = set()  # who asked since this process last spoke
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
            self._forget(member.stamp.worker)
            self._askers.discard(member.stamp.worker)
        for member in joined:
            if member.role in LISTENS_TO[self._role]:
                self._heard_s[member.stamp.worker] = now  # it has until `dead_after_s` to be heard
        self._listeners = {w: m for w, m in self._members.items() if self._role in LISTENS_TO.get(m.role, ())}
        return Changes(self.view, joined=joined, left=left)

    def on_heard(self, sender: Stamp, now: float) -> Changes | None:
        """Any frame of a member shows that it lives. None: the sender is no member."""
        worker = sender.worker
        member = self._members.get(worker)
        if member is None or member.stamp != sender:
            return None
        if worker in self._heard_s:
            self._heard_s[worker] = now
        if worker not in self._silent:
            return NO_CHANGE
        self._silent.discard(worker)
        return Changes(self.view, came_back=(worker,))

    def on_asked(self, sender: Stamp) -> None:
        """A member wants to hear that this process lives."""
        self._askers.add(sender.worker)

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

    def audience(self, partners: Iterable[Stamp], now: float) -> Audience:
        """For this time. `partners`: with whom there are hand-offs. From now on they are listened to."""
        members = self._members
        wanted = {stamp.worker: members[stamp.worker] for stamp in partners if self.lists(stamp)}
        wanted |= {worker: members[worker] for worker in sorted(self._partners & self._silent)}
        for worker in self._partners - wanted.keys():
            self._forget(worker)
        for worker in wanted.keys() - self._heard_s.keys():
            self._heard_s[worker] = now
            self._partners.add(worker)
        askers = {worker: members[worker] for worker in sorted(self._askers - wanted.keys())}
        self._askers.clear()
        return Audience({**self._listeners, **askers}, wanted)

    def _forget(self, worker: WorkerId) -> None:
        """It is not listened to any more."""
        self._heard_s.pop(worker, None)
        self._partners.discard(worker)
        self._silent.discard(worker)

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

    def speaks_to(self, member: Member) -> bool:
        """There may be something to say to it: a way is wanted."""
        return member.role in SPEAKS_TO[self._role]

    def callers(self) -> list[Member]:
        """Who may have something to say to this process: nobody else needs to be let in."""
        return [member for member in self._members.values() if self._role in SPEAKS_TO.get(member.role, ())]

    def lists(self, stamp: Stamp) -> bool:
        """The very process `stamp` is a member."""
        member = self._members.get(stamp.worker)
        return member is not None and member.stamp == stamp

    def member(self, worker: WorkerId) -> Member | None:
        """Who is in that seat."""
        return self._members.get(worker)

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
        return MembershipView(self.version, members, self.silent)

    @property
    def version(self) -> int:
        """Of the newest membership; 0 before there is one."""
        return max(self._source[1], 0)
