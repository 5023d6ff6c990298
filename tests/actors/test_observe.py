"""A working cluster, looked at: a trace with all that it shall show, the lives of its hand-offs, and its metrics."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import ask_all, check, kill_config, question
from paced import PACED
from trace_checks import check_chrome_trace, names_of

from baton.deploy.client import Client
from baton.deploy.launch import ClusterHandle, launch

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(120)]

LANE = "zmq"  # gathers and scatters; the local lane does neither
RECORDED_S = 2.0
KEEP = "BATON_KEEP_TRACE"
"""A file to leave the trace in, to look at."""


@pytest.fixture
def cluster(ray_session: str) -> Iterator[ClusterHandle]:
    config = replace(kill_config(f"observe-{os.getpid()}", (LANE,)), prefill=1, decode=1)
    transfer = replace(config.transfer, region_bytes=16 << 10, staging_ring_bytes=1 << 20)
    handle = launch(replace(config, transfer=transfer), class_paths=PACED)
    try:
        yield handle
    finally:
        handle.shutdown()


def test_a_working_cluster_can_be_watched(cluster: ClusterHandle) -> None:
    rng = random.Random(5)
    with Client(cluster.gateway_url) as client, Client(cluster.gateway_url) as watching:
        check(ask_all(client, [question(rng, prompt_tokens=64, max_tokens=2)]))  # everybody is connected
        with ThreadPoolExecutor(1) as pool:
            recording = pool.submit(watching.trace, RECORDED_S)
            while not recording.done():
                check(ask_all(client, [question(rng, prompt_tokens=700, max_tokens=16) for _ in range(4)], at_once=4))
            recorded = recording.result()
        if KEEP in os.environ:
            Path(os.environ[KEEP]).write_bytes(recorded)
        check_trace(json.loads(recorded))
        check_lives(client)
    check_metrics(httpx.get(f"{cluster.gateway_url}/metrics", timeout=20.0).text)


def check_trace(trace: dict[str, Any]) -> None:
    check_chrome_trace(trace)
    workers = names_of(trace)
    assert set(workers.values()) == {"prefill-0", "decode-0"}
    seen = Counter((workers[event["pid"]], event["name"]) for event in trace["traceEvents"] if event["ph"] in "Xb")
    for worker, names in (
        ("prefill-0", ("prefill", "gather", "hand-offs out")),
        ("decode-0", ("decode", "scatter", f"wire {LANE}", "hand-offs in")),
    ):
        for name in (*names, "plan", "outcome"):
            assert seen[worker, name] > 0, (worker, name, seen)
    arcs: dict[str, list[str]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            arcs.setdefault(event["id"], []).append(workers[event["pid"]])
    whole = [one for one in arcs.values() if one[0] == one[-1] == "decode-0" and "prefill-0" in one]
    assert whole, "asked for here, computed there, arrived here"


def check_lives(client: Client) -> None:
    taken, given = client.handoffs("decode-0"), client.handoffs("prefill-0")
    committed = {one.handoff: one for one in taken if one.outcome == "committed"}
    both = [(committed[one.handoff], one) for one in given if one.handoff in committed]
    assert both
    for here, there in both:
        assert (here.nbytes, here.tokens, here.lane) == (there.nbytes, there.tokens, there.lane)
        assert abs(here.begun_at_s - there.begun_at_s) < 5.0, "by one wall clock"


def check_metrics(page: str) -> None:
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    labels = f'{{direction="in",lane="{LANE}",peer="prefill-0",worker="decode-0"}}'
    assert float(lines[f"baton_transfer_bytes_total{labels}"]) > 0
    assert float(lines[f"baton_transfer_handoff_seconds_count{labels}"]) > 0
    assert float(lines['baton_staging_slots{ring="receive",state="free",worker="decode-0"}']) > 0
