"""Guided answers in simulated worlds: decode workers die in the middle of them, pools are too small for all, and every
token is still the one that grammar, seed and the tokens before it say (the world's clients compare)."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from baton.common.config import DecodeConfig
from baton.common.engine.fake_model import FAKE_VOCAB_SIZE
from baton.common.ids import RequestId, Stamp
from baton.common.messages import Grammar, Output, SamplingParams
from baton.deploy.sim.clients import ClientRequest
from baton.deploy.sim.plan import BASE, FIRST_S, Plan
from baton.deploy.sim.world import World

END = FAKE_VOCAB_SIZE - 1
WORDS = Grammar(kind="regex", text="([a-c]{4}-){6}[xyz]")
REQUESTS = 6


@pytest.mark.parametrize("seed", range(4))
def test_decode_workers_die_in_the_middle_of_guided_answers(seed: int) -> None:
    decode = DecodeConfig(num_reserved_decode_tokens=0, chunk_tokens=16)
    plan = Plan(replace(BASE, decode=2, decode_pages=32, decode_config=decode), seed)
    rng = np.random.default_rng(seed)
    for number in range(REQUESTS):
        sampling = SamplingParams(temperature=0.7, seed=number, max_tokens=60, stop_token_ids=(END,), grammar=WORDS)
        prompt = rng.integers(0, 256, 9 + 5 * number).astype(np.int32)
        plan.enter(ClientRequest(RequestId(f"r{number}"), prompt, sampling, None), FIRST_S + 0.01 * number)
    struck: set[str] = set()

    def strike(world: World, details: object) -> None:
        match details:
            case (Stamp() as sender, _, Output(first_index=first, request_id=name)) if first >= 5 and len(struck) < 2:
                if name not in struck:
                    struck.add(name)
                    world.schedule.after(0.0, lambda: world.crash(sender.worker))

    plan.world.on("sent", strike)
    plan.ready().reached(plan.world.run())
    assert len(struck) == 2
    for request in plan.requests:
        assert request.outcome == "stop"
        assert re.fullmatch(WORDS.text, bytes(request.tokens[:-1]).decode())
