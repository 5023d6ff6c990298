"""The controller on real Ray, over stub processes: deaths that Ray sees, deaths it does not, and its own."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from baton.common.clock import MonotonicClock
from baton.common.config import ClusterConfig, GatewayConfig, KvConfig, LivenessConfig, ModelConfig
from baton.common.errors import ConfigError
from baton.common.ids import CONTROLLER, WorkerId
from baton.common.messages import Membership
from baton.deploy import changing
from baton.deploy.cluster_plan import ControllerStatus
from baton.deploy.launch import ClusterHandle, LaunchError, launch
from baton.transfer.process import recorded_pid

pytestmark = pytest.mark.ray

D0 = WorkerId("decode-0")
STUB = "stub_process:StubActor"
STUBS = {"prefill": STUB, "decode": STUB, "gateway": STUB}
WAIT_S = 30.0


def stub_config(name: str) -> ClusterConfig:
    return ClusterConfig(
        cluster=name,
        prefill=1,
        decode=1,
        pin_cores=False,
        model=ModelConfig(model="fake", max_model_len=256),
        kv=KvConfig(num_pages=64),
        liveness=LivenessConfig(
            republish_interval_s=0.5, dead_after_s=1.5, engine_stuck_after_s=5.0, restart_backoff_s=0.1
        ),
        gateway=GatewayConfig(port=0),
    )


@pytest.fixture(scope="module")
def shared_cluster(ray_session: str) -> Iterator[ClusterHandle]:
    handle = launch(stub_config("controller-test"), class_paths=STUBS)
    yield handle
    processes = [pid_of(handle, name) for name in names(handle.status())]
    handle.shutdown()
    assert not Path(handle.plan.run_dir).exists()
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []


@pytest.fixture
def cluster(shared_cluster: ClusterHandle) -> ClusterHandle:
    """With every seat filled, whatever the test before did."""
    shared_cluster.wait_ready(WAIT_S)
    return shared_cluster


def pid_of(cluster: ClusterHandle, name: str) -> int:
    pid = recorded_pid(cluster.plan.run_dir, name)
    assert pid is not None, name
    return pid


def wait_for(cluster: ClusterHandle, wanted: Callable[[ControllerStatus], bool]) -> ControllerStatus:
    clock = MonotonicClock()
    deadline_s = clock.now() + WAIT_S
    status = cluster.status()
    while not wanted(status):
        assert clock.now() < deadline_s, status
        status = cluster.wait_change(status, 1.0)
    return status


def incarnation(status: ControllerStatus, worker: WorkerId = D0) -> int:
    """0: not a member."""
    return next((m.stamp.incarnation for m in status.members if m.stamp.worker == worker), 0)


def names(status: ControllerStatus) -> list[str]:
    return [f"{m.stamp.worker}@{m.stamp.incarnation}" for m in status.members]


def test_a_cluster_comes_up_with_every_seat_filled(cluster: ClusterHandle) -> None:
    assert names(cluster.status()) == ["prefill-0@1", "decode-0@1", "gateway-0@1"]


def test_a_killed_process_is_replaced_by_a_later_incarnation(cluster: ClusterHandle) -> None:
    before = cluster.status()
    old, pid = incarnation(before), pid_of(cluster, f"decode-0@{incarnation(before)}")
    os.kill(pid, signal.SIGKILL)
    status = wait_for(cluster, lambda s: incarnation(s) > old)
    assert status.version > before.version
    assert pid_of(cluster, f"decode-0@{incarnation(status)}") != pid
    assert not Path(f"/proc/{pid}").exists()


def test_a_stopped_process_is_killed_before_it_leaves_the_membership(cluster: ClusterHandle) -> None:
    old = incarnation(cluster.status())
    pid = pid_of(cluster, f"decode-0@{old}")
    os.kill(pid, signal.SIGSTOP)
    wait_for(cluster, lambda s: incarnation(s) != old)
    assert not Path(f"/proc/{pid}").exists(), "published as dead while it could still wake up"
    wait_for(cluster, lambda s: incarnation(s) > old)


def test_a_wedged_engine_is_replaced(cluster: ClusterHandle) -> None:
    old = incarnation(cluster.status())
    actor = cluster.actor(D0)
    assert actor is not None
    ray.get(actor.pretend_stuck.remote(6.0))
    status = wait_for(cluster, lambda s: incarnation(s) > old)
    assert any("engine step" in line for line in status.transitions)


def test_a_restarted_controller_adopts_the_living(cluster: ClusterHandle) -> None:
    before = cluster.status()
    workers = {name: pid_of(cluster, name) for name in names(before)}
    os.kill(pid_of(cluster, CONTROLLER), signal.SIGKILL)
    status = wait_for(cluster, lambda s: s.ready and s.version > before.version)
    assert {name: pid_of(cluster, name) for name in workers} == workers
    actor = cluster.actor(D0)
    assert actor is not None
    clock = MonotonicClock()
    deadline_s = clock.now() + WAIT_S
    while True:  # the members hear the new controller
        view: Membership = ray.get(actor.view.remote())
        if view.version >= status.version:
            break
        assert clock.now() < deadline_s
    old = incarnation(status)
    os.kill(workers[f"decode-0@{old}"], signal.SIGKILL)  # and it still guards them
    wait_for(cluster, lambda s: incarnation(s) > old)


def test_a_controller_that_was_away_proves_a_death_it_missed(cluster: ClusterHandle) -> None:
    old = incarnation(cluster.status())
    stopped = pid_of(cluster, f"decode-0@{old}")
    os.kill(stopped, signal.SIGSTOP)
    os.kill(pid_of(cluster, CONTROLLER), signal.SIGKILL)
    wait_for(cluster, lambda s: incarnation(s) > old)
    assert not Path(f"/proc/{stopped}").exists()


def test_a_process_that_was_starting_when_the_controller_died_is_started(cluster: ClusterHandle) -> None:
    old = incarnation(cluster.status())
    os.kill(pid_of(cluster, f"decode-0@{old}"), signal.SIGKILL)
    wait_for(cluster, lambda s: any(seat.worker == D0 and seat.incarnation > old for seat in s.seats))
    os.kill(pid_of(cluster, CONTROLLER), signal.SIGKILL)
    wait_for(cluster, lambda s: incarnation(s) > old)


def test_a_process_that_cannot_start_fails_the_launch_with_its_reason(ray_session: str) -> None:
    with pytest.raises(LaunchError, match=r"decode-0 could not start: .*there is no such model"):
        launch(stub_config("is-broken"), class_paths=STUBS)


def test_a_controller_that_cannot_start_fails_the_launch_with_its_reason(ray_session: str) -> None:
    config = replace(stub_config("elsewhere"), bind_host="192.0.2.1")  # an address of nobody
    with pytest.raises(LaunchError, match=r"^the controller could not start: bind_host = '192.*cannot listen there"):
        launch(config, class_paths=STUBS)


def test_workers_that_cannot_exchange_pages_fail_the_launch_by_field(ray_session: str) -> None:
    with pytest.raises(LaunchError, match=r"layout: (a != b|b != a)"):
        launch(stub_config("layout-differs"), class_paths=STUBS)


def test_a_taken_port_is_found_before_anything_starts(cluster: ClusterHandle) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = replace(stub_config("port"), gateway=GatewayConfig(port=port))
        with pytest.raises(ConfigError, match=r"gateway\.port = \d+: cannot listen"):
            launch(config, class_paths=STUBS)


def test_two_clusters_of_one_name_are_refused(cluster: ClusterHandle) -> None:
    with pytest.raises(ConfigError, match="a cluster of this name is running"):
        launch(replace(cluster.plan.config, gateway=GatewayConfig(port=0)), class_paths=STUBS)
    assert cluster.status().ready


def test_an_upgrade_that_was_given_up_is_not_begun_again(cluster: ClusterHandle) -> None:
    """Neither by a controller that Ray restarts, nor by whoever wants more workers."""
    broken = dict.fromkeys(STUBS, "no_such_module:Nobody")
    failed = changing.upgrade(cluster, cluster.current_plan().config, class_paths=broken).revision
    told = changing.watch(cluster, WAIT_S, upgrade_to=failed)
    assert "no_such_module" in told
    assert told.endswith("revision 1 serves")
    version = wait_for(cluster, lambda s: s.ready).version
    os.kill(pid_of(cluster, CONTROLLER), signal.SIGKILL)
    status = wait_for(cluster, lambda s: s.ready and s.version > version)
    assert (status.halted, status.changing) == (told, False)
    changing.scale(cluster, {"decode": 2})
    status = wait_for(cluster, lambda s: s.ready and len(s.seats) == 4)
    assert {seat.revision for seat in status.seats} == {1}
    changing.scale(cluster, {"decode": 1})
    wait_for(cluster, lambda s: s.ready and not s.changing)
