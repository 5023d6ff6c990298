"""The fused path computes what the generic one computes, for each family and each of its peculiarities; and what it
does not understand takes the generic path."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from family_rig import FAMILIES, SMALL, VOCAB, WINDOW, save_random_model
from model_rig import Sequence, run_mixed
from transformers import Gemma2Config, GemmaConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from baton.common.engine.backends import choose_backends
from baton.common.engine.batch import BatchRow, pack_batch
from baton.common.engine.fused.choice import PathChoice
from baton.common.engine.panels import WeightFormat
from baton.common.engine.torch_runner import TorchRunner
from baton.common.errors import ConfigError
from baton.common.kv.page_layout import LayoutChoice
from baton.common.model.loading import Dtype

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ODD = {**SMALL, "vocab_size": VOCAB - 7, "intermediate_size": 80}  # a last panel that is not full, no whole tiles
FUSED: dict[str, PretrainedConfig] = {
    **{family: FAMILIES[family] for family in ("llama", "qwen3", "mistral", "gemma2", "gemma3")},
    "llama-biases": LlamaConfig(**ODD, head_dim=48, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE),
    "qwen2": Qwen2Config(**{**SMALL, "num_key_value_heads": 1}),
    "qwen3-large-heads": Qwen3Config(**{**SMALL, "num_key_value_heads": 4}, head_dim=128, tie_word_embeddings=True),
    "gemma": GemmaConfig(**SMALL, head_dim=256),
    "gemma2-capped-logits": Gemma2Config(
        **SMALL, head_dim=64, sliding_window=WINDOW, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
}
PATHS: tuple[PathChoice, ...] = ("fused", "generic")
GENERIC: dict[str, tuple[PretrainedConfig, str]] = {
    "gpt-oss": (FAMILIES["gpt-oss"], "gpt_oss is not of the Llama family"),
    "odd-heads": (LlamaConfig(**SMALL, head_dim=24), "no compiled kernels"),
    "dynamic-rope": (
        LlamaConfig(**SMALL, head_dim=16, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "rotary embedding",
    ),
    "activation": (LlamaConfig(**SMALL, head_dim=16, hidden_act="relu"), "activation relu"),
}


@pytest.fixture(scope="module", autouse=True)
def needs_kernels() -> None:
    try:
        choose_backends("compiled", 64)
    except ConfigError as error:
        pytest.skip(str(error))


def load(
    directory: Path, dtype: Dtype, path: PathChoice, page_size: int = 4, weights: WeightFormat = "dtype"
) -> TorchRunner:
    return TorchRunner.load(
        str(directory),
        dtype=dtype,
        num_pages=120,
        page_size=page_size,
        sliding_groups=False,
        threads=1,
        forward_path=path,
        weights=weights,
    )


def logits_of(runner: TorchRunner, outputs: list[list[int]] | None = None) -> list[Sequence]:
    """Of mixed steps; with `outputs` the sequences go on as these say, whatever the runner would choose."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB - 10) for _ in range(length)] for length in (1, 5, 16, 33, 70)]
    sequences = [Sequence(i, prompt, max_tokens=6) for i, prompt in enumerate(prompts)]
    for sequence, forced in zip(sequences, outputs or [], strict=bool(outputs)):
        sequence.prompt, sequence.max_tokens = sequence.prompt + forced[:-1], 1
    run_mixed(runner, sequences, max_rows=4, seed=9)
    return sequences


@pytest.mark.parametrize("family", FUSED)
def test_both_paths_say_the_same(family: str, tmp_path: Path) -> None:
    save_random_model(FUSED[family], tmp_path)
    generic = logits_of(load(tmp_path, "float32", "generic"))
    fused = logits_of(load(tmp_path, "float32", "fused"))
    for ours, theirs in zip(fused, generic, strict=True):
        assert ours.outputs == theirs.outputs
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=1e-3, rtol=1e-4)
    # In bfloat16 what the paths compute differs by rounding; the fused one must be at least as near to the truth.
    outputs = [sequence.outputs for sequence in generic]
    truth = torch.stack([sequence.logits[-1] for sequence in generic])
    half = [logits_of(load(tmp_path, "bfloat16", path), outputs) for path in PATHS]
    errors = [torch.stack([one.logits[-1].float() for one in found]) - truth for found in half]
    assert errors[0].norm() < 1.2 * errors[1].norm()


@pytest.mark.parametrize("family", ["llama-biases", "gemma2-capped-logits"])
def test_both_paths_say_the_same_over_int8_weights(family: str, tmp_path: Path) -> None:
    """And that is near to what the weights say that these were rounded from, but not the same."""
    save_random_model(FUSED[family], tmp_path)
    generic = logits_of(load(tmp_path, "float32", "generic", weights="int8"))
    outputs = [sequence.outputs for sequence in generic]
    rounded = torch.stack([sequence.logits[-1] for sequence in generic])

    def last(dtype: Dtype, weights: WeightFormat) -> torch.Tensor:
        found = logits_of(load(tmp_path, dtype, "fused", weights=weights), outputs)
        return torch.stack([sequence.logits[-1].float() for sequence in found])

    torch.testing.assert_close(last("float32", "int8"), rounded, atol=1e-3, rtol=1e-4)
    assert (last("bfloat16", "int8") - rounded).norm() < 0.02 * rounded.norm()
    assert 0.001 < (last("float32", "dtype") - rounded).norm() / rounded.norm() < 0.05


def test_where_the_time_of_a_step_goes_is_told(tmp_path: Path) -> None:
    save_random_model(FUSED["gemma3"], tmp_path)
    runner = load(tmp_path, "float32", "fused")
    tokens = np.arange(3, 43, dtype=np.int32)
    batch = pack_batch([BatchRow(0, tokens, 40, np.arange(1, 11, dtype=np.int32), None)], 4)
    before = runner.part_s()
    began_s = time.perf_counter()
    runner.logits(batch, (0,))
    took_s = time.perf_counter() - began_s
    parts = {name: seconds - before[name] for name, seconds in runner.part_s().items()}
    assert min(parts.values()) > 0
    assert sum(parts.values()) <= took_s
    assert load(tmp_path, "float32", "generic").part_s() == {}


@pytest.mark.parametrize("family", ["llama-biases", "qwen3-large-heads", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_how_pages_are_laid_out_changes_no_bit(family: str, dtype: Dtype, tmp_path: Path) -> None:
    """Heads of 48, 128 and 64, windows and capped scores, on both paths."""
    save_random_model(FUSED[family], tmp_path)
    for path in PATHS:
        runners = [load(tmp_path, dtype, path, page_size) for page_size in (4, 16)]
        assert [runner.memory.main.page_layout.value for runner in runners] == ["canonical", "panels"]
        found = [logits_of(runner) for runner in runners]
        for canonical, panels in zip(*found, strict=True):
            assert torch.equal(torch.stack(canonical.logits), torch.stack(panels.logits)), path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_that_another_layout_computed_are_gone_on_with(dtype: Dtype, tmp_path: Path) -> None:
    """A hand-off between unequal workers, without the wire: to the bit what one of them computes alone."""
    save_random_model(FUSED["llama-biases"], tmp_path)
    layouts: tuple[LayoutChoice, ...] = ("canonical", "panels")
    runners = [
        TorchRunner.load(str(tmp_path), dtype=dtype, num_pages=9, page_size=16, page_layout=layout)
        for layout in layouts
    ]
    pages, tokens = np.array([3, 5, 1, 2], np.int32), np.arange(3, 53, dtype=np.int32)
    prompt = pack_batch([BatchRow(0, tokens, 50, pages, None)], 16)
    later = pack_batch([BatchRow(0, tokens[:1], 51, pages, None)], 16)
    for source, sink in (runners, runners[::-1]):
        source.logits(prompt, (0,))
        sink.memory.main.as_bytes()[pages] = source.memory.main.as_bytes()[pages]
        sink.memory.main.adopt(pages, slice(0, sink.memory.main.layers), source.memory.main.page_layout)
        assert torch.equal(sink.logits(later, (0,)), source.logits(later, (0,)))


def test_a_pool_of_more_than_two_billion_numbers(tmp_path: Path) -> None:
    """The last pages of a pool that is never touched otherwise, so that it takes no memory."""
    save_random_model(FUSED["llama"], tmp_path)
    page_numbers = 4 * 2 * 2 * 4 * 16
    runner = TorchRunner.load(str(tmp_path), dtype="bfloat16", num_pages=(1 << 31) // page_numbers + 9, page_size=4)
    assert runner.forward_path == "fused"
    tokens = np.arange(3, 9, dtype=np.int32)
    far = np.array([runner.memory.main.num_pages - 1, runner.memory.main.num_pages - 3], np.int32)
    logits = [
        runner.logits(pack_batch([BatchRow(0, tokens, 6, pages, None)], 4), (0,)) for pages in (far, far * 0 + [1, 2])
    ]
    assert torch.equal(logits[0], logits[1])
    kept = runner.memory.main.as_bytes()
    assert np.array_equal(kept[far[0]], kept[1])
    assert kept[1].any()


@pytest.mark.parametrize("weights", ["dtype", "int8"])
def test_bits_do_not_depend_on_the_batch_in_bfloat16_either(tmp_path: Path, weights: WeightFormat) -> None:
    save_random_model(FUSED["gemma2"], tmp_path)
    runner = load(tmp_path, "bfloat16", "fused", weights=weights)
    tokens, pages = np.arange(5, 75, dtype=np.int32), np.arange(1, 19, dtype=np.int32)
    beside = [
        BatchRow(1 + i, tokens[: 1 + 9 * i], 1 + 9 * i, pages[: 1 + 9 * i // 4] + 20 * (i + 1), None) for i in range(4)
    ]

    def last_logits(chunks: list[int], others: list[BatchRow]) -> torch.Tensor:
        done = 0
        for chunk in chunks:
            ids, done = tokens[done : done + chunk], done + chunk
            row = BatchRow(0, ids, done, pages[: -(-done // 4)], None)
            logits = runner.logits(pack_batch([*others, row], 4), (len(others),))
        return logits

    whole = last_logits([70], [])
    assert torch.equal(whole, last_logits([1, 33, 31, *[1] * 5], []))
    assert torch.equal(whole, last_logits([60, 10], beside))
    torch.set_num_threads(2)
    try:
        assert torch.equal(whole, last_logits([50, 20], beside[:2]))
    finally:
        torch.set_num_threads(1)


def test_angles_that_could_not_be_had_are_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step longer than all before it fails for want of memory; what the kernel reads stays as it was."""
    save_random_model(FUSED["gemma3"], tmp_path)
    ids, pages = np.arange(1200, dtype=np.int32) % VOCAB, np.arange(1, 301, dtype=np.int32)
    long = pack_batch([BatchRow(0, ids, 1200, pages, None)], 4)
    short = pack_batch([BatchRow(0, ids[:600], 600, pages[:150], None)], 4)
    first, second = (
        TorchRunner.load(
            str(tmp_path), dtype="float32", num_pages=301, page_size=4, sliding_groups=False, forward_path="fused"
        )
        for _ in range(2)
    )
    expected = [first.logits(batch, (0,)) for batch in (short, long)]
    rotary, asked = second.model.base_model.rotary_emb, list[str]()
    assert isinstance(rotary, torch.nn.Module)
    compute = rotary.forward

    def fail_at_the_second(x: torch.Tensor, places: torch.Tensor, kind: str) -> object:
        asked.append(kind)
        if len(asked) > 1:
            raise MemoryError
        return compute(x, places, kind)

    with monkeypatch.context() as patch:
        patch.setattr(rotary, "forward", fail_at_the_second)
        with pytest.raises(MemoryError):
            second.logits(long, (0,))
    assert len(set(asked)) == 2
    for batch, logits in zip((short, long), expected, strict=True):
        assert torch.equal(second.logits(batch, (0,)), logits)


@pytest.mark.parametrize("case", GENERIC)
def test_what_is_not_understood_takes_the_generic_path(case: str, tmp_path: Path) -> None:
    config, reason = GENERIC[case]
    save_random_model(config, tmp_path)
    assert load(tmp_path, "float32", "fastest").forward_path == "generic"
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path, "float32", "fused")
