"""`baton leave`: who is asked to go, how long, and what is told of it. On real hosts: tests/clusters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from baton.common.ids import CONTROLLER, WorkerId
from baton.deploy import leaving
from baton.deploy.launch import ClusterHandle, LaunchError

ROLES = {"prefill-0": "prefill", "decode-0": "decode", "gateway-0": "gateway"}


@dataclass
class FakeCluster:
    """A cluster whose processes on this node are the records in `run_dir`: to take one away is its end."""

    run_dir: Path
    refusals: int = 0
    told: list[str] = field(default_factory=list)
    drained: list[float] = field(default_factory=list)

    @property
    def plan(self) -> SimpleNamespace:
        return SimpleNamespace(run_dir=str(self.run_dir))

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(
            seats=[SimpleNamespace(worker=WorkerId(name), role=role) for name, role in ROLES.items()]
        )

    def wait_change(self, seen: object, timeout_s: float) -> None:
        pass

    def replace_worker(self, worker: WorkerId) -> None:
        if self.refusals > 0:
            self.refusals -= 1
            raise LaunchError(f"{worker} is the only live worker of its role")
        self.told.append(worker)
        (self.run_dir / f"{worker}@1").unlink()

    def actor(self, worker: WorkerId) -> SimpleNamespace:
        return SimpleNamespace(drain=SimpleNamespace(remote=self.drain))

    def drain(self, timeout_s: float) -> bool:
        self.drained.append(timeout_s)
        return True


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster(tmp_path / "run")
    fake.run_dir.mkdir()
    monkeypatch.setattr(leaving, "find_cluster", lambda *_: cast(ClusterHandle, fake))
    monkeypatch.setattr(leaving, "recorded_pid", lambda folder, name: 1 if (Path(folder) / name).exists() else None)
    monkeypatch.setattr(leaving, "_close_node", lambda within_s: None)
    monkeypatch.setattr(leaving.ray, "get", lambda answer: answer)
    return fake


def seat(cluster: FakeCluster, *names: str) -> None:
    for name in names:
        (cluster.run_dir / name).touch()


def test_workers_go_gateways_finish_and_nothing_is_left(cluster: FakeCluster) -> None:
    seat(cluster, "prefill-0@1", "decode-0@1")
    assert leaving.leave("c", "auto", 5.0, lambda line: None)
    assert sorted(cluster.told) == ["decode-0", "prefill-0"]
    assert not cluster.run_dir.exists()


def test_a_gateway_finishes_what_it_has(cluster: FakeCluster) -> None:
    seat(cluster, "gateway-0@1")
    assert leaving.leave("c", "auto", 5.0, lambda line: None)
    (within_s,) = cluster.drained
    assert 0 < within_s <= 5.0
    assert cluster.told == []
    assert (cluster.run_dir / "gateway-0@1").exists()  # it lives, and must be found to be killed


def test_the_only_one_of_its_role_waits_for_another(cluster: FakeCluster) -> None:
    cluster.refusals = 3
    seat(cluster, "decode-0@1")
    said: list[str] = []
    assert leaving.leave("c", "auto", 5.0, said.append)
    assert cluster.told == ["decode-0"]
    assert said == ["decode-0 finishes what it has"]


def test_who_is_still_there_when_time_is_up_is_told(cluster: FakeCluster) -> None:
    cluster.refusals = 10**9
    seat(cluster, "decode-0@1", CONTROLLER)
    said: list[str] = []
    assert not leaving.leave("c", "auto", 0.05, said.append)
    assert said == ["decode-0 is still here: decode-0 is the only live worker of its role"]
    assert cluster.run_dir.exists()


def test_there_is_nothing_to_leave(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "find_cluster", lambda *_: None)
    assert leaving.leave("c", "auto", 5.0, lambda line: None)


def test_whoever_leaves_a_cluster_that_is_not_there_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "find_cluster", lambda *_: None)
    said: list[str] = []
    assert leaving.leave("batno", "auto", 1.0, said.append)
    assert said == ["nothing named batno runs there"]
