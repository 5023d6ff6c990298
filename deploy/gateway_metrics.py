"""What a gateway counts, in Prometheus's terms; beside it what its workers do (`worker_metrics.py`), and some of it
once more under vLLM's names (`vllm_metrics.py`). Owns its own registry: two gateways in one process do not mix.

A prompt token is counted once, by where its KV came from: computed on the decode worker, found in its prefix cache, or
handed over. The three add up to the prompt (`double_counted_metrics` in the failure list).
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from baton.common.messages import Timeline
from baton.deploy.routing.index import NO_INDEX, IndexCounts
from baton.deploy.status import WorkerView
from baton.deploy.vllm_metrics import VllmNames
from baton.deploy.worker_metrics import WorkerCollector
from baton.transfer.reports import WorkerMetrics

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_TOTAL_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class GatewayMetrics:
    """Counters and histograms of one gateway. Used from its loop's thread."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._ended = Counter(
            "baton_requests", "Requests that ended, by outcome: stop, length, or an error code.", ["outcome"],
            registry=self._registry,
        )  # fmt: skip
        self._http = Counter(
            "baton_http_responses", "HTTP responses, by path and status.", ["path", "status"], registry=self._registry
        )
        self._refused = Counter(
            "baton_http_connections_ended", "Connections that broke a limit of the HTTP server, by which.", ["reason"],
            registry=self._registry,
        )  # fmt: skip
        self._connections = Gauge("baton_http_connections", "That are open.", registry=self._registry)
        self._tokens = Counter("baton_output_tokens", "Output tokens received.", registry=self._registry)
        self._prompt = Counter(
            "baton_prompt_tokens", "Prompt tokens, by the origin of their KV: local, cached, restored, transferred.",
            ["source"], registry=self._registry,
        )  # fmt: skip
        self._ttft = Histogram(
            "baton_time_to_first_token_seconds", "Arrival until the first token.", buckets=_TTFT_BUCKETS_S,
            registry=self._registry,
        )  # fmt: skip
        self._itl = Histogram(
            "baton_inter_token_latency_seconds", "Between two outputs of one request.", buckets=_ITL_BUCKETS_S,
            registry=self._registry,
        )  # fmt: skip
        self._total = Histogram(
            "baton_request_seconds", "Arrival until the end, of answered requests.", buckets=_TOTAL_BUCKETS_S,
            registry=self._registry,
        )  # fmt: skip
        self._by_key = Counter(
            "baton_key_requests", "Requests that ended, by the name of the API key and outcome.", ["key", "outcome"],
            registry=self._registry,
        )  # fmt: skip
        self._waiting = Gauge(
            "baton_waiting_requests", "Requests that wait for their turn at the gateway, by the name of the API key.",
            ["key"], registry=self._registry,
        )  # fmt: skip
        self._waiting_tokens = Gauge(
            "baton_waiting_prompt_tokens", "Tokens of the prompts that wait there, by the name of the API key.",
            ["key"], registry=self._registry,
        )  # fmt: skip
        self._inflight = Gauge("baton_requests_in_flight", "Admitted and not ended.", registry=self._registry)
        self._indexed = Gauge(
            "baton_indexed_pages", "Cached pages of all workers that this gateway routes by.", registry=self._registry
        )
        self._not_indexed = Gauge(
            "baton_index_refused_pages", "Cached pages, since the start, for which the index had no room.",
            registry=self._registry,
        )  # fmt: skip
        self._behind = Gauge(
            "baton_index_behind_workers", "Workers whose news of their caches are missing here.",
            registry=self._registry,
        )  # fmt: skip
        self._policy_failures = Gauge(
            "baton_routing_policy_failures", "Choices, since the start, at which routing.policy failed.",
            registry=self._registry,
        )  # fmt: skip
        self._workers = Gauge(
            "baton_workers", "Workers in the membership, by role and whether they answer.", ["role", "state"],
            registry=self._registry,
        )  # fmt: skip
        self._of_workers = WorkerCollector()
        self._registry.register(self._of_workers)
        aliases = (self._ended, self._tokens, self._prompt, self._ttft, self._itl, self._total)
        self._registry.register(VllmNames(model, self._of_workers, aliases))

    def tokens(self, count: int, since_last_s: float, *, first: bool) -> None:
        self._tokens.inc(count)
        (self._ttft if first else self._itl).observe(since_last_s)

    def ended(self, outcome: str, key: str) -> None:
        """`key`: its name, "" where there are none."""
        self._ended.labels(outcome).inc()
        self._by_key.labels(key, outcome).inc()

    def finished(self, timeline: Timeline, total_s: float) -> None:
        self._total.observe(total_s)
        self._prompt.labels("local").inc(timeline.local_tokens)
        self._prompt.labels("cached").inc(timeline.cached_tokens)
        self._prompt.labels("restored").inc(timeline.restored_tokens)
        self._prompt.labels("transferred").inc(timeline.transferred_tokens)

    def http(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def connection_ended(self, reason: str) -> None:
        """One that broke a limit."""
        self._refused.labels(reason).inc()

    def connections(self, count: int) -> None:
        self._connections.set(count)

    def page(
        self,
        in_flight: int,
        waiting: Mapping[str, tuple[int, int]],
        seen: Sequence[WorkerView],
        of_workers: Mapping[str, WorkerMetrics],
        index: IndexCounts = NO_INDEX,
        policy_failures: int = 0,
    ) -> bytes:
        """The exposition text. `waiting`: (requests, tokens of prompts) by key. `seen`: the members, by their
        heartbeats; `of_workers`: what they count themselves."""
        self._of_workers.metrics, self._of_workers.seen = of_workers, seen
        self._inflight.set(in_flight)
        self._indexed.set(index.pages)
        self._not_indexed.set(index.refused_pages)
        self._behind.set(index.behind)
        self._policy_failures.set(policy_failures)
        for key, (requests, tokens) in waiting.items():
            self._waiting.labels(key).set(requests)
            self._waiting_tokens.labels(key).set(tokens)
        self._workers.clear()
        for (role, state), count in Counts((one.role, "silent" if one.silent else "live") for one in seen).items():
            self._workers.labels(role, state).set(count)
        return generate_latest(self._registry)
