"""Kernels compiled for other processors than this one say what its own say: without matrix units, and without
AVX-512."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

import numpy as np
import pytest
import torch
from family_rig import FAMILIES, save_random_model

from baton.common.engine import backends
from baton.common.engine.batch import BatchRow, pack_batch
from baton.common.engine.kernels import LIBRARY, Kernels
from baton.common.engine.torch_runner import TorchRunner
from baton.common.model.loading import Dtype
from baton.common.native import BuildError, built

pytestmark = [pytest.mark.slow, pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86's abilities")]

VARIANTS = {"no matrix units": ("-mno-amx-tile", "-mno-amx-bf16"), "AVX2": ("-march=haswell", "-Wno-psabi")}


def logits_of(directory: Path, dtype: Dtype) -> torch.Tensor:
    runner = TorchRunner.load(
        str(directory), dtype=dtype, num_pages=60, page_size=4, sliding_groups=False, threads=1, forward_path="fused"
    )
    ids = np.random.default_rng(2).integers(3, 290, 101).astype(np.int32)
    rows = [
        BatchRow(0, ids[:70], 70, np.arange(1, 19, dtype=np.int32), None),
        BatchRow(1, ids[70:], 31, np.arange(20, 28, dtype=np.int32), None),
    ]
    first = runner.logits(pack_batch(rows, 4), (0, 1))
    later = runner.logits(pack_batch([BatchRow(0, ids[:1], 71, np.arange(1, 19, dtype=np.int32), None)], 4), (0,))
    return torch.cat([first, later])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_agree(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = dataclasses.replace(LIBRARY, flags=(*LIBRARY.flags, *VARIANTS[variant]))
    try:
        other = Kernels(built(library))
    except BuildError as error:
        pytest.skip(str(error))
    assert not other.matrix_units
    dtypes: tuple[tuple[Dtype, float], ...] = (("float32", 1e-4), ("bfloat16", 5e-2))
    for family in ("llama", "gemma2"):
        save_random_model(FAMILIES[family], tmp_path / family)
        for dtype, tolerance in dtypes:
            own = logits_of(tmp_path / family, dtype)
            with monkeypatch.context() as patch:
                patch.setattr(backends, "load_kernels", lambda progress: other)
                found = logits_of(tmp_path / family, dtype)
            assert (found - own).norm() < tolerance * own.norm()
