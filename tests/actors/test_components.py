"""A model with full attention, a sliding window and a recurrent state through a real cluster: every byte of it counts
in the fake model's answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from harness import WAIT_S, Question, ask, kill, kill_config, question, wait_clean
from layered import LAYERED, LAYOUT

from baton.common.engine.fake_runner import fake_generate
from baton.common.ids import WorkerId
from baton.common.messages import SamplingParams
from baton.deploy.client import Client
from baton.deploy.launch import ClusterHandle, launch
from baton.deploy.tokenizer import ByteTokenizer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


@pytest.fixture(params=["local", pytest.param("zmq", marks=pytest.mark.slow)])
def cluster(ray_session: str, request: pytest.FixtureRequest) -> Iterator[ClusterHandle]:
    handle = launch(kill_config(f"layered-{request.param}", (request.param,)), class_paths=LAYERED)
    yield handle
    handle.shutdown()


def expected(asked: Question) -> str:
    sampling = SamplingParams(temperature=asked.temperature, seed=asked.seed, max_tokens=asked.max_tokens)
    return ByteTokenizer().decode(fake_generate(list(asked.prompt), sampling, asked.max_tokens, layout=LAYOUT))


def test_answers_are_right_also_when_workers_die(cluster: ClusterHandle) -> None:
    rng = random.Random(5)
    questions = [question(rng) for _ in range(60)]
    with Client(cluster.gateway_url, timeout_s=120) as client, ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(ask, client, asked) for asked in questions]
        answers[15].result()
        assert kill(cluster, WorkerId("prefill-0"))
        answers[30].result()
        assert kill(cluster, WorkerId("decode-0"))
        for asked, future in zip(questions, answers, strict=True):
            outcome = future.result()
            assert outcome.error is None, outcome.error
            assert outcome.text == expected(asked)
    wait_clean(cluster)
    for name in ("prefill-1", "decode-1"):
        actor = cluster.actor(WorkerId(name))
        status = ray.get(actor.status.remote(), timeout=WAIT_S)  # type: ignore[union-attr]
        flows = ray.get(actor.metrics.remote(), timeout=WAIT_S).flows  # type: ignore[union-attr]
        assert set(status.components) == {"swa", "state"}
        for census in status.components.values():
            assert census["free"] + census["cached"] == census["total"]
        assert sum(flow.nbytes for flow in flows) > 0
