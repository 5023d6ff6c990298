"""Kernels compiled for other processors than this one say what its own say: without matrix units, without AVX-512,
without AVX2, and with matrix units, which are emulated; and in each, how pages are laid out changes no bit."""

from __future__ import annotations

import dataclasses
import platform
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from family_rig import FAMILIES, save_random_model

from baton.common import env
from baton.common.engine import backends
from baton.common.engine.batch import BatchRow, pack_batch
from baton.common.engine.kernels import LIBRARY, Kernels
from baton.common.engine.panels import WeightFormat
from baton.common.engine.torch_runner import TorchRunner
from baton.common.kv.page_layout import PageLayout
from baton.common.model.loading import Dtype
from baton.common.native import built
from baton.common.units import pages_for_tokens

pytestmark = [pytest.mark.slow, pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86's abilities")]

TILES = "emulated matrix units"
VARIANTS = {
    "no matrix units": ("-mno-amx-tile", "-mno-amx-bf16"),
    "AVX2": ("-march=haswell", "-Wno-psabi"),
    "short registers": ("-march=x86-64", "-Wno-psabi"),
    TILES: (
        "-march=haswell",
        "-Wno-psabi",
        "-include",
        str(Path(__file__).parent / "emulated_tiles.h"),
        "-D__AMX_BF16__",
        "-O1",  # what stands for a tile is inlined everywhere: optimising that takes minutes
    ),
}


def logits_of(directory: Path, dtype: Dtype, weights: WeightFormat) -> torch.Tensor:
    """Of two prompts and a step of decode, with pages of 4 tokens (canonical) and of 16 (in panels)."""
    found = list[torch.Tensor]()
    for page_size in (4, 16):
        runner = TorchRunner.load(
            str(directory),
            dtype=dtype,
            num_pages=60,
            page_size=page_size,
            sliding_groups=False,
            threads=1,
            forward_path="fused",
            weights=weights,
        )
        assert runner.memory.main.page_layout is (PageLayout.PANELS if page_size == 16 else PageLayout.CANONICAL)
        ids = np.random.default_rng(2).integers(3, 290, 101).astype(np.int32)
        pages = [
            np.arange(at, at + pages_for_tokens(length, page_size), dtype=np.int32)
            for at, length in ((1, 70), (20, 31))
        ]
        first = [BatchRow(0, ids[:70], 70, pages[0], None), BatchRow(1, ids[70:], 31, pages[1], None)]
        later = [BatchRow(0, ids[:1], 71, pages[0], None)]
        found.append(
            torch.cat(
                [runner.logits(pack_batch(first, page_size), (0, 1)), runner.logits(pack_batch(later, page_size), (0,))]
            )
        )
    assert torch.equal(found[0], found[1])
    return found[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_agree(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = dataclasses.replace(LIBRARY, flags=(*LIBRARY.flags, *VARIANTS[variant]))
    if shutil.which(env.compiler()) is None:
        pytest.skip("there is no compiler")
    other = Kernels(built(library))
    assert other.matrix_units == (variant == TILES)
    forms: tuple[tuple[Dtype, WeightFormat, float], ...] = (
        ("float32", "dtype", 1e-4),
        ("bfloat16", "dtype", 5e-2),
        ("float32", "int8", 1e-4),
        ("bfloat16", "int8", 5e-2),
    )
    for family in ("llama", "gemma2"):
        save_random_model(FAMILIES[family], tmp_path / family)
        for dtype, weights, tolerance in forms:
            own = logits_of(tmp_path / family, dtype, weights)
            with monkeypatch.context() as patch:
                patch.setattr(backends, "load_kernels", lambda progress: other)
                found = logits_of(tmp_path / family, dtype, weights)
            assert (found - own).norm() < tolerance * own.norm()
