"""`baton doctor` on a real Ray of three nodes: what is wrong with one of them is found, and nothing stays behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from odd_probes import HOSTS, HangingProbe, OddProbe
from ray.cluster_utils import Cluster

from baton.common import env
from baton.common.config import ClusterConfig, ModelConfig
from baton.deploy.doctor import command, ray_probes
from baton.deploy.doctor.examination import Bounds
from baton.deploy.doctor.findings import Finding, Severity
from baton.deploy.doctor.judge import judge
from baton.deploy.doctor.shapes import Found
from baton.transfer.process import new_run_dir

pytestmark = [pytest.mark.slow, pytest.mark.ray]

CONFIG = ClusterConfig(cluster="doctor-test", model=ModelConfig(model="fake"), prefill=1, decode=1)
CONFIG = replace(CONFIG, transfer=replace(CONFIG.transfer, lanes=("local", "tcp", "zmq")))
BOUNDS = Bounds(start_s=60.0, pair_s=5.0)


@pytest.fixture(scope="module")
def nodes() -> Iterator[str]:
    env.prepare_ray(joins=False)
    here = str(Path(__file__).parent)  # actors import the odd ones from here
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="bt", dir="/tmp") as folder:
        cluster = Cluster()
        try:
            for address in HOSTS:
                cluster.add_node(
                    num_cpus=1, object_store_memory=100_000_000, include_dashboard=False, node_ip_address=address,
                    **({"temp_dir": folder} if address == HOSTS[0] else {}),
                )  # fmt: skip
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield cluster.address
        finally:
            ray.shutdown()
            cluster.shutdown()


def examined(address: str, config: ClusterConfig = CONFIG, bounds: Bounds = BOUNDS) -> tuple[Found, list[Finding]]:
    lines: list[str] = []
    records: list[str] = []

    def recorded(cluster: str) -> str:
        records.append(new_run_dir(cluster))
        return records[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "new_run_dir", recorded)
        found = command.examine_ray(config, address, bounds, lines.append)
    assert not found.left
    assert [Path(one).exists() for one in records] == [False], "a probe's record was left behind"
    for host in found.hosts:
        assert host.facts is None or not Path(f"/proc/{host.facts.pid}").exists(), "a probe was left behind"
    return found, [one for one in judge(found) if one.severity is Severity.FAIL]


def test_all_hosts_are_measured_and_the_loopback_is_named(nodes: str) -> None:
    found, failed = examined(nodes)
    assert [host.name for host in found.hosts] == list(HOSTS)
    assert len(found.pairs) == 6
    assert {pair.chosen for pair in found.pairs} <= {"local", "tcp"}
    assert not found.deaf
    assert len(found.clocks) == 3
    assert not failed, failed


def test_one_that_may_not_use_shared_memory_one_of_another_version_one_that_nobody_reaches(
    nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_probes, "ProbeActor", OddProbe)
    found, failed = examined(nodes)
    said = {(one.what, one.where) for one in failed}
    assert {("lane", f"{HOSTS[0]} -> {HOSTS[1]}"), ("lane", f"{HOSTS[1]} -> {HOSTS[0]}")} <= said
    assert {("reachability", f"{HOSTS[0]} -> {HOSTS[2]}"), ("reachability", f"{HOSTS[1]} -> {HOSTS[2]}")} <= said
    assert ("clock", HOSTS[2]) in {(one.what, one.where) for one in judge(found) if one.severity is Severity.WARN}
    (version,) = [one for one in judge(found) if one.what == "version" and one.where == HOSTS[1]]
    assert (version.value, version.expected[:5]) == ("baton 99.0", "baton")


def test_one_that_hangs_is_a_finding_and_is_gone_afterwards(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_probes, "ProbeActor", HangingProbe)
    found, failed = examined(nodes, bounds=replace(BOUNDS, start_s=20.0, pair_s=2.0))
    assert found.hosts[1].facts is not None
    assert "no answer within" in found.hosts[1].trouble
    assert ("probe", HOSTS[1]) in {(one.what, one.where) for one in failed}
    measured = {(pair.source, pair.receiver) for pair in found.pairs if pair.chosen and not pair.trouble}
    assert {(HOSTS[0], HOSTS[2]), (HOSTS[2], HOSTS[0])} <= measured
