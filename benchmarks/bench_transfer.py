"""Hand-off bandwidth and latency of every lane between two processes on this host, against copying the same scattered
pages with memcpy in one process; all alive at once, measured in turns, medians.

    python benchmarks/bench_transfer.py [--rounds 7] [--write docs/benchmarks/transfer.md]

A hand-off is measured whole, as an engine sees it: from posting OpenSink on the decode side to SinkCommitted, through
offer, gather, digest, transfer, check, scatter and acknowledgement.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import queue
import statistics
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from baton.common.config import ClusterConfig, LivenessConfig, TransferConfig
from baton.common.engine.batch import KvMemory
from baton.common.engine.core_api import FromPeer, MembershipView, SendTo
from baton.common.ids import CONTROLLER, Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.buffers import NumpyKvBuffer
from baton.common.kv.layout import Component
from baton.common.messages import FinishAck, Hello, Membership, SamplingParams
from baton.transfer.api import FinishSource, OfferReceived, OpenSink, PrefillResult, ShipRegion, SinkCommitted
from baton.transfer.io import IoThread
from baton.transfer.mesh import ClusterKeys, Mesh
from baton.transfer.process import die_with_parent
from baton.transfer.transports.ucx import why_unavailable

TOTAL_BYTES = 64 << 20
PAGE_BYTES = (16 << 10, 64 << 10, 720 << 10)
SPREAD = 2
"""The pool is this many times the hand-off, so that its pages are scattered."""
ONE_PAGE_TRIES = 30
PING = FinishAck(request_id=RequestId("ping"), placement=0)
PREFILL, DECODE = WorkerId("prefill-0"), WorkerId("decode-0")


@dataclass(frozen=True)
class Leg:
    """One row of the table: a lane and the conditions it runs under."""

    name: str
    lane: str
    encrypted: bool = True
    environment: dict[str, str] = field(default_factory=dict)


LEGS = (
    Leg("local", "local"),
    Leg("ucx (shared memory)", "ucx"),
    Leg("ucx (tcp)", "ucx", environment={"UCX_TLS": "tcp,self"}),
    Leg("zmq (encrypted)", "zmq"),
    Leg("zmq (no keys)", "zmq", encrypted=False),
)


@dataclass
class Measured:
    gbps: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)
    one_page_s: list[float] = field(default_factory=list)
    ping_s: list[float] = field(default_factory=list)


def scattered(page_bytes: int, seed: int) -> np.ndarray:
    """Page ids of one hand-off, in random order over the whole pool."""
    count = TOTAL_BYTES // page_bytes
    return np.random.default_rng(seed).permutation(np.arange(1, count * SPREAD + 1, dtype=np.int32))[:count]


def new_pool(page_bytes: int) -> NumpyKvBuffer:
    buffer = NumpyKvBuffer(TOTAL_BYTES // page_bytes * SPREAD + 1, page_bytes, page_size=1, shared=True)
    buffer.as_bytes()[:] = np.random.default_rng(page_bytes).integers(0, 256, page_bytes, dtype=np.uint8)
    return buffer


def worker_main(pipe: Connection, role: str, leg: Leg, page_bytes: int, keys: ClusterKeys | None, hub: str) -> None:
    """A process with an I/O thread. The decode side measures on demand; the prefill side answers offers."""
    die_with_parent()
    os.environ.update(leg.environment)
    worker = PREFILL if role == "prefill" else DECODE
    config = ClusterConfig(
        transfer=TransferConfig(lanes=(leg.lane,)),
        liveness=LivenessConfig(heartbeat_interval_s=1.0, republish_interval_s=10.0, dead_after_s=30.0),
    )
    buffer = new_pool(page_bytes)
    pages = scattered(page_bytes, 1 if role == "prefill" else 2)
    events: queue.Queue[object] = queue.Queue()

    def deliver(event: object) -> None:
        match event:
            case OfferReceived():
                io.post(ShipRegion(event.key, 0, len(event.tokens), pages[: len(event.tokens)]))
                io.post(FinishSource(event.key, PrefillResult(-1, None, 0.0, 0)))
            case FromPeer(sender, body) if role == "prefill":
                io.post(SendTo(sender.worker, sender.epoch, body))
            case _:
                events.put(event)

    stamp = Stamp(worker, 1, Epoch(os.getpid()))
    io = IoThread(stamp, role, config, KvMemory.full(buffer, page_size=1), keys, deliver, controller_address=hub)
    io.start()
    io.wait_admitted(30.0)
    pipe.send(None)
    handoff = 0
    while (command := pipe.recv()) is not None:
        if command == "cpu":
            pipe.send(time.process_time())
            continue
        if command == "ping":
            started = time.perf_counter()
            io.post(SendTo(PREFILL, 0, PING))
            wait_for(events, FromPeer)
        else:
            handoff += 1
            started = time.perf_counter()
            io.post(open_sink(handoff, pages[:command]))
            committed = wait_for(events, SinkCommitted)
            assert committed.lane == leg.lane, committed
        pipe.send(time.perf_counter() - started)
    io.stop(10.0)


def wait_for(events: queue.Queue[object], kind: type) -> object:
    while True:
        event = events.get(timeout=60.0)
        if isinstance(event, kind):
            return event
        assert isinstance(event, MembershipView), event


def open_sink(handoff: int, pages: np.ndarray) -> OpenSink:
    return OpenSink(
        key=HandoffKey(HandoffId(handoff), 1),
        peer=PREFILL,
        request_id=RequestId(str(handoff)),
        tokens=np.zeros(len(pages), dtype=np.int32),
        start=0,
        pages={Component.FULL: pages},
        sample=False,
        sampling=SamplingParams(),
        deadline_s=time.monotonic() + 60.0,
    )


class Pair:
    """A decode and a prefill process, joined by a membership that this process publishes."""

    def __init__(self, leg: Leg, page_bytes: int) -> None:
        self.leg = leg
        keys = ClusterKeys.generate() if leg.encrypted else None
        mesh = Mesh(Stamp(CONTROLLER, 1, Epoch(1)), "127.0.0.1", keys)
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._pipes: dict[str, Connection] = {}
        for role in ("prefill", "decode"):
            ours, theirs = context.Pipe()
            self._pipes[role] = ours
            process = context.Process(target=worker_main, args=(theirs, role, leg, page_bytes, keys, mesh.address))
            process.start()
            self._processes.append(process)
        admit_both(mesh)
        for pipe in self._pipes.values():
            pipe.recv()
        mesh.close()

    def ask(self, role: str, command: object) -> float:
        self._pipes[role].send(command)
        answer: float = self._pipes[role].recv()
        return answer

    def cpu_s(self) -> float:
        return self.ask("prefill", "cpu") + self.ask("decode", "cpu")

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.send(None)
        for process in self._processes:
            process.join(15.0)
            if process.is_alive():
                process.kill()


def admit_both(mesh: Mesh) -> None:
    """Answers Hello until both have heard of each other; they stay members for good then."""
    members = {}
    quiet_until = float("inf")
    while time.monotonic() < quiet_until:
        for frame in mesh.poll(0.05):
            if isinstance(frame.body, Hello):
                members[frame.src.worker] = frame.body.member
        if len(members) == 2:
            quiet_until = min(quiet_until, time.monotonic() + 3.0)
        for worker, member in members.items():
            mesh.connect(worker, member.address)
            mesh.send(worker, Epoch(0), Membership(version=len(members), members=tuple(members.values())))


def memcpy_gbps(source: np.ndarray, target: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> float:
    """One thread copies the pages one by one: what a hand-off would cost if nothing lay between."""
    pairs = list(zip(ours.tolist(), theirs.tolist(), strict=True))
    started = time.perf_counter()
    for to, of in pairs:
        target[to] = source[of]
    return len(pairs) * source.shape[1] / (time.perf_counter() - started) / 1e9


def measure(page_bytes: int, rounds: int, legs: tuple[Leg, ...]) -> tuple[dict[str, Measured], list[float]]:
    """All legs alive at once; each round runs every one of them and memcpy."""
    results = {leg.name: Measured() for leg in legs}
    baseline: list[float] = []
    source, target = new_pool(page_bytes).as_bytes(), new_pool(page_bytes).as_bytes()
    ours, theirs = scattered(page_bytes, 2), scattered(page_bytes, 1)
    pairs = [Pair(leg, page_bytes) for leg in legs]
    nbytes = len(ours) * page_bytes
    try:
        for warm in (True, *[False] * rounds):
            copied = memcpy_gbps(source, target, ours, theirs)
            baseline += [] if warm else [copied]
            for pair in pairs:
                cpu_s = pair.cpu_s()
                took_s = pair.ask("decode", len(ours))
                cpu_s = pair.cpu_s() - cpu_s
                if not warm:
                    results[pair.leg.name].gbps.append(nbytes / took_s / 1e9)
                    results[pair.leg.name].cpu_s_per_gb.append(cpu_s / nbytes * 1e9)
        for _ in range(ONE_PAGE_TRIES):
            for pair in pairs:
                results[pair.leg.name].one_page_s.append(pair.ask("decode", 1))
                results[pair.leg.name].ping_s.append(pair.ask("decode", "ping"))
    finally:
        for pair in pairs:
            pair.close()
    return results, baseline


def rows_of(page_bytes: int, results: dict[str, Measured], baseline: list[float]) -> list[str]:
    copied = statistics.median(baseline)
    rows = [f"| {page_bytes >> 10} KiB | memcpy, one thread | {copied:.1f} | 100 % | | | |"]
    for name, measured in results.items():
        gbps = statistics.median(measured.gbps)
        rows.append(
            f"| {page_bytes >> 10} KiB | {name} | {gbps:.2f} | {100 * gbps / copied:.0f} % "
            f"| {statistics.median(measured.cpu_s_per_gb):.2f} | {1e3 * statistics.median(measured.one_page_s):.2f} "
            f"| {1e3 * statistics.median(measured.ping_s):.2f} |"
        )
    return rows


def report(rows: list[str], rounds: int) -> str:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    lines = [
        "# Hand-off bandwidth and latency per lane",
        "",
        f"{TOTAL_BYTES >> 20} MiB of scattered pages from one process to another on one host, whole hand-offs (offer,"
        " gather, digest, transfer, check, scatter, acknowledgement). Medians of"
        f" {rounds} rounds, all lanes alive at once and measured in turns; memcpy copies the same pages in the same"
        " rounds. Ratios count, absolute numbers do not: the machine is shared.",
        "",
        f"- Machine: {model}, {os.cpu_count()} cores, Linux {platform.release()}; load average"
        f" {os.getloadavg()[0]:.1f} at the end.",
        f"- Remake: `python benchmarks/bench_transfer.py --rounds {rounds} --write docs/benchmarks/transfer.md`",
        "",
        "| page | lane | GB/s | of memcpy | CPU-s per GB (both sides) | one page, ms | control round trip, ms |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        "- One page: a whole hand-off of one page. It needs two control round trips one after the other (offer →"
        " announced region, acknowledgement → done), and on staged lanes another one to ask for the bytes.",
        "- `zmq` is encrypted (CURVE); without keys the same lane shows what the encryption costs.",
        "- `ucx` needs two threads per process; on a machine with as many processes as cores they queue for cores.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", help="run only legs whose name contains this")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    legs = tuple(
        leg
        for leg in LEGS
        if (not arguments.only or arguments.only in leg.name) and not (leg.lane == "ucx" and why_unavailable())
    )
    rows: list[str] = []
    for page_bytes in PAGE_BYTES:
        results, baseline = measure(page_bytes, arguments.rounds, legs)
        rows += rows_of(page_bytes, results, baseline)
        print("\n".join(rows[-len(legs) - 1 :]), flush=True)
    text = report(rows, arguments.rounds)
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(text)
    assert threading.active_count() == 1


if __name__ == "__main__":
    main()
