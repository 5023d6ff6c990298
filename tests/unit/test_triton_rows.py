"""The Triton kernel: any rows of any pools, in Triton's interpreter; and what is compiled for GPUs, without one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_rig import HAS_TRITON, WITHOUT, interpreted_copy, interpreted_kernel

IDS = st.sampled_from(["both", "gather", "scatter", "neither"])


def pool(units: int, unit_bytes: int, offset: int, seed: int) -> np.ndarray:
    """Units that begin `offset` bytes behind a word."""
    memory = np.random.default_rng(seed).integers(0, 256, units * unit_bytes + 32, dtype=np.uint8)
    first = -memory.ctypes.data % 16 + offset
    return memory[first : first + units * unit_bytes].reshape(units, unit_bytes)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    count=st.integers(1, 4),
    row_bytes=st.integers(1, 64) | st.sampled_from([511, 512, 513, 528, 8191, 8192, 8193, 8208, 16400]),
    begins=st.tuples(*[st.sampled_from([0, 1, 8, 16, 48])] * 2),
    ends=st.tuples(*[st.sampled_from([0, 3, 16])] * 2),
    offsets=st.tuples(*[st.sampled_from([0, 0, 4])] * 2),
    ids=IDS,
)
def test_every_byte_of_the_rows_and_no_other(
    seed: int,
    count: int,
    row_bytes: int,
    begins: tuple[int, int],
    ends: tuple[int, int],
    offsets: tuple[int, int],
    ids: str,
) -> None:
    copy, rng = interpreted_copy(), np.random.default_rng(seed)
    target, source = (
        pool(count + 3, begin + row_bytes + end, offset, seed + side)
        for side, (begin, end, offset) in enumerate(zip(begins, ends, offsets, strict=True))
    )
    ours, theirs = (rng.permutation(np.arange(count + 3, dtype=np.int32))[:count] for _ in range(2))
    expected = target.copy()
    to, to_ids = (ours, ours) if ids in ("both", "scatter") else (slice(0, count), None)
    from_, from_ids = (theirs, theirs) if ids in ("both", "gather") else (slice(0, count), None)
    stretches = [slice(begin, begin + row_bytes) for begin in begins]
    expected[to, stretches[0]] = source[from_, stretches[1]]
    copy(
        target[slice(None) if to_ids is not None else to, stretches[0]],
        to_ids,
        source[slice(None) if from_ids is not None else from_, stretches[1]],
        from_ids,
    )
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("offset", [0, 1], ids=["words", "bytes"])
def test_a_row_beyond_two_gigabytes_is_found(offset: int) -> None:
    kernel = interpreted_kernel()
    memory = torch.empty((3 << 30) + 1, dtype=torch.uint8)[offset:]  # untouched memory costs nothing
    last = torch.tensor([2], dtype=torch.int32)
    far = memory.as_strided((3, 64), (5 << 28, 1))
    far[2] = torch.arange(64)
    near = torch.zeros(1, 64, dtype=torch.uint8)
    kernel(near, None, far, last)
    assert torch.equal(near[0], torch.arange(64, dtype=torch.uint8))
    kernel(far, last, near.flip(1), None)
    assert far[2].tolist() == list(range(63, -1, -1))


def test_warming_up_goes_through_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted_kernel()
    rows, variants = sys.modules["baton.transfer.triton_rows"], set()

    class Recorder:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return self.launch

        def launch(self, to: object, to_ids: object, _: int, source: object, ids: object, *__: int, **how: int) -> None:
            variants.add((to_ids is None, ids is None, how["BLOCK"], how["WORDS"]))

    monkeypatch.setattr(rows, "copy_rows_kernel", Recorder())
    rows.warm_up(torch.device("cpu"))
    sides = ((True, False), (False, True))
    assert variants == {(*s, block, words) for s in sides for block in (512, 8192) for words in (True, False)}


COMPILE = """
    import re, triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from baton.transfer.triton_rows import BLOCK_BYTES, SMALL_BLOCK_BYTES, copy_rows_kernel

    rows = {"target": "*u8", "target_ids": "*i32", "target_step": "i32"}
    rows |= {"source": "*u8", "source_ids": "*i32", "source_step": "i32", "row_bytes": "i32"}
    for without in ("target_ids", "source_ids"):
        for block, warps, words in ((BLOCK_BYTES, 4, True), (SMALL_BLOCK_BYTES, 1, True), (BLOCK_BYTES, 4, False)):
            constants = {"BLOCK": block, "WORDS": words, without: None}
            kernel = ASTSource(copy_rows_kernel, rows | dict.fromkeys(constants, "constexpr"), constants)
            made = triton.compile(kernel, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
            assert made.asm["cubin"], "no machine code"
            wide = re.findall(r"(ld|st)[.]global[.](?:v2[.]b64|v4[.]b32)", made.asm["ptx"])
            print(block, words, wide.count("ld"), wide.count("st"))
"""


@pytest.mark.skipif(not HAS_TRITON, reason=WITHOUT)
def test_for_a_gpu_words_become_loads_and_stores_of_16_bytes(tmp_path: object) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    made = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COMPILE)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines() == 2 * ["8192 True 4 4", "512 True 1 1", "8192 False 0 0"]


def test_a_worker_on_cpus_does_not_import_triton() -> None:
    modules = "baton.deploy.cli, baton.transfer.worker, baton.prefill.actor, baton.decode.actor"
    program = f"import sys, {modules}, baton.common.engine.torch_runner; print('triton' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert said.stdout.split()[-1] == "False"
