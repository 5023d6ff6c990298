"""What one release pickles, and another one reads: a plan, settings, what a process is started with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from ray import cloudpickle

from baton.common import by_name
from baton.common.by_name import ByName
from baton.common.config import ClusterConfig, ModelConfig
from baton.common.errors import ConfigError
from baton.common.ids import WorkerId
from baton.deploy.autoscale import Policy
from baton.deploy.cluster_plan import ClusterPlan, ControllerStatus, Place, PlannedSeat, Settings
from baton.deploy.controller_seats import SeatSpec, SeatStatus
from baton.deploy.planner.outcome import Slo
from baton.transfer.actor import ProcessReport
from baton.transfer.keys import ControllerDoor
from baton.transfer.process import ProcessSpec

CONFIG = ClusterConfig(cluster="mine", model=ModelConfig(model="fake", max_model_len=99))
PLAN = ClusterPlan(
    config=CONFIG,
    run_dir="/run/mine",
    seats=(PlannedSeat(spec=SeatSpec(WorkerId("prefill-0"), "prefill", 2), cores=(3,), place=Place(num_cpus=1.0)),),
    class_paths={"prefill": "some.module:Class"},
    launched_at_ms=5,
    revision=2,
    before={1: Settings(ClusterConfig(), {})},
)


def kinds(one: type) -> Iterator[type]:
    """The settings' classes, each with its groups."""
    yield one
    for field in dataclasses.fields(one):
        if dataclasses.is_dataclass(kind := getattr(field.default_factory, "__mro__", (None,))[0]):
            yield from kinds(kind)


def read(one: object, without: str = "", **more: object) -> Any:
    """What becomes of it where the writer had other fields."""
    function, (cls, values, defaulted) = one.__reduce__()  # type: ignore[misc]
    assert function is by_name.read
    return function(cls, {name: value for name, value in values.items() if name != without} | more, defaulted)


def test_all_of_it_comes_back() -> None:
    assert cloudpickle.loads(cloudpickle.dumps(PLAN)) == PLAN


def test_everything_that_a_release_tells_another_one_is_told_by_name() -> None:
    settings = list(kinds(ClusterConfig))
    assert len(settings) > 15
    told = [ClusterPlan, PlannedSeat, SeatSpec, Settings, Place, Policy, Slo, ControllerStatus, SeatStatus]
    for kind in [*settings, *told, ProcessSpec, ProcessReport, ControllerDoor]:
        assert issubclass(kind, ByName), kind


def test_a_plan_that_was_written_without_a_field_has_its_default() -> None:
    assert read(PLAN, without="before") == replace(PLAN, before={})
    assert read(CONFIG.model, without="forward_path") == CONFIG.model
    assert read(CONFIG.model, without="model") == replace(CONFIG.model, model=ModelConfig().model)


def test_a_setting_that_the_reader_does_not_know_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"ModelConfig.colour = 'red'.*does not know it") as caught:
        read(CONFIG.model, colour="red")
    assert caught.value.field == "ModelConfig.colour"


def test_a_field_without_which_nothing_goes_is_missed_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"ClusterPlan.run_dir.*needs it"):
        read(PLAN, without="run_dir")


@dataclass(frozen=True, slots=True)
class Older(ByName):
    size: int = 1


@dataclass(frozen=True, slots=True)
class Newer(ByName):
    colour: str = "grey"
    size: int = 1
    names: tuple[str, ...] = dataclasses.field(default_factory=tuple)


def test_a_release_ignores_what_it_does_not_know_where_that_says_nothing() -> None:
    """And the order of the fields, which is what decides when they are pickled by position."""
    _, (_, values, defaulted) = Newer(size=7).__reduce__()
    assert by_name.read(Older, values, defaulted) == Older(7)
    _, (_, values, defaulted) = Newer("red", 7, ("a",)).__reduce__()
    with pytest.raises(ConfigError, match=r"Older.colour = 'red'"):
        by_name.read(Older, values, defaulted)
    _, (_, values, defaulted) = Older(7).__reduce__()
    assert by_name.read(Newer, values, defaulted) == Newer(size=7)
