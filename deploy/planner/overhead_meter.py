"""Times requests through a real cluster whose model costs next to nothing: gateway, frames, threads and the client.

Owns: that cluster, for some seconds: one prefill and one decode worker with the fake model. Never: a step of a real
model: what is left of a first token is what the planner calls a request's overhead, and a hand-off of a few pages.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace

from baton.common.config import FAKE_MODEL, ClusterConfig, GatewayConfig, KvConfig, ModelConfig
from baton.deploy.client import Client
from baton.deploy.launch import launch

PROMPT_TOKENS = 64
NUM_PAGES = 256
WARM_UP = 10
REQUESTS = 30


def measure_first_token(config: ClusterConfig) -> float:
    """Seconds until a client has the first token of a request that is alone: the median. Raises LaunchError."""
    handle = launch(_without_a_model(config))
    try:
        with Client(handle.gateway_url) as client:
            took_s = [_first_token_s(client, number) for number in range(WARM_UP + REQUESTS)]
    finally:
        handle.shutdown()
    return statistics.median(took_s[WARM_UP:])


def _without_a_model(config: ClusterConfig) -> ClusterConfig:
    """The same settings of workers and lanes, pinned alike."""
    return replace(
        config,
        cluster=f"baton-calibrate-{os.getpid()}",
        prefill=1,
        decode=1,
        model=ModelConfig(model=FAKE_MODEL, max_model_len=4 * PROMPT_TOKENS),
        kv=KvConfig(num_pages=NUM_PAGES),
        gateway=GatewayConfig(port=0),
    )


def _first_token_s(client: Client, number: int) -> float:
    """Of a prompt that shares no block with others."""
    prompt = [1 + number, *range(1, PROMPT_TOKENS)]
    started = time.perf_counter()
    with client.stream(prompt, max_tokens=2, temperature=0, ignore_eos=True) as pieces:
        next(pieces)
        return time.perf_counter() - started
