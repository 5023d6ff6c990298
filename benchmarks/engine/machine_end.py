"""What this machine can do, measured in turn with the engines: bytes per second that are read and copied, with and
without huge pages, and floating-point operations per second of a matrix product.

Reading is a sum over the buffer by a compiled loop, which streams faster than any step can: nothing is done with the
bytes. Sizes matter: a step's weights may lie in the last cache, a large pool does not.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.engine.cases import Case
from benchmarks.engine.child import Step, main

READ_MIB = (64, 256, 512, 1024, 2048)
SMALL_BYTES = 1 << 30
MADV_NOHUGEPAGE = 15  # Python has no name for it
GEMM = 2048
GEMM_TRIED = 256
TRIES = 3


class Machine:
    """A case is ignored: it always measures the same things, which come back as `extra`."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        torch.set_num_threads(len(spec["cores"]))
        self._huge = _buffer(READ_MIB[-1] << 20, mmap.MADV_HUGEPAGE)
        self._small = _buffer(SMALL_BYTES, MADV_NOHUGEPAGE)
        # Where the processor has no products of bfloat16, torch's are hundreds of times slower than those of float32.
        kinds = (torch.float32, getattr(torch, spec["dtype"]))
        fastest = max(kinds, key=lambda kind: _rate(1, _multiplying(GEMM_TRIED, kind)))
        self._multiply = _multiplying(GEMM, fastest)
        self.extra: dict[str, Any] = {}
        self.about = "the machine itself"

    def prepare(self, case: Case) -> Step:
        return self._everything

    def drop(self) -> None:
        pass

    def _everything(self) -> None:
        self.extra = {
            "read": {mib: _rate(mib << 20, _reading(self._huge, mib << 20)) for mib in READ_MIB},
            "read_small_pages": _rate(SMALL_BYTES, _reading(self._small, SMALL_BYTES)),
            "copy": _rate(4 * len(self._huge), _copying(self._huge)),
            "copy_small_pages": _rate(4 * len(self._small), _copying(self._small)),
            "flops": _rate(2 * GEMM**3, self._multiply),
        }


def _buffer(nbytes: int, advice: int) -> torch.Tensor:
    """float32, written once."""
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(advice)
    memory = torch.frombuffer(block, dtype=torch.float32)
    return memory.fill_(1.0)


def _reading(buffer: torch.Tensor, nbytes: int) -> Callable[[], object]:
    """Two streams, as weights and activations are not: what reads one half also reads the other."""
    values = buffer[: nbytes // 4]
    half = len(values) // 2
    return lambda: torch.dot(values[:half], values[half:])


def _multiplying(size: int, dtype: torch.dtype) -> Callable[[], object]:
    left = torch.randn(size, size).to(dtype)
    right, out = left.T.contiguous(), torch.empty_like(left)
    return lambda: torch.matmul(left, right, out=out)


def _copying(buffer: torch.Tensor) -> Callable[[], object]:
    """One half to the other: all of its bytes are read or written."""
    half = len(buffer) // 2
    return lambda: buffer[:half].copy_(buffer[half:])


def _rate(amount: int, work: Callable[[], object]) -> float:
    """Per second, the best of some tries: the machine's limit, not its mood."""
    best_s = float("inf")
    for _ in range(TRIES):
        started = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - started)
    return amount / best_s


if __name__ == "__main__":
    main(Machine)
