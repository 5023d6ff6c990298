"""What `baton deploy` says to a Ray that is elsewhere, and where its processes are put."""

from __future__ import annotations

import shlex
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, cast

import pytest
from ray.job_submission import JobStatus

from baton.common.config import ClusterConfig, GatewayConfig, PlacementConfig
from baton.common.config_checks import validate
from baton.common.errors import ConfigError
from baton.common.resolve import Layer, assignments_layer, merge
from baton.deploy import standing
from baton.deploy.cli import FAILED, OK, run_command
from baton.deploy.cluster_plan import Place, place_of
from baton.deploy.launch import ClusterHandle, LaunchError


def test_the_command_for_another_machine_says_every_setting_as_it_was_meant() -> None:
    layers = [Layer("file", {"prefill": 2, "kv": {"page_size": 4}}), assignments_layer(["prefill=3", "bind_host=node"])]
    layers += [assignments_layer(["transfer.lanes=[tcp,zmq]", "kv.num_pages=null", "model.thinking_start='<a b>'"])]
    said = shlex.split(shlex.join(standing.deploy_command(layers, ["--replace"])))
    assert said[:3] == ["baton", "deploy", "--replace"]
    assert all(word.startswith("--set=") for word in said[3:])
    understood, _ = merge([assignments_layer([word.removeprefix("--set=") for word in said[3:]])])
    assert understood == merge(layers)[0]


def test_a_password_is_not_said_where_a_dashboard_shows_it() -> None:
    layers = [Layer("file", {"jobs": {"database": "postgresql://me:secret@host/jobs"}})]
    with pytest.raises(ConfigError, match="BATON_SET_JOBS__DATABASE") as raised:
        standing.deploy_command(layers, [])
    assert "secret" not in str(raised.value)


class FakeJobs:
    """The Jobs API: remembers what it was given, says two lines, and ends."""

    entrypoints: ClassVar[list[str]] = []  # of all clients: the code under test makes them
    end = JobStatus.SUCCEEDED

    def __init__(self, address: str) -> None:
        self.address = address

    def submit_job(self, entrypoint: str) -> str:
        self.entrypoints.append(entrypoint)
        return "job-1"

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        yield "starting\n"
        yield "http://10.0.0.7:8000\n"

    def get_job_status(self, job: str) -> JobStatus:
        return self.end


@pytest.mark.parametrize(("end", "code"), [(JobStatus.SUCCEEDED, OK), (JobStatus.FAILED, FAILED)])
def test_deploy_and_down_through_the_jobs_api(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, end: JobStatus, code: int
) -> None:
    monkeypatch.setattr(standing, "JobSubmissionClient", FakeJobs)
    monkeypatch.setattr(FakeJobs, "entrypoints", [])
    monkeypatch.setattr(FakeJobs, "end", end)
    (tmp_path / "baton.yaml").write_text("decode: 8")
    address = "--address=http://head:8265"
    deploy = ["deploy", address, f"--config={tmp_path / 'baton.yaml'}", "--prefill", "4", "--drain-s", "5"]
    assert run_command(deploy) == code
    assert run_command(["down", address, "--cluster", "other"]) == code
    assert FakeJobs.entrypoints == [
        "baton deploy --drain-s=5.0 --set=decode=8 --set=prefill=4",
        "baton down --cluster=other --drain-s=30.0",
    ]
    assert "http://10.0.0.7:8000" in capfd.readouterr().out


def test_each_role_has_its_place() -> None:
    plain = PlacementConfig()
    assert place_of("decode", plain) == Place(num_cpus=1)
    assert place_of("gateway", plain) == Place()
    placed = PlacementConfig(resources="role", cpus=4, gpus=1, strategy="spread", node_labels=("zone=a",))
    labels = ("zone=a",)
    on_decode = Place(num_cpus=4, num_gpus=1, resources={"baton_decode": 1}, node_labels=labels, spread=True)
    assert place_of("decode", placed) == on_decode
    assert place_of("controller", placed) == Place(resources={"baton_controller": 1}, node_labels=labels)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (ClusterConfig(placement=PlacementConfig(node_labels=("zone",))), "placement.node_labels"),
        (ClusterConfig(placement=PlacementConfig(cpus=0)), "placement.cpus"),
        (ClusterConfig(placement=PlacementConfig(gpus=-1)), "placement.gpus"),
        (ClusterConfig(placement=PlacementConfig(resources="role")), "pin_cores"),
    ],
)
def test_a_place_that_cannot_be(config: ClusterConfig, field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate(config)
    assert raised.value.field == field


def test_what_nobody_answers_for_is_deployed_again_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tries that fail, one that works; it answers, falls silent, and is deployed once more."""
    monkeypatch.setattr(standing, "PATIENCE_S", 0.0)
    monkeypatch.setattr(standing, "KEEP_INTERVAL_S", 0.0)
    stop, said, tries = threading.Event(), list[str](), list[int]()

    def deploy() -> None:
        tries.append(len(tries))
        if len(tries) <= 2:
            raise LaunchError("no Ray cluster there")
        if len(tries) == 4:
            stop.set()

    standing.keep(deploy, "http://127.0.0.1:9", stop, said.append)
    assert len(tries) == 4
    assert said == ["no Ray cluster there; trying again in 0 s"] * 2


def test_what_answers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, looks = threading.Event(), list[str]()

    def answers(url: str) -> bool:
        looks.append(url)
        if len(looks) == 3:
            stop.set()
        return True

    monkeypatch.setattr(standing, "KEEP_INTERVAL_S", 0.0)
    monkeypatch.setattr(standing, "_answers", answers)
    deployed = list[int]()
    standing.keep(lambda: deployed.append(1), "http://gateway:8000", stop, lambda line: None)
    assert (looks, deployed) == (["http://gateway:8000"] * 3, [1])


@pytest.mark.parametrize(("cert", "scheme"), [("", "http"), ("/etc/tls/cert.pem", "https")])
def test_gateways_are_reached_at_their_nodes(cert: str, scheme: str) -> None:
    """Those that listen on all addresses; over TLS where there is a certificate."""
    gateway = GatewayConfig(host="0.0.0.0", port=8000, tls_cert=cert, tls_key=cert)
    config = ClusterConfig(gateway=gateway, gateways=2)
    members = [
        SimpleNamespace(role=role, address=f"tcp://10.0.0.{n}:4711", stamp=SimpleNamespace(worker=f"{role}-{n}"))
        for role, n in (("gateway", 0), ("gateway", 1), ("decode", 0))
    ]
    handle = SimpleNamespace(plan=SimpleNamespace(config=config), status=lambda: SimpleNamespace(members=members))
    found = standing.gateway_urls(cast(ClusterHandle, handle))
    assert found == [f"{scheme}://10.0.0.0:8000", f"{scheme}://10.0.0.1:8001"]
