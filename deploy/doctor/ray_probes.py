"""Probes as Ray actors, on every host of a Ray cluster: where workers would be.

Owns: the actors, their places, and that none is left: one that hangs obeys nobody but the kernel of its host, so each
leaves its pid where `reap` finds it. Never: a CPU or GPU of Ray's: nothing has to wait for a probe, and a probe for
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.common.config import ClusterConfig, PlacementConfig
from baton.common.ids import WorkerId
from baton.deploy.doctor.probe import ProbeProcess, born
from baton.deploy.doctor.probes import Silent, decode_answer
from baton.deploy.doctor.shapes import Answer, ProbeSpec, Request, Stop
from baton.deploy.ray_side import forget_run_dir, reap_strangers
from baton.transfer.actor import at_this_node

END_S = 3.0


class RayNode(msgspec.Struct, frozen=True):
    """A live node. `workers`: that a cluster could have there, going by Ray's resources."""

    node_id: str
    name: str
    workers: int
    object_store_bytes: int


class ProbeActor:
    """Ray's shell of a `ProbeProcess`. Not named, not detached: it ends with whoever made it."""

    def __init__(self, spec: bytes) -> None:
        decoded = msgspec.json.decode(spec, type=ProbeSpec)
        here = msgspec.structs.replace(decoded, config=at_this_node(decoded.config))
        self._probe: ProbeProcess = born(msgspec.json.encode(here))

    def ask(self, request: bytes) -> bytes:
        return self._probe.ask(request)


def ray_nodes(config: ClusterConfig) -> list[RayNode]:
    """All that live, by name. Nodes of one name get a number."""
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeName"])
    names = [str(node["NodeName"]) for node in nodes]
    return [
        RayNode(
            node_id=node["NodeID"],
            name=name if names.count(name) == 1 else f"{name}~{names[:index].count(name)}",
            workers=workers_on(node["Resources"], config.placement),
            object_store_bytes=int(node["Resources"].get("object_store_memory", 0)),
        )
        for index, (node, name) in enumerate(zip(nodes, names, strict=True))
    ]


def workers_on(resources: Mapping[str, float], placement: PlacementConfig) -> int:
    """At most, by the resources of one node. Pure."""
    if placement.resources == "role":
        return int(resources.get("baton_prefill", 0) + resources.get("baton_decode", 0))
    by_cpus = int(resources.get("CPU", 0) // placement.cpus)
    return min(by_cpus, int(resources.get("GPU", 0) // placement.gpus)) if placement.gpus else by_cpus


class RayProbes:
    """`Probes`; `specs` by the id of the node where each shall be."""

    def __init__(self, specs: Sequence[tuple[str, ProbeSpec]]) -> None:
        self._run_dirs = {spec.run_dir for _, spec in specs}
        actor = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)(ProbeActor)
        self._actors: dict[WorkerId, Any] = {
            spec.worker: actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                msgspec.json.encode(spec)
            )
            for node, spec in specs
        }

    def ask(self, requests: Mapping[WorkerId, Request], within_s: float) -> dict[WorkerId, Answer | Silent]:
        refs = {
            self._actors[worker].ask.remote(msgspec.json.encode(request)): worker
            for worker, request in requests.items()
        }
        answered, silent = ray.wait(list(refs), num_returns=len(refs), timeout=within_s) if refs else ([], [])
        answers: dict[WorkerId, Answer | Silent] = {refs[ref]: _taken(ref) for ref in answered}
        return answers | {refs[ref]: Silent(f"no answer within {within_s:g} s") for ref in silent}

    def close(self) -> tuple[WorkerId, ...]:
        self.ask({worker: Stop() for worker in self._actors}, END_S)
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        proofs = [reap_strangers(run_dir, frozenset()) for run_dir in self._run_dirs]
        gone = all(proofs)
        left = () if gone else tuple(self._actors)
        for run_dir in self._run_dirs if gone else ():
            forget_run_dir(run_dir)
        self._actors.clear()
        return left


def _taken(ref: Any) -> Answer | Silent:
    try:
        return decode_answer(ray.get(ref, timeout=END_S))
    except GetTimeoutError:
        return Silent("its answer did not come through")
    except RayError as error:
        words = [line for line in str(error).splitlines() if line.strip()]
        return Silent(f"it could not be started or has ended: {words[-1].strip() if words else 'no reason given'}")
