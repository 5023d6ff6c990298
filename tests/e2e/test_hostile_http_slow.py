"""Attacks in numbers: what the gateway's process has of memory and descriptors afterwards, and how late a stream of
somebody else's was meanwhile. The gateway is in a process of its own, so that only it is measured."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow

CLIENTS = 500
GIVE_UP_S = 120.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SERVER = """
import asyncio, ctypes, gc, sys, time
sys.path.insert(0, {folder!r})
from http_loopback import Loopback, saying, serving
from baton.common.http_config import HttpConfig
limits = HttpConfig(header_timeout_s=2.0, stall_s=3.0, min_bytes_per_s=1000.0, max_connections_per_address=700)
class Forgotten(list):
    def append(self, one):
        pass
worker = Loopback(script=saying("x" * 900), submits=Forgotten())
with serving(worker, http=limits, max_model_len=1 << 17, max_inflight_requests=4096, max_queued_tokens=1 << 30,
             rows=4096) as served:
    latest = [0.0]
    async def watch():
        while True:
            asleep = time.perf_counter()
            await asyncio.sleep(0.005)
            latest[0] = max(latest[0], time.perf_counter() - asleep - 0.005)
    print(served.url, flush=True)
    sys.stdin.readline()
    served.server.begin(watch())
    for line in sys.stdin:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free is not held, so that what is held is counted
        print(latest[0], flush=True)
"""


@dataclass(frozen=True)
class Process:
    url: str
    running: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.running.pid

    def watch(self) -> None:
        self._say("watch")

    def latest_s(self) -> float:
        """How long its loop was kept at most, since `watch`."""
        self._say("tell")
        assert self.running.stdout is not None
        return float(self.running.stdout.readline())

    def _say(self, line: str) -> None:
        assert self.running.stdin is not None
        self.running.stdin.write(line + "\n")
        self.running.stdin.flush()

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def resident_bytes(self) -> int:
        self.latest_s()
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * PAGE_BYTES

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    async def metric(self, http: httpx.AsyncClient, name: str) -> float:
        page = (await http.get("/metrics")).text
        return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE))


@pytest.fixture
def process() -> Iterator[Process]:
    program = SERVER.format(folder=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as server:
        assert server.stdout is not None
        try:
            yield Process(server.stdout.readline().strip(), server)
        finally:
            server.kill()


def request(path: str, body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (
        path.encode(),
        len(content),
        content,
    )


async def until(process: Process, http: httpx.AsyncClient, name: str, good: Callable[[float], bool]) -> None:
    give_up_s = time.monotonic() + GIVE_UP_S
    while not good(await process.metric(http, name)):
        assert time.monotonic() < give_up_s
        await asyncio.sleep(0.2)  # asking takes the server's time


async def attack(process: Process, said: bytes, ended: int) -> None:
    """Connections that say this and then read nothing, until so many in all have been ended for it."""
    writers = []
    async with httpx.AsyncClient(base_url=process.url, timeout=GIVE_UP_S) as http:
        for _ in range(CLIENTS):
            small = socket.socket()
            small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            small.connect(("127.0.0.1", process.port))
            _, writer = await asyncio.open_connection(sock=small, limit=1024)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(said)
            writers.append(writer)
        await until(process, http, "baton_http_connections_ended_total", lambda count: count >= ended)
        for writer in writers:
            writer.transport.abort()
        await until(process, http, "baton_http_connections", lambda count: count == 1)
        await until(process, http, "baton_requests_in_flight", lambda count: count == 0)


def stream_of(prompt_chars: int) -> bytes:
    body = {"model": "fake", "prompt": "y" * prompt_chars, "echo": True, "max_tokens": 4, "stream": True, "n": 4}
    return request("/v1/completions", body)


@pytest.mark.parametrize(
    "said",
    [stream_of(40_000), stream_of(40_000)[:-1000], b"GET /live HTTP/1.1\r\nX-A: " + b"x" * 30_000],
    ids=["answers that are not read", "bodies that do not come", "headers that do not end"],
)
def test_500_clients_that_stop(process: Process, said: bytes) -> None:
    """Nothing is left of them, and the second 500 take no more than the first."""
    process.watch()
    asyncio.run(attack(process, said, CLIENTS))
    resident_bytes, descriptors = process.resident_bytes(), process.descriptors()
    asyncio.run(attack(process, said, 2 * CLIENTS))
    grown_bytes = process.resident_bytes() - resident_bytes
    print(f"{resident_bytes >> 20} MiB, then {grown_bytes >> 20} MiB more")
    assert grown_bytes < 32 << 20
    assert process.descriptors() <= descriptors + 2  # somebody else's, kept alive


def test_bodies_that_take_long_to_read(process: Process) -> None:
    """Refused or read, each keeps the loop, and so the streams of others, for a moment only."""
    start = b'{"model": "fake", "prompt": '
    bodies = [
        (start + b"[" + b",".join([b"[]"] * 1_300_000) + b"]}", 413),
        (start + b"[" + b",".join([b"[]"] * 25_000) + b"]}", 400),
        (start + b"[" + b",".join([b"1"] * 260_000) + b"]}", 400),
        (start + b'"' + b"x " * 2_000_000 + b'"}', 400),
    ]
    with httpx.Client(base_url=process.url, timeout=GIVE_UP_S) as http:
        assert http.get("/live").status_code == 200
        process.watch()
        for body, status in bodies * 5:
            assert http.post("/v1/completions", content=body).status_code == status
    late_s = process.latest_s()
    print(f"the loop was kept for {late_s:.3f} s at most")
    assert late_s < 0.5
