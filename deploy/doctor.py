"""`baton doctor`: what of this machine, and of a running cluster, would keep Baton from working well.

Owns: the findings and what to do about each. Never: changes anything, but for compiling what a worker would compile.

Every check tries the thing itself where that is cheap (compiles, binds, writes), instead of guessing from versions.
"""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.markup import escape

from baton.common import env
from baton.common.config import FAKE_MODEL, NODE_ADDRESS, ClusterConfig
from baton.common.errors import BatonError, ConfigError
from baton.common.huge_pages import shared_huge_pages
from baton.common.model.spec import resolve_source
from baton.common.native import BuildError, NativeLibrary, built
from baton.common.units import format_bytes
from baton.deploy.client import Client
from baton.deploy.show import unaccounted
from baton.deploy.show_parts import account_of
from baton.deploy.status import GatewayStatus

OPEN_FILES = 4096
"""A worker has a few sockets with each peer, a gateway one for each client."""
STUCK_S = 30.0
CLEARLY_FASTER = 1.5


class Verdict(StrEnum):
    OK = "ok"
    SLOW = "slow"  # it works, and could work better
    BROKEN = "broken"


COLOURS = {Verdict.OK: "green", Verdict.SLOW: "yellow", Verdict.BROKEN: "red"}


class Finding(Struct, frozen=True):
    """`way_out`: what to do about it; "" where nothing is wrong."""

    what: str
    verdict: Verdict
    detail: str
    way_out: str = ""


def examine_machine(config: ClusterConfig, progress: Callable[[str], None]) -> Iterator[Finding]:
    """What a cluster of this configuration would find here. One finding at a time: some take a while."""
    yield _python()
    yield _cores(config)
    yield _open_files()
    yield _cache()
    yield from _compiled(progress)
    yield _model(config)
    yield from _lanes(config)
    yield _huge_pages()
    yield _interface(config)
    yield _port(config)


def examine_cluster(url: str) -> Iterator[Finding]:
    """What is wrong with one that runs."""
    try:
        with Client(url, timeout_s=15.0) as client:
            yield from findings_of(client.status())
    except BatonError as error:
        yield Finding("cluster", Verdict.BROKEN, str(error))


def findings_of(status: GatewayStatus) -> Iterator[Finding]:
    """Of what a gateway tells. Pure."""
    yield _readiness(status)
    yield from _workers(status)
    yield from _pages(status)
    yield from _lanes_in_use(status)


def nothing_broken(findings: Iterable[Finding]) -> bool:
    return not any(one.verdict is Verdict.BROKEN for one in findings)


def print_findings(findings: Iterable[Finding], console: Console) -> bool:
    """Line by line, as they come. Whether nothing is broken."""
    told = []
    for one in findings:
        told.append(one)
        console.print(f"[{COLOURS[one.verdict]}]{one.verdict:>6}[/]  {one.what}: {escape(one.detail)}", soft_wrap=True)
        if one.way_out:
            console.print(f"        [bold]{escape(one.way_out)}[/]", soft_wrap=True)
    return nothing_broken(told)


# --------------------------------------------------------------------------------------------- the machine


def _python() -> Finding:
    parts = [f"{platform.python_implementation()} {platform.python_version()}", platform.platform(terse=True)]
    for package in ("torch", "ray", "transformers"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            return Finding("software", Verdict.BROKEN, f"{package} is not installed", "pip install baton-pd")
    if sys.version_info < (3, 11) or sys.platform != "linux":
        return Finding("software", Verdict.BROKEN, ", ".join(parts), "Baton needs Linux and Python 3.11 or newer")
    return Finding("software", Verdict.OK, ", ".join(parts))


def _cores(config: ClusterConfig) -> Finding:
    cores, workers = len(os.sched_getaffinity(0)), config.prefill + config.decode
    detail = f"{cores} for {workers} workers; {format_bytes(_available_memory())} of memory available"
    if cores < workers:
        way_out = f"workers would share cores and slow each other down: --prefill 1 --decode {max(1, cores - 1)}"
        return Finding("cores", Verdict.SLOW, detail, way_out)
    return Finding("cores", Verdict.OK, detail)


def _available_memory() -> int:
    """Bytes, with what the kernel would give up for it: free pages alone are few wherever files have been read."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    raise BatonError("/proc/meminfo has no MemAvailable")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft} allowed"
    if soft < OPEN_FILES:
        return Finding("open files", Verdict.SLOW, detail, f"ulimit -n {min(hard, 16 * OPEN_FILES)}, before serving")
    return Finding("open files", Verdict.OK, detail)


def _cache() -> Finding:
    folder = env.cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        disk = os.statvfs(folder)
    except OSError as error:
        way_out = "set BATON_CACHE_DIR to a folder that can be written: converted weights and kernels are kept there"
        return Finding("cache", Verdict.BROKEN, f"{folder}: {error.strerror}", way_out)
    return Finding("cache", Verdict.OK, f"{folder}, {format_bytes(disk.f_bavail * disk.f_frsize)} free")


def _compiled(progress: Callable[[str], None]) -> Iterator[Finding]:
    from baton.common.engine.kernels import LIBRARY as KERNELS
    from baton.common.kv.prefix.compiled import LIBRARY as TREE
    from baton.transfer.copying import LIBRARY as COPYING

    libraries: tuple[tuple[str, NativeLibrary], ...] = (
        ("attention kernels", KERNELS), ("prefix tree", TREE), ("page copies", COPYING),
    )  # fmt: skip
    for name, library in libraries:
        try:
            yield Finding(name, Verdict.OK, f"compiled: {built(library, progress)}")
        except BuildError as error:
            way_out = "install g++ or set CXX; without them a slower path is taken"
            yield Finding(name, Verdict.SLOW, " ".join(str(error).split())[:300], way_out)


def _model(config: ClusterConfig) -> Finding:
    name = config.model.model
    if name == FAKE_MODEL:
        return Finding("model", Verdict.OK, "fake: for trying Baton out, not an answer in it means anything")
    try:
        source = resolve_source(name)
    except ConfigError as error:
        return Finding("model", Verdict.BROKEN, f"{name}: {error.reason}", error.hint)
    return Finding("model", Verdict.OK, f"{source.name}: {source.path}")


def _lanes(config: ClusterConfig) -> Iterator[Finding]:
    from baton.transfer.transports import ucx

    reasons = {
        "local": "" if hasattr(os, "memfd_create") else "this system has no memfd",
        "tcp": "",
        "ucx": ucx.why_unavailable(),
        "zmq": "",
    }
    for lane in config.transfer.lanes:
        reason = reasons[lane]
        yield Finding(f"lane {lane}", Verdict.SLOW if reason else Verdict.OK, reason or "can be built here")


def _huge_pages() -> Finding:
    if shared_huge_pages():
        return Finding("huge pages", Verdict.OK, "given to shared memory that asks for them")
    way_out = "as root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return Finding(
        "huge pages", Verdict.SLOW, "not given to shared memory: the local lane is up to a third slower", way_out
    )


def _interface(config: ClusterConfig) -> Finding:
    if config.bind_host == NODE_ADDRESS:
        return Finding("cluster interface", Verdict.OK, "that by which Ray knows each node")
    try:
        with socket.create_server((config.bind_host, 0)):
            return Finding("cluster interface", Verdict.OK, f"bind_host = {config.bind_host}")
    except OSError as error:
        way_out = "--set bind_host=ADDRESS, one of this machine's that its peers reach"
        return Finding("cluster interface", Verdict.BROKEN, f"bind_host = {config.bind_host}: {error}", way_out)


def _port(config: ClusterConfig) -> Finding:
    host, port = config.gateway.host, config.gateway.port
    try:
        with socket.create_server((host, port)):
            return Finding("gateway", Verdict.OK, f"{host}:{port} is free")
    except OSError as error:
        return Finding("gateway", Verdict.SLOW, f"{host}:{port}: {error.strerror}", "--port 0 takes any that is free")


# --------------------------------------------------------------------------------------------- a cluster


def _readiness(status: GatewayStatus) -> Finding:
    detail = (
        f"{status.model}, baton {status.version}: {status.requests.running} running, {status.requests.queued} waiting"
    )
    if status.ready:
        return Finding("cluster", Verdict.OK, detail)
    return Finding("cluster", Verdict.BROKEN, f"{detail}; not ready: {status.reason}", "baton status shows its workers")


def _workers(status: GatewayStatus) -> Iterator[Finding]:
    for worker in status.workers:
        if worker.silent:
            way_out = "the controller replaces it once its process is proven dead; if it hangs, kill it"
            yield Finding(worker.worker, Verdict.BROKEN, "is silent", way_out)
        elif worker.load.step_age_s > STUCK_S:
            detail = f"has been in one step for {worker.load.step_age_s:.0f} s"
            yield Finding(worker.worker, Verdict.BROKEN, detail, "py-spy dump shows where; killing it costs no answer")
        elif worker.incarnation > 1:
            detail = f"is process number {worker.incarnation} in its seat"
            yield Finding(worker.worker, Verdict.SLOW, detail, "look for why the ones before ended")
    if not any(worker.role == "prefill" for worker in status.workers):
        yield Finding("prefill", Verdict.SLOW, "no worker: decode workers compute prompts themselves")


def _pages(status: GatewayStatus) -> Iterator[Finding]:
    for worker in status.workers:
        account = account_of(status, worker.worker)
        for name, census in {account.component: account.census, **account.components}.items():
            if not census:
                continue
            lost = unaccounted(census)
            if lost:
                detail = f"{lost} pages of {name} belong to nobody"
                yield Finding(worker.worker, Verdict.BROKEN, detail, "a bug of ours: please report `baton kv --json`")
            elif census["quarantined"]:
                detail = f"{census['quarantined']} pages of {name} wait for proof that nobody writes to them"
                yield Finding(worker.worker, Verdict.SLOW, detail, "normal for a moment after a worker was lost")


def _lanes_in_use(status: GatewayStatus) -> Iterator[Finding]:
    """A slow lane where a faster one is up is what nobody sees otherwise."""
    for use in status.lanes:
        lanes = [lane for lane in account_of(status, use.decode_worker).lanes if lane.peer == use.prefill_worker]
        speed = next((lane.gbps for lane in lanes if lane.lane == use.lane), 0.0)
        pair = f"{use.prefill_worker} to {use.decode_worker}"
        faster = [lane for lane in lanes if lane.status == "up" and speed and lane.gbps > CLEARLY_FASTER * speed]
        down = [lane for lane in lanes if lane.status != "up"]
        if faster:
            detail = f"over {use.lane} at {speed:.2f} GB/s, though {faster[0].lane} reaches {faster[0].gbps:.2f}"
            yield Finding(pair, Verdict.SLOW, detail, "normal for a moment after a lane came up")
        elif down:
            told = ", ".join(f"{lane.lane} {lane.status}{f' ({lane.reason})' if lane.reason else ''}" for lane in down)
            yield Finding(pair, Verdict.OK, f"over {use.lane}, {speed:.2f} GB/s; {told}")
        else:
            yield Finding(pair, Verdict.OK, f"over {use.lane}, {speed:.2f} GB/s")
