"""What must hold of every pod and rule, whatever the values: least rights, bounds, probes, and names that meet."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from helm_rig import CASES, Manifest, needs_helm, of_kind, pods, render
from test_dashboards import names_in, told

from baton.common.config import ClusterConfig
from baton.common.ids import WorkerId
from baton.common.resolve import Layer, merge
from baton.transfer.kv_publisher import publishing_ports

pytestmark = needs_helm

cases = pytest.mark.parametrize("case", CASES)


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def ports(template: Manifest) -> dict[str, int]:
    (container,) = template["spec"]["containers"]
    return {one["name"]: one["containerPort"] for one in container.get("ports", [])}


@cases
def test_pods_have_no_rights_that_they_do_not_need(case: str) -> None:
    for name, pod in pods(render(case)).items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        needs_api = name == "head" and CASES[case].get("rayAutoscaler", {}).get("enabled", False)
        assert spec["automountServiceAccountToken"] is needs_api, name
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]
            rdma = any(resource.startswith("rdma/") for resource in container["resources"]["limits"])
            assert context["capabilities"].get("add", []) == (["IPC_LOCK"] if rdma else [])
            assert not {"hostPort"} & {key for port in container.get("ports", []) for key in port}
        assert not [one for one in spec["volumes"] if "hostPath" in one], name


@cases
def test_pods_are_bounded(case: str) -> None:
    for name, pod in pods(render(case)).items():
        (container,) = pod["spec"]["containers"]
        image, resources = container["image"], container["resources"]
        assert "@sha256:" in image or (":" in image and not image.endswith(":latest")), image
        assert {"cpu", "memory"} <= set(resources["limits"]) & set(resources["requests"]), name
        extended = {key: value for key, value in resources["limits"].items() if "/" in key or "hugepages" in key}
        assert {key: resources["requests"][key] for key in extended} == extended
        for volume in pod["spec"]["volumes"]:
            empty = volume.get("emptyDir", {})
            bounded = "sizeLimit" in empty or str(empty.get("medium", "")).startswith("HugePages")
            assert bounded or "emptyDir" not in volume or volume["name"] == "more", name
        mounted = {one["name"] for one in container["volumeMounts"]}
        assert mounted == {one["name"] for one in pod["spec"]["volumes"]}, name


@cases
def test_probes_are_patient_and_ask_for_the_end_of_work(case: str) -> None:
    every = {name: pod for name, pod in pods(render(case)).items() if not name.endswith("-deployer")}
    for name, pod in every.items():
        (container,) = pod["spec"]["containers"]
        probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}
        assert all(probe["timeoutSeconds"] >= 5 for probe in probes.values()), name  # two seconds kill the busy
        for probe in probes.values():
            assert probe["httpGet"]["port"] in ports(pod), name
        # A gateway that is being replaced must not take its pod along.
        assert probes["liveness"]["httpGet"]["path"] == "/api/local_raylet_healthz"
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "gateway":
            assert {"path": "/health", "port": "http"}.items() <= probes["readiness"]["httpGet"].items()


@cases
def test_services_and_budgets_meet_pods(case: str) -> None:
    manifests = render(case)
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(manifests).items()}
    for service in of_kind(manifests, "Service"):
        selector = dict(service["spec"]["selector"])
        if service["metadata"]["name"].endswith("-own") or not CASES[case].get("service", {}).get("release"):
            found = [name for name, has in labels.items() if selects(selector, has)]
            if service["spec"].get("clusterIP") == "None":  # of KV events
                assert set(found) == {name for name in labels if name.startswith(("prefill", "decode"))}
                continue
            assert found == ["gateway"]
            assert service["spec"]["ports"][0]["targetPort"] in ports(pods(manifests)["gateway"])
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        found = [name for name, has in labels.items() if selects(budget["spec"]["selector"]["matchLabels"], has)]
        assert len(found) == 1
        assert budget["metadata"]["name"].endswith(f"-{found[0]}")
    for monitor in of_kind(manifests, "PodMonitor"):
        assert [name for name, has in labels.items() if selects(monitor["spec"]["selector"]["matchLabels"], has)]
        assert all(one["port"] in ports(pods(manifests)["gateway"]) for one in monitor["spec"]["podMetricsEndpoints"])


@pytest.mark.parametrize("case", ["everything", "spot-decode"])
def test_what_scales_by_load_asks_for_metrics_that_there_are(case: str) -> None:
    manifests, there = render(case), told()
    for scaled in of_kind(manifests, "ScaledObject"):
        for trigger in scaled["spec"]["triggers"]:
            assert set(trigger["metadata"]) == {"serverAddress", "query", "threshold"}
            assert names_in(trigger["metadata"]["query"]) <= set(there)
    for scaled in of_kind(manifests, "HorizontalPodAutoscaler"):
        assert len(scaled["spec"]["metrics"]) == 2
    assert of_kind(manifests, "ScaledObject") or of_kind(manifests, "HorizontalPodAutoscaler")


def settings_of(manifests: list[Manifest]) -> ClusterConfig:
    (config,) = (one["data"]["baton.yaml"] for one in of_kind(manifests, "ConfigMap") if "baton.yaml" in one["data"])
    return merge([Layer("chart", yaml.safe_load(config))])[0]


def allowed(policies: list[Manifest], labels: dict[str, str], direction: str) -> list[dict[str, Any]] | None:
    """The rules for a pod; None: nobody closed it."""
    specs = [one["spec"] for one in policies if direction.title() in one["spec"]["policyTypes"]]
    closing = [spec for spec in specs if selects(spec["podSelector"]["matchLabels"], labels)]
    return [rule for spec in closing for rule in spec.get(direction, [])] if closing else None


@pytest.mark.parametrize("case", [case for case in CASES if case != "off"])
def test_everything_is_closed_and_what_is_needed_is_open(case: str) -> None:
    manifests = render(case)
    policies = of_kind(manifests, "NetworkPolicy")
    for name, pod in pods(manifests).items():
        labels, has = pod["metadata"]["labels"], ports(pod)
        incoming, outgoing = allowed(policies, labels, "ingress"), allowed(policies, labels, "egress")
        assert incoming is not None, name
        assert outgoing is not None, name
        peers = [peer.get("podSelector", {}).get("matchLabels") for rule in incoming for peer in rule.get("from", [])]
        assert any(peer is not None and selects(peer, labels) for peer in peers), name  # its own release's pods
        for rule in incoming:
            if "from" not in rule:  # everybody
                assert [port["port"] for port in rule["ports"]] == ["http"], name
            named = {port["port"] for port in rule.get("ports", []) if "endPort" not in port}
            assert named <= set(has), name
        assert any(port["port"] == 53 for rule in outgoing for port in rule.get("ports", [])), name
        if "kvEvents" in CASES[case] and name.startswith(("prefill", "decode")):
            (rule,) = (one for one in incoming if any("endPort" in port for port in one.get("ports", [])))
            assert rule["from"] == CASES[case]["kvEvents"]["from"]
            open_ports = {n for port in rule["ports"] for n in range(port["port"], port["endPort"] + 1)}
            settings = settings_of(manifests)
            assert settings.kv_events.publish
            for role, workers in (("prefill", settings.prefill), ("decode", settings.decode)):
                for number in range(workers):
                    assert set(publishing_ports(WorkerId(f"{role}-{number}"), settings.kv_events)) <= open_ports
        if name == "head":
            assert any(port["port"] == "dashboard" for rule in incoming for port in rule.get("ports", []))
