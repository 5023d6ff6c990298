"""Real architectures through both engine cores: hand-offs, prefix hits, conversations, retraction, lost hand-offs.

Small random models; a transfer plane that copies at once (`core_rig`), with the books of every component checked after
every event. The reference is one uncached float32 pass of `transformers` over prompt and outputs: each output must be
its best token, or nearly tied with it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from core_rig import EVERYONE, Engine, Rig, decode_engine, prefill_engine
from family_rig import FAMILIES, VOCAB, save_random_model
from transformers import AutoModelForCausalLM

from baton.common.engine.core_api import Drain
from baton.common.engine.torch_runner import TorchRunner
from baton.common.messages import SamplingParams
from baton.common.model.loading import model_info

TIE = 2e-4  # of logits around 2 to 12
ANSWER = SamplingParams(max_tokens=18)
GROUPED = [name for name in FAMILIES if name not in ("llama", "qwen3")]  # what those do is tested with real weights

Model = tuple[TorchRunner, torch.nn.Module]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}
    torch.set_num_threads(1)

    def make(name: str) -> Model:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            save_random_model(FAMILIES[name], directory)
            reference = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="eager"
            )
            counts = dict.fromkeys(model_info(str(directory)).layout(4).components, 8)
            runner = TorchRunner.load(str(directory), dtype="float32", num_pages=counts, page_size=4, threads=1)
            made[name] = (runner, reference)
        return made[name]

    return make


def with_model(engine: Engine, runner: TorchRunner) -> Engine:
    """The engine's pool, with this model behind it."""
    pool = engine.pool
    counts = {component: pool.supply.total(component) + 1 for component in pool.layout.components}
    engine.runner = TorchRunner(  # type: ignore[assignment]
        runner.model, runner.info, dtype="float32", num_pages=counts, page_size=pool.page_size
    )
    return engine


def rig_of(runner: TorchRunner, page_size: int = 4, pages: int = 512, **decode: int) -> Rig:
    layout, count = runner.info.layout(page_size), pages // page_size
    return Rig(
        with_model(decode_engine(count, page_size, 12, 256, layout, chunk_tokens=16, **decode), runner),
        with_model(prefill_engine(512 // page_size, page_size, 12, 256, layout, chunk_tokens=16), runner),
    )


def prompt_of(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)


def check(rig: Rig, name: str, prompt: np.ndarray, model: Model, outputs: int = 18) -> list[int]:
    said = rig.gateway.tokens[name]
    assert len(said) == outputs, rig.gateway.finals[name]
    with torch.inference_mode():
        logits = model[1](torch.tensor([prompt.tolist() + said])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits[torch.arange(len(said)), torch.tensor(said)]
    assert (logits.max(-1).values - chosen).max() <= TIE, name
    return said


@pytest.mark.parametrize("family", GROUPED)
@pytest.mark.parametrize("page_size", [4, 16])
def test_hand_offs_and_prefix_hits(family: str, page_size: int, model_of: Callable[[str], Model]) -> None:
    model = model_of(family)
    rig = rig_of(model[0], page_size)
    prompts = {f"r{n}": prompt_of(n, n) for n in (1, 4, 13, 37, 60)}
    prompts["shares"] = np.concatenate((prompts["r60"][:50], prompt_of(9, 99)))
    for name, prompt in prompts.items():
        rig.submit(name, prompt, ANSWER)
        rig.settle()
        check(rig, name, prompt, model)
    timeline = rig.gateway.finals["shares"].timeline
    assert timeline is not None
    assert timeline.cached_tokens + timeline.prefill_cached_tokens >= 32
    rig.assert_clean()


@pytest.mark.parametrize("family", GROUPED)
def test_a_conversation_and_a_lost_hand_off(family: str, model_of: Callable[[str], Model]) -> None:
    model = model_of(family)
    rig = rig_of(model[0])
    conversation = prompt_of(21, 1)
    for number in range(3):
        name = f"s{number}"
        rig.submit(name, conversation, ANSWER, session=("s", number))
        if number == 2:
            while not rig.handoffs:
                rig.run(rig.decode.step() or [])
            rig.run(rig.prefill.step() or [])
            for key in list(rig.handoffs):
                rig.fail(key)
        rig.settle()
        said = check(rig, name, conversation, model)
        conversation = np.concatenate((conversation, np.array(said, dtype=np.int32), prompt_of(40, 5 + number)))
    rig.run(rig.decode.handle(Drain()))
    rig.assert_clean()


@pytest.mark.parametrize("family", GROUPED)
def test_retraction_and_prompts_that_are_computed_here(family: str, model_of: Callable[[str], Model]) -> None:
    model = model_of(family)
    rig = rig_of(model[0], pages=116, num_reserved_decode_tokens=0)
    rig.view(*EVERYONE[:2])
    for n in range(4):
        rig.submit(f"r{n}", prompt_of(14 + n, n), SamplingParams(max_tokens=40))
    rig.settle()
    for n in range(4):
        check(rig, f"r{n}", prompt_of(14 + n, n), model, 40)
    rig.assert_clean()
