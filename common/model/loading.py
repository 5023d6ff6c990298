"""From a model's name to its tokenizer, its facts and its weights.

Owns: the conversion of GGUF files (once, into the cache folder; afterwards weights are mapped from safetensors in about
a second) and the check that an architecture can run over paged KV. Never: fetches anything, or keeps a loaded model.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import xxhash

from baton.common import env
from baton.common.errors import ConfigError
from baton.common.kv.cache_dtype import CacheDtype, token_head_bytes
from baton.common.kv.layout import Component, KvLayout
from baton.common.model.cache import Progress, cached, file_digest, silent
from baton.common.model.groups import LayerGroups, has_known_state, layer_groups, max_positions
from baton.common.model.spec import FIELD, ModelSource, resolve_source
from baton.common.model.weights import SINGLE, check_complete, check_files
from baton.common.units import format_bytes

env.forbid_downloads()

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Dtype = Literal["float32", "bfloat16"]
ITEMSIZE: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
_DESCRIPTIONS = ("config.json", "generation_config.json")
COPY_AGAIN = "copy it again from where it came"
_BAD_GGUF = (ValueError, KeyError, IndexError, OverflowError, OSError, struct.error)
_CONVERSION = 1  # part of the cache key: raise it when a conversion writes something else than before
_FACTS = 2  # the same for `ModelInfo`


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a model without its weights. `sliding_groups` asks whether its sliding layers have a pool of
    their own, or keep every token in one pool with the full ones (`LayerGroups.in_one_pool`)."""

    name: str
    architecture: str
    max_positions: int
    vocab_size: int
    num_layers: int
    num_kv_heads: int  # 0 without attention
    head_dim: int
    eos_token_ids: tuple[int, ...]
    groups: LayerGroups

    def layer_groups(self, sliding_groups: bool = True) -> LayerGroups:
        return self.groups if sliding_groups else self.groups.in_one_pool()

    def layout(self, page_size: int, sliding_groups: bool = True) -> KvLayout:
        return self.layer_groups(sliding_groups).layout(page_size)

    def component_bytes(
        self, component: Component, dtype: Dtype, sliding_groups: bool = True, cache_dtype: CacheDtype = "auto"
    ) -> int:
        """What sizes a pool: bytes per token of a paged component, bytes per sequence of the recurrent state."""
        groups = self.layer_groups(sliding_groups)
        layers = len(groups.of(component))
        if component is Component.STATE:
            return layers * groups.state.layer_bytes(ITEMSIZE[dtype]) if groups.state else 0
        return layers * 2 * self.num_kv_heads * token_head_bytes(cache_dtype, self.head_dim, ITEMSIZE[dtype])

    def kv_bytes_per_token(self, dtype: Dtype, cache_dtype: CacheDtype = "auto") -> int:
        """Bytes of K and V that one token takes in all layers, while no window has passed it."""
        paged = (Component.FULL, Component.SWA)
        return sum(self.component_bytes(component, dtype, cache_dtype=cache_dtype) for component in paged)


def load_tokenizer(spec: str, progress: Progress = silent) -> PreTrainedTokenizerBase:
    """The tokenizer, with its chat template when the model has one. Raises ConfigError."""
    source = resolve_source(spec)
    directory = _metadata_dir(source, progress)
    if source.kind == "gguf":  # a tokenizer.json that we wrote: read without torch, which takes seconds to import
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(directory)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def model_info(spec: str, progress: Progress = silent) -> ModelInfo:
    """Facts from the model's configuration, remembered in the cache folder: finding them out imports torch, which takes
    seconds. Raises ConfigError, also for an architecture that cannot run here."""
    source = resolve_source(spec)
    directory = _metadata_dir(source, progress)
    described = [directory / name for name in _DESCRIPTIONS if (directory / name).is_file()]
    key = f"{source.name}-{'-'.join(file_digest(path) for path in described)}"

    def build(folder: Path) -> None:
        (folder / "info.json").write_bytes(msgspec.json.encode(_find_out(source, directory, progress)))

    entry = _kept(f"models/{key}-info-v{_FACTS}-transformers-{version('transformers')}", build, progress)
    return msgspec.json.decode((entry / "info.json").read_bytes(), type=ModelInfo)


def _find_out(source: ModelSource, directory: Path, progress: Progress) -> ModelInfo:
    config = load_config(source, progress)
    groups = layer_groups(config, str(source.path))
    heads = head_dim = 0  # a recurrent layer has heads too, of which these say nothing
    if groups.attention:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelInfo(
        name=source.name,
        architecture=str(config.model_type),
        max_positions=max_positions(config),
        vocab_size=int(config.vocab_size),
        num_layers=int(config.num_hidden_layers),
        num_kv_heads=int(heads),
        head_dim=int(head_dim),
        eos_token_ids=_eos_token_ids(directory, config),
        groups=groups,
    )


def load_config(source: ModelSource, progress: Progress = silent) -> PretrainedConfig:
    """The text model's configuration. Raises ConfigError when it cannot be read or cannot run over paged KV."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(_metadata_dir(source, progress))
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(FIELD, str(source.path), "its config.json cannot be read", str(error)[:200]) from error
    config = config.get_text_config(decoder=True)
    check_supported(config, str(source.path))
    return config


def check_supported(config: PretrainedConfig, spec: str) -> None:
    """Raises ConfigError unless the architecture is a decoder of layers that we know how to feed, with K and V of one
    shape wherever it attends."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config.model_type
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(FIELD, spec, f"architecture {kind} is not a decoder-only language model")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    groups = layer_groups(config, spec)
    # The hybrids let it be replaced without saying so.
    if groups.attention and not (model_class._supports_attention_backend or has_known_state(config)):
        raise ConfigError(FIELD, spec, f"architecture {kind} does not let its attention be replaced")
    if getattr(config, "kv_lora_rank", None) or getattr(config, "num_kv_shared_layers", 0):
        raise ConfigError(FIELD, spec, f"architecture {kind} has compressed or shared K and V")
    if getattr(config, "use_bidirectional_attention", None):
        raise ConfigError(FIELD, spec, f"architecture {kind} also attends to what comes after a token")


def load_model(spec: str, dtype: Dtype, progress: Progress = silent) -> PreTrainedModel:
    """The model in evaluation mode, its weights mapped from safetensors, all of them there. Raises ConfigError."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # `progress` tells; bars of several workers would write over one another
    source = resolve_source(spec)
    config = load_config(source, progress)
    directory = weights_directory(spec, dtype, progress)
    remedy = f"remove {directory}: it is made again" if source.kind == "gguf" else COPY_AGAIN
    progress(f"loading {source.name} ({dtype}, {format_bytes(check_files(directory, remedy))} on disk)")
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=getattr(torch, dtype), use_safetensors=True, output_loading_info=True
        )
    except (ValueError, OSError, RuntimeError) as error:  # the last for weights of other shapes than config.json says
        raise ConfigError(FIELD, str(directory), f"its weights cannot be loaded: {str(error)[:200]}", remedy) from error
    check_complete(directory, found["missing_keys"], remedy)
    return model.eval()


def weights_directory(spec: str, dtype: Dtype, progress: Progress = silent) -> Path:
    """Where the configuration and the safetensors are that `load_model` reads. Raises ConfigError."""
    source = resolve_source(spec)
    return source.path if source.kind == "directory" else _weights_dir(source, dtype, progress)


def weights_key(spec: str, dtype: Dtype) -> str:
    """Names the weights for what is made of them on this machine: by a GGUF file's content, by the files of a directory
    as they are (path, size, time): reading a large model to name it would take as long as loading it."""
    source = resolve_source(spec)
    if source.kind == "gguf":
        return f"{_cache_name(source)}-{dtype}-transformers-{version('transformers')}"
    files = [(path.name, one.st_size, one.st_mtime_ns, one.st_ino) for path, one in _stats_of(source)]
    seen = xxhash.xxh3_64_hexdigest(repr((str(source.path), files)).encode())
    return f"{source.name}-{seen}-{dtype}-transformers-{version('transformers')}"


def _stats_of(source: ModelSource) -> list[tuple[Path, os.stat_result]]:
    return [(path, path.stat()) for path in sorted(source.path.iterdir()) if path.is_file()]


def weights_identity(spec: str) -> str:
    """Names the weights by the content of all files, and what computes with them: models with equal names compute the
    same KV. What was kept by another version may have been computed otherwise."""
    computed_by = [f"{package}-{version(package)}" for package in ("baton-pd", "transformers")]
    return "-".join([_files_of(spec), *computed_by])


def model_identity(spec: str) -> str:
    """Names the weights alone, in a few characters. All files are read: they are about to be, anyway."""
    return str(xxhash.xxh3_64_hexdigest(_files_of(spec).encode()))


def _files_of(spec: str) -> str:
    source = resolve_source(spec)
    if source.kind == "gguf":
        return _cache_name(source)
    return "-".join(file_digest(path) for path in sorted(source.path.iterdir()) if path.is_file())


def _eos_token_ids(directory: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """What ends an answer: generation_config.json where there is one (chat models list more ids there)."""
    from transformers import GenerationConfig

    ids = config.eos_token_id
    if (directory / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(directory).eos_token_id or ids
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)


def _metadata_dir(source: ModelSource, progress: Progress) -> Path:
    """A directory with config.json and the tokenizer's files."""
    if source.kind == "directory":
        return source.path

    def build(folder: Path) -> None:
        progress(f"reading the tokenizer of {source.path.name} (once)")
        _convert_metadata(source, folder)

    return _kept(f"models/{_cache_name(source)}-metadata", build, progress)


def _weights_dir(source: ModelSource, dtype: Dtype, progress: Progress) -> Path:
    metadata = _metadata_dir(source, progress)

    def build(folder: Path) -> None:
        progress(f"converting {source.path.name} to {dtype} safetensors (once; tens of seconds for a small model)")
        _convert_weights(source, metadata, folder, dtype)

    return _kept(f"models/{_cache_name(source)}-{dtype}", build, progress)


def _kept(key: str, build: Callable[[Path], None], progress: Progress) -> Path:
    """`cached`, of what a start cannot do without. Raises ConfigError where it cannot be kept."""
    try:
        return cached(key, build, progress)
    except OSError as error:
        place = env.cache_dir()
        remedy = "make room there, or name another folder in BATON_CACHE_DIR"
        raise ConfigError("BATON_CACHE_DIR", str(place), f"{key} cannot be kept there: {error}", remedy) from error


def _cache_name(source: ModelSource) -> str:
    return f"{source.path.stem}-{file_digest(source.path)}-v{_CONVERSION}"


def _convert_metadata(source: ModelSource, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    place: dict[str, Any] = {"pretrained_model_name_or_path": source.path.parent, "gguf_file": source.path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place)
        config = AutoConfig.from_pretrained(**place)
    except _BAD_GGUF as error:
        raise _bad_gguf(source, error) from error
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)


def _bad_gguf(source: ModelSource, error: Exception) -> ConfigError:
    return ConfigError(FIELD, str(source.path), f"this GGUF file cannot be read: {str(error)[:200]}", COPY_AGAIN)


def _convert_weights(source: ModelSource, metadata: Path, folder: Path, dtype: Dtype) -> None:
    """Writes model.safetensors. The tensors are mapped onto a model without memory, so only names and shapes of
    `transformers` are used; loading through `from_pretrained(gguf_file=...)` would need one more dependency."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(metadata)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    try:
        loaded = load_gguf_checkpoint(
            str(source.path), return_tensors=True, model_to_load=skeleton, torch_dtype=getattr(torch, dtype)
        )
    except _BAD_GGUF as error:
        raise _bad_gguf(source, error) from error
    tensors: dict[str, torch.Tensor] = loaded["tensors"]
    tied = set(skeleton.all_tied_weights_keys)
    missing = {name for name, _ in skeleton.named_parameters()} - set(tensors) - tied
    if missing:
        raise ConfigError(FIELD, str(source.path), f"this GGUF file lacks {len(missing)} tensors", sorted(missing)[0])
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, folder / SINGLE, {"format": "pt"})
    except SafetensorError as error:  # which is how it tells of a full disk
        raise OSError(str(error)) from error
    config.save_pretrained(folder)
