"""Other dense architectures, with small random weights: chunked runs say what their own `generate` says.

Real weights of these families are not on the package index. Random 2-D weights are scaled up, else logits are flat and
a greedy comparison is a coin flip. Saved and loaded as Hugging Face directories, so that this path is tested too. All
attention layers share one pool here, whether they slide or not; pools of their own: test_layer_groups.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from family_rig import save_random_model
from model_rig import Sequence, run_mixed
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    T5Config,
)

from baton.common.engine.torch_runner import TorchRunner
from baton.common.errors import ConfigError
from baton.common.model.loading import model_info

SMALL = {
    "vocab_size": 600,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama-odd-head-size": LlamaConfig(**SMALL, head_dim=24, attention_bias=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
    "mistral-window": MistralConfig(**SMALL, head_dim=64, sliding_window=20),
    "gemma2": Gemma2Config(
        **SMALL, head_dim=32, sliding_window=24, query_pre_attn_scalar=32, attn_logit_softcapping=5.0
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_family_says_what_generate_says(family: str, tmp_path: Path) -> None:
    save_random_model(FAMILIES[family], tmp_path)
    # Gemma-2's capped scores exist only in the eager attention of `transformers`.
    torch.set_num_threads(1)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 600) for _ in range(length)] for length in (1, 5, 16, 31, 70, 150)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        expected.append(made[0, len(prompt) :].tolist())
    runner = TorchRunner.load(
        str(tmp_path), dtype="float32", num_pages=300, page_size=4, sliding_groups=False, threads=1
    )
    sequences = [Sequence(i, prompt, max_tokens=12, stop_token=2) for i, prompt in enumerate(prompts)]
    run_mixed(runner, sequences, max_rows=4, seed=9)
    assert [sequence.outputs for sequence in sequences] == expected


@pytest.mark.parametrize("architecture", [LlamaConfig, Phi3Config])
def test_longrope_turns_by_the_position_alone(architecture: type[PretrainedConfig], tmp_path: Path) -> None:
    """`transformers` takes the long factors for a pass whose longest row is long; whom a row shares a step with, and in
    which chunks it comes, must say nothing. The truth for a long prompt is one pass of `transformers` over it."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 32}
    factors = {"short_factor": [1.0] * 12, "long_factor": [1.0 + 0.5 * i for i in range(12)]}
    save_random_model(architecture(**SMALL, rope_parameters={**rope, **factors}), tmp_path)
    runner = TorchRunner.load(str(tmp_path), dtype="float32", num_pages=120, page_size=4, threads=1)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 600) for _ in range(length)] for length in (5, 30, 70)]

    def run(chosen: list[list[int]], chunks: tuple[int, ...]) -> list[Sequence]:
        sequences = [Sequence(i, prompt, max_tokens=6) for i, prompt in enumerate(chosen)]
        run_mixed(runner, sequences, max_rows=3, seed=9, chunks=chunks)
        return sequences

    alone = [run([prompt], (100,))[0] for prompt in prompts]
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        truth = reference(torch.tensor([prompts[2]])).logits[0, -1]
    torch.testing.assert_close(alone[2].logits[0], truth, atol=1e-3, rtol=1e-4)
    for ours, theirs in zip(run(prompts, (1, 7, 33)), alone, strict=True):
        assert ours.outputs == theirs.outputs
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1), "mamba has recurrent layers .* do not know"),
        (JambaConfig(**SMALL), "jamba has recurrent layers .* do not know"),
        (Llama4TextConfig(**SMALL), "llama4_text has layers of type chunked_attention"),
        (Gemma3TextConfig(**SMALL, use_bidirectional_attention=True), "gemma3_text also attends to what comes after"),
        (T5Config(vocab_size=100, d_model=32, num_layers=1), "not a decoder-only"),
    ],
)
def test_an_architecture_that_cannot_run_is_refused_by_name(
    config: PretrainedConfig, reason: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == config.model_type
    with pytest.raises(ConfigError, match=reason):
        model_info(str(tmp_path))
