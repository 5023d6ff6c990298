"""Brings a cluster up on a local or an existing Ray, waits until it can serve, and takes it down without a trace.

Owns: `launch`, `attach` and the `ClusterHandle` they return. Never: stays on the path of a request; a launched cluster
on an existing Ray lives on when the launching process ends, one on a local Ray ends with it.

Call `launch` on a thread that lives as long as the cluster shall: Linux ends Ray's processes with the *thread* that
started them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from baton.common import env
from baton.common.clock import MonotonicClock
from baton.common.config import FAKE_MODEL, ClusterConfig
from baton.common.config_checks import validate
from baton.common.errors import ConfigError
from baton.common.ids import CONTROLLER, WorkerId
from baton.common.model.cache import Progress, silent
from baton.common.model.spec import resolve_source
from baton.deploy.api_keys import keys_of
from baton.deploy.autoscale import Policy
from baton.deploy.cluster_plan import ClusterPlan, ControllerStatus, PlannedSeat, place_of
from baton.deploy.controller import CHANGE_TIMEOUT_S, ControllerActor
from baton.deploy.controller_seats import SeatSpec, SeatStatus
from baton.deploy.listener import draw_port, open_listener
from baton.deploy.planner.command import read_cost
from baton.deploy.planner.outcome import Slo
from baton.deploy.ray_join import LaunchError as LaunchError
from baton.deploy.ray_join import connect_ray, first_line, free_cpus, join_ray, tell_room
from baton.deploy.ray_side import (
    KILL_GRACE_S,
    REAP_TIMEOUT_S,
    create_actor,
    find_process,
    forget_plan,
    forget_run_dir,
    reap_strangers,
)
from baton.transfer.process import actor_name, make_private, new_run_dir, reap, run_root

CLASS_PATHS: Mapping[str, str] = {
    "prefill": "baton.prefill.actor:PrefillActor",
    "decode": "baton.decode.actor:DecodeActor",
    "gateway": "baton.deploy.gateway:GatewayActor",
}
CALL_TIMEOUT_S = 30.0
PROGRESS_INTERVAL_S = 0.3
RETRY_PAUSE_S = 0.2
"""Between two calls of a controller that Ray is restarting. It refuses at once, and nothing tells when it is back."""
PORT_DRAWS = 20
"""The port behind a free one may be taken."""
DRAIN_ORDER = ("gateway", "decode", "prefill")
DRAIN_ANSWER_S = 3.0
"""For the answer of a process that waited as long as it was told to."""


Missing = Callable[[ControllerStatus], list[SeatStatus]]
"""The seats that are still waited for."""


@dataclass(frozen=True, slots=True)
class ClusterHandle:
    """A running cluster, as seen from outside."""

    plan: ClusterPlan
    controller: ActorHandle
    owns_ray: bool

    @property
    def gateway_url(self) -> str:
        """Of the first gateway."""
        return self.gateway_urls[0]

    @property
    def gateway_urls(self) -> tuple[str, ...]:
        config = self.plan.config
        host = f"[{config.gateway.host}]" if ":" in config.gateway.host else config.gateway.host
        ports = [config.gateway_port(number) for number in range(config.gateways)]
        return tuple(f"{config.gateway.scheme}://{host}:{port}" for port in dict.fromkeys(ports))

    def status(self, timeout_s: float = CALL_TIMEOUT_S) -> ControllerStatus:
        """Seats and members. A controller that is just being restarted is waited for."""
        status: ControllerStatus = self._call_controller("status", timeout_s)
        return status

    def wait_ready(self, timeout_s: float) -> ControllerStatus:
        """Until every seat is filled (again). Raises LaunchError when that takes longer than `timeout_s`."""
        clock = MonotonicClock()
        deadline_s = clock.now() + timeout_s
        status = self.status()
        while not status.ready:
            left_s = deadline_s - clock.now()
            if left_s <= 0:
                raise LaunchError(f"not ready within {timeout_s} s: {_summary(status)}")
            status = self.wait_change(status, min(left_s, 1.0))
        return status

    def wait_change(self, seen: ControllerStatus, timeout_s: float) -> ControllerStatus:
        """The status as soon as it differs from the one seen, or after `timeout_s`."""
        arguments = (seen.revision, timeout_s)
        changed: ControllerStatus = self._call_controller("wait_status", timeout_s + CALL_TIMEOUT_S, *arguments)
        return changed

    def actor(self, worker: WorkerId) -> ActorHandle | None:
        """The process that sits there now; None while there is none."""
        for seat in self.status().seats:
            if seat.worker == worker:
                return find_process(self.plan.config.cluster, actor_name(worker, seat.incarnation))
        return None

    def replace_worker(self, worker: WorkerId, role: str | None = None) -> None:
        """It takes nothing new and finishes what it has; a new process of this role (None: of the same) follows in its
        seat. Returns when it has been told. Raises LaunchError with the reason when it is not."""
        if role is None:
            role = next((seat.role for seat in self.status().seats if seat.worker == worker), "")
        refused: str = self._call_controller("replace_worker", CALL_TIMEOUT_S, worker, role)
        if refused:
            raise LaunchError(refused)

    def change(self, plan: ClusterPlan) -> None:
        """The cluster becomes like this, one process after the other; `status().changing` tells for how long."""
        self._call_controller("change", CHANGE_TIMEOUT_S + CALL_TIMEOUT_S, plan)

    def current_plan(self) -> ClusterPlan:
        """It may have been changed since."""
        plan: ClusterPlan = self._call_controller("plan", CALL_TIMEOUT_S)
        return plan

    def restart_controller(self) -> None:
        """Ray starts it again, from what is installed now. Requests do not notice."""
        ray.kill(self.controller, no_restart=False)

    def drain(self, timeout_s: float) -> bool:
        """Every process admits nothing new and finishes what runs: the gateways first, then whom their requests need.
        False: not all of it ended within `timeout_s`. Afterwards the cluster is good for `shutdown` only."""
        clock = MonotonicClock()
        deadline_s = clock.now() + timeout_s
        try:
            seats = self.status().seats
        except LaunchError:
            return False
        drained = []
        for role in DRAIN_ORDER:
            workers = [seat.worker for seat in seats if seat.role == role]
            drained.append(self._drain_workers(workers, max(0.0, deadline_s - clock.now())))
        return all(drained)

    def _drain_workers(self, workers: Iterable[WorkerId], timeout_s: float) -> bool:
        try:
            actors = [actor for worker in workers if (actor := self.actor(worker)) is not None]
            calls = [actor.drain.remote(timeout_s) for actor in actors]
            return all(ray.get(calls, timeout=timeout_s + DRAIN_ANSWER_S))
        except (RayError, LaunchError):
            return False

    def shutdown(self, timeout_s: float = 30.0) -> None:
        """Ends every process of the cluster, and the local Ray with them; what runs is lost (`drain` before). Raises
        LaunchError when a process is left."""
        left: list[str] = []
        steps: tuple[Callable[[], None], ...] = (
            lambda: self._stop_workers(timeout_s),
            self._kill_controller,
            self._reap_all,
        )
        for step in steps:  # one that fails leaves the more to do for the next
            try:
                step()
            except LaunchError as error:
                left.append(str(error))
            except RayError as error:
                left.append(f"Ray did not answer: {first_line(error)}")
        if self.owns_ray:
            ray.shutdown()
        else:
            forget_plan(self.plan.run_dir)
            forget_run_dir(self.plan.run_dir)
        shutil.rmtree(self.plan.run_dir, ignore_errors=True)
        if left:
            raise LaunchError("; ".join(left))

    def _kill_controller(self) -> None:
        if find_process(self.plan.config.cluster, CONTROLLER) == self.controller:  # and not that of a successor
            ray.kill(self.controller, no_restart=True)
            reap(self.plan.run_dir, CONTROLLER, KILL_GRACE_S, REAP_TIMEOUT_S)

    def _reap_all(self) -> None:
        if not reap_strangers(self.plan.run_dir, frozenset()):
            raise LaunchError("a process could not be killed")

    def _stop_workers(self, timeout_s: float) -> None:
        clock = MonotonicClock()
        deadline_s = clock.now() + timeout_s
        self._call_controller("shut_down", timeout_s)
        status = self.status(timeout_s)
        while not status.finished and clock.now() < deadline_s:
            status = self.wait_change(status, 1.0)

    def _call_controller(self, method: str, timeout_s: float, *arguments: object) -> Any:
        return _ask(self.controller, method, timeout_s, *arguments)


def _ask(controller: ActorHandle, method: str, timeout_s: float, *arguments: object) -> Any:
    """A controller that died is restarted by Ray: calls that met its death are made again. Raises LaunchError when
    there is no answer within `timeout_s`."""
    clock = MonotonicClock()
    deadline_s = clock.now() + timeout_s
    while True:
        try:
            reference = getattr(controller, method).remote(*arguments)
            return ray.get(reference, timeout=max(0.1, deadline_s - clock.now()))
        except ActorUnavailableError as error:
            if clock.now() >= deadline_s:
                raise LaunchError(f"the controller was not there for {timeout_s:g} s") from error
            time.sleep(RETRY_PAUSE_S)
        except TimeoutError as error:
            raise LaunchError(f"the controller did not answer within {timeout_s:g} s") from error
        except RayError as error:
            if isinstance(error, RayActorError) and error.actor_init_failed:
                # Ray puts the traceback of its constructor into words; the last line says what it raised.
                reason = str(error).rstrip().rpartition("\n")[2].partition(": ")[2]
                raise LaunchError(f"the controller could not start: {reason}") from error
            raise LaunchError(f"the controller cannot be asked: {first_line(error)}") from error


def everybody(status: ControllerStatus) -> list[SeatStatus]:
    """`Missing`, where every seat must be filled."""
    return [seat for seat in status.seats if seat.state != "live"]


def one_of_each_role(status: ControllerStatus) -> list[SeatStatus]:
    """`Missing`, where it is enough that requests can be answered: others may be waiting for a node."""
    there = {seat.role for seat in status.seats if seat.state == "live"}
    return [seat for seat in status.seats if seat.role not in there]


def launch(
    config: ClusterConfig,
    *,
    ray_address: str | None = None,
    on_progress: Progress = silent,
    ray_temp_dir: str | None = None,
    class_paths: Mapping[str, str] = CLASS_PATHS,
    missing: Missing = everybody,
) -> ClusterHandle:
    """Starts a cluster and returns when it is there. `ray_address` None: a Ray of its own on this machine, unless this
    process is connected to one already. Raises ConfigError before anything is started, LaunchError afterwards."""
    config = _checked(config)
    policy = policy_of(config)
    owns_ray = connect_ray(config, ray_address, on_progress, ray_temp_dir)
    tell_room(free_cpus(), _seats(config), on_progress)
    plan = ClusterPlan(
        config=config,
        run_dir=new_run_dir(config.cluster),
        seats=_seats(config),
        class_paths=dict(class_paths),
        launched_at_ms=int(time.time() * 1000),
        policy=policy,
    )
    handle: ClusterHandle | None = None
    try:
        if find_process(config.cluster, CONTROLLER) is not None:
            raise ConfigError("cluster", config.cluster, "a cluster of this name is running on this Ray")
        controller = _create_controller(plan)
        handle = ClusterHandle(plan, controller, owns_ray)
        on_progress("starting the controller")
        wait_for(handle, missing, on_progress)
    except BaseException:
        if handle is not None:
            with contextlib.suppress(LaunchError):
                handle.shutdown()
        elif owns_ray:
            ray.shutdown()
        raise
    on_progress(f"ready: {' '.join(handle.gateway_urls)}")
    return handle


def _create_controller(plan: ClusterPlan) -> ActorHandle:
    """Its name is taken when two launch at once: one of them."""
    cluster, place = plan.config.cluster, place_of(CONTROLLER, plan.config.placement)
    try:
        return create_actor(ControllerActor, plan, cluster, CONTROLLER, place, max_restarts=-1)
    except ValueError as error:
        raise LaunchError(f"a cluster named {cluster!r} is being launched: {first_line(error)}") from error


def attach(cluster: str, ray_address: str) -> ClusterHandle:
    """A handle on a cluster that runs on an existing Ray. Raises LaunchError when there is no such Ray or cluster."""
    env.prepare_ray(joins=True)
    if not ray.is_initialized():
        join_ray(ray_address)
    controller = find_process(cluster, CONTROLLER)
    if controller is None:
        raise LaunchError(f"no cluster named {cluster!r} runs on this Ray")
    plan: ClusterPlan = _ask(controller, "plan", CALL_TIMEOUT_S)
    return ClusterHandle(plan, controller, owns_ray=False)


def _checked(config: ClusterConfig) -> ClusterConfig:
    """Everything that can be known to fail is found here. Port 0 becomes a free one: successors must find it again."""
    validate(config)
    make_private(Path(run_root()))
    if config.model.model != FAKE_MODEL:
        resolve_source(config.model.model)
    gateway = config.gateway
    if config.placement.resources == "role" and gateway.port:
        return config  # the gateway listens on another machine, perhaps
    keys_of(gateway.api_keys_file, MonotonicClock())
    for _ in range(0 if gateway.port else PORT_DRAWS):
        with contextlib.suppress(ConfigError):
            return _with_free_ports(config)
    return _with_free_ports(config)


def _with_free_ports(config: ClusterConfig) -> ClusterConfig:
    """Those of all its gateways are free, a moment ago."""
    gateway = config.gateway
    found = dataclasses.replace(
        config, gateway=dataclasses.replace(gateway, port=gateway.port or draw_port(gateway.host))
    )
    with contextlib.ExitStack() as probes:
        for port in sorted({found.gateway_port(number) for number in range(config.gateways)}):
            probes.enter_context(open_listener(gateway.host, port))
    return found


def policy_of(config: ClusterConfig) -> Policy | None:
    """By which workers change their role. Raises ConfigError when the costs cannot be read."""
    scale = config.autoscale
    if not scale.cost_file:
        return None
    return Policy(
        cost=read_cost(Path(scale.cost_file), "autoscale.cost_file"),
        slo=Slo(ttft_s=scale.ttft_s, itl_s=scale.itl_s),
        workers=config.prefill + config.decode,
        most_rows=config.decode_worker.max_running_requests,
        chunk_tokens=config.prefill_worker.chunk_tokens,
        dwell_s=scale.dwell_s,
        restart_s=scale.restart_s,
        min_prefill=scale.min_prefill,
        min_decode=scale.min_decode,
    )


def _seats(config: ClusterConfig) -> tuple[PlannedSeat, ...]:
    """Workers first, so that the gateway opens its door to a cluster that is loading already."""
    roles = ["prefill"] * config.prefill + ["decode"] * config.decode
    cores = cores_for(len(roles))
    seats = []
    for index, role in enumerate(roles):
        number = roles[:index].count(role)
        spec = SeatSpec(WorkerId(f"{role}-{number}"), role)
        seats.append(PlannedSeat(spec=spec, cores=cores[index], place=place_of(role, config.placement)))
    place = place_of("gateway", config.placement)
    specs = [SeatSpec(WorkerId(f"gateway-{number}"), "gateway") for number in range(config.gateways)]
    left = cores_left(cores)
    return (*seats, *(PlannedSeat(spec=spec, cores=left, place=place) for spec in specs))


def cores_for(workers: int) -> list[tuple[int, ...]]:
    """Which cores each of `workers` workers is pinned to where cores are pinned, round robin over the cores this
    process may use. Workers that share a machine run one thread each: see docs/adr/0005."""
    available = sorted(os.sched_getaffinity(0))
    return [(available[index % len(available)],) for index in range(workers)]


def cores_left(cores: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Beside those of workers: where gateways do not take time from steps. Empty when workers have all of them."""
    taken = {core for own in cores for core in own}
    return tuple(core for core in sorted(os.sched_getaffinity(0)) if core not in taken)


def wait_for(handle: ClusterHandle, missing: Missing, on_progress: Progress) -> None:
    """Until nobody is missing. Shows what each process says of its loading. Raises LaunchError with the reason of the
    first one among them that fails."""
    shown: dict[WorkerId, int] = {}
    status = handle.status(timeout_s=60.0)
    seen_states: dict[WorkerId, str] = {}
    while True:
        for seat in status.seats:
            if seen_states.get(seat.worker) != seat.state:
                seen_states[seat.worker] = seat.state
                on_progress(f"{seat.worker}: {'ready' if seat.state == 'live' else seat.state}")
            if seat.state == "starting":
                _show_progress(handle, seat.worker, seat.incarnation, shown, on_progress)
        for seat in missing(status):
            if seat.restarts:
                raise LaunchError(f"{seat.worker} could not start: {seat.detail}")
        if status.seats and not missing(status):  # a controller that has only begun knows of none yet
            return
        status = handle.wait_change(status, PROGRESS_INTERVAL_S)


def _show_progress(
    handle: ClusterHandle, worker: WorkerId, incarnation: int, shown: dict[WorkerId, int], on_progress: Progress
) -> None:
    actor = find_process(handle.plan.config.cluster, actor_name(worker, incarnation))
    if actor is None:
        return
    try:
        lines: list[str] = ray.get(actor.progress.remote(), timeout=1.0)
    except RayError:
        return  # still importing, or gone: the controller will tell
    for line in lines[shown.get(worker, 0) :]:
        on_progress(f"{worker}: {line}")
    shown[worker] = len(lines)


def _summary(status: ControllerStatus) -> str:
    return ", ".join(f"{seat.worker} {seat.state} ({seat.detail})" for seat in status.seats if seat.state != "live")
