"""Everything that the chart makes is what Kubernetes, KubeRay, Prometheus's operator and KEDA read."""

from __future__ import annotations

import subprocess
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from helm_rig import CASES, CHART, ROOT, TOOLS, helm, needs_helm, needs_kuberay, render, rendered_text, validator

pytestmark = [needs_helm, needs_kuberay]


@pytest.mark.parametrize("case", CASES)
def test_every_object_is_valid(case: str) -> None:
    manifests = render(case)
    assert len(manifests) > 8
    for one in manifests:
        errors = list(validator(one["kind"], one["apiVersion"]).iter_errors(one))
        assert not errors, (one["kind"], one["metadata"]["name"], [(e.json_path, e.message[:200]) for e in errors])


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("RayCluster", ("spec", "headGroupSpec", "template", "spec")),
        ("Deployment", ("spec", "template", "spec")),
        ("ScaledObject", ("spec", "triggers", 0)),
        ("PodMonitor", ("spec",)),
        ("PrometheusRule", ("spec", "groups", 0)),
    ],
)
def test_a_misspelt_field_is_noticed(kind: str, path: tuple[str | int, ...]) -> None:
    found = deepcopy(next(one for case in CASES for one in render(case) if one["kind"] == kind))
    place = found
    for step in path:
        place = place[step]
    place["nodeSelektor"] = {}
    assert list(validator(kind, found["apiVersion"]).iter_errors(found))


@pytest.mark.parametrize("case", CASES)
def test_kubectl_reads_it_and_finds_every_name_once(case: str, tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(rendered_text(case))
    (tmp_path / "kustomization.yaml").write_text("resources: [all.yaml]")
    done = subprocess.run(
        [str(TOOLS / "bin" / "kubectl"), "kustomize", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(list(yaml.safe_load_all(done.stdout))) == len(render(case))


def test_lint_finds_nothing() -> None:
    for case, values in CASES.items():
        done = helm("lint", "--strict", str(CHART), values=values)
        assert done.returncode == 0, (case, done.stdout)


def test_the_stored_manifests_are_those_of_the_chart() -> None:
    """For clusters without Helm. `make manifests` writes them."""
    stored = ROOT / "deploy" / "helm" / "manifests" / "1p1d-cpu.yaml"
    done = helm(
        "template", "baton", str(CHART), "--namespace=default", "--set=auth.existingSecret=baton-ray-token",
        values=CASES["1p1d-cpu"],
    )  # fmt: skip
    assert list(yaml.safe_load_all(stored.read_text())) == list(yaml.safe_load_all(done.stdout))
