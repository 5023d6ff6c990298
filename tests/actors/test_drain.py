"""The end of a served cluster: what runs is finished, nothing new is taken, and every worker says that it is idle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import ray
from harness import WAIT_S, Question, kill_config
from paced import PACED

from baton.common.clock import MonotonicClock
from baton.common.ids import WorkerId
from baton.deploy.client import Client
from baton.deploy.launch import launch
from baton.transfer.worker import WorkerStatus

pytestmark = pytest.mark.ray

D0, P0 = WorkerId("decode-0"), WorkerId("prefill-0")


def test_a_drained_cluster_finishes_what_runs_and_takes_nothing_new(ray_session: None) -> None:
    cluster = launch(replace(kill_config("drain"), prefill=1, decode=1), class_paths=PACED)
    try:
        asked = Question(tuple(range(200)), max_tokens=100)
        with Client(cluster.gateway_url) as client:
            stream = client.stream(list(asked.prompt), max_tokens=asked.max_tokens, temperature=0, ignore_eos=True)
            first = next(stream)
            assert cluster.drain(WAIT_S)
            assert first + "".join(stream) == asked.expected
        for worker in (D0, P0):
            actor = cluster.actor(worker)
            assert actor is not None
            status: WorkerStatus = ray.get(actor.status.remote(), timeout=WAIT_S)
            assert status.load.draining
            assert (status.load.running, status.load.queued) == (0, 0)
    finally:
        cluster.shutdown()


def test_what_does_not_end_in_time_is_told_in_time(ray_session: None) -> None:
    cluster = launch(replace(kill_config("drain-late"), prefill=1, decode=1), class_paths=PACED)
    try:
        with Client(cluster.gateway_url) as client:
            stream = client.stream([1] * 8, max_tokens=1400, temperature=0, ignore_eos=True)
            next(stream)
            started_s = MonotonicClock().now()
            assert not cluster.drain(0.2)
            assert MonotonicClock().now() - started_s < WAIT_S / 4
    finally:
        cluster.shutdown()
