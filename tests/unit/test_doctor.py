"""`baton doctor` names what is broken or slow, and what to do; it finds nothing where nothing is."""

from __future__ import annotations

import socket

import msgspec
import pytest
from msgspec.structs import replace
from test_show import status_with

from baton.common.config import ClusterConfig, GatewayConfig, ModelConfig
from baton.common.messages import Load
from baton.deploy.cli import FAILED, OK, run_command
from baton.deploy.doctor.findings import Finding, Severity
from baton.deploy.doctor.machine import examine_machine
from baton.deploy.doctor.report import SCHEMA, Report
from baton.deploy.doctor.running import findings_of
from baton.deploy.status import GatewayStatus

FAKE = ClusterConfig(model=ModelConfig(model="fake"), gateway=GatewayConfig(port=0))


def of(findings: list[Finding], what: str) -> Finding:
    return next(one for one in findings if one.what == what)


def looked_at(status: GatewayStatus) -> list[Finding]:
    return list(findings_of(status))


def with_worker(status: GatewayStatus, load: Load, *, silent: bool = False) -> GatewayStatus:
    first, *others = status.workers
    changed = replace(first, load=load, silent=silent, incarnation=1)
    return replace(status, workers=[changed, *(replace(one, incarnation=1) for one in others)])


def test_this_machine_is_fit_for_the_fake_model() -> None:
    findings = list(examine_machine(FAKE, lambda line: None))
    assert not [one for one in findings if one.severity is Severity.FAIL]
    assert {"software", "prefix tree", "page copies", "gateway"} <= {one.what for one in findings}
    assert all(one.way_out for one in findings if one.severity is not Severity.OK)


def test_what_is_taken_or_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ClusterConfig(
            bind_host="192.0.2.1",
            gateway=GatewayConfig(port=taken.getsockname()[1]),
        )
        findings = list(examine_machine(config, lambda line: None))
    assert of(findings, "cluster interface").severity is Severity.FAIL
    assert of(findings, "gateway").severity is Severity.WARN
    compiled = of(findings, "page copies")
    assert (compiled.severity, "no-such-compiler" in compiled.value) == (Severity.WARN, True)


def test_a_cluster_that_is_well_has_nothing_broken() -> None:
    findings = looked_at(with_worker(status_with(), Load()))
    assert {one.severity for one in findings} == {Severity.OK}


def test_pages_of_nobody_silent_and_stuck_workers_are_found() -> None:
    lost = looked_at(status_with(free=990))
    assert any("10 pages of full belong to nobody" in one.value for one in lost if one.severity is Severity.FAIL)
    silent = of(looked_at(with_worker(status_with(), Load(), silent=True)), "decode-0")
    assert (silent.severity, silent.value) == (Severity.FAIL, "is silent")
    stuck = of(looked_at(with_worker(status_with(), Load(step_age_s=99.0))), "decode-0")
    assert stuck.severity is Severity.FAIL
    assert "99 s" in stuck.value
    waiting = of(looked_at(with_worker(status_with(free=998, quarantined=2), Load())), "decode-0")
    assert (waiting.severity, waiting.value[:7]) == (Severity.WARN, "2 pages")
    assert of(looked_at(replace(status_with(), ready=False, reason="none")), "cluster").severity is Severity.FAIL


def test_a_slow_lane_where_a_faster_one_is_up_is_told() -> None:
    status = status_with()
    status.details["decode-0"]["lanes"] = [
        {"peer": "prefill-0", "lane": "local", "status": "up", "gbps": 0.4},
        {"peer": "prefill-0", "lane": "tcp", "status": "up", "gbps": 2.0},
    ]
    found = of(looked_at(status), "prefill-0 to decode-0")
    assert found.severity is Severity.WARN
    assert "over local at 0.40 GB/s, though tcp reaches 2.00" in found.value


def test_the_command_ends_with_what_it_found(capfd: pytest.CaptureFixture[str]) -> None:
    looking = ["doctor", "--port", "0", "--no-measure"]
    assert run_command([*looking, "--model", "fake", "--json"]) == OK
    report = msgspec.json.decode(capfd.readouterr().out, type=Report)
    assert (report.schema, of(report.findings, "model").severity) == (SCHEMA, Severity.OK)
    assert report.hosts[0].facts is not None
    assert run_command([*looking, "--model", "./nowhere/x"]) == FAILED
    assert "no such directory" in capfd.readouterr().out
    assert run_command([*looking, "--model", "fake", "--url", "http://127.0.0.1:9"]) == FAILED
    assert "nobody answers at http://127.0.0.1:9" in capfd.readouterr().out
