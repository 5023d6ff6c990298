"""Compiles C++ that ships with Baton: on first use, once per machine, into the cache folder. The result is loaded
through ctypes and includes no header of Python's or torch's, so a compiler is all it takes.

Owns: the build, and its key, which has everything that decides the machine code. Several processes may ask at the same
time: one compiles, the others wait (`model.cache`). Never: knows what is compiled, or decides what happens without a
compiler.
"""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import xxhash

from baton.common import env
from baton.common.model.cache import Progress, cached, silent

BUILD_TIMEOUT_S = 300
_ALWAYS = ("-std=c++17", "-shared", "-fPIC")


class BuildError(Exception):
    """The compiler is missing or refused, or there is no room for what it makes; the message is for a person."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """`name`: of its folder in the cache. `what`: in words, for whoever waits for the compiler. `sources`: the folder
    whose .cpp files it consists of."""

    name: str
    what: str
    sources: Path
    flags: tuple[str, ...]

    @property
    def command(self) -> tuple[str, ...]:
        return (*_ALWAYS, *self.flags)


def built(library: NativeLibrary, progress: Progress = silent) -> Path:
    """The shared object; compiled now if this machine has not done so yet. Raises BuildError."""
    compiler = shutil.which(env.compiler())
    if compiler is None:
        raise BuildError(f"there is no C++ compiler ({env.compiler()} is not on PATH)")
    build = functools.partial(_build, library, compiler, progress)
    try:
        return cached(f"{library.name}/{_build_key(library, compiler)}", build, progress) / _file_name(library)
    except OSError as error:
        raise BuildError(f"the cache folder {env.cache_dir()} cannot be used: {error}") from error


def _file_name(library: NativeLibrary) -> str:
    return f"baton_{library.name}.so"


def _build_key(library: NativeLibrary, compiler: str) -> str:
    """Of the sources, the flags, the compiler and, because of -march=native, the processor's abilities."""
    digest = xxhash.xxh3_64()
    for source in sorted(path for path in library.sources.iterdir() if path.suffix in (".cpp", ".h")):
        digest.update(source.read_bytes())
    digest.update(" ".join([compiler, *library.command, platform.machine()]).encode())
    cpu = Path("/proc/cpuinfo")
    if cpu.is_file():
        lines = cpu.read_text().splitlines()
        digest.update(next((line for line in lines if line.startswith(("flags", "Features"))), "").encode())
    return str(digest.hexdigest())


def _build(library: NativeLibrary, compiler: str, progress: Progress, folder: Path) -> None:
    progress(f"compiling {library.what}")
    sources = sorted(str(path) for path in library.sources.glob("*.cpp"))
    command = [compiler, *library.command, *sources, "-o", str(folder / _file_name(library))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the compiler could not be run: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{compiler} failed: {done.stderr.strip()[:500]}")
