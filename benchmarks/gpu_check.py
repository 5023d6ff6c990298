"""What is to be seen to on a GPU, in one run of minutes: parity, bandwidth, tokens per second, graphs, a hand-off.

    python -m benchmarks.gpu_check [--interpret]      (make gpu-check)

Prints a table. Ends with 0 when everything that can be compared is right, with 1 when something is not, and with 3 when
there is no GPU to check. `--interpret` goes through the same with tiny sizes on the host, kernels in Triton's
interpreter, for tests of this script: its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from benchmarks.gpu.rig import Bench, Line

NO_GPU: Final = 3
MODEL: Final = "smollm2-135m-instruct"


def why_no_gpu() -> str:
    """Empty: there is one, and what computes on it."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build for CPUs"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return "" if importlib.util.find_spec("triton") else 'triton is not installed (pip install "baton-pd[gpu]")'


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="without a GPU, tiny: for tests of this script")
    interpret = parser.parse_args(arguments).interpret
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before kernels are defined
    elif reason := why_no_gpu():
        print(f"gpu-check: nothing to check: {reason}")
        return NO_GPU
    with tempfile.TemporaryDirectory() as folder:
        lines = list(_told(_bench(interpret, Path(folder))))
    wrong = [line for line in lines if line.ok is False]
    print(f"{len(lines)} lines, {len(wrong)} wrong")
    return 1 if wrong else 0


def _told(bench: Bench) -> Iterator[Line]:
    """Each section's lines; one that raises is a wrong line, and the others go on."""
    from benchmarks.gpu import handoff, parity, speed
    from benchmarks.gpu.rig import Line

    sections: dict[str, Callable[[Bench], Iterator[Line]]] = {
        "device": facts,
        "parity": parity.kernels,
        "model": parity.model,
        "bandwidth": speed.bandwidth,
        "speed": speed.model,
        "hand-off": handoff.over_ipc,
    }
    for name, section in sections.items():
        started = time.perf_counter()
        try:
            with bench.device.stream():
                found = list(section(bench))
        except Exception as error:  # noqa: BLE001 - the script's top frame, once for each section
            traceback.print_exc()
            found = [Line(name, "does not come to its end", f"{type(error).__name__}: {error}".splitlines()[0], False)]
        for line in found:
            _print(line)
            yield line
        print(f"{'':10} {name}: {time.perf_counter() - started:.1f} s", flush=True)


def _print(line: Line) -> None:
    sign = {True: "ok", False: "WRONG", None: ""}[line.ok]
    print(f"{line.section:10} {sign:5} {line.what}: {line.found}", flush=True)


def facts(bench: Bench) -> Iterator[Line]:
    from benchmarks.gpu.rig import Line

    if bench.interpret:
        yield Line("device", "none", "the host, and Triton's interpreter")
    else:
        one = torch.cuda.get_device_properties(bench.device.place)
        yield Line("device", one.name, f"{one.total_memory / 2**30:.0f} GiB, {one.multi_processor_count} processors")
        yield Line("device", "compute capability", f"{one.major}.{one.minor}, CUDA {torch.version.cuda}")
    yield Line(
        "device", "packages", ", ".join(f"{name} {_version(name)}" for name in ("torch", "triton", "flashinfer-python"))
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


def _bench(interpret: bool, folder: Path) -> Bench:
    from baton.common.engine.gpu.device import CudaEngineDevice, HostDevice
    from baton.transfer.triton_rows import copy_rows_on_device
    from benchmarks.gpu.rig import FULL, TINY, Bench

    if interpret:
        from baton.transfer.testing_device import LateDevice

        return Bench(HostDevice(), LateDevice(1), copy_rows_on_device, _tiny_model(folder), TINY, True)
    from baton.transfer.cuda_device import CudaDevice

    place = torch.device("cuda", torch.cuda.current_device())
    return Bench(CudaEngineDevice(place), CudaDevice(place), copy_rows_on_device, MODEL, FULL, False)


def _tiny_model(folder: Path) -> str:
    """A random one, on the disk."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    sys.exit(main())
