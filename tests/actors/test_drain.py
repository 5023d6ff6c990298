"""The end of a served cluster that has more to do than there is time for. One that finishes in time: test_kills."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import WAIT_S, kill_config
from paced import PACED

from baton.common.clock import MonotonicClock
from baton.deploy.client import Client
from baton.deploy.launch import launch

pytestmark = pytest.mark.ray


def test_what_does_not_end_in_time_is_told_in_time(ray_session: str) -> None:
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
