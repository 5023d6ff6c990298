"""Simulated processes: the shells of the real cores, on virtual time; workers are in `worker`.

What each has is `SimProcess`, with a roster `MemberProcess`. `GatewayProcess` has a core and clients,
`ControllerProcess` the controller's core. They do what `transfer/io.py`, `gateway.py` and `controller.py` do, without
sockets and threads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from msgspec import structs

from baton.common.engine.core_api import FromPeer, MembershipView, SendTo
from baton.common.ids import CONTROLLER, Epoch, RequestId, Stamp, WorkerId
from baton.common.messages import (
    PROTOCOL_VERSION,
    Body,
    Frame,
    HandoffBody,
    Heartbeat,
    Hello,
    Load,
    Member,
    Membership,
    Submit,
)
from baton.deploy.controller_core import ControllerCore
from baton.deploy.controller_seats import (
    DrainWorker,
    Effect,
    Keep,
    KillWorker,
    Publish,
    Refused,
    Reply,
    SeatSpec,
    StartWorker,
)
from baton.deploy.gateway_core import GatewayCore
from baton.deploy.gateway_states import GatewayEffect, TokensArrived
from baton.deploy.sim.schedule import Event
from baton.deploy.sim.watch_admission import AdmissionWatch
from baton.deploy.sim.watch_members import GatewayWatch
from baton.deploy.sim.watch_requests import RequestWatch
from baton.deploy.sim.watch_seats import SeatWatch
from baton.transfer.membership import NO_CHANGE, Changes, Roster

if TYPE_CHECKING:
    from baton.deploy.sim.world import World

HAND_OFF_KINDS = frozenset(get_args(HandoffBody))


class Wakeup:
    """At most one pending call of `action`, at the earliest time asked for."""

    def __init__(self, process: SimProcess, action: Callable[[], None], label: str) -> None:
        self._process = process
        self._schedule = process.schedule
        self._action = action
        self._label = label
        self._at_s: float | None = None

    def want(self, at_s: float | None) -> None:
        """By the clock of the process."""
        if at_s is None or (self._at_s is not None and self._at_s <= at_s):
            return
        self._at_s = at_s
        # Exactly then: a rounded difference would fire a hair too early, find nothing due, and so on for ever.
        self._schedule.enter(self._process.clock.world_s(at_s), self._process, self._label, self._fire, (at_s,))

    def _fire(self, at_s: float) -> None:
        if self._at_s == at_s:
            self._at_s = None
            self._action()


class SimProcess:
    """What every process has: a stamp, a clock, a life, and a queue of what came while it was stopped."""

    def __init__(self, world: World, stamp: Stamp, role: str) -> None:
        self.world = world
        self.schedule = world.schedule
        self.stamp = stamp
        self.name = f"{stamp.worker}@{stamp.incarnation}"
        self.role = role
        self.clock = world.new_clock()
        self.alive = True
        self.paused = False
        self.backlog: list[Event] = []

    @property
    def now(self) -> float:
        """By its own clock, which shows another time than others' do and may run at another speed."""
        offset_s, rate = self.clock
        return self.schedule.now * rate + offset_s  # `Clock.local_s`, without another call for each event

    def run(self, action: Callable[..., None], label: str, *args: object) -> None:
        """Does it now, or when the process is resumed, or never when it is dead."""
        if not self.alive:
            return
        schedule = self.schedule
        if self.paused:
            self.backlog.append((schedule.now, 0, self, label, action, args))
            return
        schedule.note(self.name, label)
        action(*args)

    def after(self, delay_s: float, action: Callable[..., None], label: str, *args: object) -> None:
        schedule = self.schedule
        schedule.enter(schedule.now + delay_s, self, label, action, args)

    def kill(self) -> None:
        """As by SIGKILL: nothing of it happens any more."""
        self.alive = False
        self.backlog.clear()

    def pause(self) -> None:
        """As by SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        backlog, self.backlog = self.backlog, []
        for _, _, _, label, action, args in backlog:
            self.run(action, label, *args)

    def frame_arrived(self, frame: Frame) -> None:
        raise NotImplementedError

    @property
    def settled(self) -> bool:
        """Owes nobody anything."""
        return True


class MemberProcess(SimProcess):
    """A process with a roster: hears and sends heartbeats, says Hello until it is listed."""

    def __init__(self, world: World, stamp: Stamp, role: str, revision: int) -> None:
        super().__init__(world, stamp, role)
        self.revision = revision
        self.layout = f"v{revision}" if world.settings.new_layouts else "v1"
        fingerprint = {} if role == "gateway" else {"layout": self.layout}
        self.member = Member(stamp=stamp, role=role, address=f"tcp://{stamp.worker}", fingerprint=fingerprint)
        self.roster = Roster(stamp, role, world.settings.liveness, self.now)
        self._told_s = self.now
        self._tick_s = world.settings.liveness.heartbeat_interval_s / 2
        self.after(0.0, self._tick, "tick")

    def _tick(self) -> None:
        now = self.now
        changes = self.roster.on_timer(now)
        if changes is not NO_CHANGE:
            self._apply(changes)
        if self.roster.speak(now):
            self._speak()
        # Twice per interval, so that a stall of this process is told from the silence of others.
        self.after(self._tick_s, self._tick, "tick")

    def _speak(self) -> None:
        heartbeat = Heartbeat(load=self.load(), view=self.roster.version)
        audience = self.roster.audience(self.partners(), self.now)
        self.world.network.send_to_all(self.stamp, audience.told, heartbeat)
        if audience.asked:
            self.world.network.send_to_all(self.stamp, audience.asked, Heartbeat(load=heartbeat.load, asks=True))
        hello = Hello(protocol_version=PROTOCOL_VERSION, member=self.member)
        self.send(CONTROLLER, 0, heartbeat if self.roster.listed else hello)

    def send(self, worker: WorkerId, epoch: int, body: Body) -> None:
        member = self.roster.member(worker)
        assert member is None or self.roster.speaks_to(member), f"{self.name} has no way to {worker}"
        self.world.network.send(self.stamp, worker, epoch, body)

    def frame_arrived(self, frame: Frame) -> None:
        sender, body = frame.src, frame.body
        if frame.dst_epoch not in (0, self.stamp.epoch):
            self.stray_frame(frame)
            return
        if sender.worker == CONTROLLER:
            if isinstance(body, Membership):
                self.world.publications.heard(self.stamp, body)
                self._apply(self.roster.on_membership(sender, body, self.now))
            return
        changes = self.roster.on_heard(sender, self.now)
        if changes is None:
            self.world.probe("frame_of_unlisted_process", frame)
            self.stray_frame(frame)
            return
        if changes is not NO_CHANGE:
            self._apply(changes)
        if isinstance(body, Heartbeat):
            if self.role == "gateway":
                self.deliver(FromPeer(sender, body))
            elif body.asks:
                self.roster.on_asked(sender)
        elif type(body) in HAND_OFF_KINDS:
            self.hand_off_frame(frame)
        else:
            self.deliver(FromPeer(sender, body))

    def knows(self, stamp: Stamp, since_s: float) -> bool:
        """Has had a view with it since then at least."""
        return self._told_s <= since_s and self.roster.lists(stamp)

    def _apply(self, changes: Changes) -> None:
        if changes.view is not None:
            for worker in changes.fell_silent:
                other = self.world.seats.get(worker)
                since_s = self.now - self.world.settings.liveness.dead_after_s
                known = isinstance(other, MemberProcess) and other.knows(self.stamp, since_s)
                assert not (known and self.world.is_sound(worker)), (
                    f"{self.name} has not heard {worker}, which was there all the time"
                )
            if changes.left or changes.joined:
                self._told_s = self.now
                self.membership_changed(changes.view)
            self.deliver(changes.view)

    def drain(self) -> None:
        """It takes nothing new."""
        raise NotImplementedError

    def hand_over(self) -> None:
        """What it has shall go on elsewhere, if that can be."""

    @property
    def drained(self) -> bool:
        """It was told to leave, and has nothing left to do."""
        raise NotImplementedError

    def partners(self) -> list[Stamp]:
        """With whom it has hand-offs."""
        return []

    def load(self) -> Load:
        raise NotImplementedError

    def deliver(self, event: FromPeer | MembershipView) -> None:
        raise NotImplementedError

    def hand_off_frame(self, frame: Frame) -> None:
        """Only workers have hand-offs."""

    def stray_frame(self, frame: Frame) -> None:
        """For a predecessor, or of somebody who is no member: dropped before anybody acts on it."""

    def membership_changed(self, view: MembershipView) -> None:
        """Only workers have hand-offs."""


class GatewayProcess(MemberProcess):
    """A gateway and its clients."""

    def __init__(self, world: World, stamp: Stamp, role: str, revision: int) -> None:
        settings, config = world.settings, world.gateway_config
        rows = min(settings.rows, settings.decode_config.max_running_requests)
        self.core = GatewayCore(
            config,
            settings.transfer,
            settings.liveness,
            settings.max_context_len,
            settings.thinking_token_id,
            settings.routing,
            settings.page_size,
            dataclasses.replace(settings.decode_config, max_running_requests=rows),
        )
        self._draining = False
        name, ahead = str(stamp.worker), config.dispatch_ahead_requests
        self.admission = AdmissionWatch(name, rows, ahead, config.max_inflight_requests)
        self._watch = GatewayWatch(name, settings.transfer.resend_after_s, world.is_prompt)
        self.requests = RequestWatch(name, config.session_ttl_s)
        self._timer: Wakeup | None = None
        super().__init__(world, stamp, role, revision)
        self._timer = Wakeup(self, self._due, "gateway timer")

    def load(self) -> Load:
        return structs.replace(self.core.load(), draining=self._draining)

    def deliver(self, event: FromPeer | MembershipView) -> None:
        now = self.now
        effects = self.core.handle(event, now)
        for effect in effects:
            if isinstance(effect, TokensArrived) and effect.first_index == 0 and isinstance(event, FromPeer):
                self.world.clients.begun(effect.request_id, self._layout_of(event.sender.worker, event.sender.epoch))
        if isinstance(event, MembershipView):
            self._watch.view.told(event)
            self.requests.told(event)
            self.admission.view(event)
        else:
            self._watch.hears(event, now)
            self.requests.hears(event)
            if isinstance(event.body, Heartbeat):
                self.admission.heard(event.sender, event.body.load)
        if effects or not (
            isinstance(event, FromPeer) and isinstance(event.body, Heartbeat)
        ):  # which makes nothing due
            self.carry_out(effects)

    def _due(self) -> None:
        now = self.now
        self.carry_out(self.core.on_timer(now), on_timer=True)
        self.requests.timer(now)

    def carry_out(self, effects: Sequence[GatewayEffect], *, on_timer: bool = False) -> None:
        self._watch.says(effects, self.now, on_timer=on_timer)
        self.admission.says(effects, self.now)
        self.requests.says(effects, self.now)
        for effect in effects:
            if isinstance(effect, TokensArrived):
                self.world.clients.tokens(effect)
            elif isinstance(effect, SendTo):
                if isinstance(effect.body, Submit):
                    layout = self._layout_of(effect.worker, effect.epoch)
                    self.world.clients.placed(self.stamp, effect.epoch, effect.body, layout)
                self.send(effect.worker, effect.epoch, effect.body)
            else:
                self.world.clients.ended(effect)
        assert self._timer is not None
        self._timer.want(self.core.next_deadline())

    def _layout_of(self, worker: WorkerId, epoch: int) -> str:
        """ "": it has had a successor."""
        process = self.world.seats.get(worker)
        return process.layout if isinstance(process, MemberProcess) and process.stamp.epoch == epoch else ""

    def kill(self) -> None:
        super().kill()
        self.world.clients.gateway_died(self)

    def drain(self) -> None:
        self._draining = True

    @property
    def drained(self) -> bool:
        return self._draining and self.core.idle

    @property
    def takes_requests(self) -> bool:
        return self.alive and not self.paused and not self._draining and self.roster.listed

    def finish(self, request_id: RequestId) -> None:
        """The text so far has a stop string in it."""
        self.admission.finished(request_id)
        self.carry_out(self.core.finish(request_id, self.now))

    def cancel(self, request_id: RequestId) -> None:
        self.run(lambda: self.carry_out(self.core.cancel(request_id, self.now)), f"cancel {request_id}")

    @property
    def settled(self) -> bool:
        return self.core.idle


class ControllerProcess(SimProcess):
    """Starts, watches and buries the others, through the real controller core."""

    def __init__(self, world: World, seats: Iterable[SeatSpec], first_version: int = 1) -> None:
        super().__init__(world, Stamp(CONTROLLER, 1, Epoch(1)), "controller")
        self.core = ControllerCore(seats, world.settings.liveness, first_version, self.now)
        self._watch = SeatWatch(self.core, world.settings.liveness)
        self._timer = Wakeup(self, self._due, "controller timer")
        self._timer.want(self.now)

    def frame_arrived(self, frame: Frame) -> None:
        effects = self.core.on_message(frame.src, frame.body, self.now)
        if effects or not isinstance(frame.body, Heartbeat):  # which makes nothing due earlier
            self._carry_out(effects)

    def rebuild(self, given: Mapping[WorkerId, int], living: Sequence[SimProcess]) -> None:
        """After its predecessor's death: who is there stays, and no incarnation is `given` twice."""
        effects: list[Effect] = []
        members = [process for process in living if isinstance(process, MemberProcess)]
        views = [view for process in members if (view := process.roster.latest) is not None]
        # One that has not heard of its own admission yet is a member all the same: others have (C1).
        published = {member.stamp for view in views for member in view.members}
        for member in [member for view in views for member in view.members]:
            self.core.note_incarnation(member.stamp.worker, member.stamp.incarnation, member.role)
        for worker, incarnation in given.items():
            self.core.note_incarnation(worker, incarnation)
        for process in living:
            if isinstance(process, MemberProcess) and process.stamp in published:
                leaving, revision = process.load().draining, process.revision
                effects += self.core.adopt(process.member, self.now, leaving=leaving, revision=revision)
            elif isinstance(process, MemberProcess):
                stamp, revision = process.stamp, process.revision
                self.core.adopt_starting(stamp.worker, stamp.incarnation, process.role, self.now, revision)
        self._carry_out(effects)
        self._timer.want(self.now)

    def died(self, stamp: Stamp) -> None:
        """The supervisor saw the process end: that is the proof."""
        self.run(
            lambda: self._carry_out(self.core.on_dead(stamp.worker, stamp.incarnation, self.now)),
            f"dead {stamp.worker}@{stamp.incarnation}",
        )

    def start_failed(self, stamp: Stamp) -> None:
        """It says itself that it cannot begin."""
        self.run(
            lambda: self._carry_out(self.core.on_start_failed(stamp.worker, stamp.incarnation, "no room", self.now)),
            f"failed {stamp.worker}@{stamp.incarnation}",
        )

    def shut_down(self) -> None:
        self.run(lambda: self._carry_out(self.core.shut_down(self.now)), "shut down")

    def change(self, seats: Sequence[SeatSpec]) -> None:
        """An operator wants the cluster to be like this."""
        self.run(self._change, "change", seats)

    def _change(self, seats: Sequence[SeatSpec]) -> None:
        self._watch.wants(seats)
        effects = self.core.change(seats, self.world.settings.liveness, self.now)
        self._watch.upgrades(effects)
        self._carry_out(effects)

    def flip(self, worker: WorkerId) -> None:
        """An operator wants the worker there in the other role. It may be refused."""
        self.run(self._flip, f"flip {worker}", worker)

    def _flip(self, worker: WorkerId) -> None:
        process = self.world.seats.get(worker)
        role = "decode" if process is not None and process.role == "prefill" else "prefill"
        live = self.core.live_members()
        effects = self.core.replace_worker(worker, role, self.now)
        if not isinstance(effects, Refused):
            self._watch.flipped(worker, role, live)
            self.world.probe("flip", (process, role))
            self._carry_out(effects)

    def drained(self, stamp: Stamp) -> None:
        """The worker says that it has nothing left to do."""
        self.run(
            lambda: self._carry_out(self.core.on_drained(stamp.worker, stamp.incarnation, self.now)),
            f"drained {stamp.worker}@{stamp.incarnation}",
        )

    def _due(self) -> None:
        effects = self.core.on_timer(self.now)
        self._watch.upgrades(effects)
        self._carry_out(effects)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartWorker(spec, incarnation):
                    self._watch.starts(spec, self.now)
                    self.world.start(spec, incarnation)
                case DrainWorker(worker, incarnation, timeout_s):
                    self.world.ask_to_leave(worker, incarnation, timeout_s)
                case KillWorker(worker, incarnation):
                    self.world.leaves.dies(worker, incarnation)
                    self.world.kill_for_sure(worker, incarnation)
                case Publish(membership, readers):
                    self.world.publications.published(membership)
                    self.world.leaves.published(membership)
                    for member in readers:
                        self.world.network.send(self.stamp, member.stamp.worker, member.stamp.epoch, membership)
                case Reply(member, body):
                    self.world.network.send(self.stamp, member.stamp.worker, member.stamp.epoch, body)
                case Keep():
                    self.world.keep(effect)
        self._timer.want(self.core.next_deadline())
