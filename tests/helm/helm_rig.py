"""Real helm, what it renders, and the schemas of real controllers.

`make helm` (and CI) sets `.venv-helm` up; where it is missing, tests that need it skip and say so.
"""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "baton"
TOOLS = ROOT / ".venv-helm"
KUBERAY = ROOT.parent / "shared" / "data" / "kuberay"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
KUBERNETES = "v1.37.0-local-strict"
CUSTOM = {"ScaledObject", "PodMonitor", "PrometheusRule"}

Manifest = dict[str, Any]

needs_helm = pytest.mark.skipif(not (TOOLS / ".ready").exists(), reason="no .venv-helm here: make .venv-helm/.ready")
needs_kuberay = pytest.mark.skipif(
    not KUBERAY.is_dir(), reason="KubeRay's definitions are not here: shared/data/kuberay"
)

EVERYTHING = {
    "nameOverride": "llm",
    "auth": {"existingSecret": ""},
    "apiKeys": {"existingSecret": "keys"},
    "jobs": {"existingSecret": "store", "stateClaim": "state"},
    "model": {"name": "/models/m", "existingClaim": "models"},
    "tls": {"existingSecret": "tls"},
    "gcsFaultTolerance": {
        "redisAddress": "rediss://redis:6380", "redisPasswordSecret": "redis", "redisUsername": "ray",
    },
    "kvEvents": {"enabled": True, "from": [{"podSelector": {"matchLabels": {"app": "indexer"}}}]},
    "config": {"kv_events": {"port": 5560}},
    "rayAutoscaler": {"enabled": True},
    "image": {"pullSecrets": ["pull"]},
    "podDefaults": {
        "gpu": {"count": 2},
        "rdma": {"enabled": True},
        "hugepages": {"size": "1Gi", "amount": "8Gi"},
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "labels": {"team": "llm"},
        "annotations": {"note": "x"},
    },
    "groups": {"decode-spot": {"role": "decode", "replicas": 3, "workersPerPod": 2, "minReplicas": 0}},
    "ingress": {"enabled": True, "className": "nginx", "annotations": {"a": "b"},
                "hosts": [{"host": "llm.example.com"}], "tls": [{"secretName": "tls", "hosts": ["llm.example.com"]}]},
    "networkPolicy": {"ingressFrom": [{"podSelector": {}}], "extraEgress": [{"ports": [{"port": 5432}]}]},
    "monitoring": {"podMonitor": {"enabled": True, "labels": {"a": "b"}, "tlsConfig": {"serverName": "x.org"}},
                   "rules": {"enabled": True},
                   "dashboard": {"enabled": True, "annotations": {"folder": "LLM"}}},
    "autoscaling": {"enabled": True, "kind": "hpa", "scaleTargetRef": {"name": "pool"}},
    "service": {"release": "green", "annotations": {"a": "b"}},
    "serviceAccount": {"annotations": {"a": "b"}},
}  # fmt: skip
"""Every branch of every template, but for KEDA's."""
PLAIN: dict[str, Any] = {}
CLOSED_OFF = {"auth": {"enabled": False}, "networkPolicy": {"enabled": False}, "serviceAccount": {"create": False}}
CASES = {
    "defaults": PLAIN,
    "everything": EVERYTHING,
    "off": CLOSED_OFF,
    **{path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES},
}


def helm(*arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """What helm says of these values. Without a network, a cluster or a home."""
    command = [str(TOOLS / "bin" / "helm"), *arguments, *(["--values=-"] if values is not None else [])]
    given = None if values is None else json.dumps(values)
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin"})


@cache
def rendered_text(case: str) -> str:
    done = helm("template", "blue", str(CHART), "--namespace=llm", values=CASES[case])
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def render(case: str) -> list[Manifest]:
    """Of all tests: not to be changed."""
    return [one for one in yaml.load_all(rendered_text(case), yaml.CSafeLoader) if one is not None]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] == kind]


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Every pod template, by who makes it: the head, each group, each Deployment."""
    found: dict[str, Manifest] = {}
    for cluster in of_kind(manifests, "RayCluster"):
        found["head"] = cluster["spec"]["headGroupSpec"]["template"]
        found |= {group["groupName"]: group["template"] for group in cluster["spec"]["workerGroupSpecs"]}
    return found | {one["metadata"]["name"]: one["spec"]["template"] for one in of_kind(manifests, "Deployment")}


def env_of(template: Manifest) -> dict[str, Any]:
    """Of its one container: values, or where they come from."""
    (container,) = template["spec"]["containers"]
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container.get("env", [])}


# ------------------------------------------------------------------------------------------------ schemas


def validator(kind: str, api_version: str) -> Validator:
    """Of the controller that reads such an object: unknown fields are errors."""
    if kind == "RayCluster":
        return _kuberay(api_version.rpartition("/")[2])
    if kind in CUSTOM:
        return Draft202012Validator(json.loads((TOOLS / "schemas" / f"{kind}.json").read_text()))
    group, _, version = api_version.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], version)))
    (folder,) = TOOLS.glob(f"lib/python3*/site-packages/kubernetes_validate/kubernetes-json-schema/{KUBERNETES}")
    schema = json.loads((folder / f"{name}.json").read_text())
    return Draft202012Validator(schema, registry=_kubernetes(folder))


@cache
def _kubernetes(folder: Path) -> Registry[Any]:
    definitions = json.loads((folder / "_definitions.json").read_text())
    resource = Resource(contents=definitions, specification=DRAFT202012)
    return Registry().with_resource("/api/_definitions.json", resource)


@cache
def _kuberay(version: str) -> Validator:
    definition = yaml.load((KUBERAY / "rayclusters.yaml").read_text(), yaml.CSafeLoader)
    (found,) = (one for one in definition["spec"]["versions"] if one["name"] == version)
    return Draft202012Validator(_closed(found["schema"]["openAPIV3Schema"]))


def _closed(schema: Any) -> Any:
    """As the API server reads it: fields that are not named are errors, fields with a default may be missing."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    fields = closed.get("properties")
    if isinstance(fields, dict) and "type" in closed:
        if not closed.get("x-kubernetes-preserve-unknown-fields"):
            closed["additionalProperties"] = False
        closed["required"] = [name for name in closed.get("required", []) if "default" not in fields.get(name, {})]
    return closed
