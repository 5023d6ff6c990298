"""What workers count of their load, hand-offs, staging and tiers, in Prometheus's terms. Owns the names, which
docs/OBSERVABILITY.md explains. Never asks a worker anything.

Series are bounded by the cluster: one per worker, peer, lane and direction, of pairs that had a hand-off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from baton.common.histogram import LATENCY_BOUNDS_S
from baton.common.messages import Load
from baton.deploy.status import WorkerView
from baton.transfer.reports import Flow, Latencies, WorkerMetrics

_FLOW_LABELS = ["worker", "peer", "lane", "direction"]
_BOUNDS = (*map(str, LATENCY_BOUNDS_S), "+Inf")

_COUNTERS: tuple[tuple[str, str, Callable[[Flow], float]], ...] = (
    ("bytes", "KV bytes that arrived in the receiver's pages.", lambda flow: flow.nbytes),
    ("regions", "Regions that arrived in the receiver's pages.", lambda flow: flow.regions),
    ("busy_seconds", "Time in which at least one region was under way.", lambda flow: flow.busy_s),
    ("failed_handoffs", "Hand-offs that ended without commit.", lambda flow: flow.failed),
    ("resent_frames", "Control frames said again for want of an answer.", lambda flow: flow.resent_frames),
    ("damaged_regions", "Regions asked for a second time.", lambda flow: flow.damaged_regions),
    ("lane_failures", "Hand-offs that broke with the lane.", lambda flow: flow.lane_failures),
    ("lane_changes", "Hand-offs that came by this lane after one by another.", lambda flow: flow.lane_changes),
    ("credit_stalls", "Times that a sender had computed more than it had credit for.", lambda flow: flow.stalls),
    ("credit_stall_seconds", "Time that senders waited so.", lambda flow: flow.stall_s),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[Flow], Latencies]], ...] = (
    ("region_seconds", "A region: announced until it arrived (in) or was acknowledged (out).",
     lambda flow: flow.region),
    ("handoff_seconds", "A hand-off: asked for until committed (in), offered until released (out).",
     lambda flow: flow.handoff),
    ("tail_seconds", "All computed until committed: what requests waited for the transfer alone.",
     lambda flow: flow.tail),
)  # fmt: skip
_LEVEL_GAUGES = ("used_bytes", "capacity_bytes")
_QUEUES = ("queued_restores", "queued_stores")


_LOADS: tuple[tuple[str, str, Callable[[Load], float]], ...] = (
    ("running", "Requests that its engine works on.", lambda load: load.running),
    ("queued", "Requests that wait for pages or their turn.", lambda load: load.queued),
    ("queued_tokens", "Tokens of theirs that nobody has computed.", lambda load: load.queued_tokens),
    ("pages", "KV pages of the model's first component.", lambda load: load.total_pages),
    ("available_pages", "Of them: free, or cached and to be had.", lambda load: load.free_pages),
    ("step_age_seconds", "How long the current step has run.", lambda load: load.step_age_s),
)


class WorkerCollector(Collector):
    """Registered once; tells what `metrics` and `seen` were set to last."""

    def __init__(self) -> None:
        self.metrics: Mapping[str, WorkerMetrics] = {}
        self.seen: Sequence[WorkerView] = ()

    def collect(self) -> Iterator[Metric]:
        yield from _load_families([one for one in self.seen if one.role in ("prefill", "decode")])
        yield from _flow_families(self.metrics)
        yield _slots(self.metrics)
        yield _spans(self.metrics)
        yield _refused(self.metrics)
        yield from _tier_families(self.metrics)

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are checked when they are collected."""
        return iter(())


def _load_families(workers: Sequence[WorkerView]) -> Iterator[Metric]:
    """From heartbeats: fresh, and told without asking."""
    for name, text, value in _LOADS:
        family = GaugeMetricFamily(f"baton_worker_{name}", text, labels=["worker", "role"])
        for one in workers:
            family.add_metric([one.worker, one.role], value(one.load))
        yield family
    steps = CounterMetricFamily("baton_worker_steps", "Steps of its engine.", labels=["worker", "role"])
    overhead = CounterMetricFamily(
        "baton_worker_step_overhead_seconds",
        "What these steps have spent outside of the model.",
        labels=["worker", "role"],
    )
    for one in workers:
        steps.add_metric([one.worker, one.role], one.load.steps)
        overhead.add_metric([one.worker, one.role], one.load.step_overhead_s)
    yield steps
    yield overhead


def _flow_families(workers: Mapping[str, WorkerMetrics]) -> Iterator[Metric]:
    flows = [
        ([worker, flow.peer, flow.lane, flow.direction], flow)
        for worker, metrics in workers.items()
        for flow in metrics.flows
    ]
    for name, text, count in _COUNTERS:
        counter = CounterMetricFamily(f"baton_transfer_{name}", text, labels=_FLOW_LABELS)
        for labels, flow in flows:
            counter.add_metric(labels, count(flow))
        yield counter
    speed = GaugeMetricFamily(
        "baton_transfer_recent_bytes_per_second", "While it had work, over the last of it; 0: not known.",
        labels=_FLOW_LABELS,
    )  # fmt: skip
    queue = SummaryMetricFamily(
        "baton_transfer_queue_seconds",
        "Waiting: of a hand-off for lane and staging (in), of a region for its turn (out).",
        labels=_FLOW_LABELS,
    )  # fmt: skip
    for labels, flow in flows:
        speed.add_metric(labels, flow.recent_gbps * 1e9)
        queue.add_metric(labels, flow.queued, flow.queue_s)
    yield from (speed, queue)
    for name, text, latencies in _HISTOGRAMS:
        histogram = HistogramMetricFamily(f"baton_transfer_{name}", text, labels=_FLOW_LABELS)
        for labels, flow in flows:
            found = latencies(flow)
            if found.count:
                buckets = list(zip(_BOUNDS, accumulate(found.counts), strict=True))
                histogram.add_metric(labels, buckets, found.total_s)
        yield histogram


def _spans(workers: Mapping[str, WorkerMetrics]) -> Metric:
    spans = CounterMetricFamily(
        "baton_trace_spans", "OpenTelemetry spans: sent, dropped for want of room, failed at the collector.",
        labels=["worker", "outcome"],
    )  # fmt: skip
    for worker, metrics in workers.items():
        for outcome, count in metrics.trace_spans.items():
            spans.add_metric([worker, outcome], count)
    return spans


def _refused(workers: Mapping[str, WorkerMetrics]) -> Metric:
    refused = CounterMetricFamily(
        "baton_refused_frames", "What came over a process's sockets and was not heard, by why (docs/OBSERVABILITY.md).",
        labels=["worker", "reason"],
    )  # fmt: skip
    for worker, metrics in workers.items():
        for reason, count in metrics.refused.items():
            refused.add_metric([worker, reason], count)
    return refused


def _slots(workers: Mapping[str, WorkerMetrics]) -> Metric:
    slots = GaugeMetricFamily(
        "baton_staging_slots", "Staging slots, by ring (receive, send) and state (free, reserved, leased).",
        labels=["worker", "ring", "state"],
    )  # fmt: skip
    for worker, metrics in workers.items():
        for ring, states in metrics.slots.items():
            for state, count in states.items():
                slots.add_metric([worker, ring, state], count)
    return slots


def _tier_families(workers: Mapping[str, WorkerMetrics]) -> Iterator[Metric]:
    """Names with a dot are a level's, "disk.hits"; the others are of all levels together."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for worker, metrics in workers.items():
        for name, value in metrics.tiers.items():
            level, dot, what = name.rpartition(".")
            family = families.get(what)
            if family is None:
                kind = GaugeMetricFamily if what in (*_LEVEL_GAUGES, *_QUEUES) else CounterMetricFamily
                text = f"Tiers below the pool: {what.replace('_', ' ')}."
                labels = ["worker", "tier"] if dot else ["worker"]
                family = families[what] = kind(f"baton_tier_{what}", text, labels=labels)
            family.add_metric([worker, level] if dot else [worker], value)
    yield from families.values()
