"""Clusters that outlive whoever brings them up, on a Ray that runs: `baton deploy` and `baton down`.

Owns: that both may be said any number of times: `stand_up` finds what is wanted there already, `take_down` finds
nothing. Never: starts or stops Ray, or changes a cluster that runs as something else unless told to.

From a machine that is no node of Ray's, its Jobs API (http://HEAD:8265) runs the same commands on its head node.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence

import httpx
import ray
from ray.job_submission import JobStatus, JobSubmissionClient

from baton.common import env
from baton.common.clock import MonotonicClock
from baton.common.config import POSTGRES, ClusterConfig
from baton.common.errors import ConfigError
from baton.common.ids import CONTROLLER
from baton.common.model.cache import Progress, silent
from baton.common.resolve import Layer, differences, flat
from baton.deploy.launch import (
    CLASS_PATHS,
    ClusterHandle,
    LaunchError,
    attach,
    launch,
    one_of_each_role,
)
from baton.deploy.ray_join import join_ray
from baton.deploy.ray_side import find_process, kill_actors

KEEP_INTERVAL_S = 5.0
PATIENCE_S = 60.0
"""A gateway's successor is there sooner, and the controller needs no help with it."""
JOBS_API = ("http://", "https://")


def stand_up(
    config: ClusterConfig,
    ray_address: str,
    *,
    replace: bool = False,
    drain_s: float = 0.0,
    on_progress: Progress = silent,
    class_paths: Mapping[str, str] = CLASS_PATHS,
) -> ClusterHandle:
    """The cluster of this name, as configured, with a live process of each role. One that runs with other settings is
    an error that names them; with `replace` it finishes what it has within `drain_s`, and makes room. Raises
    ConfigError, LaunchError."""
    running = find_cluster(config.cluster, ray_address)
    if running is not None:
        differences = _differences(config, running.plan.config)
        if not differences:
            on_progress(f"{config.cluster} runs already, as configured")
            _wait_back(running)
            return running
        if not replace:
            field, value = next(iter(differences.items()))
            reason = f"{config.cluster} runs with other settings: {', '.join(differences)}"
            raise ConfigError(field, value, reason, "--replace ends it first")
        on_progress(f"{config.cluster} runs with other {', '.join(differences)}: ending it")
        running.drain(drain_s)
        running.shutdown()
    return launch(
        config, ray_address=ray_address, on_progress=on_progress, class_paths=class_paths, missing=one_of_each_role
    )


def _wait_back(running: ClusterHandle) -> None:
    """Until a process of each role is there. Whoever died before may be on his way back. Raises LaunchError."""
    clock = MonotonicClock()
    patience_s = running.plan.config.liveness.start_deadline_s
    deadline_s = clock.now() + patience_s
    status = running.status()
    while not status.seats or one_of_each_role(status):
        if clock.now() >= deadline_s:
            missing = ", ".join(f"{seat.worker} ({seat.detail})" for seat in one_of_each_role(status))
            raise LaunchError(f"after {patience_s:g} s there is nobody of a role: {missing}")
        status = running.wait_change(status, 1.0)


def take_down(cluster: str, ray_address: str, drain_s: float) -> bool:
    """Ends the cluster of this name, when it has finished what it runs or `drain_s` have passed. False: there was
    none. Raises LaunchError when a process is left."""
    running = find_cluster(cluster, ray_address)
    if running is None:
        return kill_actors(cluster) > 0  # of one whose controller was killed by hand
    running.drain(drain_s)
    running.shutdown()
    return True


def find_cluster(cluster: str, ray_address: str) -> ClusterHandle | None:
    """None: no cluster of this name runs on that Ray. Raises LaunchError when there is no such Ray."""
    env.prepare_ray(joins=True)
    if not ray.is_initialized():
        join_ray(ray_address, cluster)
    return attach(cluster, ray_address) if find_process(cluster, CONTROLLER) is not None else None


def keep(deploy: Callable[[], None], url: str, stop: threading.Event, say: Callable[[str], None]) -> None:
    """Deploys, and again when nobody has answered at this gateway for `PATIENCE_S`, until told to stop: what a Ray
    whose head began anew has lost is put back."""
    clock = MonotonicClock()
    heard_s = -math.inf
    while not stop.is_set():
        if clock.now() - heard_s >= PATIENCE_S:
            try:
                deploy()
                heard_s = clock.now()
            except LaunchError as error:
                say(f"{error}; trying again in {KEEP_INTERVAL_S:g} s")
        stop.wait(KEEP_INTERVAL_S)
        if _answers(url):
            heard_s = clock.now()


def _answers(url: str) -> bool:
    try:  # nothing secret is said or heard, and its certificate may be of another name than the address here
        return httpx.get(f"{url}/live", timeout=KEEP_INTERVAL_S, verify=False).is_success
    except httpx.HTTPError:
        return False


def gateway_urls(handle: ClusterHandle) -> list[str]:
    """Where they are reached from other machines: one that listens on all addresses of its node has that node's."""
    config = handle.plan.config
    if config.gateway.host not in ("0.0.0.0", "::"):
        return list(handle.gateway_urls)
    found = []
    for member in handle.status().members:
        if member.role == "gateway":
            host = member.address.removeprefix("tcp://").rpartition(":")[0]
            number = int(member.stamp.worker.removeprefix("gateway-"))
            found.append(f"{config.gateway.scheme}://{host}:{config.gateway_port(number)}")
    return found


def is_jobs_api(ray_address: str) -> bool:
    return ray_address.startswith(JOBS_API)


def deploy_command(layers: Sequence[Layer], options: Sequence[str]) -> list[str]:
    """`baton deploy` for the head node. Raises as `command_for_head`."""
    return command_for_head(["deploy", *options], layers)


def command_for_head(words: Sequence[str], layers: Sequence[Layer]) -> list[str]:
    """A command of ours for the head node, with the settings of these layers. Raises ConfigError for a setting that
    must not be seen by all who see Ray's dashboard."""
    values = {name: value for layer in layers for name, value in flat(layer.values)}
    database = values.get("jobs.database", "")
    if isinstance(database, str) and database.startswith(POSTGRES) and "@" in database:
        hint = "set BATON_SET_JOBS__DATABASE in the environment of Ray's nodes"
        raise ConfigError("jobs.database", database.partition(":")[0], "Ray's dashboard would show it", hint)
    settings = [f"--set={name}={json.dumps(value)}" for name, value in values.items()]
    return ["baton", *words, *settings]


def submit(ray_address: str, command: Sequence[str], say: Callable[[str], None]) -> None:
    """Runs a command of ours on the head node, through Ray's Jobs API, and says what it says. Raises LaunchError when
    it cannot be run, or fails."""
    env.prepare_ray(joins=True)
    try:
        client = JobSubmissionClient(ray_address)
        job = client.submit_job(entrypoint=shlex.join(command))
        asyncio.run(_follow(client, job, say))
        status = client.get_job_status(job)
    except (ConnectionError, RuntimeError) as error:  # nobody there; no token; another version
        raise LaunchError(f"Ray's Jobs API at {ray_address}: {str(error).partition(chr(10))[0]}") from error
    if status != JobStatus.SUCCEEDED:
        raise LaunchError(f"{shlex.join(command[:2])} ended there as {status}")


async def _follow(client: JobSubmissionClient, job: str, say: Callable[[str], None]) -> None:
    """Until the job has ended."""
    async for lines in client.tail_job_logs(job):
        say(lines.rstrip("\n"))


def _differences(wanted: ClusterConfig, running: ClusterConfig) -> dict[str, object]:
    """Settings that are not as wanted, with their wanted values. Any free port is as good as another."""
    if wanted.gateway.port == 0:
        wanted = dataclasses.replace(wanted, gateway=dataclasses.replace(wanted.gateway, port=running.gateway.port))
    return {name: value for name, (_, value) in differences(running, wanted).items()}
