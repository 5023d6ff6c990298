"""Real probe processes on this machine: what they measure, and what becomes of one that hangs or cannot be reached."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from baton.common.config import ClusterConfig, ModelConfig
from baton.common.ids import WorkerId
from baton.deploy.cli import FAILED, run_command
from baton.deploy.doctor.examination import Bounds, Examination
from baton.deploy.doctor.findings import Severity
from baton.deploy.doctor.judge import judge
from baton.deploy.doctor.local_probes import LocalProbes
from baton.deploy.doctor.prober import LANE_BYTES
from baton.deploy.doctor.probes import Silent
from baton.deploy.doctor.shapes import Answer, Found, Host, Meet, ProbeSpec, Request
from baton.transfer.keys import KeyPair
from baton.transfer.process import new_run_dir

FAKE = ClusterConfig(model=ModelConfig(model="fake"))
CONFIG = replace(FAKE, transfer=replace(FAKE.transfer, lanes=("local", "tcp")))
ALL = replace(FAKE, transfer=replace(FAKE.transfer, lanes=("local", "tcp", "zmq")))  # ucx takes seconds to start
BOUNDS = Bounds(start_s=45.0, pair_s=20.0)


def spec(worker: str, run_dir: str, config: ClusterConfig = CONFIG) -> ProbeSpec:
    return ProbeSpec(WorkerId(worker), config, run_dir, 120.0)


@contextmanager
def probes(
    *specs: ProbeSpec, before: Mapping[WorkerId, Sequence[str]] | None = None, kind: type[LocalProbes] = LocalProbes
) -> Iterator[LocalProbes]:
    running = kind(specs, before)
    pids = [running.pid(one.worker) for one in specs]
    try:
        yield running
    finally:
        assert not running.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a probe was left behind"
        assert not Path(specs[0].run_dir).exists()


def examine(running: LocalProbes, *workers: str, bounds: Bounds = BOUNDS) -> Found:
    hosts = [Host(worker, (WorkerId(worker),), None, workers=1) for worker in workers]
    return Examination(
        config=CONFIG,
        hosts=hosts,
        probes=running,
        bounds=bounds,
        say=lambda line: None,
        ports=[("nobody", "127.0.0.1", 9)],
    ).run()


def test_every_lane_is_measured_in_both_directions_and_the_best_is_chosen() -> None:
    run_dir = new_run_dir("doctor-test")
    with probes(spec("a", run_dir, ALL), spec("b", run_dir, ALL)) as running:
        found = examine(running, "a", "b")
    assert {(pair.source, pair.receiver) for pair in found.pairs} == {("a", "b"), ("b", "a")}
    for pair in found.pairs:
        assert pair.control_us > 0
        assert [(lane.lane, lane.status, lane.reason) for lane in pair.lanes] == [
            (lane, "up", "") for lane in ("local", "tcp", "zmq")
        ]
        assert all(lane.gbps > 0 and lane.latency_us > 0 for lane in pair.lanes)
        assert all(0 < lane.nbytes <= LANE_BYTES for lane in pair.lanes)
        assert pair.chosen
    assert found.moved_bytes == sum(lane.nbytes for pair in found.pairs for lane in pair.lanes)
    assert (found.deaf, found.pairs_possible) == ((), 2)
    assert [clock.host for clock in found.clocks] == ["a", "b"]
    assert all(abs(clock.offset_s) <= clock.error_s + 1e-3 for clock in found.clocks)  # one clock
    assert {(reach.source, reach.outcome) for reach in found.ports} == {("a", "refused"), ("b", "refused")}
    failed = [one for one in judge(found) if one.severity is Severity.FAIL]
    assert {one.what for one in failed} == {"port of nobody"}


class Deceived(LocalProbes):
    """One that is told other keys of those it is to meet than they have."""

    def ask(self, requests: Mapping[WorkerId, Request], within_s: float) -> dict[WorkerId, Answer | Silent]:
        stranger = WorkerId("stranger")
        told = requests.get(stranger)
        if isinstance(told, Meet):
            wrong = [structs.replace(one, key=KeyPair.generate().public) for one in told.everybody]
            requests = {**requests, stranger: structs.replace(told, everybody=tuple(wrong))}
        return super().ask(requests, within_s)


def test_a_probe_that_hangs_and_one_of_other_keys_are_findings_and_cost_their_time_only() -> None:
    run_dir = new_run_dir("doctor-test")
    specs = [spec("a", run_dir), spec("b", run_dir), spec("stranger", run_dir)]
    with probes(*specs, kind=Deceived) as running:
        first = examine(running, "a", "stranger", bounds=replace(BOUNDS, pair_s=2.0))
        os.kill(running.pid(WorkerId("b")), signal.SIGSTOP)
        second = examine(running, "a", "b", bounds=replace(BOUNDS, start_s=3.0))
    for pair in first.pairs:
        assert (pair.control_us, pair.chosen) == (0.0, "local")  # which asks memory, and no socket
        assert {lane.lane for lane in pair.lanes if lane.status == "up"} == {"local"}
    assert set(first.deaf) == {("a", "stranger"), ("stranger", "a")}
    said = {(one.what, one.where) for one in judge(first) if one.severity is Severity.FAIL}
    assert {("control frames", "a -> stranger"), ("reachability", "stranger -> a")} <= said
    (hung,) = [host for host in second.hosts if host.facts is None]
    assert (hung.name, "no answer within 3 s" in hung.trouble, second.pairs) == ("b", True, ())
    assert ("probe", "b") in {(one.what, one.where) for one in judge(second) if one.severity is Severity.FAIL}


def namespaces(*kinds: str) -> tuple[str, ...]:
    """As a container of one's own has them."""
    return ("unshare", *kinds, "--fork", "--kill-child", *(["--mount-proc"] if "--pid" in kinds else []))


@pytest.mark.skipif(os.getuid() != 0, reason="namespaces want root")
def test_a_pid_namespace_forbids_shared_memory_and_a_shut_network_all_but_that() -> None:
    run_dir = new_run_dir("doctor-test")
    specs = [spec(worker, run_dir) for worker in ("a", "container", "island")]
    before = {WorkerId("container"): namespaces("--pid", "--ipc"), WorkerId("island"): namespaces("--net")}
    with probes(*specs, before=before) as running:
        found = examine(running, "a", "container", "island", bounds=replace(BOUNDS, pair_s=2.0))
    failed = {(one.what, one.where): one for one in judge(found) if one.severity is Severity.FAIL}
    for where in ("a -> container", "container -> a"):
        assert failed["lane", where].value.startswith("fell back to tcp")
        assert "PID namespaces of their own" in failed["lane", where].way_out
    assert {("control frames", "a -> island"), ("reachability", "a -> island"), ("reachability", "island -> a")} <= set(
        failed
    )
    assert all(host.facts is not None and not host.trouble for host in found.hosts)


def test_nothing_is_brought_up_where_the_doctor_fails(capfd: pytest.CaptureFixture[str]) -> None:
    """An address that is none of this machine's: no probe can listen there, and no worker could."""
    serving = ["serve", "--doctor", "--model", "fake", "--port", "0", "--set", "bind_host=192.0.2.1"]
    assert run_command(serving) == FAILED
    said = capfd.readouterr().err
    assert "cannot listen there" in said
    assert "nothing was brought up" in said


def test_a_probe_ends_by_itself_when_its_time_is_over() -> None:
    run_dir = new_run_dir("doctor-test")
    short = ProbeSpec(WorkerId("a"), CONFIG, run_dir, 0.0)
    running = LocalProbes([short])
    try:
        _, status = os.waitpid(running.pid(WorkerId("a")), 0)
        assert os.waitstatus_to_exitcode(status) == 1
    finally:
        running.close()
