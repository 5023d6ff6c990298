"""An hour's load, pressed into minutes, on a cluster that is upgraded, made larger and smaller while a hundred of its
workers are killed (`make upgrade-soak`). Nobody's answer fails or is another one; recovery times come as a table
(docs/UPGRADES.md).

An hour here is 3600 s / SCALE: steps, answers and the time between kills are SCALE times as fast as in the hour that
is meant (48 ms a step and 0.5 ms for each token of a prompt, a kill every 36 s). What recovers is not:
silence is noticed after the same 3 s, and a process takes as long to start. So it is harder than the hour.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
from harness import LATE_S, REQUEST_TIMEOUT_S, WAIT_S, Load, kill, kill_config, wait_clean
from paced import PACED
from recoveries import Successions, row, stream

from baton.common.ids import CONTROLLER
from baton.deploy.changing import scale, upgrade, watch
from baton.deploy.client import Client
from baton.deploy.launch import ClusterHandle, LaunchError, launch

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]

SCALE = 12
KILLS = int(os.environ.get("UPGRADE_KILLS", "100"))
CLIENTS = 16
LONG_S = 0.5
"""Between two pieces of an answer: something has happened."""
CHANGE_S = 420.0


@dataclass(slots=True)
class Killer:
    """One worker after the other, at random moments; now and then the controller."""

    cluster: ClusterHandle
    successions: Successions
    rng: random.Random
    killed: Counter[str] = field(default_factory=Counter)
    decode_s: list[float] = field(default_factory=list)  # when decode workers were
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while sum(self.killed.values()) < KILLS and not self.stop.is_set():
            self.stop.wait(self.rng.uniform(0.4, 2 * 3600 / SCALE / 100 - 0.4))
            if self.rng.random() < 0.03:
                kill(self.cluster, CONTROLLER)  # beside the hundred
            try:
                seats = self.cluster.status().seats
            except LaunchError:
                continue  # it is being restarted
            workers = [seat for seat in seats if seat.state in ("live", "leaving") and seat.role != "gateway"]
            if not workers:
                continue
            seat = self.rng.choice(workers)
            number = signal.SIGSTOP if self.rng.random() < 0.15 else signal.SIGKILL
            if kill(self.cluster, seat.worker, number):
                self.successions.killed(seat.worker, seat.incarnation)
                self.killed[f"{seat.role} {number.name}"] += 1
                if seat.role == "decode":
                    self.decode_s.append(time.monotonic())


def change(cluster: ClusterHandle, killer: Future[None]) -> list[str]:
    """An upgrade, more workers, fewer workers, again and again until all kills are over; each once at least."""
    said: list[str] = []
    number = 0
    config = cluster.plan.config
    while number < 3 or not killer.done():
        began_s, revision = time.monotonic(), 0
        if number % 3 == 0:
            config = replace(config, prefill_worker=replace(config.prefill_worker, chunk_tokens=128 + 16 * number))
            revision = upgrade(cluster, config).revision
            what = "upgrade"
        else:
            counts = {"prefill": 3, "decode": 4} if number % 3 == 1 else {"prefill": 2, "decode": 3}
            scale(cluster, counts)
            what = f"scale {counts}"
        given_up = watch(cluster, CHANGE_S, upgrade_to=revision)
        said.append(f"{what}: {time.monotonic() - began_s:.0f} s {given_up}")
        assert not given_up, said
        number += 1
    return said


@pytest.fixture
def cluster(ray_session: str) -> Iterator[ClusterHandle]:
    config = replace(kill_config("upgrade-soak"), prefill=2, decode=3)
    handle = launch(config, class_paths=PACED)
    yield handle
    handle.shutdown()


def test_an_hour_with_an_upgrade_and_a_hundred_kills(
    cluster: ClusterHandle, capsys: pytest.CaptureFixture[str]
) -> None:
    began_s = time.monotonic()
    successions = Successions(cluster)
    killer = Killer(cluster, successions, random.Random("upgrade"))
    with Client(cluster.gateway_url, retries=20) as client, ThreadPoolExecutor(CLIENTS + 2) as pool:
        load = Load(lambda asked: stream(client, asked, LONG_S), 20261130)
        loops = [pool.submit(load.run, number) for number in range(CLIENTS)]
        watching = pool.submit(successions.run)
        killing = pool.submit(killer.run)
        try:
            said = change(cluster, killing)
            killing.result(WAIT_S)
        finally:
            killer.stop.set()
            successions.stop.set()
            load.stop.set()
        for loop in loops:
            loop.result()
        watching.result(WAIT_S)
    took_s = time.monotonic() - began_s
    books = wait_clean(replace(cluster, plan=cluster.current_plan()))
    outcomes = [one.outcome for one in load.done]
    failed = [one for one in outcomes if not one.right]
    gaps = [gap for one in load.done for gap in one.gaps]
    went_on = [begun + long_s - at for begun, long_s in gaps for at in killer.decode_s if begun <= at <= begun + long_s]
    with capsys.disabled():
        print(
            f"\n{len(outcomes)} requests in {took_s:.0f} s ({took_s * SCALE / 3600:.1f} h at {SCALE} times the speed),",
            f"{len(failed)} failed; {sum(one.placements > 1 for one in load.done)} went on elsewhere;",
            f"killed: {dict(sorted(killer.killed.items()))}\n" + "\n".join(said),
            "\n| s | number | p50 | p99 | max |\n|---|---|---|---|---|\n"
            + row("kill -> its successor takes requests", successions.took_s)
            + "\n"
            + row("kill of a decode worker -> its streams go on", went_on)
            + "\n"
            + row("whole answers", [one.took_s for one in outcomes])
            + f"\npages: {books}",
        )
    assert not failed, [(str(one.error), one.text, one.question.expected) for one in failed[:3]]
    assert max(one.took_s for one in outcomes) < REQUEST_TIMEOUT_S + LATE_S
    assert sum(killer.killed.values()) == KILLS
    assert went_on
