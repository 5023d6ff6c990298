"""Dashboards, alerts and vLLM's names: whatever they ask for is told, and means what it says."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families
from test_worker_metrics import latencies

from baton.common.messages import Load, Timeline
from baton.deploy import grafana
from baton.deploy.gateway_metrics import GatewayMetrics
from baton.deploy.grafana.dashboard import dashboard, text
from baton.deploy.routing.index import IndexCounts
from baton.deploy.status import WorkerView
from baton.transfer.reports import Flow, WorkerMetrics

FOLDER = Path(grafana.__file__).parent
DOCUMENT = Path(__file__).parents[2] / "docs" / "OBSERVABILITY.md"


def told() -> dict[str, list[tuple[dict[str, str], float]]]:
    """Every sample of a gateway at which everything has happened once."""
    metrics = GatewayMetrics("some-model")
    metrics.tokens(1, 0.25, first=True)
    metrics.tokens(6, 0.02, first=False)
    for outcome in ("stop", "stop", "length", "overloaded"):
        metrics.ended(outcome, "somebody")
    metrics.finished(Timeline(local_tokens=1, cached_tokens=20, restored_tokens=300, transferred_tokens=4000), 3.0)
    metrics.http("/v1/completions", 200)
    flows = tuple(
        Flow(
            peer="prefill-0", lane="tcp", direction=direction, nbytes=1, handoff=latencies(0.1), region=latencies(0.1),
            tail=latencies(0.1),
        )
        for direction in ("in", "out")
    )  # fmt: skip
    tiers = {"disk.hits": 1, "disk.damaged": 0, "disk.failed_writes": 0, "disk.used_bytes": 7}
    workers = {"decode-0": WorkerMetrics(flows=flows, slots={"send": {"free": 3}}, tiers=tiers)}
    load = Load(
        running=3, queued=2, queued_tokens=50, total_pages=100, free_pages=25, steps=9, step_age_s=0.5,
        step_overhead_s=0.25,
    )  # fmt: skip
    seen = [
        WorkerView(worker="decode-0", role="decode", incarnation=1, silent=False, load=load),
        WorkerView(worker="prefill-0", role="prefill", incarnation=1, silent=True, load=Load(total_pages=10)),
        WorkerView(worker="gateway-0", role="gateway", incarnation=1, silent=False, load=Load(running=5)),
    ]
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(
        metrics.page(5, {"somebody": (2, 300)}, seen, workers, IndexCounts(9, 1, 2)).decode()
    ):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:baton|vllm)[a-z0-9_:]+", query))


def test_every_query_asks_for_what_is_told_with_the_labels_that_it_has() -> None:
    samples = told()
    alerts = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    queries += [rule["expr"] for group in alerts for rule in group["rules"]]
    assert len(queries) > 40
    for query in queries:
        assert query.count("(") == query.count(")")
        for name in names_in(query):
            assert name in samples, query
        labels = {label for name in names_in(query) for one, _ in samples[name] for label in one} | {"le"}
        wanted = {name for by in re.findall(r"by \(([a-z, ]+)\)", query) for name in by.split(", ")}
        wanted |= set(re.findall(r"(\w+)(?:=|!~)\"", query))
        assert wanted <= labels, query


def test_the_stored_dashboard_is_the_one_that_is_made() -> None:
    assert (FOLDER / "baton.json").read_text() == text()
    numbers = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_vllms_names_say_the_same() -> None:
    samples = told()

    def one(name: str, **labels: str) -> float:
        (value,) = (value for given, value in samples[name] if labels.items() <= given.items())
        return value

    assert one("vllm:num_requests_running", engine="decode-0") == 3
    assert one("vllm:num_requests_waiting", engine="decode-0") == 2
    assert one("vllm:kv_cache_usage_perc", engine="decode-0") == 0.75
    assert one("vllm:prompt_tokens_total", model_name="some-model") == 4321
    assert one("vllm:generation_tokens_total") == 7
    assert one("vllm:request_success_total", finished_reason="stop") == 2
    assert one("vllm:request_success_total", finished_reason="length") == 1
    assert not any(labels["finished_reason"] == "overloaded" for labels, _ in samples["vllm:request_success_total"])
    assert one("vllm:time_to_first_token_seconds_sum", model_name="some-model") == 0.25
    assert one("vllm:time_to_first_token_seconds_bucket", le="0.25") == 1
    assert one("vllm:inter_token_latency_seconds_count") == 1
    assert one("vllm:e2e_request_latency_seconds_sum") == 3.0
    assert all(len(found) == 1 for name, found in samples.items() if name.startswith("vllm:num_"))


def test_every_name_is_documented() -> None:
    words = set(re.findall(r"[a-z0-9_:]+", DOCUMENT.read_text()))
    stems = {re.sub("_(bucket|count|sum|total|created)$", "", name) for name in told()}
    shortened = ("baton_transfer_", "baton_tier_")  # the document has their tables
    assert not {stem for stem in stems if not stem.startswith(shortened) and not {stem, f"{stem}_total"} & words}
