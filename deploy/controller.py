"""The controller process: runs `ControllerCore` on a thread, with a socket to every process and Ray behind it.

Owns: the controller's Mesh, its thread, and the wiring of decisions to Ray. Never: decides who lives (the core does),
or stands on the path of a request: when it is gone, running requests go on.

A controller that Ray restarts finds the processes of its cluster by name, kills those that do not answer, adopts the
others, tells them its new address, and continues with a higher membership version.
"""

from __future__ import annotations

import functools
import math
import os
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from baton.common.clock import MonotonicClock
from baton.common.engine.loop import FATAL_EXIT_CODE
from baton.common.ids import CONTROLLER, Epoch, Stamp, WorkerId
from baton.common.log import EventLog, ProcessName, configure_logging
from baton.common.messages import Body, Hello, Member, Membership
from baton.deploy import ray_side
from baton.deploy.autoscale_control import AutoscaleControl
from baton.deploy.cluster_plan import ClusterPlan, ControllerStatus, place_of
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
from baton.deploy.ray_join import first_line
from baton.transfer.actor import HEALTH, WATCH, at_this_node, in_group
from baton.transfer.keys import ControllerDoor, KeyPair
from baton.transfer.mesh import Mesh
from baton.transfer.process import ProcessSpec, actor_name, die_with_parent, register_process
from baton.transfer.reports import WorkerMetrics

REBUILD_ANSWER_TIMEOUT_S = 5.0
"""A process that does not answer by then is killed. Answering takes a free thread, also while it loads."""
ANSWER_TIMEOUT_S = 20.0
"""For what is asked of the core: behind a rebuild, at most."""
CHANGE_TIMEOUT_S = 60.0
RAY_THREADS = 8
MAX_REJECTED_PEERS = 16
NODES_LOOK_S = 2.0
"""So often Ray is asked which nodes are about to go."""

_log = EventLog("baton.controller")


class ControllerLoop:
    """The controller's thread. The only one that touches the core and the mesh."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        self._config = plan.config
        self._seats = {seat.spec.worker: seat for seat in plan.seats}
        self._clock = MonotonicClock()
        # Views of successive controllers are ordered by their version; there is nobody to count incarnations.
        self._stamp = Stamp(CONTROLLER, 1, Epoch(secrets.randbits(62) + 1))
        self._keys = KeyPair.generate()
        self._mesh = Mesh(self._stamp, at_this_node(plan.config).bind_host, self._keys)
        self._core: ControllerCore | None = None
        self._autoscale = AutoscaleControl(plan.policy, self._clock.now()) if plan.policy is not None else None
        self._look_at_nodes_s = 0.0
        self._peers: dict[WorkerId, Member] = {}
        self._rejected: deque[WorkerId] = deque()
        self._keeping = threading.Lock()  # of the plan in Ray's store
        self._asked = self._begun = 0  # changes
        self._unkept: deque[tuple[ClusterPlan, int]] = deque(maxlen=1)  # what came of an upgrade, and of which change
        self._inbox: deque[Callable[[float], list[Effect]]] = deque()
        self._pool = ThreadPoolExecutor(RAY_THREADS, thread_name_prefix="ray")
        self._changed = threading.Condition()
        self._status = ControllerStatus(
            revision=0, address=self._mesh.address, ready=False, finished=False, version=0, seats=(), members=(),
            transitions=(),
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)

    # ------------------------------------------------------------------------------ from any thread

    def start(self) -> None:
        self._thread.start()

    def status(self) -> ControllerStatus:
        return self._status

    def wait_status(self, after_revision: int, timeout_s: float) -> ControllerStatus:
        """The status, as soon as it is newer than `after_revision`, or after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._status.revision > after_revision, timeout_s)
            return self._status

    def metrics(self) -> WorkerMetrics:
        """What came over its socket and was not heard; of a controller that is still rebuilding, nothing."""
        core = self._core
        if core is None:
            return WorkerMetrics()
        own = {"unlisted": core.unlisted_messages, "role": core.stray_messages}
        return WorkerMetrics(refused=self._mesh.counters.refusals() | own)

    def shut_down(self) -> None:
        """Begins to end every process; `status().finished` tells when all are proven dead."""
        self._post(lambda now: self._live_core.shut_down(now))

    def change(self, plan: ClusterPlan) -> None:
        """From now on the cluster shall be like this. Also after a restart of the controller."""
        with self._keeping:
            ray_side.keep_plan(plan.run_dir, plan)
            self._asked += 1
        begun: Future[None] = Future()

        def begin(now: float) -> list[Effect]:
            self._begun += 1
            self._go_by(plan, now)
            effects = self._live_core.change((seat.spec for seat in plan.seats), plan.config.liveness, now)
            self._publish_status()  # whoever asks next sees that it is changing
            begun.set_result(None)
            return effects

        self._post(begin)
        begun.result(CHANGE_TIMEOUT_S)

    def _go_by(self, plan: ClusterPlan, now: float) -> None:
        if plan.policy != self._plan.policy:
            self._autoscale = None if plan.policy is None else AutoscaleControl(plan.policy, now)
        self._plan, self._config = plan, plan.config
        self._seats = {seat.spec.worker: seat for seat in plan.seats}

    @property
    def plan(self) -> ClusterPlan:
        return self._plan

    def replace_worker(self, worker: WorkerId, role: str) -> str:
        """Why it is not done; "" when the worker has been told to leave."""
        answer: Future[str] = Future()

        def ask(now: float) -> list[Effect]:
            found = self._live_core.replace_worker(worker, role, now)
            answer.set_result(found.reason if isinstance(found, Refused) else "")
            return [] if isinstance(found, Refused) else found

        self._post(ask)
        return answer.result(ANSWER_TIMEOUT_S)

    # ----------------------------------------------------------------------------- controller thread

    def _run(self) -> None:
        try:
            self._rebuild()
            while True:
                now = self._clock.now()
                due_s = self._live_core.next_deadline()
                if self._autoscale is not None:
                    due_s = min(due_s, self._autoscale.due_s)
                frames = self._mesh.poll(max(0.0, due_s - now))
                now = self._clock.now()
                for frame in frames:
                    if not isinstance(frame.body, Hello):
                        self._mesh.allow.withdraw(frame.src.worker, frame.src.incarnation)  # by its own key
                    self._carry_out(self._live_core.on_message(frame.src, frame.body, now))
                while self._inbox:
                    self._carry_out(self._inbox.popleft()(now))
                self._carry_out(self._live_core.on_timer(now))
                if self._autoscale is not None:
                    self._scale(self._autoscale, now)
                if now >= self._look_at_nodes_s:
                    self._look_at_nodes_s = math.inf  # until this look is over
                    self._in_pool(self._leave_nodes_that_go)
                self._publish_status()
        except BaseException:  # noqa: BLE001 - the thread's top frame
            # Ray starts the controller again, and it rebuilds its view: better than one that half works.
            _log.fatal("controller_failed")
            os._exit(FATAL_EXIT_CODE)

    @property
    def _live_core(self) -> ControllerCore:
        assert self._core is not None, "used before rebuild"
        return self._core

    def _rebuild(self) -> None:
        """Finds what an earlier controller left (at the first start: nothing) and begins from there."""
        found = ray_side.find_live_processes(self._config.cluster, REBUILD_ANSWER_TIMEOUT_S)
        known = [(each, each.report) for each in found if each.worker in self._seats and each.report is not None]
        keep = frozenset(actor_name(each.worker, each.incarnation) for each, _ in known) | {CONTROLLER}
        # C1: whoever will be missing in the first membership must be proven dead before it is published.
        silent = [each for each in found if each.report is None]
        while not self._reap(silent, keep):
            _log.warning("waiting_for_strangers_to_die")
        now = self._clock.now()
        views = [report.view for _, report in known if report.view is not None]
        first_version = max([int(time.time() * 1000), *(view.version + 1 for view in views)])
        core = ControllerCore((seat.spec for seat in self._plan.seats), self._config.liveness, first_version, now)
        for view in views:
            for member in view.members:
                core.note_incarnation(member.stamp.worker, member.stamp.incarnation, member.role)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            # A seat whose process died unseen may have had any number of incarnations, but not ten in a second.
            core.book.first_incarnation = (first_version - self._plan.launched_at_ms) // 100
            for seat in self._plan.seats:
                core.note_incarnation(seat.spec.worker, core.book.first_incarnation)
        for process in found:
            core.note_incarnation(process.worker, process.incarnation)
        # One that has not heard of its own admission yet is a member all the same: others have (C1).
        published = {(one.stamp.worker, one.stamp.incarnation): one for view in views for one in view.members}
        effects: list[Effect] = []
        for process, report in known:
            known_as = report.member or published.get((process.worker, process.incarnation))
            if known_as is None:
                core.adopt_starting(process.worker, process.incarnation, report.role, now, report.revision)
                self._mesh.allow.invite(report.key, process.worker, process.incarnation)
            else:
                effects += core.adopt(known_as, now, leaving=report.draining, revision=report.revision)
        self._core = core
        self._carry_out(effects)
        for process, _ in known:
            self._in_pool(self._rejoin, process.worker, process.incarnation)
        _log.info("controller_started", adopted=len(known), version=first_version, address=self._mesh.address)

    def _reap(self, silent: list[ray_side.FoundProcess], keep: frozenset[str]) -> bool:
        cluster, run_dir = self._config.cluster, self._plan.run_dir
        gone = [ray_side.kill_and_prove(cluster, run_dir, each.worker, each.incarnation) for each in silent]
        return ray_side.reap_strangers(run_dir, keep) and all(gone)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartWorker():
                    guest = KeyPair.generate()
                    self._mesh.allow.invite(guest.public, effect.spec.worker, effect.incarnation)
                    self._in_pool(self._start_process, effect.spec, effect.incarnation, guest)
                case DrainWorker():
                    _log.info("drain", worker=effect.worker, incarnation=effect.incarnation)
                    self._in_pool(self._drain, effect.worker, effect.incarnation, effect.timeout_s)
                case KillWorker():
                    _log.info("kill", worker=effect.worker, incarnation=effect.incarnation, reason=effect.reason)
                    self._mesh.allow.withdraw(effect.worker, effect.incarnation)
                    self._in_pool(self._prove_dead, effect.worker, effect.incarnation, effect.reason)
                case Publish():
                    self._publish(effect.membership, effect.readers)
                case Reply():
                    self._reply(effect.member, effect.body)
                case Keep():
                    self._go_by(self._plan.after(effect), self._clock.now())
                    self._live_core.live_by(self._config.liveness)
                    _log.info("upgrade_over", revision=self._plan.revision, given_up=self._plan.halted)
                    self._unkept.append((self._plan, self._begun))
                    self._in_pool(self._keep_plan)

    def _scale(self, control: AutoscaleControl, now: float) -> None:
        effects, flips = control.look(self._live_core, now)
        for flip in flips:
            _log.info("flip", worker=flip.worker, role=flip.role, reason=flip.reason)
        self._carry_out(effects)

    def _publish(self, membership: Membership, readers: tuple[Member, ...]) -> None:
        members = {member.stamp.worker: member for member in membership.members}
        self._mesh.allow.set_members(membership.members)
        for worker in self._peers.keys() - members.keys():
            self._mesh.disconnect(worker)
        for worker, member in members.items():
            self._mesh.connect(worker, member.address, member.key)
        for member in readers:
            self._mesh.send(member.stamp.worker, member.stamp.epoch, membership)
        self._peers = members

    def _reply(self, member: Member, body: Body) -> None:
        """To a process that is no peer: over a connection of its own, kept for a while so that the frame gets out."""
        peer = WorkerId(f"!{member.stamp.worker}@{member.stamp.incarnation}")
        if peer not in self._rejected:
            self._rejected.append(peer)
            if len(self._rejected) > MAX_REJECTED_PEERS:
                self._mesh.disconnect(self._rejected.popleft())
        self._mesh.connect(peer, member.address, member.key)
        self._mesh.send(peer, member.stamp.epoch, body)

    def _publish_status(self) -> None:
        core = self._live_core
        membership = core.membership()
        seats, transitions = tuple(core.status()), tuple(core.transitions)
        with self._changed:
            old = self._status
            news = (seats, transitions, membership.version, core.book.changing, self._plan.halted)
            changed = news != (old.seats, old.transitions, old.version, old.changing, old.halted)
            self._status = ControllerStatus(
                revision=old.revision + changed,
                address=self._mesh.address,
                ready=core.ready,
                finished=core.finished,
                version=membership.version,
                seats=seats,
                members=membership.members,
                transitions=transitions,
                changing=core.book.changing,
                halted=self._plan.halted,
                given_up=self._plan.given_up.revision if self._plan.given_up is not None else 0,
            )
            if changed:
                self._changed.notify_all()

    def _post(self, event: Callable[[float], list[Effect]]) -> None:
        """From any thread: `event(now)` runs on the controller's."""
        self._inbox.append(event)
        self._mesh.wake()

    def _in_pool(self, function: Callable[..., None], *arguments: object) -> None:
        """Ray's calls block: they run beside the loop. One that fails in an unforeseen way is a bug like any other."""
        self._pool.submit(function, *arguments).add_done_callback(_end_on_bug)

    # ------------------------------------------------------------------------------ on pool threads

    def _start_process(self, spec: SeatSpec, incarnation: int, guest: KeyPair) -> None:
        seat = self._seats.get(spec.worker)
        worker, settings = spec.worker, self._plan.settings(spec.revision)
        if seat is None:
            return  # not wanted any more
        place = place_of(seat.spec.role, settings.config.placement)  # its revision's, as cores are
        process = ProcessSpec(
            worker=worker,
            role=spec.role,
            incarnation=incarnation,
            controller=ControllerDoor(self._mesh.address, self._keys.public, guest),
            config=settings.config,
            cores=seat.cores if settings.config.pin_cores else (),
            run_dir=self._plan.run_dir,
            revision=spec.revision,
        )
        try:
            handle = ray_side.create_process(process, settings.class_paths[spec.role], place)
        except (ray.exceptions.RayError, ValueError, ImportError) as error:
            self._on_start_failed(worker, incarnation, str(error))
            return
        self._watch(handle, worker, incarnation)

    def _leave_nodes_that_go(self) -> None:
        """Who can be asked to leave is; the only one of his role is asked again, when there is another one. While Ray's
        head is away nothing is heard of nodes, and nothing else is the worse for it."""
        self._keep_plan()
        try:
            for worker, _ in ray_side.on_nodes_that_go(self._config.cluster):
                self._post(functools.partial(self._leave_node, worker))
        except RayError as error:
            _log.warning("nodes_unknown", error=first_line(error))
        self._post(self._look_again)

    def _look_again(self, now: float) -> list[Effect]:
        self._look_at_nodes_s = now + NODES_LOOK_S
        return []

    def _leave_node(self, worker: WorkerId, now: float) -> list[Effect]:
        role = next((seat.role for seat in self._live_core.status() if seat.worker == worker), "")
        found = self._live_core.replace_worker(worker, role, now)
        return [] if isinstance(found, Refused) else found

    def _drain(self, worker: WorkerId, incarnation: int, timeout_s: float) -> None:
        """Its answer is awaited on no thread. One that does not finish in time is killed by the core's own clock."""

        def drained() -> None:
            self._post(lambda now: self._live_core.on_drained(worker, incarnation, now))

        handle = ray_side.find_process(self._config.cluster, actor_name(worker, incarnation))
        if handle is not None:  # else its death is noticed
            ray_side.drain_process(handle, timeout_s, drained)

    def _keep_plan(self) -> None:
        """What came of an upgrade, unless the cluster is to be another one meanwhile. While Ray's head is away a
        successor would not know of it: tried again."""
        with self._keeping:
            if not self._unkept:
                return
            plan, begun = self._unkept.popleft()
            try:
                if begun == self._asked:
                    ray_side.keep_plan(plan.run_dir, plan)
            except RayError as error:
                _log.warning("plan_not_kept", error=first_line(error))
                if not self._unkept:
                    self._unkept.append((plan, begun))

    def _rejoin(self, worker: WorkerId, incarnation: int) -> None:
        """An adopted process hears where the controller is now. One that cannot be told falls silent: replaced."""
        handle = ray_side.find_process(self._config.cluster, actor_name(worker, incarnation))
        if handle is None:
            self._on_ray_death(worker, incarnation)
            return
        handle.rejoin.remote(ControllerDoor(self._mesh.address, self._keys.public))
        self._watch(handle, worker, incarnation)

    def _watch(self, handle: ActorHandle, worker: WorkerId, incarnation: int) -> None:
        ray_side.watch_process(
            handle,
            on_start_failed=lambda reason: self._on_start_failed(worker, incarnation, reason),
            on_dead=lambda: self._on_ray_death(worker, incarnation),
        )

    def _on_start_failed(self, worker: WorkerId, incarnation: int, reason: str) -> None:
        _log.error("start_failed", worker=worker, incarnation=incarnation, reason=reason)
        self._post(lambda now: self._live_core.on_start_failed(worker, incarnation, reason, now))

    def _on_ray_death(self, worker: WorkerId, incarnation: int) -> None:
        self._in_pool(self._prove_dead, worker, incarnation, "process died")

    def _prove_dead(self, worker: WorkerId, incarnation: int, reason: str) -> None:
        try:
            proven = ray_side.kill_and_prove(self._config.cluster, self._plan.run_dir, worker, incarnation)
        except ray.exceptions.RayError as error:
            _log.warning("kill_failed", worker=worker, incarnation=incarnation, error=str(error)[:200])
            proven = False
        if not proven:
            # A live member falls silent and is killed again; one that was loading must be remembered as failed.
            self._post(lambda now: self._live_core.on_start_failed(worker, incarnation, reason, now))
        else:
            _log.info("proven_dead", worker=worker, incarnation=incarnation, reason=reason)
            self._post(lambda now: self._live_core.on_dead(worker, incarnation, now, reason))


def _end_on_bug(future: Future[None]) -> None:
    error = future.exception()
    if error is not None:
        _log.error("controller_failed", error="".join(traceback.format_exception(error)))
        os._exit(FATAL_EXIT_CODE)


class ControllerActor:
    """The Ray shell of the controller; detached, restarted by Ray without limit."""

    def __init__(self, plan: ClusterPlan) -> None:
        configure_logging(ProcessName(CONTROLLER, CONTROLLER), plan.config.logging)
        die_with_parent()
        register_process(plan.run_dir, CONTROLLER)
        self._loop = ControllerLoop(ray_side.kept_plan(plan.run_dir) or plan)
        self._loop.start()

    @in_group(HEALTH)
    def status(self) -> ControllerStatus:
        return self._loop.status()

    @in_group(HEALTH)
    def metrics(self) -> WorkerMetrics:
        return self._loop.metrics()

    @in_group(HEALTH)
    def plan(self) -> ClusterPlan:
        """For whoever attaches to the running cluster."""
        return self._loop.plan

    def change(self, plan: ClusterPlan) -> None:
        """The cluster shall be like this: one process after the other, while it goes on answering."""
        self._loop.change(plan)

    @in_group(WATCH)
    def wait_status(self, after_revision: int, timeout_s: float) -> ControllerStatus:
        return self._loop.wait_status(after_revision, timeout_s)

    def replace_worker(self, worker: WorkerId, role: str) -> str:
        """The process there finishes what it has and is succeeded by one of this role. Returns why not, or ""."""
        return self._loop.replace_worker(worker, role)

    def shut_down(self) -> None:
        self._loop.shut_down()
