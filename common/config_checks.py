"""Whether a configuration can work at all: `validate`, before anything is started. Pure.

Owns: what is wrong with each setting, and what would be right. Never: looks at the machine, a model, or Ray.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import math
import re

from baton.common.config import (
    DEVICE_LANES,
    FAKE_MODEL,
    LANES,
    MAX_PAGES,
    MAX_PRIORITY,
    MAX_REQUEST_S,
    MAX_TCP_STREAMS,
    PAGE_SIZES,
    POSTGRES,
    ClusterConfig,
    GatewayConfig,
    JobsConfig,
    KvConfig,
    ModelConfig,
    TracingConfig,
    TransferConfig,
)
from baton.common.errors import ConfigError
from baton.common.http_config import HttpConfig, validate_http
from baton.common.kv.cache_dtype import is_quantised
from baton.common.kv.prefix.names import WITHOUT_SHARING
from baton.common.routing_config import validate_routing

_CLUSTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def validate(config: ClusterConfig) -> None:
    """Raises ConfigError for the first setting that cannot work. Needs no machine, no model, no Ray."""
    if not _CLUSTER_NAME.fullmatch(config.cluster):
        reason = "names a directory and a Ray namespace: at most 64 letters, digits, dots, underscores and dashes"
        raise ConfigError("cluster", config.cluster, reason)
    if config.kv.page_size not in PAGE_SIZES:
        raise ConfigError("kv.page_size", config.kv.page_size, f"must be one of {', '.join(map(str, PAGE_SIZES))}")
    known_lanes = (*LANES, *DEVICE_LANES)
    for lane in config.transfer.lanes:
        if lane not in known_lanes:
            near = difflib.get_close_matches(lane, known_lanes, n=1)
            raise ConfigError("transfer.lanes", lane, "no such lane", f"did you mean {near[0]}?" if near else "")
    if not config.transfer.lanes:
        raise ConfigError(
            "transfer.lanes", config.transfer.lanes, "at least one lane is needed", f"of {', '.join(known_lanes)}"
        )
    if config.transfer.staging_ring_bytes < config.transfer.region_bytes * config.transfer.credit_regions:
        raise ConfigError(
            "transfer.staging_ring_bytes",
            config.transfer.staging_ring_bytes,
            "smaller than one hand-off's credit (region_bytes x credit_regions)",
            f"at least {config.transfer.region_bytes * config.transfer.credit_regions}",
        )
    if not 1 <= config.transfer.tcp_streams <= MAX_TCP_STREAMS:
        reason = f"must be 1 to {MAX_TCP_STREAMS}"
        raise ConfigError("transfer.tcp_streams", config.transfer.tcp_streams, reason)
    validate_interface(config.bind_host)
    _validate_placement(config)
    _validate_fake_model(config)
    _validate_device(config)
    _validate_tiers(config.kv)
    _validate_autoscale(config)
    if config.decode < 1:
        raise ConfigError("decode", config.decode, "at least one decode worker is needed: it answers the requests")
    if config.prefill < 0:
        raise ConfigError("prefill", config.prefill, "cannot be negative", "0 means: decode workers prefill themselves")
    if config.gateways < 1:
        raise ConfigError("gateways", config.gateways, "at least one is needed: clients talk to it")
    live = config.liveness
    if not 0 < live.heartbeat_interval_s < live.dead_after_s:
        raise ConfigError("liveness", dataclasses.asdict(live), "needs 0 < heartbeat_interval_s < dead_after_s")
    if not 0 < live.republish_interval_s < live.dead_after_s:  # else the controller takes its rest for its absence
        raise ConfigError("liveness", dataclasses.asdict(live), "needs 0 < republish_interval_s < dead_after_s")
    for name, value in _positive_settings(config):
        if value is not None and not 0 < value < math.inf:  # neither is a number that is none
            raise ConfigError(name, value, "must be positive and finite")
    for name, gbps in [("max_gbps", config.transfer.max_gbps), *_lane_caps(config.transfer)]:
        if not 0 <= gbps < math.inf:
            raise ConfigError(
                f"transfer.{name}", gbps, "must be a finite number of gigabytes per second", "0: no limit"
            )
    for name, count in _natural_settings(config):
        if not 0 <= count < math.inf:
            raise ConfigError(name, count, "cannot be negative, and is finite")
    if config.gateway.request_timeout_s > MAX_REQUEST_S:
        reason = f"must be at most {MAX_REQUEST_S:g}"
        raise ConfigError("gateway.request_timeout_s", config.gateway.request_timeout_s, reason)
    for name in ("num_pages", "swa_pages", "state_slots"):
        if (getattr(config.kv, name) or 0) > MAX_PAGES:
            raise ConfigError(f"kv.{name}", getattr(config.kv, name), f"must be at most {MAX_PAGES}")
    _validate_jobs(config.jobs)
    validate_routing(config.routing, config.kv_events)
    _validate_tracing(config.tracing)
    _validate_door(config.gateway)
    if not 0 <= config.gateway.port <= 65535:
        raise ConfigError("gateway.port", config.gateway.port, "must be 0 (any free port) to 65535")
    if config.gateway_port(config.gateways - 1) > 65535:
        reason = f"{config.gateways} gateways on one machine take as many ports from there on, and 65535 is the last"
        raise ConfigError("gateway.port", config.gateway.port, reason)


def validate_interface(bind_host: str) -> None:
    """Not the wildcard: peers must be able to connect to what is bound, and nobody else needs to. Raises
    ConfigError."""
    if bind_host in ("", "*") or _is_wildcard(bind_host):
        reason = "would listen on every interface"
        raise ConfigError("bind_host", bind_host, reason, "name the cluster interface's address")


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _validate_placement(config: ClusterConfig) -> None:
    for label in config.placement.node_labels:
        key, equals, value = label.partition("=")
        if not (key and equals and value):
            hint = "for example ray.io/availability-zone=eu-1a"
            raise ConfigError("placement.node_labels", label, "expected key=value", hint)
    if config.placement.resources == "role" and config.pin_cores:
        reason = "cores are counted on the machine that launches, and the workers are on others"
        raise ConfigError("pin_cores", True, reason, "pin_cores=false, with placement.cpus")


def _validate_fake_model(config: ClusterConfig) -> None:
    """It has no weights, and pages of its own."""
    if config.model.model != FAKE_MODEL:
        return
    usual, model = ModelConfig(), config.model
    for name in ("attention", "weights", "forward_path"):
        if (value := getattr(model, name)) != getattr(usual, name):
            raise ConfigError(f"model.{name}", value, "the fake model multiplies nothing", "leave it out")
    if config.kv.page_layout != "auto":
        raise ConfigError(
            "kv.page_layout", config.kv.page_layout, "the fake model has pages of its own", "leave it out"
        )


def _validate_device(config: ClusterConfig) -> None:
    model = config.model
    if model.device == "cpu":
        if model.attention in ("triton", "flashinfer"):
            raise ConfigError("model.attention", model.attention, "computes on a GPU", "model.device=cuda, or auto")
        return
    if model.model == FAKE_MODEL:
        raise ConfigError("model.device", model.device, "the fake model computes on the host", "model.device=cpu")
    if model.attention == "compiled":
        raise ConfigError("model.attention", model.attention, "is for CPUs", "auto, with model.device=cuda")
    if model.forward_path == "fused":
        raise ConfigError("model.forward_path", model.forward_path, "is for CPUs", "fastest, with model.device=cuda")
    if is_quantised(config.kv.cache_dtype):
        reason = "the attention of this device does not read quantised pages"
        raise ConfigError("kv.cache_dtype", config.kv.cache_dtype, reason, "kv.cache_dtype=auto, or model.device=cpu")
    if config.kv.tiers.named:
        reason = "tiers copy pages of host memory, and those of this device are not there"
        raise ConfigError("kv.tiers", model.device, reason, "leave kv.tiers out, or model.device=cpu")


def _validate_door(gateway: GatewayConfig) -> None:
    files = {name: getattr(gateway, name) for name in ("api_keys_file", "tls_cert", "tls_key")}
    for name, path in files.items():
        if path and not (path.startswith("/") and path.isprintable()):
            raise ConfigError(f"gateway.{name}", path, "must be an absolute path: the gateway starts elsewhere")
    if not gateway.api_keys_file and not gateway.open_to_network and not is_loopback(gateway.host):
        reason = "others could use the cluster without an API key"
        hint = "gateway.api_keys_file, made with `baton keys new`; or gateway.open_to_network=true"
        raise ConfigError("gateway.host", gateway.host, reason, hint)
    for host in gateway.allowed_hosts:
        if not host or set(host) & set("/:*[] "):
            raise ConfigError("gateway.allowed_hosts", host, "expected a name alone", "for example baton.example.org")
    for name in ("tls_cert", "tls_key"):
        if not files[name] and gateway.tls_cert + gateway.tls_key:
            raise ConfigError(f"gateway.{name}", "", "a certificate and its key are needed together")
    validate_http(gateway.http)


def is_loopback(host: str) -> bool:
    """An address of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _validate_jobs(jobs: JobsConfig) -> None:
    # A server's address may hold a password: it is not shown.
    if jobs.database and not jobs.database.startswith(("/", *POSTGRES)):
        hint = f"or {POSTGRES[0]}user@host/database"
        raise ConfigError("jobs.database", jobs.database.partition(":")[0], "must be an absolute path", hint)
    if not jobs.database.isprintable():
        raise ConfigError("jobs.database", "", "has characters that no path or address should have")
    if not -MAX_PRIORITY <= jobs.priority <= MAX_PRIORITY:
        raise ConfigError("jobs.priority", jobs.priority, f"must be {-MAX_PRIORITY} to {MAX_PRIORITY}")
    if not 3 * jobs.poll_s <= jobs.lease_s:
        reason = "leases are renewed every jobs.poll_s, and one of these may be late"
        raise ConfigError("jobs.lease_s", jobs.lease_s, reason, f"at least {3 * jobs.poll_s:g}")


def _validate_tracing(tracing: TracingConfig) -> None:
    if tracing.endpoint and not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", tracing.endpoint):
        hint = "for example http://localhost:4318"
        raise ConfigError("tracing.endpoint", "", "must be the plain address of an OTLP/HTTP collector", hint)
    if not 0 <= tracing.sample_ratio <= 1:
        raise ConfigError("tracing.sample_ratio", tracing.sample_ratio, "must be 0 to 1")


def _validate_tiers(kv: KvConfig) -> None:
    tiers = kv.tiers
    if tiers.disk_path and not tiers.disk_path.startswith("/"):
        raise ConfigError("kv.tiers.disk_path", tiers.disk_path, "must be an absolute path: workers start elsewhere")
    if tiers.external and not tiers.external.startswith("file:///"):
        hint = "for example file:///mnt/shared/baton-kv"
        raise ConfigError("kv.tiers.external", tiers.external, "the external store is a directory: file:///path", hint)
    if tiers.external and (set(tiers.external) & set("?#%") or not tiers.external.removeprefix("file://").strip("/")):
        raise ConfigError("kv.tiers.external", tiers.external, "a plain path below the root follows file://, unescaped")
    for name, place in (("disk_path", tiers.disk_path), ("external", tiers.external)):
        if not place.isprintable():
            raise ConfigError(f"kv.tiers.{name}", place, "has characters that no path should have")
    if kv.prefix_cache in WITHOUT_SHARING and tiers.named:
        hint = "kv.prefix_cache=radix"
        raise ConfigError(
            "kv.tiers", kv.prefix_cache, "tiers lie below a prefix cache, and this one keeps nothing", hint
        )
    if kv.prefix_cache == "LMCRadixCache" and not tiers.external:
        hint = "kv.tiers.external=file:///path"
        raise ConfigError("kv.prefix_cache", kv.prefix_cache, "is a prefix cache over an external store", hint)


def _validate_autoscale(config: ClusterConfig) -> None:
    scale = config.autoscale
    for name, least, there in (
        ("min_prefill", scale.min_prefill, config.prefill),
        ("min_decode", scale.min_decode, config.decode),
    ):
        if least < 1:
            raise ConfigError(f"autoscale.{name}", least, "must be at least 1: a role without workers serves nobody")
        if scale.cost_file and there < least:
            role = name.removeprefix("min_")
            raise ConfigError(f"autoscale.{name}", least, f"there are {there} {role} workers to begin with")


def _positive_settings(config: ClusterConfig) -> list[tuple[str, float | None]]:
    groups = config.prefill_worker.layer_groups
    return [
        ("placement.cpus", config.placement.cpus),
        ("model.max_model_len", config.model.max_model_len),
        ("kv.pool_bytes", config.kv.pool_bytes),
        ("kv.num_pages", config.kv.num_pages),
        ("kv.tiers.disk_bytes", config.kv.tiers.disk_bytes),
        ("kv.tiers.external_bytes", config.kv.tiers.external_bytes),
        ("kv.tiers.restore_min_pages", config.kv.tiers.restore_min_pages),
        ("kv.tiers.restore_deadline_s", config.kv.tiers.restore_deadline_s),
        ("kv.tiers.max_queued_jobs", config.kv.tiers.max_queued_jobs),
        ("prefill_worker.chunk_tokens", config.prefill_worker.chunk_tokens),
        ("prefill_worker.max_queued_requests", config.prefill_worker.max_queued_requests),
        ("prefill_worker.layer_groups", None if groups == "adaptive" else groups),
        ("decode_worker.max_running_requests", config.decode_worker.max_running_requests),
        ("decode_worker.max_queued_requests", config.decode_worker.max_queued_requests),
        ("decode_worker.chunk_tokens", config.decode_worker.chunk_tokens),
        ("decode_worker.session_ttl_s", config.decode_worker.session_ttl_s),
        ("transfer.region_bytes", config.transfer.region_bytes),
        ("transfer.direct_region_bytes", config.transfer.direct_region_bytes),
        ("transfer.credit_regions", config.transfer.credit_regions),
        ("transfer.resend_after_s", config.transfer.resend_after_s),
        ("transfer.handoff_ttl_s", config.transfer.handoff_ttl_s),
        ("transfer.tombstone_ttl_s", config.transfer.tombstone_ttl_s),
        ("transfer.max_tombstones", config.transfer.max_tombstones),
        ("liveness.engine_stuck_after_s", config.liveness.engine_stuck_after_s),
        ("liveness.start_deadline_s", config.liveness.start_deadline_s),
        ("liveness.restart_backoff_s", config.liveness.restart_backoff_s),
        ("liveness.restart_forgiven_after_s", config.liveness.restart_forgiven_after_s),
        ("liveness.max_restarts_per_minute", config.liveness.max_restarts_per_minute),
        ("liveness.drain_deadline_s", config.liveness.drain_deadline_s),
        ("autoscale.ttft_s", config.autoscale.ttft_s),
        ("autoscale.itl_s", config.autoscale.itl_s),
        ("autoscale.dwell_s", config.autoscale.dwell_s),
        ("autoscale.restart_s", config.autoscale.restart_s),
        ("gateway.max_inflight_requests", config.gateway.max_inflight_requests),
        ("gateway.max_queued_tokens", config.gateway.max_queued_tokens),
        ("gateway.dispatch_ahead_requests", config.gateway.dispatch_ahead_requests),
        ("gateway.request_timeout_s", config.gateway.request_timeout_s),
        ("gateway.max_body_bytes", config.gateway.max_body_bytes),
        ("gateway.max_sessions", config.gateway.max_sessions),
        ("routing.max_indexed_pages", config.routing.max_indexed_pages),
        ("kv_events.buffer_batches", config.kv_events.buffer_batches),
        ("gateway.session_ttl_s", config.gateway.session_ttl_s),
        *_positive_of_http(config.gateway.http),
        ("idempotency.linger_s", config.idempotency.linger_s),
        ("idempotency.keep_s", config.idempotency.keep_s),
        ("idempotency.max_bytes", config.idempotency.max_bytes),
        ("jobs.max_running_lines", config.jobs.max_running_lines),
        ("jobs.max_lines", config.jobs.max_lines),
        ("jobs.max_file_bytes", config.jobs.max_file_bytes),
        ("jobs.max_uploads", config.jobs.max_uploads),
        ("jobs.max_stored_bytes", config.jobs.max_stored_bytes),
        ("jobs.max_attempts", config.jobs.max_attempts),
        ("jobs.lease_s", config.jobs.lease_s),
        ("jobs.poll_s", config.jobs.poll_s),
        ("jobs.keep_s", config.jobs.keep_s),
    ]


def _positive_of_http(http: HttpConfig) -> list[tuple[str, float]]:
    numbers = {name: value for name, value in dataclasses.asdict(http).items() if isinstance(value, int | float)}
    return [(f"gateway.http.{name}", value) for name, value in numbers.items()]


def _lane_caps(transfer: TransferConfig) -> list[tuple[str, float]]:
    return [(f"lane_max_gbps.{lane}", gbps) for lane, gbps in dataclasses.asdict(transfer.lane_max_gbps).items()]


def _natural_settings(config: ClusterConfig) -> list[tuple[str, float]]:
    return [
        ("placement.gpus", config.placement.gpus),
        ("model.graph_rows", config.model.graph_rows),
        ("prefill_worker.grace_s", config.prefill_worker.grace_s),
        ("prefill_worker.chunk_target_s", config.prefill_worker.chunk_target_s),
        ("decode_worker.chunk_target_s", config.decode_worker.chunk_target_s),
        ("decode_worker.itl_s", config.decode_worker.itl_s or 0.0),
        ("kv.swa_pages", config.kv.swa_pages or 0),
        ("kv.state_slots", config.kv.state_slots or 0),
        ("kv.tiers.host_bytes", config.kv.tiers.host_bytes),
        ("decode_worker.num_reserved_decode_tokens", config.decode_worker.num_reserved_decode_tokens),
        ("decode_worker.local_prefill_max_tokens", config.decode_worker.local_prefill_max_tokens),
        ("decode_worker.max_sessions", config.decode_worker.max_sessions),
    ]
