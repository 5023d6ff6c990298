"""Who is in the cluster: the brain of the controller. Pure; the shell is `controller.py`.

Owns: one state per *seat* (a worker id), the incarnations given to it, the membership version, and the decision to
kill, to wait or to start a successor. Never: talks to Ray, to a socket or to a clock; never touches a request or KV.

Invariants:
C1. A stamp leaves the membership only after `on_dead`: the shell has *proven* that its process is gone. Others free
    pages on the strength of it (docs/KV-OWNERSHIP.md: quarantined -> free).
C2. A seat holds at most one process. A successor is started only after its predecessor is proven dead.
C3. Incarnations of a seat and versions of the membership only grow, also over a restart of the controller.
C4. Restarts are bounded: exponential back-off, and at most `max_restarts_per_minute` per seat.
C5. Nobody is asked to leave while there is no other live worker of its role, but for an upgrade in the end (whose plan
    has an extra one then); who says that he was told to stop leaves.
C6. While an upgrade is under way at most one process at a time leaves for it, and only when all others are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import assert_never

from msgspec import structs

from baton.common.compat import NO_GROUP, RELEASE, differences, group_of
from baton.common.config import LivenessConfig
from baton.common.ids import Stamp, WorkerId
from baton.common.messages import PROTOCOL_VERSION, Body, Heartbeat, Hello, Member, Membership, Reject
from baton.deploy.controller_seats import (
    COMPUTE_ROLES,
    DrainWorker,
    Effect,
    Killing,
    KillWorker,
    Leaving,
    Live,
    Publish,
    Refused,
    Reply,
    Retired,
    SeatSpec,
    SeatState,
    SeatStatus,
    Starting,
    StartWorker,
    Vacant,
    incarnation_of,
    member_of,
)
from baton.deploy.fitting import misfit
from baton.deploy.seat_book import Seat, SeatBook

BURST_S = 0.05
"""After news went out, further news waits this long."""
MOST_TRIES = 5
"""To start the first process of a new revision in a seat. One of them may have been struck by something else."""
_RESTART_WINDOW_S = 60.0
_MAX_BACKOFF_DOUBLINGS = 6


class ControllerCore:
    """Events in (`on_*`), effects out. `first_version` must be above every version published before."""

    def __init__(self, seats: Iterable[SeatSpec], liveness: LivenessConfig, first_version: int, now: float) -> None:
        self._liveness = liveness
        self.book = SeatBook(seats, now)
        self._seats = self.book.seats
        self._version = first_version
        self._published_at_s = now
        self._timer_at_s = now
        self._changed = False  # in this event
        self._untold = False  # the newest version is still to be published
        self._told_at_s = now - BURST_S  # when a new version last was
        self._shutting_down = False
        self.transitions: list[str] = []  # the last ones, for people; bounded
        self.stray_messages = 0  # not for a controller, or in another's name
        self.unlisted_messages = 0  # heartbeats of processes that are no members

    # ------------------------------------------------------------------------------------------ events

    def adopt(self, member: Member, now: float, leaving: bool = False, revision: int = 1) -> list[Effect]:
        """A restarted controller found this live process: it stays a member, without a second admission. One that was
        told to leave still does; what its successor was to become is not known any more, so that keeps its role."""
        seat = self._seats.get(member.stamp.worker)
        if seat is None:
            return []
        assert isinstance(seat.state, Vacant), f"{member.stamp.worker} adopted twice"
        seat.spec = replace(seat.spec, role=member.role)
        seat.revision = seat.proven = revision
        seat.last_incarnation = max(seat.last_incarnation, member.stamp.incarnation)
        live = Live(structs.replace(member, group=group_of(member.fingerprint)), since_s=now, heard_s=now)
        self._move(seat, live, "found alive")
        self._changed = True
        return [self._drain(seat, live, "found leaving", now)] if leaving else []

    def adopt_starting(self, worker: WorkerId, incarnation: int, role: str, now: float, revision: int = 1) -> None:
        """A restarted controller found this process still loading."""
        seat = self._seats.get(worker)
        if seat is None:
            return
        assert isinstance(seat.state, Vacant), f"{worker} adopted twice"
        seat.spec = replace(seat.spec, role=role)
        seat.revision = revision
        seat.last_incarnation = max(seat.last_incarnation, incarnation)
        self._move(seat, Starting(incarnation, now + self._liveness.start_deadline_s), "found loading")

    def note_incarnation(self, worker: WorkerId, incarnation: int, role: str = "") -> None:
        """This incarnation was perhaps used once: never give it again, nor a lower one (C3). Its successor has its
        role, where that is known."""
        seat = self._seats.get(worker)
        if seat is not None and incarnation >= seat.last_incarnation:
            seat.last_incarnation = incarnation
            seat.spec = replace(seat.spec, role=role or seat.spec.role)

    def on_message(self, sender: Stamp, body: Body, now: float) -> list[Effect]:
        """Hello and Heartbeat; anything else is not for a controller, and is counted."""
        effects: list[Effect] = []
        if isinstance(body, Hello) and body.member.stamp == sender:
            effects = self._on_hello(body, now)
        elif isinstance(body, Heartbeat):
            seat = self._seats.get(sender.worker)
            if seat is not None and isinstance(seat.state, Live | Leaving) and seat.state.member.stamp == sender:
                member = _with_load(seat.state.member, body)
                seat.state = structs.replace(seat.state, member=member, heard_s=now, knows=body.view)
                if body.leaving and isinstance(seat.state, Live):
                    effects = self._ask_to_leave(seat, seat.state, "it was told to stop", now)
            else:
                self.unlisted_messages += 1
        else:
            self.stray_messages += 1
        return effects + self._after(now)

    def on_start_failed(self, worker: WorkerId, incarnation: int, reason: str, now: float) -> list[Effect]:
        """The process could not start or load. It may linger: it is killed and proven dead like any other."""
        seat = self._seats.get(worker)
        effects: list[Effect] = []
        if seat is not None and isinstance(seat.state, Starting) and seat.state.incarnation == incarnation:
            effects = self._kill(seat, incarnation, None, f"start failed: {reason}", now)
        return effects + self._after(now)

    def on_dead(self, worker: WorkerId, incarnation: int, now: float, reason: str = "process died") -> list[Effect]:
        """Proof: the process of this incarnation is gone. Late and repeated reports are ignored."""
        seat = self._seats.get(worker)
        if seat is not None:
            match seat.state:
                case Starting() if seat.state.incarnation == incarnation:
                    self._vacate(seat, reason, lived_s=0.0, now=now)
                case Live() | Leaving() if seat.state.member.stamp.incarnation == incarnation:
                    self._changed = True
                    self._vacate(seat, reason, lived_s=now - seat.state.since_s, now=now)
                case Killing() if seat.state.incarnation == incarnation:
                    self._changed = self._changed or seat.state.member is not None
                    lived_s = math.inf if seat.state.planned else 0.0
                    self._vacate(seat, seat.state.reason, lived_s, now)
                case Starting() | Live() | Leaving() | Killing() | Vacant() | Retired():
                    pass  # about a predecessor, or a duplicate
                case _:
                    assert_never(seat.state)
        return self._after(now)

    def change(self, specs: Iterable[SeatSpec], liveness: LivenessConfig, now: float) -> list[Effect]:
        """From now on the cluster has these seats. Whoever sits in one that is not among them leaves; whoever was
        started with another revision is replaced in his turn. The roles of seats that are there stay as they are."""
        self.live_by(liveness)
        self.book.want(specs, now)
        return self.on_timer(now)

    def live_by(self, liveness: LivenessConfig) -> None:
        """From now on."""
        self._liveness = liveness

    def replace_worker(self, worker: WorkerId, role: str, now: float) -> list[Effect] | Refused:
        """The process in this seat takes nothing new and finishes what it has; its successor has this role, another one
        or the same."""
        seat = self._seats.get(worker)
        if seat is None or seat.spec.role not in COMPUTE_ROLES:
            known = [str(one) for one, other in self._seats.items() if other.spec.role in COMPUTE_ROLES]
            return Refused(f"there is no worker {worker!r}: there are {', '.join(known)}")
        if role not in COMPUTE_ROLES:
            return Refused(f"no worker can become {role!r}: {' or '.join(sorted(COMPUTE_ROLES))}")
        if not isinstance(seat.state, Live):
            return Refused(f"{worker} is {_name_of(seat.state)}: only a live worker can be asked to leave")
        if not self.book.has_peer(seat, but_extra=True):
            return Refused(f"{worker} is the only live {seat.spec.role} worker")
        if role != seat.spec.role and self.book.changing:
            return Refused("the cluster is changing: roles change before that or afterwards")
        why = f"drains, to become {role}" if role != seat.spec.role else "drains, to be replaced"
        seat.spec = replace(seat.spec, role=role)
        return self._ask_to_leave(seat, seat.state, why, now)

    def on_drained(self, worker: WorkerId, incarnation: int, now: float) -> list[Effect]:
        """The process that was told to leave has nothing left to do."""
        seat = self._seats.get(worker)
        effects: list[Effect] = []
        if seat is not None and isinstance(seat.state, Leaving) and incarnation_of(seat.state) == incarnation:
            effects = self._kill(seat, incarnation, seat.state.member, "drained", now, planned=True)
        return effects + self._after(now)

    def shut_down(self, now: float) -> list[Effect]:
        """Ends every process and starts none again. `finished` tells when all are proven dead."""
        self._shutting_down = True
        effects: list[Effect] = []
        for seat in self._seats.values():
            match seat.state:
                case Live() | Leaving():
                    stamp = seat.state.member.stamp
                    effects += self._kill(seat, stamp.incarnation, seat.state.member, "shutdown", now)
                case Starting():
                    effects += self._kill(seat, seat.state.incarnation, None, "shutdown", now)
                case Vacant():
                    self._move(seat, Retired(), "shutdown")
                case Killing() | Retired():
                    pass
                case _:
                    assert_never(seat.state)
        return effects

    def on_timer(self, now: float) -> list[Effect]:
        """Starts, kills, repeats kills and re-publishes what is due."""
        effects: list[Effect] = []
        self._forgive_own_absence(now)
        self.book.prove(self._liveness.dead_after_s, now)
        for seat in self._seats.values():
            match seat.state:
                case Vacant() if now >= seat.state.start_at_s and not self.book.is_surplus(seat):
                    effects.append(self._start(seat, now))
                case Starting() if now >= seat.state.deadline_s:
                    effects += self._kill(seat, seat.state.incarnation, None, "did not become ready in time", now)
                case Live() | Leaving():
                    verdict = self._verdict(seat.state, now)
                    if verdict:
                        stamp = seat.state.member.stamp
                        effects += self._kill(seat, stamp.incarnation, seat.state.member, verdict, now)
                    elif isinstance(seat.state, Leaving) and now >= seat.state.deadline_s:
                        stamp, late = seat.state.member.stamp, "did not finish in time what it had"
                        effects += self._kill(seat, stamp.incarnation, seat.state.member, late, now, planned=True)
                case Killing() if now >= seat.state.retry_at_s:
                    seat.state = replace(seat.state, retry_at_s=now + self._liveness.dead_after_s)
                    effects.append(KillWorker(seat.spec.worker, seat.state.incarnation, seat.state.reason))
                case Vacant() | Starting() | Killing() | Retired():
                    pass
                case _:
                    assert_never(seat.state)
        if not self._shutting_down:
            effects += self._go_on_with_changes(now)  # C6: by now it is known who has fallen silent
            if (kept := self.book.keep()) is not None:
                effects.append(kept)
        if now >= self._published_at_s + self._liveness.republish_interval_s:
            self._published_at_s = now
            behind = self._behind()
            if behind and not (self._changed or self._untold):
                effects.append(Publish(self.membership(), behind))
        return effects + self._after(now)

    def next_deadline(self) -> float:
        """When `on_timer` has something to do at the latest."""
        due = [self._published_at_s + self._liveness.republish_interval_s]
        if self._untold:
            due.append(self._told_at_s + BURST_S)
        for seat in self._seats.values():
            match seat.state:
                case Vacant() if self.book.is_surplus(seat):
                    pass
                case Vacant():
                    due.append(seat.state.start_at_s)
                case Starting():
                    due.append(seat.state.deadline_s)
                case Live():
                    stays = seat.proven == seat.revision
                    since_s = seat.state.heard_s if stays else min(seat.state.since_s, seat.state.heard_s)
                    due.append(since_s + self._liveness.dead_after_s)
                case Leaving():
                    due.append(min(seat.state.heard_s + self._liveness.dead_after_s, seat.state.deadline_s))
                case Killing():
                    due.append(seat.state.retry_at_s)
                case Retired():
                    pass
                case _:
                    assert_never(seat.state)
        return min(due)

    # ------------------------------------------------------------------------------------------- views

    def membership(self) -> Membership:
        """Everyone admitted and not proven dead, in seat order."""
        members = [member for seat in self._seats.values() if (member := member_of(seat.state)) is not None]
        return Membership(version=self._version, members=tuple(members))

    def _behind(self) -> tuple[Member, ...]:
        """Who goes by an older view than the newest, as far as its heartbeats have told. To tell all of them again and
        again would cost as much as there are pairs of processes."""
        states = [seat.state for seat in self._seats.values()]
        return tuple(one.member for one in states if isinstance(one, Live | Leaving) and one.knows < self._version)

    def live_members(self) -> list[Member]:
        """Who takes requests, with what they said last."""
        return [seat.state.member for seat in self._seats.values() if isinstance(seat.state, Live)]

    def status(self) -> list[SeatStatus]:
        first = next((one for _, one in self._everybody() if one.group), None)
        return [self._told_of(seat, first) for seat in self._seats.values()]

    def _told_of(self, seat: Seat, first: Member | None) -> SeatStatus:
        """`first`: whose group the others' are compared with."""
        member = member_of(seat.state)
        return SeatStatus(
            worker=seat.spec.worker,
            role=member.role if member is not None else seat.spec.role,
            state=_name_of(seat.state),
            incarnation=incarnation_of(seat.state) or seat.last_incarnation,
            detail=seat.last_failure,
            restarts=seat.restarts,
            revision=seat.revision if incarnation_of(seat.state) else seat.spec.revision,
            group=member.group if member is not None else NO_GROUP,
            release=member.fingerprint.get(RELEASE, "") if member is not None else "",
            differs=_apart(member, first),
        )

    @property
    def ready(self) -> bool:
        """Every seat is filled by an admitted process, of the revision that is wanted there."""
        seats = [seat for seat in self._seats.values() if not self.book.is_surplus(seat)]
        return all(isinstance(seat.state, Live) and not seat.is_outdated for seat in seats)

    @property
    def finished(self) -> bool:
        """After `shut_down`: every process is proven dead."""
        return all(isinstance(seat.state, Retired) for seat in self._seats.values())

    # ------------------------------------------------------------------------------------- transitions

    def _on_hello(self, hello: Hello, now: float) -> list[Effect]:
        member = hello.member
        seat = self._seats.get(member.stamp.worker)
        if seat is None:
            return self._refuse(None, member, "there is no such seat in this cluster", {}, now)
        match seat.state:
            case Live() | Leaving() if seat.state.member.stamp == member.stamp:
                seat.state = structs.replace(seat.state, heard_s=now)
                return [Publish(self.membership(), (member,))]  # it asks again: the first answer was lost
            case Starting() if seat.state.incarnation == member.stamp.incarnation:
                if member.role != seat.spec.role:
                    difference = {"role": f"{member.role} != {seat.spec.role}"}
                    return self._refuse(seat, member, "this seat is for another role", difference, now)
                unfit = misfit(hello, seat.revision, self._everybody())
                if unfit is not None:
                    return self._refuse(seat, member, unfit.reason, unfit.differences, now)
                member = structs.replace(member, group=group_of(member.fingerprint))
                self._move(seat, Live(member, since_s=now, heard_s=now), "admitted")
                self._changed = True
                return []
            case Killing() if seat.state.incarnation == member.stamp.incarnation:
                return []  # its end is decided
            case Starting() | Live() | Leaving() | Killing() | Vacant() | Retired():
                effects = self._refuse(None, member, "superseded by a newer process in this seat", {}, now)
                if member.stamp.incarnation == incarnation_of(seat.state):
                    return effects  # a process has one epoch: who says so is not the one that would be killed
                return [*effects, KillWorker(member.stamp.worker, member.stamp.incarnation, "superseded")]
            case _:
                assert_never(seat.state)

    def _refuse(
        self, seat: Seat | None, member: Member, reason: str, differences: Mapping[str, str], now: float
    ) -> list[Effect]:
        reply = Reply(member, Reject(protocol_version=PROTOCOL_VERSION, reason=reason, differences=dict(differences)))
        if seat is None or not isinstance(seat.state, Starting) or seat.state.incarnation != member.stamp.incarnation:
            return [reply]
        named = "; ".join(f"{name}: {values}" for name, values in sorted(differences.items()))
        return [reply, *self._kill(seat, seat.state.incarnation, None, f"refused: {reason} ({named})", now)]

    # ---------------------------------------------------------------------------------------- changes

    def _go_on_with_changes(self, now: float) -> list[Effect]:
        """Who is not wanted leaves; then one more process of another revision than is wanted, if all others are
        there."""
        effects: list[Effect] = []
        for seat in [seat for seat in self._seats.values() if self.book.is_surplus(seat)]:
            match seat.state:
                case Live() if self.book.may_leave(seat):
                    effects += self._ask_to_leave(seat, seat.state, "drains, for it is not wanted any more", now)
                case Starting():
                    effects += self._kill(seat, seat.state.incarnation, None, "not wanted any more", now, planned=True)
                case Vacant():
                    self.book.remove(seat)
                case Live() | Leaving() | Killing() | Retired():
                    pass
                case _:
                    assert_never(seat.state)
        outdated = self.book.next_outdated()
        if outdated is not None and isinstance(outdated.state, Live):
            why = f"drains, to go from revision {outdated.revision} to {outdated.spec.revision}"
            effects += self._ask_to_leave(outdated, outdated.state, why, now)
        return effects

    def _everybody(self) -> Iterator[tuple[int, Member]]:
        """Who is a member, each with the revision that it was started with."""
        for seat in self._seats.values():
            if (member := member_of(seat.state)) is not None:
                yield seat.revision, member

    def _forgive_own_absence(self, now: float) -> None:
        """A controller that did not run for a while (stopped, swapped out) heard nobody: that is no one else's fault.
        `next_deadline` has it called every `republish_interval_s` otherwise."""
        absent_s = now - self._timer_at_s
        self._timer_at_s = now
        if absent_s > (self._liveness.republish_interval_s + self._liveness.dead_after_s) / 2:
            for seat in self._seats.values():
                if isinstance(seat.state, Live | Leaving):
                    seat.state = structs.replace(seat.state, heard_s=max(seat.state.heard_s, now))

    def _verdict(self, live: Live | Leaving, now: float) -> str:
        """Why this process must go, or ""."""
        # The same sum as in `next_deadline`: a difference may round to a hair less, and the timer would spin.
        if now >= live.heard_s + self._liveness.dead_after_s:
            return f"silent for {now - live.heard_s:.1f} s"
        if live.member.load.step_age_s >= self._liveness.engine_stuck_after_s:
            return f"engine step has been running for {live.member.load.step_age_s:.1f} s"
        return ""

    def _start(self, seat: Seat, now: float) -> Effect:
        seat.last_incarnation += 1
        seat.revision = seat.spec.revision
        seat.tries += not seat.is_proven
        seat.started_at_s = [at for at in seat.started_at_s if at > now - _RESTART_WINDOW_S] + [now]
        deadline_s = now + self._liveness.start_deadline_s
        self._move(seat, Starting(seat.last_incarnation, deadline_s), "started")
        return StartWorker(seat.spec, seat.last_incarnation)

    def _ask_to_leave(self, seat: Seat, live: Live, why: str, now: float) -> list[Effect]:
        """Who stays is known to all before."""
        self._renew()
        return [*self._tell(now), self._drain(seat, live, why, now)]

    def _drain(self, seat: Seat, live: Live, why: str, now: float) -> DrainWorker:
        drain_s = self._liveness.drain_deadline_s
        self._move(seat, Leaving(live.member, live.since_s, live.heard_s, now + drain_s), why)
        return DrainWorker(seat.spec.worker, live.member.stamp.incarnation, drain_s)

    def _kill(
        self, seat: Seat, incarnation: int, member: Member | None, reason: str, now: float, planned: bool = False
    ) -> list[Effect]:
        retry_at_s = now + self._liveness.dead_after_s
        self._move(seat, Killing(incarnation, member, reason, retry_at_s, planned), reason)
        return [KillWorker(seat.spec.worker, incarnation, reason)]

    def _vacate(self, seat: Seat, reason: str, lived_s: float, now: float) -> None:
        """The seat's process is proven gone: wait, then start a successor (C4)."""
        if self._shutting_down:
            self._move(seat, Retired(), reason)
            return
        seat.restarts += 1
        seat.last_failure = reason
        # A process that served for a while earned a fresh start; one that keeps dying waits longer each time.
        seat.failures_in_row = 0 if lived_s > self._liveness.restart_forgiven_after_s else seat.failures_in_row + 1
        backoff_s = 0.0
        if seat.failures_in_row > 1:
            backoff_s = self._liveness.restart_backoff_s * 2 ** min(seat.failures_in_row - 2, _MAX_BACKOFF_DOUBLINGS)
        if seat.tries >= MOST_TRIES and not (seat.is_proven or self.book.is_surplus(seat)):
            self.book.give_up_upgrade(seat.spec.revision, f"{seat.spec.worker} did not come up: {reason}")
        recent = [at for at in seat.started_at_s if at > now - _RESTART_WINDOW_S]
        limit = self._liveness.max_restarts_per_minute
        bounded_s = recent[-limit] + _RESTART_WINDOW_S if len(recent) >= limit else now
        self._move(seat, Vacant(max(now + backoff_s, bounded_s)), reason)

    def _after(self, now: float) -> list[Effect]:
        """One new version for all that changed in this event; it is published, in a burst the newest one per `BURST_S`:
        each goes to everybody, and a thousand processes may start together."""
        self._renew()
        return self._tell(now) if now >= self._told_at_s + BURST_S else []

    def _renew(self) -> None:
        if self._changed:
            self._changed, self._untold = False, True
            self._version += 1

    def _tell(self, now: float) -> list[Effect]:
        if not self._untold:
            return []
        self._untold = False
        self._published_at_s = self._told_at_s = now
        membership = self.membership()
        return [Publish(membership, membership.members)]

    def _move(self, seat: Seat, state: SeatState, why: str) -> None:
        who = f"{seat.spec.worker}@{incarnation_of(state) or incarnation_of(seat.state)}"
        line = f"{who}: {type(seat.state).__name__} -> {type(state).__name__}: {why}"
        self.transitions = [*self.transitions[-255:], line]
        seat.state = state


def _apart(member: Member | None, first: Member | None) -> Mapping[str, str]:
    """What keeps them from being of one group."""
    if member is None or first is None or member.group in (NO_GROUP, first.group):
        return {}
    return differences(member.fingerprint, first.fingerprint)


def _name_of(state: SeatState) -> str:
    return type(state).__name__.lower()


def _with_load(member: Member, heartbeat: Heartbeat) -> Member:
    return structs.replace(member, load=heartbeat.load)
