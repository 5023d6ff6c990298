"""Simulated processes: the shells of the real cores, on virtual time; workers are in `worker`.

What each has is `SimProcess`, with a roster `MemberProcess`. `GatewayProcess` has a core and clients,
`ControllerProcess` the controller's core. They do what `transfer/io.py`, `gateway.py` and `controller.py` do, without
sockets and threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

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
)
from baton.deploy.controller_core import ControllerCore, KillWorker, Publish, Reply, SeatSpec, StartWorker
from baton.deploy.gateway_core import GatewayCore, GatewayEffect, RequestEnded, TokensArrived
from baton.transfer.membership import Changes, Roster

if TYPE_CHECKING:
    from baton.deploy.sim.world import World


class Wakeup:
    """At most one pending call of `action`, at the earliest time asked for."""

    def __init__(self, process: SimProcess, action: Callable[[], None], label: str) -> None:
        self._process = process
        self._action = action
        self._label = label
        self._at_s: float | None = None

    def want(self, at_s: float | None) -> None:
        if at_s is None or (self._at_s is not None and self._at_s <= at_s):
            return
        self._at_s = at_s

        def fire() -> None:
            if self._at_s == at_s:
                self._at_s = None
                self._action()

        # Exactly then: a rounded difference would fire a hair too early, find nothing due, and so on for ever.
        self._process.world.schedule.at(at_s, lambda: self._process.run(fire, self._label))


class SimProcess:
    """What every process has: a stamp, a life, and a queue of what came while it was stopped."""

    def __init__(self, world: World, stamp: Stamp, role: str) -> None:
        self.world = world
        self.stamp = stamp
        self.role = role
        self.alive = True
        self.paused = False
        self._backlog: list[tuple[Callable[[], None], str]] = []

    def run(self, action: Callable[[], None], label: str) -> None:
        if not self.alive:
            return
        if self.paused:
            self._backlog.append((action, label))
            return
        self.world.schedule.note(f"{self.stamp.worker}@{self.stamp.incarnation} {label}")
        action()

    def after(self, delay_s: float, action: Callable[[], None], label: str) -> None:
        self.world.schedule.after(delay_s, lambda: self.run(action, label))

    def kill(self) -> None:
        """As by SIGKILL: nothing of it happens any more."""
        self.alive = False
        self._backlog.clear()

    def pause(self) -> None:
        """As by SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        backlog, self._backlog = self._backlog, []
        for action, label in backlog:
            self.run(action, label)

    def frame_arrived(self, frame: Frame) -> None:
        raise NotImplementedError

    @property
    def settled(self) -> bool:
        """Owes nobody anything."""
        return True


class MemberProcess(SimProcess):
    """A process with a roster: hears and sends heartbeats, says Hello until it is listed."""

    def __init__(self, world: World, stamp: Stamp, role: str) -> None:
        super().__init__(world, stamp, role)
        self.member = Member(stamp=stamp, role=role, address=f"tcp://{stamp.worker}")
        self.roster = Roster(stamp, world.settings.liveness, world.now)
        self.after(0.0, self._tick, "tick")

    def _tick(self) -> None:
        now = self.world.now
        self._apply(self.roster.on_timer(now))
        if self.roster.speak(now):
            self._speak()
        # Twice per interval, so that a stall of this process is told from the silence of others.
        self.after(self.world.settings.liveness.heartbeat_interval_s / 2, self._tick, "tick")

    def _speak(self) -> None:
        load = self.load()
        for worker, member in self.roster.members.items():
            self.send(worker, member.stamp.epoch, Heartbeat(load=load))
        hello = Hello(protocol_version=PROTOCOL_VERSION, member=self.member)
        self.send(CONTROLLER, 0, Heartbeat(load=load) if self.roster.listed else hello)

    def send(self, worker: WorkerId, epoch: int, body: Body) -> None:
        self.world.network.send(self.stamp, worker, epoch, body)

    def frame_arrived(self, frame: Frame) -> None:
        sender, body = frame.src, frame.body
        if sender.worker == CONTROLLER:
            if isinstance(body, Membership):
                self._apply(self.roster.on_membership(sender, body, self.world.now))
            return
        listed = self.roster.members.get(sender.worker)
        if listed is None or listed.stamp != sender:
            self.world.probe("frame_of_unlisted_process", frame)
            return
        self._apply(self.roster.on_heard(sender, self.world.now))
        if isinstance(body, HandoffBody):
            self.hand_off_frame(frame)
        elif not isinstance(body, Heartbeat) or self.role == "gateway":
            self.deliver(FromPeer(sender, body))

    def _apply(self, changes: Changes) -> None:
        if changes.view is not None:
            if changes.left or changes.joined:
                self.membership_changed(changes.view)
            self.deliver(changes.view)

    def load(self) -> Load:
        raise NotImplementedError

    def deliver(self, event: FromPeer | MembershipView) -> None:
        raise NotImplementedError

    def hand_off_frame(self, frame: Frame) -> None:
        """Only workers have hand-offs."""

    def membership_changed(self, view: MembershipView) -> None:
        """Only workers have hand-offs."""


class GatewayProcess(MemberProcess):
    """A gateway and its clients."""

    def __init__(self, world: World, stamp: Stamp, role: str) -> None:
        settings = world.settings
        self.core = GatewayCore(world.gateway_config, settings.transfer, settings.liveness, settings.max_context_len)
        self._timer: Wakeup | None = None
        super().__init__(world, stamp, role)
        self._timer = Wakeup(self, self._due, "gateway timer")

    def load(self) -> Load:
        return self.core.load()

    def deliver(self, event: FromPeer | MembershipView) -> None:
        self.carry_out(self.core.handle(event, self.world.now))

    def _due(self) -> None:
        self.carry_out(self.core.on_timer(self.world.now))

    def carry_out(self, effects: Iterable[GatewayEffect]) -> None:
        for effect in effects:
            match effect:
                case SendTo():
                    self.send(effect.worker, effect.epoch, effect.body)
                case TokensArrived():
                    self.world.clients.tokens(effect)
                case RequestEnded():
                    self.world.clients.ended(effect)
        assert self._timer is not None
        self._timer.want(self.core.next_deadline())

    def kill(self) -> None:
        super().kill()
        self.world.clients.gateway_died(self)

    def cancel(self, request_id: RequestId) -> None:
        self.run(lambda: self.carry_out(self.core.cancel(request_id, self.world.now)), f"cancel {request_id}")

    def finish(self, request_id: RequestId) -> None:
        """The detokenizer found a stop string."""
        self.after(0.0, lambda: self.carry_out(self.core.finish(request_id, self.world.now)), f"finish {request_id}")

    @property
    def settled(self) -> bool:
        return self.core.idle


class ControllerProcess(SimProcess):
    """Starts, watches and buries the others, through the real controller core."""

    def __init__(self, world: World, seats: Iterable[SeatSpec]) -> None:
        super().__init__(world, Stamp(CONTROLLER, 1, Epoch(1)), "controller")
        self.core = ControllerCore(seats, world.settings.liveness, 1, world.now)
        self._timer = Wakeup(self, self._due, "controller timer")
        self._timer.want(world.now)

    def frame_arrived(self, frame: Frame) -> None:
        self._carry_out(self.core.on_message(frame.src, frame.body, self.world.now))

    def died(self, stamp: Stamp) -> None:
        """The supervisor saw the process end: that is the proof."""
        self.run(
            lambda: self._carry_out(self.core.on_dead(stamp.worker, stamp.incarnation, self.world.now)),
            f"dead {stamp.worker}@{stamp.incarnation}",
        )

    def _due(self) -> None:
        self._carry_out(self.core.on_timer(self.world.now))

    def _carry_out(self, effects: Iterable[StartWorker | KillWorker | Publish | Reply]) -> None:
        for effect in effects:
            match effect:
                case StartWorker(spec, incarnation):
                    self.world.start(spec, incarnation)
                case KillWorker(worker, incarnation):
                    self.world.kill_for_sure(worker, incarnation)
                case Publish(membership):
                    for member in membership.members:
                        self.world.network.send(self.stamp, member.stamp.worker, member.stamp.epoch, membership)
                case Reply(member, body):
                    self.world.network.send(self.stamp, member.stamp.worker, member.stamp.epoch, body)
        self._timer.want(self.core.next_deadline())
