"""The only module that reads or sets environment variables. One function per variable; its docstring is the manual.

Never: holds a setting that belongs in `config`. What is here must be known before there is a config, or must reach a
library that listens to nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`BATON_CACHE_DIR`: where converted weights and compiled kernels are kept (the folder may be deleted at any time,
    and shared by processes and hosts). Default: `$XDG_CACHE_HOME/baton`, else `~/.cache/baton`."""
    chosen = os.environ.get("BATON_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "baton"


def state_dir() -> Path:
    """`BATON_STATE_DIR`: where a cluster keeps what must outlive it (jobs, with `jobs.database` unset). On a local
    disk. Default: `$XDG_STATE_HOME/baton`, else `~/.local/state/baton`."""
    chosen = os.environ.get("BATON_STATE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "baton"


def settings() -> dict[str, str]:
    """`BATON_SET_<GROUP>__<NAME>`: any setting of the configuration, as `--set group.name=value` would give it:
    `BATON_SET_KV__PAGE_SIZE=4`. Names come back as settings are named ("kv.page_size"), values as text."""
    prefix = "BATON_SET_"
    return {
        name.removeprefix(prefix).lower().replace("__", "."): value
        for name, value in os.environ.items()
        if name.startswith(prefix)
    }


def otlp_endpoint() -> str:
    """`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, else `OTEL_EXPORTER_OTLP_ENDPOINT` with `/v1/traces`: where spans go,
    unless `tracing.endpoint` says. "" with neither, or with `OTEL_SDK_DISABLED=true`. The exporter's other variables
    (`OTEL_EXPORTER_OTLP_HEADERS`, `_TIMEOUT`, `_COMPRESSION`, `_CERTIFICATE`) and `OTEL_RESOURCE_ATTRIBUTES` are read
    by OpenTelemetry's package in every process that sends."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    whole, base = (os.environ.get(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT", "").strip() for name in ("TRACES_", ""))
    return whole or (f"{base.rstrip('/')}/v1/traces" if base else "")


def service_name() -> str:
    """`OTEL_SERVICE_NAME`: under what name spans appear, unless `tracing.service_name` says. Default: `baton`."""
    return os.environ.get("OTEL_SERVICE_NAME") or "baton"


def cluster_url() -> str:
    """`BATON_URL`: the gateway that clients talk to, `baton run` and `baton status` among them. Default: `http://127.0.0.1:8000`."""
    return os.environ.get("BATON_URL") or "http://127.0.0.1:8000"


def api_key() -> str | None:
    """`BATON_API_KEY`: the key that commands and clients send: jobs and files are seen by the key that made them."""
    return os.environ.get("BATON_API_KEY") or None


def ca_file() -> str | None:
    """`BATON_CA_FILE`: a PEM file with the authorities that commands and clients trust when they talk to an `https://`
    gateway. Default: those of the package `certifi`, or of `SSL_CERT_FILE`."""
    return os.environ.get("BATON_CA_FILE") or None


def compiler() -> str:
    """`CXX`: the C++ compiler for kernels. Default: `c++`, found on `PATH`."""
    return os.environ.get("CXX") or "c++"


def forbid_downloads() -> None:
    """Sets `HF_HUB_OFFLINE=1` unless the user chose otherwise: a model comes from the disk, never from a hub. Must be
    called before `transformers` is imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def prepare_ray(*, joins: bool) -> None:
    """Sets, unless the user chose otherwise, before `ray.init`: `RAY_USAGE_STATS_ENABLED=0` (a serving process reports
    to nobody), `RAY_worker_niceness=0` (Ray's 15 starves a worker on its pinned core as soon as anything else runs
    there: heartbeats stop, and it is taken for dead), and, for a Ray of its own, `RAY_AUTH_MODE=disabled` (its default
    depends on whether a token file lies around, and a cluster whose processes disagree does not start). Who joins a
    Ray that runs leaves that to Ray, whose default was that of `ray start`, too."""
    if not joins:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")


def tune_ucx(interface: str) -> None:
    """Sets what the `ucx` lane needs, unless the user chose otherwise. Call before `ucxx` is imported.

    `UCX_NET_DEVICES`: the cluster interface ("" leaves it to UCX; name RDMA devices here yourself).
    `UCX_CMA_MEMORY_INVALIDATE=y`: else the error handling that notices a dead peer rules out shared memory.
    `UCX_TCP_TX_SEG_SIZE`, `UCX_TCP_RX_SEG_SIZE`: 512K is three times as fast as the default.
    `UCX_WARN_UNUSED_ENV_VARS=n`: the settings above are not all known to every build."""
    wanted = {
        "UCX_CMA_MEMORY_INVALIDATE": "y",
        "UCX_TCP_TX_SEG_SIZE": "512K",
        "UCX_TCP_RX_SEG_SIZE": "512K",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    if interface:
        wanted["UCX_NET_DEVICES"] = interface
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def ucx_settings() -> dict[str, str]:
    """What the user has told UCX (`UCX_...`), and which libucx is loaded (`RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY`). Only
    looked at, by `baton doctor`."""
    return {name: value for name, value in os.environ.items() if name.startswith(("UCX_", "RAPIDS_LIBUCX_"))}
