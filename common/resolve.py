"""From defaults, a file, the environment and flags to one complete configuration, and a list of what was decided.

Owns: the order of precedence (each layer overrides the one before: defaults < file < environment < flags), and the
decision of every setting that says "auto" or None. Never: starts anything, or loads weights.

The result has no "auto" left: what `baton serve` prints is what every process runs with.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from baton.common import env
from baton.common.config import FAKE_MODEL, ClusterConfig, KvConfig, from_mapping
from baton.common.config_checks import validate
from baton.common.errors import ConfigError
from baton.common.kv.cache_dtype import CacheDtype, is_quantised
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.page_layout import choose_layout
from baton.common.kv.sizing import Load, count_fields, size_pools
from baton.common.units import format_bytes

LEAST_LENGTH = 2
_TOO_SHORT = "no prompt fits: its first token and the answer's take two"


@dataclass(frozen=True, slots=True)
class Layer:
    """Some settings and where they come from, for messages: "baton.yaml", "environment", "command line"."""

    origin: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Decision:
    """One setting that was not left at its default, and why it has this value."""

    field: str
    value: object
    why: str


@dataclass(frozen=True, slots=True)
class Resolved:
    config: ClusterConfig
    decisions: tuple[Decision, ...]


class ModelFacts(Protocol):
    """What a decision needs to know of a model: `baton.common.model.loading.ModelInfo`, or the fake model's facts."""

    @property
    def name(self) -> str: ...

    @property
    def max_positions(self) -> int: ...

    def layout(self, page_size: int) -> KvLayout: ...

    def component_bytes(self, component: Component, dtype: Any, *, cache_dtype: CacheDtype) -> int:
        """Per token of a paged component, per sequence of the recurrent state."""
        ...


@dataclass(frozen=True, slots=True)
class Machine:
    """What a decision needs to know of this machine."""

    has_compiler: bool
    has_ucx: bool

    @staticmethod
    def probe() -> Machine:
        return Machine(
            has_compiler=shutil.which(env.compiler()) is not None,
            has_ucx=importlib.util.find_spec("ucxx") is not None,
        )


def file_layer(path: Path) -> Layer:
    """Settings from a YAML (or JSON) file. Raises ConfigError that says where the file is wrong."""
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError("config file", str(path), error.strerror or "cannot be read") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("config file", str(path), f"is not valid YAML: {' '.join(str(error).split())}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError("config file", str(path), "must hold settings by name", "for example `prefill: 1`")
    return Layer(str(path), values)


def environment_layer() -> Layer:
    """`BATON_SET_KV__PAGE_SIZE=4` is `--set kv.page_size=4`. What OpenTelemetry's own variables say of the collector is
    for the processes of all nodes."""
    values = {name: _scalar(name, text) for name, text in env.settings().items()}
    if endpoint := env.otlp_endpoint():
        values = {"tracing.endpoint": endpoint, "tracing.service_name": env.service_name()} | values
    return Layer("environment", nested(values))


def assignments_layer(assignments: Sequence[str]) -> Layer:
    """`key=value` texts, as `--set` takes them; values are YAML: `3`, `true`, `[local, zmq]`."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise ConfigError("--set", assignment, "expected key=value", "for example --set kv.page_size=4")
        values[name.strip()] = _scalar(name, text)
    return Layer("command line", nested(values))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"kv.page_size": 4}` -> `{"kv": {"page_size": 4}}`."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        *groups, last = name.split(".")
        place = result
        for group in groups:
            place = place.setdefault(group, {})
            if not isinstance(place, dict):
                raise ConfigError(name, value, f"{group} is given as a value and as a group of settings")
        if isinstance(place.get(last), dict):
            raise ConfigError(name, value, f"{last} is given as a value and as a group of settings")
        place[last] = value
    return result


def merge(layers: Sequence[Layer]) -> tuple[ClusterConfig, tuple[Decision, ...]]:
    """Applies layers over the defaults. Raises ConfigError for unknown keys, wrong types and impossible values; the
    message says which layer it came from."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        try:
            from_mapping(ClusterConfig, layer.values)
        except ConfigError as error:
            raise ConfigError(error.field, error.value, f"{error.reason} [{layer.origin}]", error.hint) from error
        for name, value in flat(layer.values):
            origins[name] = layer.origin
            _assign(values, name, value)
    config = from_mapping(ClusterConfig, values)
    validate(config)
    return config, tuple(Decision(name, get(config, name), origins[name]) for name in sorted(origins))


def resolve(
    layers: Sequence[Layer], find_model: Callable[[str], ModelFacts], machine: Machine | None = None
) -> Resolved:
    """The one place where an "auto" is decided. `find_model` gives the facts of the configured model; it may raise
    ConfigError. Raises ConfigError."""
    config, given = merge(layers)
    machine = machine or Machine.probe()
    chosen = {decision.field for decision in given}
    config, lanes = _decide_lanes(config, machine, explicit="transfer.lanes" in chosen)
    config, attention = _decide_attention(config, machine)
    _check_weights(config)
    config, cache_dtype = _decide_cache_dtype(config)
    config, layout = _decide_page_layout(config)
    config, pace = decide_pace(config)
    config, memory = _decide_memory(config, find_model(config.model.model))
    return Resolved(config, (*given, *lanes, *attention, *cache_dtype, *layout, *pace, *memory))


def get(config: ClusterConfig, name: str) -> object:
    """The value of a setting by its full name."""
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _decide_lanes(
    config: ClusterConfig, machine: Machine, *, explicit: bool
) -> tuple[ClusterConfig, tuple[Decision, ...]]:
    lanes = config.transfer.lanes
    if "ucx" in lanes and not machine.has_ucx:
        if explicit:
            raise ConfigError("transfer.lanes", "ucx", "ucxx is not installed here", "pip install 'baton-pd[ucx]'")
        lanes = tuple(lane for lane in lanes if lane != "ucx")
    if "zmq" not in lanes:
        lanes = (*lanes, "zmq")
    if lanes == config.transfer.lanes:
        return config, ()
    why = "zmq is always the last resort" if explicit else "ucxx is not installed"
    config = dataclasses.replace(config, transfer=dataclasses.replace(config.transfer, lanes=lanes))
    return config, (Decision("transfer.lanes", lanes, why),)


def _decide_attention(config: ClusterConfig, machine: Machine) -> tuple[ClusterConfig, tuple[Decision, ...]]:
    if config.model.attention != "auto" or config.model.model == FAKE_MODEL:
        return config, ()
    if config.model.device != "cpu":  # a worker's own node says what there is for its GPU, and its log what it took
        return config, ()
    choice: Literal["compiled", "torch"] = "compiled" if machine.has_compiler else "torch"
    why = "a C++ compiler is here" if machine.has_compiler else "no C++ compiler found"
    model = dataclasses.replace(config.model, attention=choice)
    return dataclasses.replace(config, model=model), (Decision("model.attention", choice, why),)


def _check_weights(config: ClusterConfig) -> None:
    """Once it is known what computes."""
    model = config.model
    if model.weights == "int8" and model.attention != "compiled":
        reason = f"only the compiled kernels compute with them, and attention on {model.device} is {model.attention}"
        raise ConfigError("model.weights", "int8", reason, 'use "dtype"; or the cpu, with a C++ compiler')


def _decide_cache_dtype(config: ClusterConfig) -> tuple[ClusterConfig, tuple[Decision, ...]]:
    """Raises ConfigError for another format of the model's kind than the model's."""
    choice, computed = config.kv.cache_dtype, config.model.dtype
    if choice == "auto":
        config = dataclasses.replace(config, kv=dataclasses.replace(config.kv, cache_dtype=computed))
        return config, (Decision("kv.cache_dtype", computed, "as model.dtype"),)
    if not is_quantised(choice) and choice != computed:
        reason = f"the model computes in {computed}, and only int8 and fp8 convert"
        raise ConfigError("kv.cache_dtype", choice, reason, f"auto, int8, fp8, or model.dtype={choice}")
    return config, ()


def _decide_page_layout(config: ClusterConfig) -> tuple[ClusterConfig, tuple[Decision, ...]]:
    """Raises ConfigError when what was asked for cannot be had."""
    if config.model.model == FAKE_MODEL:
        return config, ()
    kv, compiled = config.kv, config.model.attention == "compiled"
    layout = choose_layout(kv.page_layout, kv.page_size, compiled=compiled, cache_dtype=kv.cache_dtype)
    if layout == kv.page_layout:
        return config, ()
    config = dataclasses.replace(config, kv=dataclasses.replace(kv, page_layout=layout.value))
    return config, (Decision("kv.page_layout", layout.value, f"{config.model.attention}, pages of {kv.page_size}"),)


def decide_pace(config: ClusterConfig) -> tuple[ClusterConfig, tuple[Decision, ...]]:
    """What decode workers that compute prompts promise their streams between two tokens (ADR 0038)."""
    own = config.decode_worker
    if own.itl_s is not None:
        return config, ()
    config = dataclasses.replace(config, decode_worker=dataclasses.replace(own, itl_s=config.autoscale.itl_s))
    return config, (Decision("decode_worker.itl_s", config.autoscale.itl_s, "as autoscale.itl_s"),)


def _decide_memory(config: ClusterConfig, model: ModelFacts) -> tuple[ClusterConfig, tuple[Decision, ...]]:
    """Pages and slots from bytes, then the longest sequence that one pool can hold."""
    kv, layout = config.kv, model.layout(config.kv.page_size)
    unit_bytes = {
        one: model.component_bytes(one, config.model.dtype, cache_dtype=kv.cache_dtype)
        * (1 if one is Component.STATE else kv.page_size)
        for one in layout.components
    }
    load = Load(
        requests=config.decode_worker.max_running_requests,
        step_tokens=max(config.prefill_worker.chunk_tokens, config.decode_worker.chunk_tokens),
        longest=config.model.max_model_len or model.max_positions,
    )
    counts, fields = size_pools(layout, unit_bytes, kv, load), count_fields(layout)
    decisions = [
        Decision(f"kv.{field}", counts[one], f"{one}: {format_bytes(unit_bytes[one])} each, of {_total(kv)}")
        for one, field in fields.items()
        if getattr(kv, field) is None
    ]
    # Of a model that keeps only a window or a state, one pool holds sequences of any length.
    pool_tokens = counts[Component.FULL] * kv.page_size if layout.full else None
    config, length = _decide_length(config, model, pool_tokens)
    found = {field: counts[one] for one, field in fields.items()}
    kv = dataclasses.replace(
        kv,
        num_pages=found["num_pages"],
        swa_pages=found.get("swa_pages", 0),
        state_slots=found.get("state_slots", 0),
    )
    config = dataclasses.replace(config, kv=kv)
    return config, (*decisions, *length)


def _total(kv: KvConfig) -> str:
    return format_bytes(kv.pool_bytes) if kv.num_pages is None else f"{kv.num_pages} pages"


def _decide_length(
    config: ClusterConfig, model: ModelFacts, pool_tokens: int | None
) -> tuple[ClusterConfig, tuple[Decision, ...]]:
    wanted = config.model.max_model_len
    if wanted is None:
        wanted = model.max_positions if pool_tokens is None else min(model.max_positions, pool_tokens)
        why = "all that the model can" if wanted == model.max_positions else "all that one pool can hold"
        if wanted < LEAST_LENGTH:
            raise ConfigError("model.max_model_len", wanted, f"{why}, and {_TOO_SHORT}")
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, max_model_len=wanted))
        return config, (Decision("model.max_model_len", wanted, why),)
    if wanted < LEAST_LENGTH:
        raise ConfigError("model.max_model_len", wanted, _TOO_SHORT, f"at least {LEAST_LENGTH}")
    if wanted > model.max_positions:
        raise ConfigError("model.max_model_len", wanted, f"{model.name} has {model.max_positions} positions")
    if pool_tokens is not None and wanted > pool_tokens:
        raise ConfigError(
            "model.max_model_len",
            wanted,
            f"a pool of {pool_tokens // config.kv.page_size} pages of {config.kv.page_size} holds {pool_tokens} tokens",
            f"raise {'kv.pool_bytes' if config.kv.num_pages is None else 'kv.num_pages'}",
        )
    return config, ()


def _scalar(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(name, text, "is not a valid YAML value") from error


def flat(values: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        pairs += flat(value, f"{path}{name}.") if isinstance(value, Mapping) else [(f"{path}{name}", value)]
    return pairs


def differences(before: ClusterConfig, after: ClusterConfig) -> dict[str, tuple[object, object]]:
    """The settings that are not alike, by name, each as it is in either."""
    there = dict(flat(dataclasses.asdict(before)))
    pairs = {name: (there.get(name), value) for name, value in flat(dataclasses.asdict(after))}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def _assign(values: dict[str, Any], name: str, value: Any) -> None:
    *groups, last = name.split(".")
    for group in groups:
        values = values.setdefault(group, {})
    values[last] = value
