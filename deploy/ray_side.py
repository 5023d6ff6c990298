"""Everything the controller asks of Ray: create an actor, watch it, kill it and prove it dead, find the ones alive.

Owns: the options actors are created with. Never: decides who must live or die (`controller_core`), or carries tokens.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import ray._private.state as ray_state
import ray.experimental.internal_kv as internal_kv
from ray._private.worker import global_worker
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.common.errors import BatonError
from baton.common.ids import WorkerId
from baton.common.log import EventLog
from baton.deploy.cluster_plan import ClusterPlan, Place
from baton.transfer.actor import CONCURRENCY_GROUPS, ProcessReport
from baton.transfer.process import ProcessSpec, actor_name, parse_actor_name, reap, reap_all_except

REAP_TIMEOUT_S = 2.0
KILL_GRACE_S = 2.0
"""So long a process may take to obey ray.kill. One that does leaves no alarm in Ray's log; one that hangs cannot."""
_STORE = b"baton"
_log = EventLog("baton.ray")


@dataclass(frozen=True, slots=True)
class FoundProcess:
    """A live actor that a restarted controller found."""

    worker: WorkerId
    incarnation: int
    report: ProcessReport | None


def load_class(path: str) -> type[object]:
    """`"package.module:Class"` -> the class."""
    module, _, name = path.partition(":")
    found: type[object] = getattr(importlib.import_module(module), name)
    return found


def create_process(spec: ProcessSpec, class_path: str, place: Place) -> ActorHandle:
    """A detached actor that Ray never restarts: its successor gets another incarnation, from the controller."""
    cluster = spec.config.cluster
    return create_actor(load_class(class_path), spec, cluster, spec.name, place, max_restarts=0, revision=spec.revision)


def create_actor(
    cls: type[object],
    argument: object,
    cluster: str,
    name: str,
    place: Place,
    *,
    max_restarts: int,
    revision: int = 1,
) -> ActorHandle:
    """Detached: it outlives whoever creates it. One of a later revision gets an interpreter that has imported nothing
    yet, so a release that was installed meanwhile is what it runs."""
    options: dict[str, Any] = {
        "name": name,
        "namespace": cluster,
        "lifetime": "detached",
        "max_restarts": max_restarts,
        "concurrency_groups": CONCURRENCY_GROUPS,
        "num_cpus": place.num_cpus,
        "num_gpus": place.num_gpus,
        "resources": dict(place.resources),
    }
    if revision > 1:
        options["runtime_env"] = {"env_vars": {"BATON_REVISION": str(revision)}}
    if place.node_labels:
        options["label_selector"] = dict(label.split("=", 1) for label in place.node_labels)
    if place.spread:
        options["scheduling_strategy"] = "SPREAD"
    return ray.remote(**options)(cls).remote(argument)


def watch_process(handle: ActorHandle, on_start_failed: Callable[[str], None], on_dead: Callable[[], None]) -> None:
    """Calls back on a thread of Ray's: with the reason why the process could not start, or when Ray sees the actor
    die (which is not yet a proof)."""

    def ended(future: Any) -> None:
        error = future.exception()
        if isinstance(error, RayTaskError):
            cause = error.cause
            on_start_failed(str(cause) if isinstance(cause, BatonError) else f"{type(cause).__name__}: {cause}")
        elif error is not None:
            on_dead()

    handle.watch.remote(os.getpid()).future().add_done_callback(ended)


def drain_process(handle: ActorHandle, timeout_s: float, on_drained: Callable[[], None]) -> None:
    """Tells a worker to take nothing new, and calls back on a thread of Ray's when all that it had has ended."""

    def ended(future: Any) -> None:
        if future.exception() is None and future.result():
            on_drained()

    handle.drain.remote(timeout_s).future().add_done_callback(ended)


def find_process(cluster: str, name: str) -> ActorHandle | None:
    """None: no live actor of that name."""
    try:
        return ray.get_actor(name, namespace=cluster)
    except ValueError:
        return None


def kill_and_prove(cluster: str, run_dir: str, worker: WorkerId, incarnation: int) -> bool:
    """Kills the process of this name wherever it runs. True: proven gone. False: ask again later.

    `ray.kill` alone is a request that a stopped process does not hear; SIGKILL on its own node is not. A node that Ray
    has given up is not asked: its processes can reach pages of others only through sockets, and staged lanes need no
    proof from the peer (docs/KV-OWNERSHIP.md, quarantined); the pull lane exists within one host only.
    """
    name = actor_name(worker, incarnation)
    handle = find_process(cluster, name)
    if handle is not None:
        ray.kill(handle, no_restart=True)
    return _on_every_node(reap, run_dir, name, KILL_GRACE_S, REAP_TIMEOUT_S)


def reap_strangers(run_dir: str, keep: frozenset[str]) -> bool:
    """Kills every process of this cluster whose name is not in `keep`. True: all proven gone."""
    return _on_every_node(reap_all_except, run_dir, keep, REAP_TIMEOUT_S)


def kill_actors(cluster: str) -> int:
    """Of every named actor of this cluster; how many there were."""
    names = [
        entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True) if entry["namespace"] == cluster
    ]
    handles = [handle for name in names if (handle := find_process(cluster, name)) is not None]
    for handle in handles:
        ray.kill(handle, no_restart=True)
    return len(handles)


def forget_run_dir(run_dir: str) -> None:
    """On every node that answers. What is left on another holds the names of processes that are gone."""
    _on_every_node(_remove_run_dir, run_dir)


def _remove_run_dir(run_dir: str) -> bool:
    shutil.rmtree(run_dir, ignore_errors=True)
    return True


def _on_every_node(function: Callable[..., bool], *arguments: object) -> bool:
    own = ray.get_runtime_context().get_node_id()
    done = function(*arguments)
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]
    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    refs = [
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*arguments)
        for node in others
    ]
    try:
        return all(ray.get(refs, timeout=10 * REAP_TIMEOUT_S)) and done
    except RayError as error:
        _log.warning("reap_failed", error=str(error)[:200])
        return False


def keep_plan(run_dir: str, plan: ClusterPlan) -> None:
    """In Ray's own store, for a controller that Ray starts again: it would begin with what it was created with,
    otherwise. Written as Ray writes that."""
    internal_kv._internal_kv_put(_plan_key(run_dir), ray.cloudpickle.dumps(plan), overwrite=True, namespace=_STORE)


def kept_plan(run_dir: str) -> ClusterPlan | None:
    """None: it was never changed."""
    kept = internal_kv._internal_kv_get(_plan_key(run_dir), namespace=_STORE)
    return None if kept is None else ray.cloudpickle.loads(kept)


def forget_plan(run_dir: str) -> None:
    internal_kv._internal_kv_del(_plan_key(run_dir), namespace=_STORE)


def _plan_key(run_dir: str) -> bytes:
    return f"plan:{run_dir}".encode()


def on_nodes_that_go(cluster: str) -> list[tuple[WorkerId, int]]:
    """The processes of this cluster on nodes that Ray was told to drain: `ray drain-node`, a spot notice, an autoscaler
    that takes a node away."""
    going = set(global_worker.gcs_client.get_draining_nodes())
    if not going:
        return []
    found = [
        parse_actor_name(actor["Name"])
        for actor in ray_state.actors().values()
        if actor["State"] == "ALIVE" and actor["Address"]["NodeID"] in going
    ]
    ours = {entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True) if entry["namespace"] == cluster}
    return [one for one in found if one is not None and actor_name(*one) in ours]


def find_live_processes(cluster: str, timeout_s: float) -> list[FoundProcess]:
    """Asks every live actor of the cluster who it is. Those that do not answer within `timeout_s` have no report."""
    handles: dict[tuple[WorkerId, int], ActorHandle] = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        parsed = parse_actor_name(entry["name"]) if entry["namespace"] == cluster else None
        handle = find_process(cluster, entry["name"]) if parsed is not None else None
        if parsed is not None and handle is not None:
            handles[parsed] = handle
    refs = {handle.report.remote(): key for key, handle in handles.items()}
    answered, silent = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
    found = [FoundProcess(*refs[ref], report=None) for ref in silent]
    for ref in answered:
        try:
            report = ray.get(ref, timeout=timeout_s)
        except (RayActorError, GetTimeoutError):
            report = None  # died between the two calls
        found.append(FoundProcess(*refs[ref], report=report))
    return found
