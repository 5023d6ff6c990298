"""A hundred processes killed at random moments under load (`make soak`). Every request ends with the right text or,
where no worker is left, with a typed error by its deadline; afterwards every page is free or cached."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from harness import LATE_S, REQUEST_TIMEOUT_S, Load, ask, kill, kill_config, wait_clean
from paced import PACED

from baton.common.ids import CONTROLLER, WorkerId
from baton.deploy.client import Client
from baton.deploy.launch import ClusterHandle, launch

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]

KILLS = 34  # per lane; 102 over the three
CLIENTS = 10
WORKERS = (WorkerId("prefill-0"), WorkerId("prefill-1"), WorkerId("decode-0"), WorkerId("decode-1"))


@pytest.fixture(params=["local", "tcp", "zmq", "ucx"])
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cluster(ray_session: str, lane: str) -> Iterator[ClusterHandle]:
    handle = launch(kill_config(f"soak-{lane}", lanes=(lane, "zmq")), class_paths=PACED)
    yield handle
    handle.shutdown()


def test_random_kills_under_load(cluster: ClusterHandle, lane: str, capsys: pytest.CaptureFixture[str]) -> None:
    seed = 20261129
    rng = random.Random(f"{seed}/{lane}")
    killed: Counter[str] = Counter()
    started = time.monotonic()
    with Client(cluster.gateway_url) as client, ThreadPoolExecutor(CLIENTS) as pool:
        soak = Load(partial(ask, client), seed)
        loops = [pool.submit(soak.run, number) for number in range(CLIENTS)]
        try:
            while sum(killed.values()) < KILLS:
                time.sleep(rng.uniform(0.1, 3.0))  # the moment is the random variable here
                hang = rng.random() < 0.1
                victim = CONTROLLER if rng.random() < 0.05 else rng.choice(WORKERS)
                number = signal.SIGSTOP if hang and victim != CONTROLLER else signal.SIGKILL
                if kill(cluster, victim, number):
                    killed[f"{victim} {number.name}"] += 1
        finally:
            soak.stop.set()
        for loop in loops:
            loop.result()
    books = wait_clean(cluster)
    outcomes = soak.done
    right = [outcome for outcome in outcomes if outcome.right]
    no_worker = [outcome for outcome in outcomes if outcome.no_worker]
    wrong = [outcome for outcome in outcomes if not outcome.right and not outcome.no_worker]
    late = [outcome for outcome in outcomes if outcome.took_s > REQUEST_TIMEOUT_S + LATE_S]
    used = Counter(outcome.lane for outcome in right if outcome.lane)
    with capsys.disabled():
        print(
            f"\n{cluster.plan.config.cluster}: {sum(killed.values())} kills in {time.monotonic() - started:.0f} s:",
            f"{len(outcomes)} requests, {len(right)} right, {len(no_worker)} without a worker, {len(wrong)} wrong;",
            f"slowest {max(outcome.took_s for outcome in outcomes):.1f} s.\n",
            f"killed: {dict(sorted(killed.items()))}\n  last hand-offs by lane: {dict(used)}\n  pages: {books}",
        )
    assert not wrong, [(str(outcome.error), outcome.text) for outcome in wrong[:3]]
    assert not late
    assert len(right) > KILLS
    assert used[lane] > 0
