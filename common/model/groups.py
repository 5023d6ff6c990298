"""Which layers of a model keep what: full attention, sliding windows, recurrent states. From its configuration alone.

`transformers` names the kind of each layer (`layer_types`); a configuration without such names has one kind of layer,
which slides when a `sliding_window` is set. The shape of a recurrent state is stated here for each family that we run;
`TorchRunner` checks at load that the model's layers ask for exactly what was derived.
Never: loads weights, or decides how much memory a group gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.common.errors import ConfigError
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.state_shape import StateShape
from baton.common.model.spec import FIELD

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FULL = frozenset({"full_attention", "hybrid"})
_SLIDING = frozenset({"sliding_attention"})
_RECURRENT = frozenset({"linear_attention", "conv", "hybrid"})  # a hybrid layer attends beside its recurrence
SUPPORTED = "dense attention, sliding windows, and the recurrent layers of"
UNBOUNDED_POSITIONS = 1 << 20


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Layer numbers by what the layers keep, ascending; a hybrid layer is in two groups. `window` in tokens, 0 without
    sliding layers. `state` is what each recurrent layer keeps."""

    full: tuple[int, ...]
    sliding: tuple[int, ...] = ()
    window: int = 0
    recurrent: tuple[int, ...] = ()
    state: StateShape | None = None

    @property
    def attention(self) -> tuple[int, ...]:
        """All layers that keep K and V."""
        return tuple(sorted((*self.full, *self.sliding)))

    def of(self, component: Component) -> tuple[int, ...]:
        return {Component.FULL: self.full, Component.SWA: self.sliding, Component.STATE: self.recurrent}[component]

    def layout(self, page_size: int) -> KvLayout:
        return KvLayout(page_size, full=bool(self.full), window=self.window, state=bool(self.recurrent))

    def in_one_pool(self) -> LayerGroups:
        """Sliding layers keep every token, in one pool with the full ones, and still see only their window: it takes
        more memory, but a prefix of any length can be shared and nothing has to be evicted from behind the window."""
        return LayerGroups(full=self.attention, recurrent=self.recurrent, state=self.state)


def layer_groups(config: PretrainedConfig, spec: str) -> LayerGroups:
    """Raises ConfigError, naming the architecture, for a layer of a kind that we do not run. A window that no sequence
    can outgrow is none."""
    window = int(getattr(config, "sliding_window", None) or 0)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    foreign = set(kinds) - _FULL - _SLIDING - _RECURRENT
    if foreign:
        raise _unsupported(config, spec, f"layers of type {', '.join(sorted(foreign))}")
    if window >= max_positions(config):
        window = 0
    sliding = _numbers(kinds, _SLIDING) if window else ()
    recurrent = _numbers(kinds, _RECURRENT)
    if recurrent and config.model_type not in _STATE_SHAPES:
        raise _unsupported(config, spec, f"recurrent layers ({kinds[recurrent[0]]}) whose state we do not know")
    return LayerGroups(
        full=_numbers(kinds, _FULL if window else _FULL | _SLIDING),
        sliding=sliding,
        window=window if sliding else 0,
        recurrent=recurrent,
        state=_STATE_SHAPES[config.model_type](config) if recurrent else None,
    )


def max_positions(config: PretrainedConfig) -> int:
    """A model without attention has no last position: its length is bounded by configuration alone."""
    return int(getattr(config, "max_position_embeddings", None) or UNBOUNDED_POSITIONS)


def has_known_state(config: PretrainedConfig) -> bool:
    return config.model_type in _STATE_SHAPES


def _numbers(kinds: list[str], wanted: frozenset[str]) -> tuple[int, ...]:
    return tuple(number for number, kind in enumerate(kinds) if kind in wanted)


def _unsupported(config: PretrainedConfig, spec: str, what: str) -> ConfigError:
    hint = f"{SUPPORTED} {', '.join(sorted(_STATE_SHAPES))} are supported"
    return ConfigError(FIELD, spec, f"architecture {config.model_type} has {what}", hint)


def _mamba2(config: PretrainedConfig) -> StateShape:
    inner = int(config.expand * config.hidden_size)
    channels = inner + 2 * config.n_groups * config.state_size
    return StateShape((channels, config.conv_kernel), (config.num_heads, config.head_dim, config.state_size))


def _falcon_h1(config: PretrainedConfig) -> StateShape:
    inner = int(config.mamba_expand * config.hidden_size) if config.mamba_d_ssm is None else config.mamba_d_ssm
    channels = inner + 2 * config.mamba_n_groups * config.mamba_d_state
    state = (config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state)
    return StateShape((channels, config.mamba_d_conv), state)


def _qwen3_next(config: PretrainedConfig) -> StateShape:
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * key * config.linear_num_key_heads + value * config.linear_num_value_heads
    return StateShape((channels, config.linear_conv_kernel_dim), (config.linear_num_value_heads, key, value))


def _lfm2(config: PretrainedConfig) -> StateShape:
    return StateShape((config.hidden_size, config.conv_L_cache))


_STATE_SHAPES: dict[str, Callable[[PretrainedConfig], StateShape]] = {
    "falcon_h1": _falcon_h1,
    "lfm2": _lfm2,
    "lfm3": _lfm2,  # with sliding layers beside
    "mamba2": _mamba2,
    "qwen3_next": _qwen3_next,
}
