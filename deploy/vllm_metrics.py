"""What we count, once more under vLLM's names, where the meaning is the same: dashboards and autoscalers that were made
for vLLM go on working. docs/OBSERVABILITY.md lists the names.

Owns: the mapping. Never: counts. What vLLM counts in another way (its prefix cache, preemptions) has no name here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from baton.common.messages import Load
from baton.deploy.worker_metrics import WorkerCollector

HISTOGRAMS = {
    "baton_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "baton_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "baton_request_seconds": "vllm:e2e_request_latency_seconds",
}
TOTALS = {"baton_output_tokens": "vllm:generation_tokens", "baton_prompt_tokens": "vllm:prompt_tokens"}
FINISHED, SUCCESSES = "baton_requests", "vllm:request_success"
SUCCESSFUL = ("stop", "length")
LOADS: tuple[tuple[str, str, Callable[[Load], float]], ...] = (
    ("vllm:num_requests_running", "Requests that the engine works on.", lambda load: load.running),
    ("vllm:num_requests_waiting", "Requests that wait.", lambda load: load.queued),
    ("vllm:kv_cache_usage_perc", "Share of the KV pages that nobody else can have, 0 to 1.",
     lambda load: 1 - load.free_pages / load.total_pages if load.total_pages else 0.0),
)  # fmt: skip


class VllmNames(Collector):
    """`engine` is the worker; loads are those of decode workers, where requests are."""

    def __init__(self, model: str, workers: WorkerCollector, counted: Sequence[MetricWrapperBase]) -> None:
        self._labels = {"model_name": model}
        self._workers = workers
        self._counted = counted

    def collect(self) -> Iterator[Metric]:
        for name, text, value in LOADS:
            gauge = GaugeMetricFamily(name, text, labels=["model_name", "engine"])
            for one in self._workers.seen:
                if one.role == "decode":
                    gauge.add_metric([self._labels["model_name"], one.worker], value(one.load))
            yield gauge
        for ours in self._counted:
            for family in ours.collect():
                yield self._renamed(family)

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are checked when they are collected."""
        return iter(())

    def _renamed(self, family: Metric) -> Metric:
        if family.name in HISTOGRAMS:
            theirs: Metric = HistogramMetricFamily(HISTOGRAMS[family.name], family.documentation)
            theirs.samples = [
                Sample(one.name.replace(family.name, theirs.name, 1), {**self._labels, **one.labels}, one.value)
                for one in family.samples
                if not one.name.endswith("_created")
            ]
            return theirs
        totals = [one for one in family.samples if one.name.endswith("_total")]
        if family.name in TOTALS:
            total = CounterMetricFamily(TOTALS[family.name], family.documentation, labels=["model_name"])
            total.add_metric(list(self._labels.values()), sum(one.value for one in totals))
            return total
        assert family.name == FINISHED, family.name
        ended = CounterMetricFamily(
            SUCCESSES, "Requests that were answered, by why they ended.", labels=["model_name", "finished_reason"]
        )
        for one in totals:
            if one.labels["outcome"] in SUCCESSFUL:
                ended.add_metric([*self._labels.values(), one.labels["outcome"]], one.value)
        return ended
