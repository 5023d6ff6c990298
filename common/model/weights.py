"""Are a model's safetensors files whole? Found out from their headers, before anything is loaded.

`transformers` fills what a file lacks with random numbers and says so in the log; a file that was cut short is an
exception that names no file. Here each is a ConfigError with the file and the way out. Never: reads a weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from baton.common.errors import ConfigError
from baton.common.model.spec import FIELD

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHOWN_NAMES = 3


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def check_files(directory: Path, remedy: str) -> int:
    """Bytes of all weight files of a model. `remedy`: what a person can do about a bad one. Raises ConfigError."""
    if (directory / INDEX).is_file():
        files = _shards(directory, remedy)
    elif (directory / SINGLE).is_file():
        files = [directory / SINGLE]
    else:
        reason = f"there is no {SINGLE} and no {INDEX}"
        raise ConfigError(FIELD, str(directory), reason, "weights are read from safetensors files only")
    for path in files:
        _check(path, remedy)
    return sum(path.stat().st_size for path in files)


def _shards(directory: Path, remedy: str) -> list[Path]:
    path = directory / INDEX
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(FIELD, str(path), f"cannot be read: {error}", remedy) from error
    return [directory / name for name in sorted(set(index.weight_map.values()))]


def _check(path: Path, remedy: str) -> None:
    try:
        with safe_open(path, framework="pt"):
            pass
    except FileNotFoundError as error:
        raise ConfigError(FIELD, str(path), f"is missing, and {INDEX} names it", remedy) from error
    except (SafetensorError, OSError) as error:
        raise ConfigError(FIELD, str(path), f"is damaged, or half written: {error}", remedy) from error


def check_complete(directory: Path, missing: Iterable[str], remedy: str) -> None:
    """`missing`: names of the model's weights that no file had. Raises ConfigError."""
    names = sorted(missing)
    if names:
        shown = ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
        raise ConfigError(FIELD, str(directory), f"its files lack {len(names)} weights: {shown}", remedy)
