"""What the controller asks of Ray beside its loop: which nodes are to go, and to start a process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ray.exceptions import RpcError

from baton.common.config import ClusterConfig, ModelConfig, PlacementConfig
from baton.common.ids import WorkerId
from baton.deploy import ray_side
from baton.deploy.cluster_plan import ClusterPlan, Place, PlannedSeat, Settings
from baton.deploy.controller import NODES_LOOK_S, ControllerLoop
from baton.deploy.controller_seats import SeatSpec
from baton.transfer.keys import KeyPair
from baton.transfer.process import ProcessSpec


def test_while_rays_head_is_away_nodes_are_asked_about_again_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lost(cluster: str) -> list[object]:
        raise RpcError("the head is away")

    monkeypatch.setattr(ray_side, "on_nodes_that_go", lost)
    config = ClusterConfig(model=ModelConfig(model="fake"))
    plan = ClusterPlan(config=config, run_dir=str(tmp_path), seats=(), class_paths={}, launched_at_ms=0)
    loop = ControllerLoop(plan)
    loop._leave_nodes_that_go()
    (what_to_do,) = loop._inbox
    assert what_to_do(7.0) == []
    assert loop._look_at_nodes_s == 7.0 + NODES_LOOK_S
    loop._mesh.close()


def test_a_process_is_placed_and_pinned_by_the_settings_of_its_revision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An upgrade may change them, and one that is given up goes back to those before."""
    started: list[tuple[float, float, tuple[int, ...]]] = []

    def note(spec: ProcessSpec, class_path: str, place: Place) -> None:
        started.append((place.num_cpus, place.num_gpus, spec.cores))

    monkeypatch.setattr(ray_side, "create_process", note)
    monkeypatch.setattr(ControllerLoop, "_watch", lambda *_: None)
    before = ClusterConfig(model=ModelConfig(model="fake"))
    after = replace(before, pin_cores=False, placement=PlacementConfig(cpus=2, gpus=1))
    paths, spec = {"decode": "a.module:Worker"}, SeatSpec(WorkerId("decode-0"), "decode", revision=2)
    plan = ClusterPlan(
        config=after,
        run_dir=str(tmp_path),
        seats=(PlannedSeat(spec=spec, cores=(3,), place=Place(num_cpus=1)),),
        class_paths=paths,
        launched_at_ms=0,
        revision=2,
        before={1: Settings(before, paths)},
    )
    loop = ControllerLoop(plan)
    for revision in (2, 1):
        loop._start_process(replace(spec, revision=revision), revision, KeyPair.generate())
    assert started == [(2, 1, ()), (1, 0, (3,))]
    loop._mesh.close()
