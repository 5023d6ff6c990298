"""Who is in the cluster: the brain of the controller. Pure; the shell is `controller.py`.

Owns: one state per *seat* (a worker id), the incarnations given to it, the membership version, and the decision to
kill, to wait or to start a successor. Never: talks to Ray, to a socket or to a clock; never touches a request or KV.

Invariants:
C1. A stamp leaves the membership only after `on_dead`: the shell has *proven* that its process is gone. Others free
    pages on the strength of it (docs/KV-OWNERSHIP.md: quarantined -> free).
C2. A seat holds at most one process. A successor is started only after its predecessor is proven dead.
C3. Incarnations of a seat and versions of the membership only grow, also over a restart of the controller.
C4. Restarts are bounded: exponential back-off, and at most `max_restarts_per_minute` per seat.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import assert_never

from baton.common.config import LivenessConfig
from baton.common.ids import Stamp, WorkerId
from baton.common.messages import PROTOCOL_VERSION, Body, Heartbeat, Hello, Member, Membership, Reject

COMPUTE_ROLES = frozenset({"prefill", "decode"})
"""Roles that exchange KV pages, so their fingerprints must agree."""

BURST_S = 0.05
"""After news went out, further news waits this long."""
_RESTART_WINDOW_S = 60.0
_MAX_BACKOFF_DOUBLINGS = 6


@dataclass(frozen=True, slots=True)
class SeatSpec:
    """A place in the cluster that is to be filled at all times."""

    worker: WorkerId
    role: str


# ----------------------------------------------------------------------------------------- seat states


@dataclass(frozen=True, slots=True)
class Vacant:
    """Nobody sits here. A process is started at `start_at_s`."""

    start_at_s: float


@dataclass(frozen=True, slots=True)
class Starting:
    """A process was started and has not been admitted yet: it loads its model."""

    incarnation: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Live:
    """Admitted, and a member until proven dead."""

    member: Member
    since_s: float
    heard_s: float


@dataclass(frozen=True, slots=True)
class Killing:
    """To be gone, not proven gone. `member` is still published when it was admitted (C1)."""

    incarnation: int
    member: Member | None
    reason: str
    retry_at_s: float


@dataclass(frozen=True, slots=True)
class Retired:
    """Shut down for good."""


SeatState = Vacant | Starting | Live | Killing | Retired


# --------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a process for this seat; report `on_start_failed` or, later, `on_dead`."""

    spec: SeatSpec
    incarnation: int


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill the process for sure, then report `on_dead`. Repeated until that report; killing twice is harmless."""

    worker: WorkerId
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Send this view to every member of it."""

    membership: Membership


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a process that is not (yet) a member."""

    member: Member
    body: Body


Effect = StartWorker | KillWorker | Publish | Reply


@dataclass(frozen=True, slots=True)
class SeatStatus:
    """What `baton status` shows of one seat."""

    worker: WorkerId
    role: str
    state: str
    incarnation: int
    detail: str
    restarts: int


@dataclass(slots=True)
class _Seat:
    spec: SeatSpec
    state: SeatState
    last_incarnation: int = 0
    restarts: int = 0
    failures_in_row: int = 0
    started_at_s: list[float] = field(default_factory=list)  # within the restart window
    last_failure: str = ""


class ControllerCore:
    """Events in (`on_*`), effects out. `first_version` must be above every version published before."""

    def __init__(self, seats: Iterable[SeatSpec], liveness: LivenessConfig, first_version: int, now: float) -> None:
        self._liveness = liveness
        self._seats = {spec.worker: _Seat(spec, Vacant(now)) for spec in seats}
        self._version = first_version
        self._published_at_s = now
        self._timer_at_s = now
        self._changed = False  # in this event
        self._untold = False  # the newest version is still to be published
        self._told_at_s = now - BURST_S  # when a new version last was
        self._shutting_down = False
        self.transitions: list[str] = []  # the last ones, for people; bounded

    # ------------------------------------------------------------------------------------------ events

    def adopt(self, member: Member, now: float) -> None:
        """A restarted controller found this live process: it stays a member, without a second admission."""
        seat = self._seats.get(member.stamp.worker)
        if seat is None:
            return
        assert isinstance(seat.state, Vacant), f"{member.stamp.worker} adopted twice"
        seat.last_incarnation = max(seat.last_incarnation, member.stamp.incarnation)
        self._move(seat, Live(member, since_s=now, heard_s=now), "found alive")
        self._changed = True

    def adopt_starting(self, worker: WorkerId, incarnation: int, now: float) -> None:
        """A restarted controller found this process still loading."""
        seat = self._seats.get(worker)
        if seat is None:
            return
        assert isinstance(seat.state, Vacant), f"{worker} adopted twice"
        seat.last_incarnation = max(seat.last_incarnation, incarnation)
        self._move(seat, Starting(incarnation, now + self._liveness.start_deadline_s), "found loading")

    def note_incarnation(self, worker: WorkerId, incarnation: int) -> None:
        """This incarnation was perhaps used once: never give it again, nor a lower one (C3)."""
        seat = self._seats.get(worker)
        if seat is not None:
            seat.last_incarnation = max(seat.last_incarnation, incarnation)

    def on_message(self, sender: Stamp, body: Body, now: float) -> list[Effect]:
        """Hello and Heartbeat; anything else is not for a controller and is ignored."""
        effects: list[Effect] = []
        if isinstance(body, Hello) and body.member.stamp == sender:
            effects = self._on_hello(body, now)
        elif isinstance(body, Heartbeat):
            seat = self._seats.get(sender.worker)
            if seat is not None and isinstance(seat.state, Live) and seat.state.member.stamp == sender:
                member = _with_load(seat.state.member, body)
                seat.state = replace(seat.state, member=member, heard_s=now)
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
                case Live() if seat.state.member.stamp.incarnation == incarnation:
                    self._changed = True
                    self._vacate(seat, reason, lived_s=now - seat.state.since_s, now=now)
                case Killing() if seat.state.incarnation == incarnation:
                    self._changed = self._changed or seat.state.member is not None
                    self._vacate(seat, seat.state.reason, lived_s=0.0, now=now)
                case Starting() | Live() | Killing() | Vacant() | Retired():
                    pass  # about a predecessor, or a duplicate
                case _:
                    assert_never(seat.state)
        return self._after(now)

    def shut_down(self, now: float) -> list[Effect]:
        """Ends every process and starts none again. `finished` tells when all are proven dead."""
        self._shutting_down = True
        effects: list[Effect] = []
        for seat in self._seats.values():
            match seat.state:
                case Live():
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
        for seat in self._seats.values():
            match seat.state:
                case Vacant() if now >= seat.state.start_at_s:
                    effects.append(self._start(seat, now))
                case Starting() if now >= seat.state.deadline_s:
                    effects += self._kill(seat, seat.state.incarnation, None, "did not become ready in time", now)
                case Live():
                    verdict = self._verdict(seat.state, now)
                    if verdict:
                        stamp = seat.state.member.stamp
                        effects += self._kill(seat, stamp.incarnation, seat.state.member, verdict, now)
                case Killing() if now >= seat.state.retry_at_s:
                    seat.state = replace(seat.state, retry_at_s=now + self._liveness.dead_after_s)
                    effects.append(KillWorker(seat.spec.worker, seat.state.incarnation, seat.state.reason))
                case Vacant() | Starting() | Killing() | Retired():
                    pass
                case _:
                    assert_never(seat.state)
        if now >= self._published_at_s + self._liveness.republish_interval_s:
            self._published_at_s = now
            if not (self._changed or self._untold):
                effects.append(Publish(self.membership()))
        return effects + self._after(now)

    def next_deadline(self) -> float:
        """When `on_timer` has something to do at the latest."""
        due = [self._published_at_s + self._liveness.republish_interval_s]
        if self._untold:
            due.append(self._told_at_s + BURST_S)
        for seat in self._seats.values():
            match seat.state:
                case Vacant():
                    due.append(seat.state.start_at_s)
                case Starting():
                    due.append(seat.state.deadline_s)
                case Live():
                    due.append(seat.state.heard_s + self._liveness.dead_after_s)
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
        members = [member for seat in self._seats.values() if (member := _member_of(seat.state)) is not None]
        return Membership(version=self._version, members=tuple(members))

    def status(self) -> list[SeatStatus]:
        return [
            SeatStatus(
                worker=seat.spec.worker,
                role=seat.spec.role,
                state=type(seat.state).__name__.lower(),
                incarnation=_incarnation_of(seat.state) or seat.last_incarnation,
                detail=seat.last_failure,
                restarts=seat.restarts,
            )
            for seat in self._seats.values()
        ]

    @property
    def ready(self) -> bool:
        """Every seat is filled by an admitted process."""
        return all(isinstance(seat.state, Live) for seat in self._seats.values())

    @property
    def finished(self) -> bool:
        """After `shut_down`: every process is proven dead."""
        return all(isinstance(seat.state, Retired) for seat in self._seats.values())

    # ------------------------------------------------------------------------------------- transitions

    def _on_hello(self, hello: Hello, now: float) -> list[Effect]:
        member = hello.member
        seat = self._seats.get(member.stamp.worker)
        if hello.protocol_version != PROTOCOL_VERSION:
            difference = {"protocol_version": f"{hello.protocol_version} != {PROTOCOL_VERSION}"}
            return self._refuse(seat, member, "another version of Baton", difference, now)
        if seat is None or seat.spec.role != member.role:
            return self._refuse(None, member, "there is no such seat in this cluster", {}, now)
        match seat.state:
            case Live() if seat.state.member.stamp == member.stamp:
                seat.state = replace(seat.state, heard_s=now)
                return [Publish(self.membership())]  # it asks again: the first answer was lost
            case Starting() if seat.state.incarnation == member.stamp.incarnation:
                differences = self._fingerprint_differences(member)
                if differences:
                    reason = "its KV pages cannot be exchanged with the others'"
                    return self._refuse(seat, member, reason, differences, now)
                self._move(seat, Live(member, since_s=now, heard_s=now), "admitted")
                self._changed = True
                return []
            case Killing() if seat.state.incarnation == member.stamp.incarnation:
                return []  # its end is decided
            case Starting() | Live() | Killing() | Vacant() | Retired():
                effects = self._refuse(None, member, "superseded by a newer process in this seat", {}, now)
                return [*effects, KillWorker(member.stamp.worker, member.stamp.incarnation, "superseded")]
            case _:
                assert_never(seat.state)

    def _refuse(
        self, seat: _Seat | None, member: Member, reason: str, differences: dict[str, str], now: float
    ) -> list[Effect]:
        reply = Reply(member, Reject(protocol_version=PROTOCOL_VERSION, reason=reason, differences=differences))
        if seat is None or not isinstance(seat.state, Starting) or seat.state.incarnation != member.stamp.incarnation:
            return [reply]
        named = "; ".join(f"{name}: {values}" for name, values in sorted(differences.items()))
        return [reply, *self._kill(seat, seat.state.incarnation, None, f"refused: {reason} ({named})", now)]

    def _fingerprint_differences(self, member: Member) -> dict[str, str]:
        """Field -> "theirs != ours" against the first live process that exchanges pages."""
        if member.role not in COMPUTE_ROLES:
            return {}
        for seat in self._seats.values():
            other = _member_of(seat.state)
            if other is not None and other.role in COMPUTE_ROLES:
                ours, theirs = other.fingerprint, member.fingerprint
                return {
                    name: f"{theirs.get(name, '(missing)')} != {ours.get(name, '(missing)')}"
                    for name in sorted(ours.keys() | theirs.keys())
                    if ours.get(name) != theirs.get(name)
                }
        return {}

    def _forgive_own_absence(self, now: float) -> None:
        """A controller that did not run for a while (stopped, swapped out) heard nobody: that is no one else's fault.
        `next_deadline` has it called every `republish_interval_s` otherwise."""
        absent_s = now - self._timer_at_s
        self._timer_at_s = now
        if absent_s > (self._liveness.republish_interval_s + self._liveness.dead_after_s) / 2:
            for seat in self._seats.values():
                if isinstance(seat.state, Live):
                    seat.state = replace(seat.state, heard_s=max(seat.state.heard_s, now))

    def _verdict(self, live: Live, now: float) -> str:
        """Why this process must go, or ""."""
        # The same sum as in `next_deadline`: a difference may round to a hair less, and the timer would spin.
        if now >= live.heard_s + self._liveness.dead_after_s:
            return f"silent for {now - live.heard_s:.1f} s"
        if live.member.load.step_age_s >= self._liveness.engine_stuck_after_s:
            return f"engine step has been running for {live.member.load.step_age_s:.1f} s"
        return ""

    def _start(self, seat: _Seat, now: float) -> Effect:
        seat.last_incarnation += 1
        seat.started_at_s = [at for at in seat.started_at_s if at > now - _RESTART_WINDOW_S] + [now]
        deadline_s = now + self._liveness.start_deadline_s
        self._move(seat, Starting(seat.last_incarnation, deadline_s), "started")
        return StartWorker(seat.spec, seat.last_incarnation)

    def _kill(self, seat: _Seat, incarnation: int, member: Member | None, reason: str, now: float) -> list[Effect]:
        retry_at_s = now + self._liveness.dead_after_s
        self._move(seat, Killing(incarnation, member, reason, retry_at_s), reason)
        return [KillWorker(seat.spec.worker, incarnation, reason)]

    def _vacate(self, seat: _Seat, reason: str, lived_s: float, now: float) -> None:
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
        recent = [at for at in seat.started_at_s if at > now - _RESTART_WINDOW_S]
        limit = self._liveness.max_restarts_per_minute
        bounded_s = recent[-limit] + _RESTART_WINDOW_S if len(recent) >= limit else now
        self._move(seat, Vacant(max(now + backoff_s, bounded_s)), reason)

    def _after(self, now: float) -> list[Effect]:
        """One new version for all that changed in this event; it is published, in a burst the newest one per `BURST_S`:
        each goes to everybody, and a thousand processes may start together."""
        if self._changed:
            self._changed, self._untold = False, True
            self._version += 1
        if not self._untold or now < self._told_at_s + BURST_S:
            return []
        self._untold = False
        self._published_at_s = self._told_at_s = now
        return [Publish(self.membership())]

    def _move(self, seat: _Seat, state: SeatState, why: str) -> None:
        who = f"{seat.spec.worker}@{_incarnation_of(state) or _incarnation_of(seat.state)}"
        line = f"{who}: {type(seat.state).__name__} -> {type(state).__name__}: {why}"
        self.transitions = [*self.transitions[-255:], line]
        seat.state = state


def _incarnation_of(state: SeatState) -> int:
    """Of the process that sits there; 0 when nobody does."""
    match state:
        case Live():
            return state.member.stamp.incarnation
        case Starting() | Killing():
            return state.incarnation
        case Vacant() | Retired():
            return 0
        case _:
            assert_never(state)


def _member_of(state: SeatState) -> Member | None:
    match state:
        case Live():
            return state.member
        case Killing():
            return state.member
        case Vacant() | Starting() | Retired():
            return None
        case _:
            assert_never(state)


def _with_load(member: Member, heartbeat: Heartbeat) -> Member:
    return Member(
        stamp=member.stamp,
        role=member.role,
        address=member.address,
        lanes=member.lanes,
        fingerprint=member.fingerprint,
        load=heartbeat.load,
    )
