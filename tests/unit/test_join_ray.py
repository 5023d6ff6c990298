"""What a person is told when Ray cannot be joined, or the controller on it does not answer."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RaySystemError

from baton.common import env
from baton.common.clock import MonotonicClock
from baton.common.config import ClusterConfig, GatewayConfig, ModelConfig, PlacementConfig
from baton.common.errors import ConfigError
from baton.common.ids import WorkerId
from baton.common.model.cache import silent
from baton.deploy import launch, ray_join
from baton.deploy.cluster_plan import ClusterPlan, Place, PlannedSeat
from baton.deploy.controller_seats import SeatSpec
from baton.deploy.launch import ClusterHandle, LaunchError, attach


@pytest.fixture(autouse=True)
def joined_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of the same run may have left this process connected to their Ray."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.fixture
def listener() -> Iterator[str]:
    """The address of somebody who listens, and is no Ray."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("error", [ConnectionError, RuntimeError, ValueError])
def test_a_ray_that_cannot_be_joined_is_named(
    monkeypatch: pytest.MonkeyPatch, listener: str, error: type[Exception]
) -> None:
    def refuse(**_: object) -> None:
        raise error("nobody answers\nand many more lines")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(LaunchError, match=rf"at {listener}: nobody answers"):
        attach("baton", listener)


def test_where_no_ray_was_found_the_way_out_is_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance. Please specify one with the `--address` flag.")

    monkeypatch.setattr(ray, "init", find_none)
    with pytest.raises(LaunchError, match=r"^no Ray cluster was found .*--ray-address"):
        attach("baton", "auto")


@pytest.mark.parametrize(("joins", "mode"), [(True, None), (False, "disabled")])
def test_whether_a_ray_that_runs_wants_a_token_is_left_to_ray(
    monkeypatch: pytest.MonkeyPatch, joins: bool, mode: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {})
    env.prepare_ray(joins=joins)
    assert os.environ.get("RAY_AUTH_MODE") == mode


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_where_nobody_listens_is_told_at_once(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray looks for it for more than a minute"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started_s = MonotonicClock().now()
    with pytest.raises(LaunchError, match=rf"^no Ray cluster at {prefix}127\.0\.0\.1:{port}: .*refused"):
        attach("baton", f"{prefix}127.0.0.1:{port}")
    assert MonotonicClock().now() - started_s < ray_join.CONNECT_TIMEOUT_S


def test_a_port_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("there is nothing to join"))
    with pytest.raises(LaunchError, match=r"no Ray cluster at 127\.0\.0\.1:99999: "):
        attach("baton", "127.0.0.1:99999")


def test_a_ray_that_does_not_start_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nand many more lines")

    steps: list[str] = []
    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(ray, "shutdown", lambda: steps.append("ray.shutdown"))
    config = replace(ClusterConfig(), model=ModelConfig(model="fake"), gateway=GatewayConfig(port=0))
    with pytest.raises(LaunchError, match=r"^Ray did not start on this machine: The current .* startup\.$"):
        launch.launch(config)
    assert steps == ["ray.shutdown"]


@pytest.mark.parametrize(("gpus", "given"), [(0, 0), (1, None)])
def test_a_ray_of_our_own_has_the_gpus_that_workers_ask_for(
    monkeypatch: pytest.MonkeyPatch, gpus: int, given: int | None
) -> None:
    """It was told that it has none, and whoever asked it for one waited for ever."""
    asked: dict[str, object] = {}
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 2.0})
    config = ClusterConfig(prefill=1, decode=1, placement=PlacementConfig(gpus=gpus))
    assert ray_join.connect_ray(config, None, silent, None)
    assert asked["num_gpus"] == given


def test_gpus_that_a_ray_of_our_own_does_not_find_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 1.0})
    monkeypatch.setattr(ray, "shutdown", lambda: steps.append("ray.shutdown"))
    config = ClusterConfig(prefill=1, decode=1, placement=PlacementConfig(gpus=1))
    with pytest.raises(ConfigError, match=r"placement\.gpus = 1: 2 workers take 2, and Ray found 1 GPUs"):
        ray_join.connect_ray(config, None, silent, None)
    assert steps == ["ray.shutdown"]


@dataclass
class FakeController:
    """A handle whose every call fails with the next of `errors`, and from then on returns its arguments."""

    errors: list[Exception]
    calls: list[str] = field(default_factory=list)

    def __getattr__(self, method: str) -> FakeMethod:
        return FakeMethod(self, method)


@dataclass
class FakeMethod:
    controller: FakeController
    name: str

    def remote(self, *arguments: object) -> object:
        self.controller.calls.append(self.name)
        if self.controller.errors:
            raise self.controller.errors.pop(0)
        return arguments


@dataclass
class FakeRay:
    """What a handle reaches of Ray."""

    pauses_s: list[float] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()

    def step(name: str, result: object) -> Callable[..., object]:
        def take(*_: object, **__: object) -> object:
            fake.steps.append(name)
            return result

        return take

    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference)
    monkeypatch.setattr(launch.time, "sleep", fake.pauses_s.append)
    monkeypatch.setattr(launch, "find_process", step("find", None))
    monkeypatch.setattr(launch, "reap_strangers", step("reap", True))
    monkeypatch.setattr(launch, "forget_run_dir", lambda run_dir: None)
    monkeypatch.setattr(launch, "forget_plan", lambda run_dir: None)
    monkeypatch.setattr(ray, "shutdown", step("ray.shutdown", None))
    return fake


def handle(controller: FakeController, run_dir: str = "/nowhere", owns_ray: bool = False) -> ClusterHandle:
    plan = ClusterPlan(config=ClusterConfig(), run_dir=run_dir, seats=(), class_paths={}, launched_at_ms=0)
    return ClusterHandle(plan, controller, owns_ray)


def unavailable() -> Exception:
    return ActorUnavailableError("restarting", None)


def test_a_controller_that_is_restarted_is_asked_again_after_a_pause(fake_ray: FakeRay) -> None:
    controller = FakeController([unavailable(), unavailable()])
    assert handle(controller).status() == ()  # type: ignore[comparison-overlap]
    assert controller.calls == ["status"] * 3
    assert fake_ray.pauses_s == [launch.RETRY_PAUSE_S] * 2


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (unavailable(), "was not there for 0 s"),
        (GetTimeoutError("Get timed out"), "did not answer within 0 s"),
        (ActorDiedError(), "cannot be asked: "),
        (RaySystemError("no connection\nand a trace"), "cannot be asked: System error: no connection$"),
    ],
)
def test_a_controller_that_does_not_answer_is_one_line(fake_ray: FakeRay, error: Exception, told: str) -> None:
    with pytest.raises(LaunchError, match=told) as raised:
        handle(FakeController([error])).status(timeout_s=0.0)
    assert "\n" not in str(raised.value)


def test_a_drain_without_a_controller_has_not_drained(fake_ray: FakeRay) -> None:
    lost = handle(FakeController([ActorDiedError()]))
    gateway = PlannedSeat(spec=SeatSpec(WorkerId("gateway-0"), "gateway"), cores=(), place=Place())
    assert not replace(lost, plan=replace(lost.plan, seats=(gateway,))).drain(0.0)


@pytest.mark.parametrize("error", [GetTimeoutError("late"), ActorDiedError()])
def test_a_shutdown_goes_on_when_the_controller_does_not_answer(
    fake_ray: FakeRay, tmp_path: Path, error: Exception
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with pytest.raises(LaunchError, match="the controller"):
        handle(FakeController([error]), str(run_dir), owns_ray=True).shutdown()
    assert fake_ray.steps == ["find", "reap", "ray.shutdown"]
    assert not run_dir.exists()


def test_a_cluster_that_was_replaced_does_not_end_the_one_that_replaced_it(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, killed = FakeController([ActorDiedError()]), FakeController([]), list[object]()
    monkeypatch.setattr(ray, "kill", lambda controller, no_restart: killed.append(controller))
    monkeypatch.setattr(launch, "find_process", lambda *_: new)
    with pytest.raises(LaunchError, match="the controller"):
        handle(old).shutdown()
    assert killed == []
    monkeypatch.setattr(launch, "find_process", lambda *_: old)
    old.errors.append(ActorDiedError())
    with pytest.raises(LaunchError, match="the controller"):
        handle(old).shutdown()
    assert killed == [old]


def test_a_shutdown_goes_on_when_ray_does_not_answer(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise RaySystemError("gone")

    monkeypatch.setattr(launch, "find_process", lost)
    with pytest.raises(
        LaunchError, match=r"the controller cannot be asked: .*; Ray did not answer: System error: gone"
    ):
        handle(FakeController([ActorDiedError()]), owns_ray=True).shutdown()
    assert fake_ray.steps == ["reap", "ray.shutdown"]


def test_of_two_that_launch_at_once_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: object, **__: object) -> None:
        raise ValueError("The name controller (namespace=baton) is already taken.\nand more lines")

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 64.0})
    monkeypatch.setattr(launch, "find_process", lambda *_: None)
    monkeypatch.setattr(launch, "create_actor", taken)
    config = replace(ClusterConfig(), model=ModelConfig(model="fake"), gateway=GatewayConfig(port=0))
    with pytest.raises(LaunchError, match=r"^a cluster named 'baton' is being launched: .* is already taken\.$"):
        launch.launch(config)


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_no_ray_is_started_for_an_address_that_this_machine_does_not_have(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("started Ray"))
    with pytest.raises(ConfigError, match=rf"bind_host = '{host}': cannot listen there: .*machine's, or node"):
        ray_join.connect_ray(ClusterConfig(bind_host=host), None, silent, None)


@pytest.mark.parametrize("meanwhile", [False, True])
def test_sigterm_is_the_callers_again_behind_a_join_and_one_that_came_meanwhile_is_his(
    meanwhile: bool, monkeypatch: pytest.MonkeyPatch, listener: str
) -> None:
    told: list[int] = []

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as Ray does
        if meanwhile:
            signal.raise_signal(signal.SIGTERM)

    def on_sigterm(number: int, _: object) -> None:
        told.append(number)

    monkeypatch.setattr(ray, "init", init)
    usual = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        if meanwhile:
            with pytest.raises(LaunchError, match="told to stop"):
                ray_join.join_ray(listener)
        else:
            ray_join.join_ray(listener)
        assert signal.getsignal(signal.SIGTERM) is on_sigterm
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert told == [signal.SIGTERM] * meanwhile
