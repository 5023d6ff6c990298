"""Quantised KV over two workers, their tiers and their caches: what they say together is, token for token, what one
engine with the same format says alone and without any cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_rig import COMPONENTS, FAMILIES, save_random_model
from model_rig import Sequence, run_mixed
from pd_rig import Case, Model, Pair, Tokens
from test_pd_parity import all_traffic, crowded_out, prefixes

from baton.common.engine.torch_runner import TorchRunner
from baton.common.kv.cache_dtype import CacheDtype
from baton.common.kv.layout import Component
from baton.transfer.api import ShipRegion

REAL = "smollm2-135m-instruct"
CASES = [
    (Case("radix", "llama", 16), "int8"),
    (Case("radix", "qwen3", 4), "fp8"),
    (Case("SWARadixCache", "gemma2", 16), "int8"),
    (Case("SWARadixCache", "gemma3", 4), "fp8"),
    (Case("UnifiedRadixCache", "falcon-h1", 1), "int8"),
]


class AloneModel(Model):
    """What an engine with the same format answers, one request after the other, each in pages of its own. In one piece
    rather than in a worker's chunks."""

    def __init__(self, family: str, spec: str, cache_dtype: CacheDtype) -> None:
        torch.set_num_threads(1)
        self.family = family
        counts = dict.fromkeys(COMPONENTS[family], 300)
        self.runner = TorchRunner.load(
            spec, dtype="float32", num_pages=counts, page_size=4, threads=1, cache_dtype=cache_dtype
        )
        self._answers: dict[bytes, list[int]] = {}

    def assert_greedy(self, prompt: Tokens, said: list[int]) -> None:
        known = self._answers.get(prompt.tobytes(), [])
        if len(known) < len(said):
            alone = Sequence(0, prompt.tolist(), len(said))
            run_mixed(self.runner, [alone], max_rows=1, seed=0, chunks=(512,))
            known = self._answers[prompt.tobytes()] = alone.outputs
        assert said == known[: len(said)], (self.family, self.runner.cache_dtype)


@pytest.mark.parametrize(("case", "cache_dtype"), CASES, ids=lambda value: str(value))
def test_what_two_workers_say_is_what_one_says_alone(case: Case, cache_dtype: CacheDtype, tmp_path: Path) -> None:
    save_random_model(FAMILIES[case.family], tmp_path / "model")
    disk = tmp_path / "disk" if case.layout.only_full else None
    pair = Pair(case, AloneModel(case.family, str(tmp_path / "model"), cache_dtype), disk)
    assert pair.decode.runner.memory.fingerprint() == pair.rig.prefill.runner.memory.fingerprint()
    all_traffic(pair)
    if disk is not None:
        crowded_out(pair)
    pair.end()


@pytest.mark.model
@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
@pytest.mark.timeout(1200)
def test_real_weights_say_the_same_with_and_without_a_hand_off(cache_dtype: CacheDtype, tmp_path: Path) -> None:
    """Prompts in chunks, prefixes found in both caches and on the disk; last chunks by groups of layers."""
    pair = Pair(Case("radix", "llama", 16), AloneModel("llama", REAL, cache_dtype), tmp_path, layer_groups=2)
    prefixes(pair)
    pair.end()
    assert pair.spans_sent("first")[Component.FULL]
    assert [one for one in pair.rig.log if isinstance(one, ShipRegion) and one.parts > 1]
