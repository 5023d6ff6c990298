"""`baton doctor`, and `--doctor` of what brings a cluster up: which hosts are examined, and with which probes.

Owns: that the probes are gone afterwards, whatever happened. Never: a finding.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from msgspec import structs
from rich.console import Console

from baton.common.config import NODE_ADDRESS, ClusterConfig
from baton.common.errors import BatonError
from baton.common.ids import WorkerId
from baton.common.messages import Member
from baton.common.model.cache import silent
from baton.deploy.commands.options import err
from baton.deploy.doctor.examination import SLACK_S, Bounds, Examination
from baton.deploy.doctor.findings import Severity, nothing_failed, worst
from baton.deploy.doctor.host import facts_here
from baton.deploy.doctor.judge import judge
from baton.deploy.doctor.local_probes import LocalProbes
from baton.deploy.doctor.machine import examine_machine
from baton.deploy.doctor.pairs import FEW
from baton.deploy.doctor.probes import Probes
from baton.deploy.doctor.report import print_finding, print_found, report_of
from baton.deploy.doctor.running import examine_gateway
from baton.deploy.doctor.shapes import Found, Host, ProbeSpec, Running
from baton.deploy.show import print_json
from baton.transfer.process import new_run_dir

MOST_ON_A_HOST = 2
"""What two workers of a host can have with each other, any two can."""
LOCAL_PROBES = 2
REST_S = 120.0

Say = Callable[[str], None]


class NotFit(BatonError):
    """A cluster was to be brought up only where nothing is wrong."""


def examine(
    config: ClusterConfig, url: str | None, ray_address: str | None, bounds: Bounds, out: Console | None
) -> Severity:
    """All that `baton doctor` looks at, shown on `out`, or as JSON on stdout: with a Ray its hosts, else this one."""
    say = silent if out is None else (lambda line: err.print(line, markup=False, style="dim"))
    early = chain(
        examine_machine(config, say) if ray_address is None else (),
        examine_gateway(url) if url is not None else (),
    )
    findings = []
    for finding in early:
        findings.append(finding)
        if out is not None:
            print_finding(finding, out)
    if ray_address is not None:
        found = examine_ray(config, ray_address, bounds, say)
    else:
        found = examine_here(config, bounds, say)
    judged = judge(found)
    if out is None:
        print_json(report_of([*findings, *judged], found))
    else:
        print_found(found, judged, out)
    return worst([*findings, *judged])


def examine_here(config: ClusterConfig, bounds: Bounds, say: Say) -> Found:
    """This machine: two workers as they would be here; without measuring, itself alone."""
    name = socket.gethostname()
    host = Host(name, _probes_of(name, LOCAL_PROBES), None, workers=config.prefill + config.decode)
    address = "127.0.0.1" if config.bind_host == NODE_ADDRESS else config.bind_host
    if not bounds.measure:
        return Found(config, (structs.replace(host, probes=(), facts=facts_here(config, address, "")),))
    specs = _specs(dataclasses.replace(config, bind_host=address), host.probes, bounds)
    return _examine(config, [host], LocalProbes(specs), bounds, say)


def examine_ray(config: ClusterConfig, ray_address: str, bounds: Bounds, say: Say) -> Found:
    """Every node of a Ray. The cluster of this name, where it runs, is looked at as it is configured. Raises
    LaunchError."""
    from baton.deploy.doctor.ray_probes import RayProbes, ray_nodes
    from baton.deploy.standing import find_cluster

    running = find_cluster(config.cluster, ray_address)
    members: tuple[Member, ...] = ()
    if running is not None:
        config = running.plan.config
        say(f"{config.cluster} runs there: its own settings are looked at")
        members = running.status().members
    nodes = ray_nodes(config)
    hosts = [
        Host(
            node.name,
            _probes_of(node.name, max(1, min(MOST_ON_A_HOST, node.workers))),
            None,
            workers=node.workers,
            object_store_bytes=node.object_store_bytes,
        )
        for node in nodes
    ]
    # Between hosts a loopback address could not be measured at all; that it is configured is a finding.
    bind_host = NODE_ADDRESS if len(nodes) > 1 else config.bind_host
    specs = _specs(
        dataclasses.replace(config, bind_host=bind_host), [probe for host in hosts for probe in host.probes], bounds
    )
    places = [node.node_id for node, host in zip(nodes, hosts, strict=True) for _ in host.probes]
    probes = RayProbes(list(zip(places, specs, strict=True)))
    return _examine(config, hosts, probes, bounds, say, members)


def refuse_unfit(config: ClusterConfig, ray_address: str | None, console: Console) -> None:
    """Before a cluster is brought up: examines the hosts of that Ray, or this machine, and shows what was found. Raises
    NotFit when anything has failed."""

    def say(line: str) -> None:
        console.print(line, markup=False, style="dim")

    if ray_address is None:
        found = examine_here(config, Bounds(), say)
    else:
        found = examine_ray(config, ray_address, Bounds(), say)
    findings = judge(found)
    print_found(found, findings, console)
    if not nothing_failed(findings):
        raise NotFit("the doctor found what would keep it from working: nothing was brought up")


def _examine(
    config: ClusterConfig,
    hosts: Sequence[Host],
    probes: Probes,
    bounds: Bounds,
    say: Say,
    members: Sequence[Member] = (),
) -> Found:
    left: tuple[WorkerId, ...] = ()
    try:
        found = Examination(
            config=config,
            hosts=hosts,
            probes=probes,
            bounds=bounds,
            say=say,
            ports=[port for member in members for port in ports_of(member)],
            members=[Running(one.stamp.worker, one.role, one.address, one.fingerprint) for one in members],
        ).run()
    finally:
        left = probes.close()
    return structs.replace(found, left=left)


def ports_of(member: Member) -> Iterator[tuple[str, str, int]]:
    """On which it is reached by its peers: the control port, and those of its lanes that have one."""
    name = member.stamp.worker
    yield (f"{name} control", *_host_and_port(member.address))
    for lane in member.lanes:
        match lane.address:
            case {"host": str(host), "port": int(port)}:
                yield f"{name} {lane.lane}", host, port
            case {"tcp": str(address)}:
                yield (f"{name} {lane.lane}", *_host_and_port(address))


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def _probes_of(host: str, count: int) -> tuple[WorkerId, ...]:
    return tuple(WorkerId(f"{host}/{number}") for number in range(count)) if count > 1 else (WorkerId(host),)


def _specs(config: ClusterConfig, probes: Sequence[WorkerId], bounds: Bounds) -> list[ProbeSpec]:
    """Each makes keys of its own: it can say nothing to a cluster, and no cluster to it."""
    run_dir = new_run_dir("doctor")
    rounds = 2 * (len(probes) if bounds.all_pairs else min(len(probes), 2 * FEW))
    lifetime_s = bounds.start_s + rounds * (bounds.pair_s + SLACK_S) + REST_S
    return [ProbeSpec(probe, config, run_dir, lifetime_s) for probe in probes]
