"""The I/O thread of a process: sockets, hand-offs, heartbeats, deadlines. It never waits for the engine, nor the engine
for it.

Owns: the mesh, the roster, and in a worker the endpoint and the data plane with its staging memory. Carries out their
effects. Never: a decision (the endpoint, the roster and the cores decide), or KV state.

Queue towards this thread: commands of the engine are never refused (each is about a hand-off, and those are bounded);
of plain messages at most POSTED_MESSAGES wait, further ones are dropped and counted, and whoever wanted them sends
again. Queue towards the engine: whatever `deliver` says; a message that it refuses is dropped, and its sender sends it
again.

An exception here is a bug and ends the process (`on_fatal`): a worker without its I/O thread can finish nothing.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import version

from msgspec import structs

from baton.common.asking import ResultT, question
from baton.common.clock import Clock, MonotonicClock
from baton.common.compat import KV_VERSION, rounded_weights, spoken
from baton.common.config import ClusterConfig
from baton.common.engine.batch import KvMemory
from baton.common.engine.core_api import FromPeer, MembershipView, SendTo, group_in
from baton.common.engine.guiding import Guides
from baton.common.engine.loop import end_process
from baton.common.errors import BatonError, ErrorCode
from baton.common.ids import CONTROLLER, Epoch, Stamp, WorkerId
from baton.common.log import EventLog
from baton.common.messages import (
    PROTOCOL_VERSION,
    Body,
    Frame,
    HandoffBody,
    Heartbeat,
    Hello,
    LaneAddress,
    Load,
    Member,
    Membership,
    Outputs,
    Probe,
    ProbeReady,
    Reject,
)
from baton.common.spans import trace_id_of
from baton.common.trace import Recorder
from baton.common.tracing import NOBODY, SpanSink
from baton.transfer.allow_list import PairSecrets
from baton.transfer.api import SinkCommand, SourceCommand
from baton.transfer.compiling import Compiling
from baton.transfer.data_plane import DataPlane, DataPlaneSnapshot
from baton.transfer.endpoint import Endpoint
from baton.transfer.handoff_spans import handoff_spans
from baton.transfer.keys import NOWHERE, ControllerDoor, KeyPair
from baton.transfer.lanes import LaneFactory, build_lanes
from baton.transfer.membership import Changes, Roster
from baton.transfer.mesh import Mesh, MeshCounters
from baton.transfer.output_frames import gathered
from baton.transfer.reports import Flow, HandoffTimes
from baton.transfer.session.effects import DataEvent, EndpointEffect, EngineEvent, SendFrame
from baton.transfer.staging import state_pieces_of
from baton.transfer.stalls import BEHIND_SILENCE_S

POSTED_MESSAGES = 1 << 16
POSTED_PER_TURN = 1024

MeshFactory = Callable[[Stamp, str, KeyPair | None], Mesh]

_log = EventLog("baton.io")


def _kv_of(memory: KvMemory | None, config: ClusterConfig, model_identity: str) -> dict[str, str]:
    """What must agree between those that hand KV over to each other, and go on with each other's answers."""
    if memory is None:
        return {}
    computed = {"model": model_identity, "kv_version": str(KV_VERSION)}
    computed |= rounded_weights(config.model.weights)
    return memory.fingerprint() | computed | {"digest": config.transfer.digest}


class NotAdmitted(BatonError):
    """The controller does not let this process in. Another process of the same kind would fare no better."""


@dataclass(frozen=True, slots=True)
class IoSnapshot:
    """What this thread last said of itself, once per heartbeat. `at_s` is old when the thread is stuck."""

    at_s: float
    listed: bool
    members: tuple[Member, ...]
    silent: frozenset[WorkerId]
    mesh: MeshCounters
    dropped: Mapping[str, int]
    data: DataPlaneSnapshot | None
    hand_offs: int  # sessions that hold pages here
    endpoint: Mapping[str, int]


def refusals_of(snapshot: IoSnapshot) -> dict[str, int]:
    """What came over this process's sockets and was not heard, by why: what its mesh says (`MeshCounters.refusals`), of
    no member (`unlisted`), of the controller and none of its words (`controller`), an offer without a good ticket
    (`ticket`), of no use to a hand-off (`handoff`; repeated ones too), stray on a lane (`lane`), and what there was no
    room for (`full`)."""
    dropped = snapshot.dropped
    tickets = sum(count for name, count in snapshot.endpoint.items() if name.startswith("ticket."))
    return snapshot.mesh.refusals() | {
        "unlisted": dropped.get("frame_of_unlisted_process", 0),
        "controller": dropped.get("odd_frame_of_controller", 0),
        "ticket": tickets,
        "handoff": sum(snapshot.endpoint.values()) - tickets,
        "lane": 0 if snapshot.data is None else snapshot.data.stray,
        "full": dropped.get("refused_by_owner", 0) + dropped.get("uncompiled", 0),
    }


class _HandOffs:
    """What only a worker has: its pool's end of the transfer plane."""

    def __init__(
        self, stamp: Stamp, role: str, config: ClusterConfig, mesh: Mesh, memory: KvMemory, lanes: LaneFactory
    ) -> None:
        built = lanes(stamp, config, mesh, memory)
        returns = memory.layout.only_full and config.prefill_worker.kv_return != "off"
        self.receives_from = "prefill" if role == "decode" else "decode" if returns else ""
        stalled_s = config.liveness.dead_after_s + BEHIND_SILENCE_S
        self.data = DataPlane(
            config.transfer,
            memory,
            built.staged,
            built.pull,
            built.direct,
            built.copier,
            stalled_s=stalled_s,
            late=built.late,
            missing=built.missing,
        )
        names = [transport.lane for transport in (*built.staged, *built.pull, *built.direct, *built.late)]
        pieces = state_pieces_of(memory)
        self.endpoint = Endpoint(
            stamp,
            config.transfer,
            memory.layout,
            names,
            state_pieces=pieces,
            layers=memory.layers,
            secret_with=PairSecrets(mesh.keys, mesh.allow).of("ticket"),
        )


class IoThread:
    """Sockets are opened here (ConfigError when they cannot be), the thread runs from `start` to `stop`. `deliver`,
    `load` and `on_fatal` are called on the thread and must not wait. `memory` None: a process without KV. With `guides`
    a frame that asks for a token under a grammar is heard when that is compiled."""

    def __init__(
        self,
        stamp: Stamp,
        role: str,
        config: ClusterConfig,
        memory: KvMemory | None,
        keys: KeyPair | None,
        deliver: Callable[[object], object],
        *,
        controller: ControllerDoor = NOWHERE,
        load: Callable[[], Load] = Load,
        clock: Clock | None = None,
        on_fatal: Callable[[], None] = end_process,
        lanes: LaneFactory = build_lanes,
        mesh: MeshFactory = Mesh,
        guides: Guides | None = None,
        spans: SpanSink = NOBODY,
        model_identity: str = "",
    ) -> None:
        self._stamp = stamp
        self._deliver = deliver
        self._load = load
        self._clock = clock or MonotonicClock()
        self._on_fatal = on_fatal
        self._spans = spans
        self._hears_loads = role == "gateway"
        self._roster = Roster(stamp, role, config.liveness, self._clock.now())
        self._mesh = mesh(stamp, config.bind_host, keys)
        self._compiling = None if guides is None else Compiling(guides, self._mesh.wake)
        self._hand_offs: _HandOffs | None = None
        addresses: tuple[LaneAddress, ...] = ()
        if memory is not None:
            try:
                self._hand_offs = _HandOffs(stamp, role, config, self._mesh, memory, lanes)
            except BaseException:
                self._mesh.close()
                raise
            addresses = self._hand_offs.data.addresses()
        self.member = Member(
            stamp=stamp,
            role=role,
            address=self._mesh.address,
            key=keys.public if keys is not None else "",
            lanes=addresses,
            fingerprint=spoken(version("baton-pd")) | _kv_of(memory, config, model_identity),
        )
        self._controller = controller
        self._commands: deque[object] = deque()
        self._messages: deque[SendTo] = deque()
        self._questions: deque[Callable[[], None]] = deque()
        self._dropped: Counter[str] = Counter()
        self._stopping = False
        self.leaving = False  # told to the controller, which sees to a successor; set from any thread
        self._told = threading.Condition()
        self._rejected: NotAdmitted | None = None
        self._was_listed = False
        self._snapshot = self._take_snapshot(self._clock.now())
        if self._hand_offs is not None:
            self._hand_offs.endpoint.ledger.on_ended = self._on_handoff_ended
        self._thread = threading.Thread(target=self._run, name="io", daemon=True)

    # ------------------------------------------------------------------------------ from any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Closes everything; what is under way is lost. False: the thread did not end in time."""
        self._stopping = True
        self._mesh.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def post(self, effect: object) -> None:
        """A SendTo, or a command of `baton.transfer.api`. Never waits."""
        if isinstance(effect, SendTo):
            if len(self._messages) >= POSTED_MESSAGES:
                self._dropped["posted_message"] += 1
                return
            self._messages.append(effect)
        else:
            self._commands.append(effect)
        self._mesh.wake()

    def set_controller(self, door: ControllerDoor) -> None:
        """The controller is there now."""
        self._controller = door
        self._mesh.wake()

    def wait_admitted(self, timeout_s: float) -> None:
        """Returns when the membership lists this process. Raises NotAdmitted: it will not, or has not by then."""
        with self._told:
            self._told.wait_for(lambda: self._snapshot.listed or self._rejected is not None, timeout_s)
            if self._rejected is not None:
                raise self._rejected
            if not self._snapshot.listed:
                raise NotAdmitted(f"the controller at {self._controller.address} did not answer")

    def snapshot(self) -> IoSnapshot:
        return self._snapshot

    def call(self, function: Callable[[], ResultT]) -> Future[ResultT]:
        """Runs `function` on this thread between two turns. What it raises is the asker's."""
        future, answer = question(function)
        self._questions.append(answer)
        self._mesh.wake()
        return future

    def flows(self) -> Future[tuple[Flow, ...]]:
        """What has moved, by peer, lane and direction; nothing in a process without KV."""

        def take() -> tuple[Flow, ...]:
            ours = self._hand_offs
            if ours is None:
                return ()
            flows = ours.endpoint.ledger.flows(self._clock.now())
            return tuple(
                structs.replace(flow, recent_gbps=ours.data.lane_gbps(WorkerId(flow.peer), flow.lane)) for flow in flows
            )

        return self.call(take)

    def handoff_times(self) -> Future[tuple[HandoffTimes, ...]]:
        """The last hand-offs, and the open ones."""
        ours = self._hand_offs
        return self.call(lambda: () if ours is None else tuple(ours.endpoint.ledger.handoffs()))

    def trace(self, recorder: Recorder | None) -> Future[None]:
        """From the next turn on this thread is recorded, or no more."""

        def switch() -> None:
            if self._hand_offs is not None:
                self._hand_offs.data.trace = self._hand_offs.endpoint.ledger.trace = recorder

        return self.call(switch)

    @property
    def latest_membership(self) -> Membership | None:
        return self._roster.latest

    # ----------------------------------------------------------------------------------- I/O thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            if self._compiling is not None:
                self._compiling.stop()
            if self._hand_offs is not None:
                self._hand_offs.data.close()
            self._mesh.close()
        except Exception:  # noqa: BLE001 - the thread's top frame
            _log.fatal("io_thread_failed")
            self._on_fatal()
            self._mesh.close()  # whoever survived that: an open socket would hold up the end of the process

    def _turn(self) -> None:
        """One round: wait, hear, do, speak."""
        frames = self._mesh.poll(self._wait_s(self._clock.now()))
        now = self._clock.now()
        self._apply(self._roster.on_timer(now), now)
        if self._compiling is not None:
            frames = [*self._compiling.take(), *(frame for frame in frames if not self._compiling.holds(frame))]
        for frame in frames:
            self._on_frame(frame, now)
        self._take_posted(now)
        if self._hand_offs is not None:
            events = self._hand_offs.data.poll(now)
            now = self._clock.now()  # copying took a while
            self._answer(events, now)
            self._carry_out(self._hand_offs.endpoint.on_timer(now), now)
            self._carry_out(self._hand_offs.data.take_frames(), now)
        if self._roster.speak(now):
            self._speak(now)

    def _wait_s(self, now: float) -> float:
        waits = [self._roster.next_deadline - now]
        if self._commands or self._messages or self._questions:
            return 0.0
        if self._hand_offs is not None:
            due_s, data_wait_s = self._hand_offs.endpoint.next_deadline(), self._hand_offs.data.wait_s(now)
            waits += [due_s - now] if due_s is not None else []
            waits += [data_wait_s] if data_wait_s is not None else []
        return max(0.0, min(waits))

    def _take_posted(self, now: float) -> None:
        for _ in range(len(self._questions)):
            self._questions.popleft()()
        for _ in range(min(POSTED_PER_TURN, len(self._commands))):
            command = self._commands.popleft()
            assert self._hand_offs is not None, f"{command} was posted to a process without KV"
            assert isinstance(command, SinkCommand | SourceCommand), command
            self._carry_out(self._hand_offs.endpoint.command(command, now), now)
        messages = [self._messages.popleft() for _ in range(min(POSTED_PER_TURN, len(self._messages)))]
        for message in gathered(messages):
            self._mesh.send(message.worker, Epoch(message.epoch), message.body)

    def _on_frame(self, frame: Frame, now: float) -> None:
        sender, body = frame.src, frame.body
        if sender.worker == CONTROLLER:
            self._on_controller(sender, body, now)
            return
        changes = self._roster.on_heard(sender, now)
        if changes is None:
            self._dropped["frame_of_unlisted_process"] += 1
            return
        self._apply(changes, now)
        if isinstance(body, HandoffBody):
            if self._hand_offs is not None:
                self._carry_out(self._hand_offs.endpoint.on_frame(frame, now), now)
        elif isinstance(body, Probe | ProbeReady):
            if self._hand_offs is not None:
                self._hand_offs.data.on_frame(body, sender, now)
        elif isinstance(body, Heartbeat) and not self._hears_loads:
            if body.asks:
                self._roster.on_asked(sender)
        else:
            for one in body.parts if isinstance(body, Outputs) else (body,):
                if self._deliver(FromPeer(sender, one)) is False:
                    self._dropped["refused_by_owner"] += 1

    def _on_controller(self, controller: Stamp, body: Body, now: float) -> None:
        match body:
            case Membership():
                self._apply(self._roster.on_membership(controller, body, now), now)
            case Reject():
                self._on_rejected(body)
            case _:
                self._dropped["odd_frame_of_controller"] += 1

    def _on_rejected(self, body: Reject) -> None:
        named = "; ".join(f"{name}: {values}" for name, values in sorted(body.differences.items()))
        with self._told:
            self._rejected = NotAdmitted(f"{body.reason} ({named})" if named else body.reason)
            self._told.notify_all()
        if self._was_listed:
            _log.error("superseded", reason=body.reason)  # another process sits in this seat: this one must go
            self._on_fatal()

    def _apply(self, changes: Changes, now: float) -> None:
        """News of the others: who is let in first, then connections, so that whatever the news cause can be sent."""
        if changes.left or changes.joined:
            self._mesh.allow.set_members(self._roster.callers())
        for member in changes.left:
            self._mesh.disconnect(member.stamp.worker)
            _log.info("left", peer=member.stamp.worker, incarnation=member.stamp.incarnation)
        for member in changes.joined:
            if self._roster.speaks_to(member):
                self._mesh.connect(member.stamp.worker, member.address, member.key)
            _log.info("joined", peer=member.stamp.worker, incarnation=member.stamp.incarnation)
        for worker in changes.fell_silent:
            _log.warning("silent", peer=worker)
        for worker in changes.came_back:
            _log.info("heard_again", peer=worker)
        if changes.view is not None:
            if self._hand_offs is not None and (changes.left or changes.joined):
                self._tell_hand_offs(self._hand_offs, changes, changes.view, now)
            self._publish(now)
            self._deliver(changes.view)

    def _tell_hand_offs(self, hand_offs: _HandOffs, changes: Changes, view: MembershipView, now: float) -> None:
        for member in changes.left:
            hand_offs.data.shut_out(member.stamp)
        group = group_in(view, self._stamp)
        others = self._roster.members.values()
        sources = [one for one in others if one.role == hand_offs.receives_from and one.group == group]
        hand_offs.data.set_peers(sources, now)
        self._carry_out(hand_offs.endpoint.on_membership(view, now), now)

    def _speak(self, now: float) -> None:
        """Once per heartbeat interval."""
        load = self._load()
        audience = self._roster.audience(() if self._hand_offs is None else self._hand_offs.endpoint.peers(), now)
        for members, asks in ((audience.told, False), (audience.asked, True)):
            heartbeat = Heartbeat(load=load, asks=asks, view=self._roster.version)
            for worker, member in members.items():
                self._mesh.send(worker, member.stamp.epoch, heartbeat)
        door = self._controller
        if door.address:
            self._mesh.allow.set_controller(door.key)
            self._mesh.connect(CONTROLLER, door.address, door.key, None if self._roster.listed else door.guest)
            heartbeat = Heartbeat(load=load, view=self._roster.version, leaving=self.leaving)
            hello = Hello(protocol_version=PROTOCOL_VERSION, member=self.member)
            self._mesh.send(CONTROLLER, Epoch(0), heartbeat if self._roster.listed else hello)
        if self._hand_offs is not None:
            for worker in self._roster.silent:
                self._carry_out(self._hand_offs.endpoint.on_peer_silent(worker, now), now)
        self._publish(now)

    def _answer(self, events: Iterable[DataEvent], now: float) -> None:
        assert self._hand_offs is not None
        for event in events:
            self._carry_out(self._hand_offs.endpoint.on_data(event, now), now)

    def _carry_out(self, effects: Iterable[EndpointEffect], now: float) -> None:
        """Data-plane effects may be answered at once, and the answers may have effects: all of them, in order."""
        assert self._hand_offs is not None
        waiting = deque(effects)
        while waiting:
            effect = waiting.popleft()
            match effect:
                case SendFrame():
                    self._mesh.send(effect.worker, Epoch(effect.dst_epoch), effect.body)
                case EngineEvent():
                    self._deliver(effect.event)
                case _:
                    for event in self._hand_offs.data.execute(effect, now):
                        waiting.extend(self._hand_offs.endpoint.on_data(event, now))

    def _on_handoff_ended(self, times: HandoffTimes) -> None:
        if times.code:
            log = _log.info if times.code == ErrorCode.CANCELLED else _log.warning
            log(
                "handoff_failed",
                request=times.request_id,
                trace=trace_id_of(times.trace),
                handoff=times.handoff,
                direction=times.direction,
                peer=times.peer,
                lane=times.lane,
                code=times.code,
                bytes=times.nbytes,
            )
        for span in handoff_spans(times):
            self._spans.tell(span)

    def _publish(self, now: float) -> None:
        snapshot = self._take_snapshot(now)
        with self._told:
            changed = snapshot.listed != self._snapshot.listed
            self._snapshot = snapshot
            self._was_listed = self._was_listed or snapshot.listed
            if changed:
                self._told.notify_all()

    def _take_snapshot(self, now: float) -> IoSnapshot:
        hand_offs = self._hand_offs
        return IoSnapshot(
            at_s=now,
            listed=self._roster.listed,
            members=tuple(self._roster.members.values()),
            silent=self._roster.silent,
            mesh=self._mesh.counters,
            dropped=dict(self._dropped) | ({} if self._compiling is None else {"uncompiled": self._compiling.dropped}),
            data=hand_offs.data.snapshot(now) if hand_offs is not None else None,
            hand_offs=hand_offs.endpoint.live_sinks + hand_offs.endpoint.live_sources if hand_offs is not None else 0,
            endpoint=dict(hand_offs.endpoint.counters) if hand_offs is not None else {},
        )
