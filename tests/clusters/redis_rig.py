"""A Redis of the test's own, as one on another host would be: with a password, and a log of all that it was told."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from baton.common.clock import MonotonicClock

PASSWORD = "not-a-secret-of-anybody"
START_S = 20.0


def missing() -> str:
    """What this machine lacks for it; "" when nothing."""
    return ", ".join(name for name in ("redis-server", "setpriv") if shutil.which(name) is None)


@contextlib.contextmanager
def running_redis(folder: Path, host: str, port: int = 6379) -> Iterator[str]:
    """Its address. Every write is on the disk before it is acknowledged, as it should be for Ray's head."""
    command = [
        "setpriv", "--pdeathsig", "KILL", "redis-server", "--bind", host, "--port", str(port), "--dir", str(folder),
        "--requirepass", PASSWORD, "--appendonly", "yes", "--appendfsync", "always", "--save", "",
    ]  # fmt: skip
    with (folder / "redis.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            _wait_for(host, port, folder / "redis.log")
            yield f"{host}:{port}"
        finally:
            server.terminate()


def _wait_for(host: str, port: int, log: Path) -> None:
    clock = MonotonicClock()
    deadline_s = clock.now() + START_S
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), 1.0).close()
            return
        assert clock.now() < deadline_s, log.read_text()
