"""`baton deploy` and `baton down`: both may be said any number of times, and nothing is left in the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import ray
from test_controller import STUBS, WAIT_S, names, pid_of, stub_config

from baton.common.config import ClusterConfig
from baton.common.errors import ConfigError
from baton.deploy.launch import ClusterHandle
from baton.deploy.standing import gateway_urls, stand_up, take_down

pytestmark = pytest.mark.ray

CONFIG = replace(
    stub_config("standing"),
    bind_host="node",
    gateway=replace(stub_config("standing").gateway, host="0.0.0.0", open_to_network=True),
)


def stand(address: str, config: ClusterConfig = CONFIG, *, replace: bool = False) -> ClusterHandle:
    return stand_up(config, address, replace=replace, class_paths=STUBS)


def test_a_cluster_stands_until_it_is_taken_down(ray_session: str) -> None:
    first = stand(ray_session)
    first.wait_ready(WAIT_S)
    try:
        again = stand(ray_session)
        assert again.plan.run_dir == first.plan.run_dir
        assert again.status().members == first.status().members
        host = ray.util.get_node_ip_address()
        assert {member.address.rpartition(":")[0] for member in again.status().members} == {f"tcp://{host}"}
        assert gateway_urls(again) == [f"http://{host}:{first.plan.config.gateway.port}"]

        other = replace(CONFIG, decode=2, kv=replace(CONFIG.kv, page_size=4))
        with pytest.raises(ConfigError, match=r"runs with other settings: decode, kv\.page_size"):
            stand(ray_session, other)
        replaced = stand(ray_session, other, replace=True)
        assert len(names(replaced.wait_ready(WAIT_S))) == 4
        assert not Path(first.plan.run_dir).exists()

        processes = [pid_of(replaced, name) for name in names(replaced.status())]
        assert take_down("standing", ray_session, drain_s=0.0)
        assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
        assert not Path(replaced.plan.run_dir).exists()
    finally:
        take_down("standing", ray_session, drain_s=0.0)
    assert not take_down("standing", ray_session, drain_s=0.0)
    assert not [one for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == "standing"]
