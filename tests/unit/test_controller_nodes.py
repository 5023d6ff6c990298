"""The controller asks Ray which nodes are to go, beside its loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import RpcError

from baton.common.config import ClusterConfig, ModelConfig
from baton.deploy import ray_side
from baton.deploy.cluster_plan import ClusterPlan
from baton.deploy.controller import NODES_LOOK_S, ControllerLoop


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
