"""What the chart says to Baton is understood by it, what its documents say is true, and wrong values are refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import typer
import yaml
from helm_rig import CASES, CHART, ROOT, env_of, helm, needs_helm, of_kind, pods, render

from baton.common.resolve import Layer, merge
from baton.deploy.cli import app

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())


def understood(command: list[str]) -> dict[str, Any]:
    """The options of a command line, as our own command line reads them."""
    name, *arguments = command[1:]
    assert command[0] == "baton"
    group = typer.main.get_command(app)
    return group.commands[name].make_context(name, list(arguments)).params  # type: ignore[attr-defined]


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_baton_understands_what_it_is_told(case: str) -> None:
    manifests = render(case)
    (config,) = (one["data"]["baton.yaml"] for one in of_kind(manifests, "ConfigMap") if "baton.yaml" in one["data"])
    settings, _ = merge([Layer("chart", yaml.safe_load(config))])
    (cluster,) = of_kind(manifests, "RayCluster")
    offered: dict[str, int] = {}
    for group in cluster["spec"]["workerGroupSpecs"]:
        for name, count in group["resources"].items():
            offered[name] = offered.get(name, 0) + int(count) * group["replicas"]
    assert offered == {
        "baton_prefill": settings.prefill, "baton_decode": settings.decode, "baton_gateway": settings.gateways,
    }  # fmt: skip
    assert cluster["spec"]["headGroupSpec"]["resources"] == {"baton_controller": "1"}
    assert settings.placement.resources == "role"
    deployer = next(pod for name, pod in pods(manifests).items() if name.endswith("-deployer"))
    told = understood(deployer["spec"]["containers"][0]["command"])
    services = {one["metadata"]["name"]: one for one in of_kind(manifests, "Service")}
    host, port = told["keep"].partition("://")[2].split(":")
    assert services[host]["spec"]["ports"][0]["port"] == int(port) == settings.gateway.port
    assert told["address"] == f"http://{cluster['metadata']['name']}-head-svc:8265"
    assert told["replace"]
    for name, pod in pods(manifests).items():
        hook = pod["spec"]["containers"][0].get("lifecycle")
        assert (hook is None) == (name in ("head", deployer["metadata"].get("name")) or name.endswith("-deployer"))
        if hook is not None:
            leaving = understood(hook["preStop"]["exec"]["command"])
            assert leaving["cluster"] == settings.cluster
            assert leaving["within_s"] < pod["spec"]["terminationGracePeriodSeconds"]
            assert settings.liveness.drain_deadline_s < leaving["within_s"]


@needs_helm
def test_secrets_are_referred_to_and_never_written_out() -> None:
    manifests = render("everything")
    (secret,) = of_kind(manifests, "Secret")
    assert len(secret["data"]["auth_token"]) >= 64
    (cluster,) = of_kind(manifests, "RayCluster")
    assert cluster["spec"]["authOptions"] == {"mode": "token", "secretName": secret["metadata"]["name"]}
    every = pods(manifests)
    deployer = env_of(every["blue-llm-deployer"])
    assert deployer["RAY_AUTH_TOKEN"] == {"secretKeyRef": {"name": secret["metadata"]["name"], "key": "auth_token"}}
    assert "BATON_SET_JOBS__DATABASE" not in deployer  # it would be told to Ray's Jobs API
    assert env_of(every["head"])["BATON_SET_JOBS__DATABASE"] == {"secretKeyRef": {"name": "store", "key": "database"}}
    mounts = {name: [one["name"] for one in pod["spec"].get("volumes", [])] for name, pod in every.items()}
    for secret_volume in ("api-keys", "tls"):
        assert [name for name, found in mounts.items() if secret_volume in found] == ["gateway"]
    assert cluster["spec"]["gcsFaultToleranceOptions"] == {
        "redisAddress": "rediss://redis:6380",
        "redisUsername": {"value": "ray"},
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "redis-password"}}},
    }


@needs_helm
@pytest.mark.parametrize(
    ("values", "scheme"),
    [
        ({}, "http"),
        ({"tls": {"existingSecret": "t"}}, "https"),
        ({"config": {"gateway": {"tls_cert": "/x.crt", "tls_key": "/x.key"}}}, "https"),  # files of one's own
    ],
)
def test_who_asks_a_gateway_speaks_as_it_does(values: dict[str, Any], scheme: str) -> None:
    """Kubelets, Prometheus and the deployer."""
    values = {**values, "monitoring": {"podMonitor": {"enabled": True}}}
    manifests = list(yaml.safe_load_all(helm("template", "x", str(CHART), values=values).stdout))
    (config,) = (one["data"]["baton.yaml"] for one in of_kind(manifests, "ConfigMap") if "baton.yaml" in one["data"])
    gateway = merge([Layer("chart", yaml.safe_load(config))])[0].gateway
    assert gateway.scheme == scheme
    every = pods(manifests)
    (container,) = every["gateway"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"].get("scheme", "HTTP") == scheme.upper()
    assert understood(every["x-baton-deployer"]["spec"]["containers"][0]["command"])["keep"].startswith(f"{scheme}://")
    (monitor,) = of_kind(manifests, "PodMonitor")
    assert [one["scheme"] for one in monitor["spec"]["podMetricsEndpoints"]] == [scheme]
    if "tls" in values:
        (folder,) = (one["mountPath"] for one in container["volumeMounts"] if one["name"] == "tls")
        assert (gateway.tls_cert, gateway.tls_key) == (f"{folder}/tls.crt", f"{folder}/tls.key")


@needs_helm
def test_a_deployer_begins_anew_when_settings_change() -> None:
    sums = set()
    for config in ({}, {"kv": {"page_size": 4}}):
        done = helm("template", "x", str(CHART), values={"config": config})
        sums |= set(re.findall("checksum/config: .*", done.stdout))
    assert len(sums) == 2


@needs_helm
@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"grups": {}}, "'grups' not allowed"),
        ({"image": {"tag": "latest"}}, "/image/tag"),
        ({"head": {"shmsize": "1Gi"}}, "'shmsize' not allowed"),
        ({"groups": {"decode": {"role": "router"}}}, "/groups/decode/role"),
        ({"groups": {"head": {"role": "decode", "replicas": 1}}}, "'head'"),
        ({"podDefaults": {"resources": {"limits": {"cpu": "many"}}}}, "/podDefaults/resources/limits/cpu"),
        ({"podSecurityContext": {"runAsNonRoot": False}}, "/podSecurityContext/runAsNonRoot"),
        ({"autoscaling": {"enabled": True}}, "/autoscaling/scaleTargetRef/name"),
        ({"groups": {"gateway": {"replicas": 2}}}, "jobs.existingSecret: several gateways share one job store"),
        ({"ingress": {"enabled": True}}, "apiKeys.existingSecret: whoever reaches the gateways from outside"),
        ({"service": {"type": "LoadBalancer"}}, "apiKeys.existingSecret: whoever reaches the gateways from outside"),
        ({"groups": {"decode": {"replicas": 0}}}, "there is no decode"),
        ({"gcsFaultTolerance": {"redisAddress": "redis"}}, "/gcsFaultTolerance/redisAddress"),
        ({"gcsFaultTolerance": {"redisPasswordSecret": "redis"}}, "gcsFaultTolerance.redisAddress: whose password"),
        ({"kvEvents": {"from": [{"podSelector": {}}]}}, "kvEvents.from: there are no events"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], says: str) -> None:
    done = helm("template", "x", str(CHART), values=values)
    assert done.returncode != 0
    assert says in done.stderr


def leaves(value: object, path: str = "") -> dict[str, object]:
    """Every value by its path. Lists, and maps that users fill, are values."""
    if isinstance(value, dict) and value and not path.endswith(("requests", "limits", "podSecurityContext", "labels")):
        found: dict[str, object] = {}
        for name, inner in value.items():
            found |= leaves(inner, f"{path}.{name}".lstrip("."))
        return found
    return {path: value}


def test_every_value_is_in_the_table() -> None:
    """Of README.md, with its default."""
    rows = dict(re.findall(r"^\| `([a-zA-Z.*<>-]+)` \| `(.*?)` \|", (CHART / "README.md").read_text(), re.MULTILINE))
    wanted = {path: json.dumps(value) for path, value in leaves(VALUES).items()}
    assert rows == wanted


def test_the_schema_knows_every_value_and_no_other() -> None:
    def known(schema: dict[str, Any], value: object, path: str) -> None:
        while "$ref" in schema:
            schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
        if not isinstance(value, dict) or "properties" not in schema or schema.get("additionalProperties") is not False:
            return
        names = set(schema["properties"])
        assert set(value) <= names, path
        if (
            path not in ("head", "podDefaults.resources.requests", "podDefaults.resources.limits")
            and "role" not in names
        ):
            assert names - set(value) - {"global", "ephemeral-storage"} == set(), path
        for name, inner in value.items():
            known(schema["properties"][name], inner, f"{path}.{name}".lstrip("."))

    known(SCHEMA, VALUES, "")


def test_versions_are_those_of_the_lock_and_of_the_project() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert f"ray=={VALUES['rayVersion']}\n" in lock
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'version = "{chart["appVersion"]}"' in (ROOT / "pyproject.toml").read_text()
