"""`deploy/ray/*.yaml`: what Ray's own launcher says of them, and that Baton finds the places it asks for."""

from __future__ import annotations

import copy
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from helm_rig import ROOT
from ray.autoscaler._private.util import prepare_config, validate_config

from baton.common.resolve import Layer, merge

FOLDER = ROOT / "deploy" / "ray"
CLUSTERS = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yaml") if path.stem != "baton"}
BATON, _ = merge([Layer("baton.yaml", yaml.safe_load((FOLDER / "baton.yaml").read_text()))])
clusters = pytest.mark.parametrize("name", CLUSTERS)


def commands(cluster: dict[str, Any], kind: str) -> list[str]:
    return [str(line) for line in cluster[f"{kind}_start_ray_commands"]]


def start_options(command: str, more: str = "") -> dict[str, Any]:
    """Of a `ray start`, as Ray's own command line reads them; what the shell would fill in is made up, and `more` is
    what ~/baton-redis adds."""
    command = command.replace("$BATON_HEAD_OPTIONS", more)
    command = re.sub(r"\$\(cat ~/baton-role\)", "decode", command).replace("$(hostname -I | cut -d' ' -f1)", "10.0.0.1")
    words = shlex.split(command.rpartition("ray start ")[2].replace("$RAY_HEAD_IP", "10.0.0.1"))
    with warnings.catch_warnings():  # of libraries that Ray's command line imports
        warnings.simplefilter("ignore")
        from ray.scripts import scripts
    params: dict[str, Any] = scripts.start.make_context("start", words).params
    return params


@clusters
def test_ray_takes_it(name: str) -> None:
    prepared = prepare_config(copy.deepcopy(CLUSTERS[name]))
    validate_config(prepared)
    with pytest.raises(jsonschema.ValidationError):
        validate_config({**prepared, "no_such_field": 1})


@clusters
def test_every_role_has_a_place(name: str) -> None:
    cluster = CLUSTERS[name]
    if cluster["provider"]["type"] == "local":
        offered = [
            yaml.safe_load(start_options(commands(cluster, kind)[1])["resources"]) for kind in ("head", "worker")
        ]
    else:
        offered = [one["resources"] for one in cluster["available_node_types"].values()]
        assert set(cluster["available_node_types"][cluster["head_node_type"]]["resources"]) >= {"baton_controller"}
        for role, wanted in (("prefill", BATON.prefill), ("decode", BATON.decode)):
            assert cluster["available_node_types"][role]["max_workers"] >= wanted
            assert cluster["available_node_types"][role]["resources"]["CPU"] >= BATON.placement.cpus
        assert cluster["max_workers"] >= sum(
            one.get("max_workers", 0) for one in cluster["available_node_types"].values()
        )
    roles = {resource for one in offered for resource in one if resource.startswith("baton_")}
    assert roles | {"baton_prefill"} == {"baton_controller", "baton_gateway", "baton_prefill", "baton_decode"}


@clusters
def test_ray_start_is_understood_and_open_to_nobody(name: str) -> None:
    for kind in ("head", "worker"):
        stop, start = commands(CLUSTERS[name], kind)
        assert stop == "ray stop"
        options = start_options(start)
        assert options["head"] is (kind == "head")
        assert options["object_store_memory"] == 100_000_000
        if kind == "head":
            assert options["dashboard_host"] == "127.0.0.1"
            assert options["autoscaling_config"] == "~/ray_bootstrap_config.yaml"
        else:
            assert "timeout " in start  # to a head that is gone it would never end
            assert options["address"] == "10.0.0.1:6379"


@clusters
def test_nodes_get_the_wheel_the_lock_and_the_token(name: str) -> None:
    cluster = CLUSTERS[name]
    mounts = cluster["file_mounts"]
    for target, source in mounts.items():
        assert source.startswith("~") or source.endswith("dist") or (FOLDER / source).is_file(), target
    told = "\n".join(map(str, cluster["setup_commands"]))
    for needed in ("~/baton-dist/", "~/baton-requirements.lock", "chmod 600 ~/.ray/auth_token", "RAY_AUTH_MODE=token"):
        assert needed in told
    assert set(mounts) == {"~/baton-dist", "~/baton-requirements.lock", "~/baton.yaml", "~/.ray/auth_token"}


def test_a_head_takes_what_its_redis_file_says() -> None:
    text = (FOLDER / "redis.env").read_text()
    command = commands(CLUSTERS["on-premise"], "head")[1]
    assert command.index(". ~/baton-redis") < command.index("ray start") < command.index("$BATON_HEAD_OPTIONS")
    (more,) = re.findall("BATON_HEAD_OPTIONS='(.*)'", text)
    options = start_options(command, shlex.quote(more.split()[0]) + " " + shlex.quote(more.split()[1]))
    assert options["redis_password"] == "yours"
    assert set(options["system_config"]) == {"gcs_rpc_server_reconnect_timeout_s"}
    assert start_options(command)["redis_password"] == ""
    assert "export RAY_REDIS_ADDRESS=" in text  # Ray takes it from its environment


def test_the_documents_name_every_file() -> None:
    document = (ROOT / "docs" / "CLUSTERS.md").read_text()
    assert all(f"deploy/ray/{path.name}" in document for path in Path(FOLDER).glob("*.yaml"))
