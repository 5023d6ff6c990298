"""Two gateways of one cluster: each answers by itself, and none needs the other. And the end of a served cluster that
has more to do than there is time for; one that finishes in time: test_kills."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from harness import WAIT_S, ask, check, kill, kill_config, question, wait_settled
from paced import PACED

from baton.common.clock import MonotonicClock
from baton.common.ids import WorkerId
from baton.deploy.client import Client
from baton.deploy.launch import ClusterHandle, launch

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster(ray_session: str) -> Iterator[ClusterHandle]:
    cluster = launch(replace(kill_config("two-gateways"), prefill=1, decode=1, gateways=2), class_paths=PACED)
    yield cluster
    cluster.shutdown()


def test_what_one_answers_does_not_depend_on_the_other(cluster: ClusterHandle) -> None:
    rng = random.Random(5)
    first, second = cluster.gateway_urls
    with Client(first) as here, Client(second) as there:
        check([ask(client, question(rng)) for client in (here, there, here)])
        asked = question(rng, max_tokens=200)
        sampling = {"max_tokens": 200, "temperature": asked.temperature, "seed": asked.seed}
        stream = here.stream(list(asked.prompt), ignore_eos=True, **sampling)
        text = next(stream)
        assert kill(cluster, WorkerId("gateway-1"))
        text += "".join(stream)
        assert text == asked.expected
        wait_settled(cluster)
        check([ask(there, question(rng))])  # its successor, at the same address


def test_what_does_not_end_in_time_is_told_in_time(cluster: ClusterHandle) -> None:
    with Client(cluster.gateway_url) as client:
        stream = client.stream([1] * 8, max_tokens=1400, temperature=0, ignore_eos=True)
        next(stream)
        started_s = MonotonicClock().now()
        assert not cluster.drain(0.2)
        assert MonotonicClock().now() - started_s < WAIT_S / 4
