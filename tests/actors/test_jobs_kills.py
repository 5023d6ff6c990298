"""Gateway, controller and workers are killed while a batch of 5,000 lines runs: it has each line once, and right."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from harness import MAX_LEN, Question, kill_config, kill_together, question, wait_clean, wait_settled
from paced import PACED

from baton.common.config import JobsConfig
from baton.common.ids import CONTROLLER, WorkerId
from baton.deploy.client import Client
from baton.deploy.jobs.shapes import BatchObject
from baton.deploy.launch import ClusterHandle, launch

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]

LINES = 5_000
GATEWAY = WorkerId("gateway-0")
WORKERS = tuple(WorkerId(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"))
ROUNDS: tuple[tuple[WorkerId, ...], ...] = (
    (GATEWAY,),
    (CONTROLLER,),
    (WORKERS[2],),
    (WORKERS[0],),
    (GATEWAY, CONTROLLER),
    WORKERS,
    (GATEWAY, *WORKERS),
    (GATEWAY, CONTROLLER, *WORKERS),
)
"""Who dies together. Everything but Ray itself dies in the last ones."""


@pytest.fixture
def cluster(ray_session: str) -> Iterator[ClusterHandle]:
    config = replace(kill_config("jobs"), jobs=JobsConfig(max_running_lines=32, lease_s=3.0, poll_s=0.5))
    handle = launch(config, class_paths=PACED)
    yield handle
    handle.shutdown()


def line_of(number: int, asked: Question) -> dict[str, Any]:
    body = {"model": "fake", "prompt": list(asked.prompt), "max_tokens": asked.max_tokens, "ignore_eos": True}
    body |= {"temperature": asked.temperature, "seed": asked.seed}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def questions() -> list[Question]:
    rng = random.Random(6)
    return [question(rng, prompt_tokens=rng.randint(1, 60), max_tokens=rng.randint(1, 12)) for _ in range(LINES)]


def test_each_line_is_answered_once_whoever_is_killed(
    cluster: ClusterHandle, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = questions()
    assert all(len(one.prompt) + one.max_tokens < MAX_LEN for one in asked)
    started, killed = time.monotonic(), []
    with Client(cluster.gateway_url, patience_s=120.0) as client:
        job = client.submit_lines((line_of(number, one) for number, one in enumerate(asked)), key="the only one")

        def kill_on_the_way(status: BatchObject) -> None:
            done = status.request_counts.completed
            if len(killed) < len(ROUNDS) and done >= (len(killed) + 1) * LINES // (len(ROUNDS) + 2):
                wait_settled(cluster)
                killed.append(kill_together(cluster, ROUNDS[len(killed)]))

        for status in job.progress(poll_s=0.2):
            kill_on_the_way(status)
        results, errors = list(job.output()), list(job.errors())
    took_s = time.monotonic() - started
    with capsys.disabled():
        total = sum(map(len, killed))
        print(
            f"\n{LINES} lines in {took_s:.0f} s, {total} kills in {len(killed)} rounds, {len(errors)} failed: {killed}"
        )
    assert [tuple(victims) for victims in killed] == list(ROUNDS), "who was to be killed was there"
    assert status.status == "completed"
    assert not errors
    assert [one["custom_id"] for one in results] == [f"line-{number}" for number in range(LINES)]
    wrong = [
        one["custom_id"]
        for one, right in zip(results, asked, strict=True)
        if one["response"]["body"]["choices"][0]["text"] != right.expected
    ]
    assert not wrong
    wait_clean(cluster)
