"""Twenty thousand requests through pools that are far too small (`make soak`), with and without tiers below them:
shared prefixes, conversations, and clients that hang up at random moments. Each request has one outcome, and at the end
every page is free or cached."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import ray
from harness import check_sources, kill_config, question, wait_clean

from baton.common.config import DecodeConfig, KvConfig, ModelConfig, TiersConfig
from baton.common.engine.fake_runner import fake_generate
from baton.common.errors import RequestError
from baton.common.ids import WorkerId
from baton.common.messages import SamplingParams
from baton.deploy.client import AsyncClient
from baton.deploy.launch import ClusterHandle, launch
from baton.deploy.tokenizer import ByteTokenizer
from baton.transfer.reports import WorkerStatus

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(3000)]

REQUESTS = int(os.environ.get("BATON_SOAK_REQUESTS", "20000"))
CLIENTS = 24
MAX_LEN = 512
NUM_PAGES = 72  # of 16 tokens: two and a half requests of the longest kind
HANG_UP = 0.2
CONVERSATIONS = 0.15


@pytest.fixture(params=["no tiers", "through", "back"])
def cluster(ray_session: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ClusterHandle]:
    tiers = TiersConfig()
    if request.param != "no tiers":
        tiers = TiersConfig(host_bytes=1 << 16, disk_path=str(tmp_path), disk_bytes=1 << 20, write=request.param)
    config = replace(
        kill_config(f"soak-kv-{request.param.replace(' ', '-')}"),
        model=ModelConfig(model="fake", max_model_len=MAX_LEN),
        kv=KvConfig(num_pages=NUM_PAGES, tiers=tiers),
        decode_worker=DecodeConfig(num_reserved_decode_tokens=16, max_running_requests=16, max_sessions=4),
    )
    handle = launch(config)
    yield handle
    handle.shutdown()


@dataclass(slots=True)
class Soak:
    """What the clients do, and what came of it."""

    client: AsyncClient
    asked: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def run(self, number: int) -> None:
        rng = random.Random(f"soak-kv/{number}")
        while self.asked < REQUESTS:
            if rng.random() < CONVERSATIONS:
                await self.converse(rng)
            else:
                asked = question(rng, prompt_tokens=int(2 ** rng.uniform(0, 8.4)), max_tokens=rng.randint(1, 150))
                await self.ask(rng, list(asked.prompt), asked.max_tokens, asked.temperature, asked.seed)

    async def converse(self, rng: random.Random) -> None:
        """Up to four turns, perhaps left open, perhaps changed after the fact."""
        session = await self.client.open_session()
        tokens = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
        for _ in range(rng.randint(1, 4)):
            most = rng.randint(1, 60)
            answered = await self.ask(rng, tokens, most, 0.0, 0, session)
            said = fake_generate(tokens, SamplingParams(), most) if answered else []
            tokens = [*tokens, *said, *(rng.randrange(256) for _ in range(rng.randint(1, 20)))]
            if rng.random() < 0.1:
                tokens = tokens[: rng.randint(1, len(tokens))]
            tokens = tokens[: MAX_LEN - 70]
        if rng.random() < 0.7:
            await self.client.close_session(session)

    async def ask(
        self, rng: random.Random, prompt: list[int], most: int, temperature: float, seed: int, session: str = ""
    ) -> bool:
        """True: answered, and rightly."""
        self.asked += 1
        leave_after = rng.randint(0, 20) if rng.random() < HANG_UP else None
        sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=most)
        more = {"session_id": session} if session else {}
        try:
            async with self.client.stream(
                prompt, max_tokens=most, temperature=temperature, seed=seed, ignore_eos=True, **more
            ) as stream:
                async with aclosing(aiter(stream)) as pieces:
                    count = 0
                    async for _ in pieces:
                        if count == leave_after:
                            self.outcomes["hung up"] += 1
                            return False
                        count += 1
                text = stream.answer.text
                check_sources(stream.answer.timeline, len(prompt))
        except RequestError as error:
            self.outcomes[str(error.code)] += 1
            return False
        right = text == ByteTokenizer().decode(fake_generate(prompt, sampling, most))
        self.outcomes["right" if right else "WRONG"] += 1
        if not right:
            self.wrong.append(f"{len(prompt)} + {most} tokens, session {session or 'none'}")
        return right


def status_of(cluster: ClusterHandle) -> WorkerStatus:
    actor = cluster.actor(WorkerId("decode-0"))
    assert actor is not None
    status: WorkerStatus = ray.get(actor.status.remote(), timeout=60.0)
    return status


def test_tiny_pools_lose_nothing(cluster: ClusterHandle, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()

    async def everything() -> Soak:
        async with AsyncClient(cluster.gateway_url, timeout_s=300) as client:
            soak = Soak(client)
            await asyncio.gather(*(soak.run(number) for number in range(CLIENTS)))
            return soak

    soak = asyncio.run(everything())
    with capsys.disabled():
        print(f"\n{soak.asked} requests in {time.monotonic() - started:.0f} s: {dict(soak.outcomes)}")
    assert not soak.wrong, soak.wrong[:5]
    assert sum(soak.outcomes.values()) == soak.asked
    assert set(soak.outcomes) <= {"right", "hung up"}, "nobody was refused or failed"
    if (status := status_of(cluster)).counters.get("tiers.restores"):
        with capsys.disabled():
            print({name: value for name, value in status.counters.items() if name.startswith("tiers.")})
    assert cluster.drain(60.0)  # conversations that were left open end here
    wait_clean(cluster)
