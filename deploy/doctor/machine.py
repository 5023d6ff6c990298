"""What can only be tried on the machine that shall serve: compiling, the cluster interface, the gateway's port.

Owns: those findings and what to do about each. Never: what any host is looked at for (`host.py`, `judge_hosts.py`), or
a change, but for compiling what a worker would compile.

Every check tries the thing itself where that is cheap (compiles, binds, writes), instead of guessing from versions.
"""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from baton.common.config import NODE_ADDRESS, ClusterConfig
from baton.common.native import BuildError, NativeLibrary, built
from baton.deploy.doctor.findings import Finding, Severity


def examine_machine(config: ClusterConfig, progress: Callable[[str], None]) -> Iterator[Finding]:
    """What a cluster of this configuration would find here. One finding at a time: some take a while."""
    yield _python()
    yield from _compiled(progress)
    yield _interface(config)
    yield _port(config)


def _python() -> Finding:
    parts = [f"{platform.python_implementation()} {platform.python_version()}", platform.platform(terse=True)]
    for package in ("torch", "ray", "transformers"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            return Finding("software", Severity.FAIL, f"{package} is not installed", "pip install baton-pd")
    if sys.version_info < (3, 11) or sys.platform != "linux":
        return Finding("software", Severity.FAIL, ", ".join(parts), "Baton needs Linux and Python 3.11 or newer")
    return Finding("software", Severity.OK, ", ".join(parts))


def _compiled(progress: Callable[[str], None]) -> Iterator[Finding]:
    from baton.common.engine.kernels import LIBRARY as KERNELS
    from baton.common.kv.prefix.compiled import LIBRARY as TREE
    from baton.transfer.copying import LIBRARY as COPYING

    libraries: tuple[tuple[str, NativeLibrary], ...] = (
        ("attention kernels", KERNELS), ("prefix tree", TREE), ("page copies", COPYING),
    )  # fmt: skip
    for name, library in libraries:
        try:
            yield Finding(name, Severity.OK, f"compiled: {built(library, progress)}")
        except BuildError as error:
            way_out = "install g++ or set CXX; without them a slower path is taken"
            yield Finding(name, Severity.WARN, " ".join(str(error).split())[:300], way_out)


def _interface(config: ClusterConfig) -> Finding:
    if config.bind_host == NODE_ADDRESS:
        return Finding("cluster interface", Severity.OK, "that by which Ray knows each node")
    try:
        with socket.create_server((config.bind_host, 0)):
            return Finding("cluster interface", Severity.OK, f"bind_host = {config.bind_host}")
    except OSError as error:
        way_out = "--set bind_host=ADDRESS, one of this machine's that its peers reach"
        return Finding("cluster interface", Severity.FAIL, f"bind_host = {config.bind_host}: {error}", way_out)


def _port(config: ClusterConfig) -> Finding:
    host, port = config.gateway.host, config.gateway.port
    try:
        with socket.create_server((host, port)):
            return Finding("gateway", Severity.OK, f"{host}:{port} is free")
    except OSError as error:
        return Finding("gateway", Severity.WARN, f"{host}:{port}: {error.strerror}", "--port 0 takes any that is free")
