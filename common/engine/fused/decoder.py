"""What csrc/forward.cpp computes, found in a model of `transformers`: a dense decoder of the Llama family, its parts.

Owns: the reading of a model into `Decoder`, and the reasons for which one cannot be read. A part that is not understood
means that the whole model takes the generic path; what is read here is tried out against that path before it is used
(`choice.py`), so a family whose parts have these names and another meaning is found out.
Never: computes, or keeps a second copy of a weight: packed weights are those of the replaced linear layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from baton.common.engine.linears import CompiledLinear
from baton.common.engine.paged_attention import AttentionParams
from baton.common.engine.pointwise import CompiledRmsNorm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"})
_ACTIVATIONS: Final = {"silu": False, "gelu_pytorch_tanh": True}
_STATIC_ROPES: Final = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embedding whose angles follow from the position alone, not from the length of the sequence."""
_WIDTH: Final = 16  # floats that a kernel takes at a time


class NotUnderstoodError(Exception):
    """Why a model takes the generic path; the message is for a person."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """`rope`: the kind by which the model's rotary embedding is asked for this layer's angles."""

    query: CompiledLinear
    key: CompiledLinear
    value: CompiledLinear
    output: CompiledLinear
    gate: CompiledLinear
    up: CompiledLinear
    down: CompiledLinear
    before_attention: CompiledRmsNorm
    of_query: CompiledRmsNorm | None
    of_key: CompiledRmsNorm | None
    after_attention: CompiledRmsNorm | None
    before_mlp: CompiledRmsNorm
    after_mlp: CompiledRmsNorm | None
    rope: str | None
    attention: AttentionParams


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model that the fused path can compute."""

    layers: tuple[DecoderLayer, ...]
    embedding: torch.Tensor  # [vocabulary, hidden]
    embedding_scale: float
    gelu: bool  # else SiLU
    last_norm: CompiledRmsNorm
    head: CompiledLinear
    logits_softcap: float  # 0.0: none
    rotary: nn.Module
    head_dim: int

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype


def read_decoder(model: PreTrainedModel, attention: Sequence[AttentionParams], head_dim: int) -> Decoder:
    """`attention`: what each layer asked for when it was tried out. Raises NotUnderstoodError."""
    config = model.config
    if config.model_type not in FAMILIES:
        raise NotUnderstoodError(f"architecture {config.model_type} is not of the Llama family")
    base = model.base_model
    _check_rope(config.rope_parameters)
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if activation not in _ACTIVATIONS:
        raise NotUnderstoodError(f"activation {activation}")
    embedding = base.embed_tokens
    decoder = Decoder(
        layers=tuple(
            _read_layer(layer, params, _rope_kind(config, number))
            for number, (layer, params) in enumerate(zip(base.layers, attention, strict=True))
        ),
        embedding=embedding.weight.detach(),
        embedding_scale=float(getattr(embedding, "embed_scale", torch.tensor(1.0)).to(embedding.weight.dtype)),
        gelu=_ACTIVATIONS[activation],
        last_norm=_norm(base, "norm"),
        head=_linear(model, "lm_head"),
        logits_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        rotary=base.rotary_emb,
        head_dim=head_dim,
    )
    _check_sizes(decoder)
    return decoder


def _check_rope(parameters: dict[str, object]) -> None:
    """Of the whole model, or by kind of layer."""
    kinds = list(parameters.values()) if "rope_type" not in parameters else [parameters]
    for kind in kinds:
        if not isinstance(kind, dict) or kind.get("rope_type") not in _STATIC_ROPES:
            raise NotUnderstoodError(f"rotary embedding {kind}")
        if kind.get("partial_rotary_factor", 1.0) != 1.0:
            raise NotUnderstoodError("a rotary embedding of a part of each head")


def _rope_kind(config: object, number: int) -> str | None:
    parameters = getattr(config, "rope_parameters", {})
    if "rope_type" in parameters:
        return None
    kind: str = getattr(config, "layer_types", [])[number]
    return kind


def _read_layer(layer: nn.Module, attention: AttentionParams, rope: str | None) -> DecoderLayer:
    if attention.sinks is not None:
        raise NotUnderstoodError("attention with sinks")
    attend, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    sandwich = hasattr(layer, "pre_feedforward_layernorm")  # norms behind the blocks too, as Gemma has since 2
    return DecoderLayer(
        query=_linear(attend, "q_proj"),
        key=_linear(attend, "k_proj"),
        value=_linear(attend, "v_proj"),
        output=_linear(attend, "o_proj"),
        gate=_linear(mlp, "gate_proj"),
        up=_linear(mlp, "up_proj"),
        down=_linear(mlp, "down_proj"),
        before_attention=_norm(layer, "input_layernorm"),
        of_query=_norm(attend, "q_norm") if hasattr(attend, "q_norm") else None,
        of_key=_norm(attend, "k_norm") if hasattr(attend, "k_norm") else None,
        after_attention=_norm(layer, "post_attention_layernorm") if sandwich else None,
        before_mlp=_norm(layer, "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"),
        after_mlp=_norm(layer, "post_feedforward_layernorm") if sandwich else None,
        rope=rope,
        attention=attention,
    )


def _linear(parent: nn.Module, name: str) -> CompiledLinear:
    layer = getattr(parent, name, None)
    if not isinstance(layer, CompiledLinear):
        raise NotUnderstoodError(f"{name} is a {type(layer).__name__}, not a packed linear layer")
    return layer


def _norm(parent: nn.Module, name: str) -> CompiledRmsNorm:
    layer = getattr(parent, name, None)
    if not isinstance(layer, CompiledRmsNorm):
        raise NotUnderstoodError(f"{name} is a {type(layer).__name__}, not a norm that our kernel computes")
    return layer


def _check_sizes(decoder: Decoder) -> None:
    hidden = decoder.embedding.shape[1]
    dtypes = {part.dtype for layer in decoder.layers for part in (layer.query, layer.down)} | {decoder.dtype}
    if len(dtypes) > 1:
        raise NotUnderstoodError(f"weights of {', '.join(sorted(map(str, dtypes)))}")
    sizes = {"hidden size": hidden, "head size": decoder.head_dim, "inner size": decoder.layers[0].gate.out_features}
    for name, size in sizes.items():
        if size % _WIDTH:
            raise NotUnderstoodError(f"{name} {size} is not a multiple of {_WIDTH}")
