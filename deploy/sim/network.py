"""Control frames and region bytes between simulated processes: delayed, lost, doubled, reordered, cut, clogged.

Owns what is under way and which pairs are cut off from each other. Knows who sits in a seat *now*, so that a frame for
a dead process reaches its successor, as it would on a real address. Never: looks into a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.messages import Body, Frame, HandoffBody, Heartbeat, Member, Membership, decode_frame, encode_frame
from baton.deploy.sim.schedule import Schedule
from baton.deploy.sim.settings import NO_FAULTS, LinkFaults


class Receiver(Protocol):
    """A process, as the network sees it."""

    stamp: Stamp
    name: str
    alive: bool
    paused: bool

    def run(self, action: Callable[..., None], label: str, *args: object) -> None:
        """Does it now, or when the process is resumed, or never when it is dead."""
        ...

    def frame_arrived(self, frame: Frame) -> None: ...


def no_extra_delay(sender: Stamp, worker: WorkerId, body: Body) -> float:
    return 0.0


class Network:
    """`seat` finds the process that sits in a seat now. Scenarios steer single frames through `extra_delay_s`: what it
    says is added to the delay; below zero, the frame is lost."""

    def __init__(
        self,
        schedule: Schedule,
        faults: LinkFaults,
        seat: Callable[[WorkerId], Receiver | None],
        probe: Callable[[str, object], None],
    ) -> None:
        self._schedule = schedule
        self.faults = faults
        self.damaged: set[int] = set()  # tags of regions that were
        self._seat = seat
        self._probe = probe
        self.extra_delay_s: Callable[[Stamp, WorkerId, Body], float] = no_extra_delay
        self._cut: dict[tuple[WorkerId, WorkerId], int] = {}  # directed; how many partitions cut it
        self._clogged_until_s: dict[tuple[WorkerId, WorkerId], float] = {}  # directed
        self._hung_until_s: dict[tuple[WorkerId, WorkerId, str], float] = {}  # directed, by lane
        self._view: tuple[Body | None, Body] = (None, Heartbeat())  # the last membership sent, and as it arrives
        self._labels: dict[tuple[WorkerId, type[Body]], str] = {}  # of frames, for the trace

    @property
    def steered(self) -> bool:
        return self.extra_delay_s is not no_extra_delay

    def calm_down(self) -> None:
        """No faults from here on."""
        self.faults = LinkFaults(delay_s=self.faults.delay_s) if self.faults is not NO_FAULTS else NO_FAULTS

    def cut(self, a: WorkerId, b: WorkerId, seconds: float) -> None:
        """Nothing passes from `a` to `b` (one direction) for a while: what is sent meanwhile is lost."""
        self._cut[(a, b)] = self._cut.get((a, b), 0) + 1

        self._schedule.after(seconds, self._heal, a, b)

    def clog(self, a: WorkerId, b: WorkerId, seconds: float) -> None:
        """Nothing arrives at `b` from `a` for a while: what is sent meanwhile arrives afterwards."""
        self._clogged_until_s[(a, b)] = self._schedule.now + seconds

    def hang(self, a: WorkerId, b: WorkerId, lane: str, seconds: float) -> None:
        """Bytes from `a` to `b` on this lane arrive afterwards, if anybody wants them then. Frames go on."""
        self._hung_until_s[(a, b, lane)] = self._schedule.now + seconds

    def hangs(self, a: WorkerId, b: WorkerId, lane: str) -> bool:
        return self._hung_until_s.get((a, b, lane), 0.0) > self._schedule.now

    def _heal(self, a: WorkerId, b: WorkerId) -> None:
        self._cut[(a, b)] -= 1
        if not self._cut[(a, b)]:
            del self._cut[(a, b)]

    def send(self, sender: Stamp, worker: WorkerId, dst_epoch: int, body: Body) -> None:
        """One control frame; it passes through the real codec."""
        self._probe("sent", (sender, worker, body))
        schedule, faults, extra_s = self._schedule, self.faults, 0.0
        if self.steered:
            extra_s = self.extra_delay_s(sender, worker, body)
        cut = self._cut and (sender.worker, worker) in self._cut
        if extra_s < 0 or cut or (faults.loss and schedule.rng.random() < faults.loss):
            self._probe("frame_lost", (sender, worker, body))
            return
        frame = Frame(sender, Epoch(dst_epoch), body)
        if isinstance(body, Membership):  # to everybody: decoded once, so that they share what they keep of it
            if body is not self._view[0]:
                self._view = body, decode_frame(encode_frame(frame)).body
            frame = Frame(sender, Epoch(dst_epoch), self._view[1])
        elif not isinstance(body, Heartbeat):
            frame = decode_frame(encode_frame(frame))
        copies = 2 if faults.duplicate and schedule.rng.random() < faults.duplicate else 1
        for _ in range(copies):
            delay_s = extra_s + self._delay_s(sender.worker, worker)
            schedule.enter(schedule.now + delay_s, None, "", self._arrive, (worker, frame))

    def send_to_all(self, sender: Stamp, members: Mapping[WorkerId, Member], heartbeat: Heartbeat) -> None:
        """One to each; all that `send` does, without looking again for faults that there are not."""
        schedule, faults = self._schedule, self.faults
        steered = self.steered or self._cut or self._clogged_until_s
        if steered or faults.loss or faults.duplicate or faults.reorder:
            for worker, member in members.items():
                self.send(sender, worker, member.stamp.epoch, heartbeat)
            return
        now, random, delay_s, enter, arrive = (
            schedule.now,
            schedule.rng.random,
            faults.delay_s,
            schedule.enter,
            self._arrive,
        )
        for worker, member in members.items():
            enter(now + random() * delay_s, None, "", arrive, (worker, Frame(sender, member.stamp.epoch, heartbeat)))

    def inject(self, after_s: float, worker: WorkerId, frame: Frame) -> None:
        """What somebody else than its sender sends, or sends again."""
        self._schedule.after(after_s, self._arrive, worker, frame)

    def carry(self, sender: Stamp, worker: WorkerId, lane: str, arrive: Callable[[Receiver], None]) -> None:
        """Region bytes: `arrive` is called with whoever sits at the other end then. Never doubled: a data lane is a
        stream. Lost only with the lane, which is the data plane's to simulate."""
        if (sender.worker, worker) not in self._cut:
            delay_s = self._delay_s(sender.worker, worker)
            if self._hung_until_s:
                hung_s = self._hung_until_s.get((sender.worker, worker, lane), 0.0) - self._schedule.now
                delay_s += max(0.0, hung_s)
            self._schedule.after(delay_s, self._deliver, worker, arrive)

    def _deliver(self, worker: WorkerId, arrive: Callable[[Receiver], None]) -> None:
        receiver = self._seat(worker)
        if receiver is not None:
            receiver.run(arrive, "region", receiver)

    def _arrive(self, worker: WorkerId, frame: Frame) -> None:
        receiver = self._seat(worker)
        if receiver is None:
            return
        if frame.dst_epoch and frame.dst_epoch != receiver.stamp.epoch:
            self._probe("frame_for_another_epoch", frame)
            if not isinstance(frame.body, HandoffBody):  # an endpoint looks for itself
                return
        kind = (frame.src.worker, type(frame.body))
        label = self._labels.get(kind)
        if label is None:
            label = self._labels[kind] = f"{type(frame.body).__name__} of {frame.src.worker}"
        if receiver.paused:
            receiver.run(receiver.frame_arrived, label, frame)
        elif receiver.alive:
            self._schedule.note(receiver.name, label)
            receiver.frame_arrived(frame)

    def _delay_s(self, a: WorkerId, b: WorkerId) -> float:
        rng, faults = self._schedule.rng, self.faults
        delay_s = rng.random() * faults.delay_s
        if self._clogged_until_s:
            delay_s += max(0.0, self._clogged_until_s.get((a, b), 0.0) - self._schedule.now)
        if faults.reorder and rng.random() < faults.reorder:
            delay_s += rng.random() * faults.reorder_s
        return delay_s
