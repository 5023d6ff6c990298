"""What workers count, as a scraper reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from baton.common.histogram import LATENCY_BOUNDS_S, LatencyHistogram
from baton.deploy.gateway_metrics import GatewayMetrics
from baton.transfer.reports import Flow, Latencies, WorkerMetrics

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
LABELS = {"worker": "decode-0", "peer": "prefill-0", "lane": "local", "direction": "in"}


def latencies(*seconds: float) -> Latencies:
    histogram = LatencyHistogram()
    for one in seconds:
        histogram.add(one)
    return Latencies(counts=tuple(histogram.counts), total_s=histogram.total_s, longest_s=histogram.longest_s)


def scrape(of_workers: dict[str, WorkerMetrics]) -> Series:
    page = GatewayMetrics("m").page(0, {}, [], of_workers).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def at(series: Series, name: str, **labels: str) -> float:
    return series[name, tuple(sorted(labels.items()))]


def test_flows_are_counters_and_histograms_by_peer_lane_and_direction() -> None:
    flow = Flow(
        peer="prefill-0", lane="local", direction="in", nbytes=3 << 30, busy_s=1.5, recent_gbps=2.5, queued=4,
        queue_s=0.5, stalls=2, stall_s=0.25, handoff=latencies(0.003, 0.2, 1e9), failed=1, damaged_regions=7,
    )  # fmt: skip
    series = scrape({"decode-0": WorkerMetrics(flows=(flow,))})
    assert at(series, "baton_transfer_bytes_total", **LABELS) == 3 << 30
    assert at(series, "baton_transfer_busy_seconds_total", **LABELS) == 1.5
    assert at(series, "baton_transfer_recent_bytes_per_second", **LABELS) == 2.5e9
    assert at(series, "baton_transfer_queue_seconds_sum", **LABELS) == 0.5
    assert at(series, "baton_transfer_queue_seconds_count", **LABELS) == 4
    assert at(series, "baton_transfer_credit_stalls_total", **LABELS) == 2
    assert at(series, "baton_transfer_credit_stall_seconds_total", **LABELS) == 0.25
    assert at(series, "baton_transfer_failed_handoffs_total", **LABELS) == 1
    assert at(series, "baton_transfer_damaged_regions_total", **LABELS) == 7
    buckets = {
        bound: at(series, "baton_transfer_handoff_seconds_bucket", le=bound, **LABELS)
        for bound in ("0.0025", "0.005", "0.25", "60.0", "+Inf")
    }
    assert buckets == {"0.0025": 0, "0.005": 1, "0.25": 2, "60.0": 2, "+Inf": 3}
    assert at(series, "baton_transfer_handoff_seconds_count", **LABELS) == 3
    assert not any(name.startswith("baton_transfer_tail_seconds") for name, _ in series), "no empty histograms"


def test_every_bound_is_a_bucket() -> None:
    flow = Flow(peer="p", lane="zmq", direction="out", region=latencies(0.1))
    series = scrape({"w": WorkerMetrics(flows=(flow,))})
    bounds = [float(dict(labels)["le"]) for name, labels in series if name == "baton_transfer_region_seconds_bucket"]
    assert sorted(bounds) == [*LATENCY_BOUNDS_S, float("inf")]


def test_slots_and_tiers_come_along() -> None:
    metrics = WorkerMetrics(
        slots={"receive": {"free": 3, "reserved": 1, "leased": 0}},
        tiers={"restores": 5, "queued_restores": 2, "disk.hits": 7, "disk.used_bytes": 1 << 20},
    )
    series = scrape({"decode-0": metrics, "decode-1": WorkerMetrics(tiers={"disk.hits": 1})})
    assert at(series, "baton_staging_slots", worker="decode-0", ring="receive", state="reserved") == 1
    assert at(series, "baton_tier_restores_total", worker="decode-0") == 5
    assert at(series, "baton_tier_queued_restores", worker="decode-0") == 2
    assert at(series, "baton_tier_hits_total", worker="decode-0", tier="disk") == 7
    assert at(series, "baton_tier_hits_total", worker="decode-1", tier="disk") == 1
    assert at(series, "baton_tier_used_bytes", worker="decode-0", tier="disk") == 1 << 20
