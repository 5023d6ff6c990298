"""Off a node that shall go: `baton leave`, said there before Ray is stopped (a pod's preStop, a notice from a cloud).

Owns: that nothing new is put on the node, and that what runs there is finished or goes on elsewhere while time is left.
Never: stops Ray, or ends a process itself; the controller does, which starts a successor where there is room.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray

from baton.common.clock import MonotonicClock
from baton.common.ids import WorkerId
from baton.common.log import EventLog
from baton.deploy.controller_seats import COMPUTE_ROLES
from baton.deploy.launch import ClusterHandle, LaunchError
from baton.deploy.standing import find_cluster
from baton.transfer.process import actor_name, parse_actor_name, recorded_pid

LOOK_S = 0.5
RAY_ANSWERS_S = 30.0

_log = EventLog("baton.leave")


def leave(cluster: str, ray_address: str, within_s: float, say: Callable[[str], None]) -> bool:
    """Returns when nothing of this cluster runs on this node, True, or `within_s` have passed, False. The only live
    worker of its role stays until another one is there. Raises LaunchError when this is no node of a Ray."""
    clock = MonotonicClock()
    deadline_s = clock.now() + within_s
    handle = find_cluster(cluster, ray_address)
    if handle is None:
        say(f"nothing named {cluster} runs there")
        return True
    run_dir = handle.plan.run_dir
    here = dict(_processes_here(run_dir))
    _close_node(within_s)
    with ThreadPoolExecutor() as pool:
        leaving = [
            pool.submit(_leave_seat, handle, worker, incarnation, deadline_s, say)
            for worker, incarnation in here.items()
        ]
        left = [one.result() for one in leaving]
    if not any(recorded_pid(run_dir, record.name) for record in _records(run_dir)):
        shutil.rmtree(run_dir, ignore_errors=True)  # Ray may be gone from here when the cluster is taken down
    return all(left)


def _processes_here(run_dir: str) -> Iterator[tuple[WorkerId, int]]:
    """Of the seats; not the controller, which Ray starts again elsewhere."""
    for record in _records(run_dir):
        parsed = parse_actor_name(record.name)
        if parsed is not None and recorded_pid(run_dir, record.name) is not None:
            yield parsed


def _records(run_dir: str) -> list[Path]:
    """Of all processes of the cluster on this node, the living and the dead."""
    return list(Path(run_dir).glob("[!.]*"))


def _leave_seat(
    handle: ClusterHandle, worker: WorkerId, incarnation: int, deadline_s: float, say: Callable[[str], None]
) -> bool:
    """Asks until the process is told to leave, and waits until it is gone."""
    clock = MonotonicClock()
    name, told, refused = actor_name(worker, incarnation), False, ""
    role = next((seat.role for seat in handle.status().seats if seat.worker == worker), "")
    if role not in COMPUTE_ROLES:
        actor = handle.actor(worker)
        return actor is None or bool(ray.get(actor.drain.remote(max(0.0, deadline_s - clock.now()))))
    while recorded_pid(handle.plan.run_dir, name) is not None:
        if clock.now() >= deadline_s:
            say(f"{worker} is still here{f': {refused}' if refused else ''}")
            return False
        status = handle.status()
        if not told:
            try:
                handle.replace_worker(worker)
                told = True
                say(f"{worker} finishes what it has")
            except LaunchError as error:
                refused = str(error)
        handle.wait_change(status, min(LOOK_S, max(0.0, deadline_s - clock.now())))
    return True


def _close_node(within_s: float) -> None:
    """Ray puts nothing on this node any more. Its own command: there is no other way to say it. One that fails is no
    reason to stay."""
    context = ray.get_runtime_context()
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--address={context.gcs_address}",
        f"--node-id={context.get_node_id()}", "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=baton leave",
        f"--deadline-remaining-seconds={int(within_s)}",
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=RAY_ANSWERS_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        _log.warning("node_not_closed", error=str(error))
