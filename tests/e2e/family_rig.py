"""Small random models of real architectures: their weights are not on the package index.

Weight matrices are scaled up, else logits are flat and a greedy comparison is a coin flip.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    Lfm3Config,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from baton.common.kv.layout import Component

VOCAB = 300
WINDOW = 12
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL, head_dim=16),
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
    "mistral": MistralConfig(**SMALL, head_dim=32, sliding_window=WINDOW),
    "gemma2": Gemma2Config(
        **SMALL, head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=32, attn_logit_softcapping=5.0
    ),
    "gemma3": Gemma3TextConfig(
        **SMALL, head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=32, layer_types=MIXED
    ),
    "gpt-oss": GptOssConfig(
        **SMALL, head_dim=32, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2, layer_types=MIXED
    ),
    "mamba2": Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=3,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=2,
        chunk_size=16,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "falcon-h1": FalconH1Config(
        **SMALL,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_chunk_size=16,
        mamba_rms_norm=True,
    ),
    "qwen3-next": Qwen3NextConfig(
        **SMALL,
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    ),
    "lfm2": Lfm2Config(**SMALL, block_multiple_of=32, layer_types=["conv", "full_attention", "conv", "conv"]),
    "lfm3": Lfm3Config(
        **SMALL,
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=["conv", "sliding_attention", "full_attention", "sliding_attention"],
    ),
}
FULL, SWA, STATE = Component.FULL, Component.SWA, Component.STATE
COMPONENTS = {
    "llama": (FULL,),
    "qwen3": (FULL,),
    "mistral": (SWA,),
    "gemma2": (FULL, SWA),
    "gemma3": (FULL, SWA),
    "gpt-oss": (FULL, SWA),
    "mamba2": (STATE,),
    "falcon-h1": (FULL, STATE),
    "qwen3-next": (FULL, STATE),
    "lfm2": (FULL, STATE),
    "lfm3": (FULL, SWA, STATE),
}


def save_random_model(config: PretrainedConfig, directory: Path) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    model.save_pretrained(directory)
