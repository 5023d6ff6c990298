"""What a client sees of each death, and how long it takes until the seat serves again: the numbers of the failure table
in docs/OPERATIONS.md, which this prints. Real processes on one Ray, workers as fast as a small real model."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
from harness import Outcome, Question, ask, check, kill, kill_config, question, wait_settled
from paced import PACED

from baton.common.clock import MonotonicClock
from baton.common.ids import CONTROLLER, WorkerId
from baton.deploy.client import Client
from baton.deploy.launch import ClusterHandle, launch

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

P0, D0, GATEWAY = WorkerId("prefill-0"), WorkerId("decode-0"), WorkerId("gateway-0")
STREAMS = 6
TOKENS = 1000
RETRIES = 30
ROUNDS = 2


@pytest.fixture(scope="module")
def cluster(ray_session: str) -> Iterator[ClusterHandle]:
    config = kill_config("recovery")  # with our own patience, and not a test's
    handle = launch(replace(config, liveness=replace(config.liveness, restart_backoff_s=1.0)), class_paths=PACED)
    yield handle
    handle.shutdown()


@dataclass(frozen=True, slots=True)
class Watched:
    """One stream."""

    longest_gap_s: float
    right: bool


def watch(client: Client, asked: Question, running: threading.Semaphore) -> Watched:
    clock = MonotonicClock()
    heard_s, longest_s, text = 0.0, 0.0, ""
    with client.stream(
        list(asked.prompt), max_tokens=asked.max_tokens, temperature=0.0, seed=asked.seed, ignore_eos=True
    ) as stream:
        for part in stream:
            now = clock.now()
            if text:
                longest_s = max(longest_s, now - heard_s)
            else:
                running.release()
            heard_s, text = now, text + part
    return Watched(longest_s, text == asked.expected)


def gaps_of_streams(cluster: ClusterHandle, worker: WorkerId | None, number: int, rng: random.Random) -> list[float]:
    """The longest silence of each of some running streams while this process is killed or stopped."""
    running = threading.Semaphore(0)
    with Client(cluster.gateway_url, timeout_s=120.0, retries=RETRIES) as client, ThreadPoolExecutor(STREAMS) as pool:
        asked = [replace(question(rng, prompt_tokens=50, max_tokens=TOKENS), temperature=0.0) for _ in range(STREAMS)]
        watched = [pool.submit(watch, client, one, running) for one in asked]
        for _ in range(STREAMS):
            assert running.acquire(timeout=60.0)
        if worker is not None:
            assert kill(cluster, worker, number)
        found = [one.result() for one in watched]
    assert all(one.right for one in found)
    return sorted(one.longest_gap_s for one in found)


def times_of_prompts(cluster: ClusterHandle, worker: WorkerId | None, number: int, rng: random.Random) -> list[float]:
    """How long new requests with long prompts take while this process is killed or stopped."""
    with Client(cluster.gateway_url, timeout_s=120.0, retries=RETRIES) as client, ThreadPoolExecutor(STREAMS) as pool:
        asked = [question(rng, prompt_tokens=1000, max_tokens=2) for _ in range(4 * STREAMS)]
        outcomes: list[Outcome] = []
        futures = [pool.submit(ask, client, one) for one in asked]
        futures[0].result()
        if worker is not None:
            assert kill(cluster, worker, number)
        outcomes = [one.result() for one in futures]
    check(outcomes)
    return sorted(outcome.took_s for outcome in outcomes)


CASES = (
    ("nothing", None, 0),
    ("prefill worker killed", P0, signal.SIGKILL),
    ("prefill worker hangs", P0, signal.SIGSTOP),
    ("decode worker killed", D0, signal.SIGKILL),
    ("decode worker hangs", D0, signal.SIGSTOP),
    ("gateway killed", GATEWAY, signal.SIGKILL),
    ("controller killed", CONTROLLER, signal.SIGKILL),
)


def test_times(cluster: ClusterHandle, capsys: pytest.CaptureFixture[str]) -> None:
    clock, rng = MonotonicClock(), random.Random(3)
    rows = []
    for measure in (gaps_of_streams, times_of_prompts):  # who is new to his work is slow
        measure(cluster, None, 0, rng)
    for name, worker, number in CASES:
        gaps: list[float] = []
        prompts: list[float] = []
        back: list[float] = []
        for _ in range(ROUNDS):
            for measure, found in ((gaps_of_streams, gaps), (times_of_prompts, prompts)):
                wait_settled(cluster)
                version, begun_s = cluster.status().version, clock.now()
                found += measure(cluster, worker, number, rng)
                if worker is not None:
                    wait_settled(cluster)
                    assert cluster.status().version > version
                    back.append(clock.now() - begun_s)
        rows.append((name, max(gaps), max(prompts), max(back, default=0.0)))
    with capsys.disabled():
        print(f"\n{'':24}{'longest gap':>14}{'slowest prompt':>16}{'all back':>10}  (s, worst of {ROUNDS})")
        for name, gap_s, prompt_s, back_s in rows:
            print(f"{name:24}{gap_s:14.2f}{prompt_s:16.2f}{back_s:10.1f}")
