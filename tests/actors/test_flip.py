"""A worker changes its role on a running cluster, while requests run on it."""

from __future__ import annotations

import random
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import ray
from harness import WAIT_S, ask, check, kill, kill_config, question, wait_clean
from paced import PACED

from baton.common.ids import WorkerId
from baton.deploy.client import Client
from baton.deploy.launch import LaunchError, launch

pytestmark = pytest.mark.ray

P0, D1 = WorkerId("prefill-0"), WorkerId("decode-1")


def test_a_decode_worker_becomes_a_prefill_worker_while_requests_run(ray_session: str) -> None:
    rng = random.Random(21)
    cluster = launch(replace(kill_config("flip"), prefill=1), class_paths=PACED)
    try:
        with Client(cluster.gateway_url) as client, ThreadPoolExecutor(8) as pool:
            asked = [question(rng, prompt_tokens=300, max_tokens=100) for _ in range(12)]
            answers = [pool.submit(ask, client, one) for one in asked]
            answers[0].result(WAIT_S)  # from now on, all workers have something to do
            cluster.replace_worker(D1, "prefill")
            with pytest.raises(LaunchError, match="only live decode worker"):
                cluster.replace_worker(WorkerId("decode-0"), "prefill")
            status = cluster.wait_ready(WAIT_S)
            check([answer.result(WAIT_S) for answer in answers])
            assert {(seat.worker, seat.role, seat.incarnation) for seat in status.seats} == {
                (P0, "prefill", 1),
                ("decode-0", "decode", 1),
                (D1, "prefill", 2),
                ("gateway-0", "gateway", 1),
            }
            assert any("Leaving -> Killing: drained" in line for line in status.transitions), status.transitions
            # The one that came last computes prompts, too: the other takes nothing any more.
            actor = cluster.actor(P0)
            assert actor is not None
            ray.get(actor.drain.remote(WAIT_S), timeout=WAIT_S)
            after = ask(client, question(rng, prompt_tokens=700, max_tokens=5))
            check([after])
            assert after.lane, "no hand-off"
            # One that is told to stop does so in good order: it finishes what it has, and has a successor.
            last = [pool.submit(ask, client, question(rng, prompt_tokens=300, max_tokens=100)) for _ in range(6)]
            assert kill(cluster, D1, signal.SIGTERM)
            while cluster.status().seats[2].incarnation == 2:
                cluster.wait_change(cluster.status(), 1.0)
            cluster.wait_ready(WAIT_S)
            check([answer.result(WAIT_S) for answer in last])
            assert any("it was told to stop" in line for line in cluster.status().transitions)
        wait_clean(cluster)
    finally:
        cluster.shutdown()
