"""What is chosen to attend on a GPU, and FlashInfer's arguments: taken at their word by plain torch."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import pytest
import torch
from attention_rig import make_plan, shuffled_pages
from triton_rig import HAS_TRITON, WITHOUT, interpreting

from baton.common.engine.backends import AttentionChoice, choose_backends, choose_device_backends
from baton.common.engine.paged_attention import AttentionParams, TorchPagedAttention
from baton.common.errors import ConfigError

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def chosen(choice: AttentionChoice, *packages: str, head_dim: int = 64, dtype: torch.dtype = BF16) -> tuple[str, bool]:
    with interpreting():
        backends = choose_device_backends(choice, head_dim, dtype, CPU, lambda package: package in packages)
    return backends.attention.name, backends.in_graphs is not None


@pytest.mark.skipif(not HAS_TRITON, reason=WITHOUT)
def test_auto_takes_what_there_is() -> None:
    assert chosen("auto") == chosen("torch", "triton") == ("torch", False)
    assert chosen("auto", "triton") == chosen("triton", "triton", "flashinfer") == ("triton", True)
    assert chosen("auto", "triton", "flashinfer", head_dim=80) == ("triton", True)
    assert chosen("auto", "triton", "flashinfer", dtype=torch.float32) == ("triton", True)


@pytest.mark.parametrize(
    ("choice", "packages", "head_dim", "dtype", "reason"),
    [
        ("compiled", ("triton",), 64, BF16, "is for CPUs"),
        ("triton", (), 64, BF16, "triton is not installed"),
        ("flashinfer", ("triton",), 64, BF16, "flashinfer is not installed"),
        ("flashinfer", ("triton", "flashinfer"), 80, BF16, "head size 80"),
        ("flashinfer", ("triton", "flashinfer"), 64, torch.float32, "float32"),
    ],
)
def test_what_cannot_be_had_is_refused(
    choice: AttentionChoice, packages: tuple[str, ...], head_dim: int, dtype: torch.dtype, reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"model\.attention.*{choice}.*{reason}"):
        choose_device_backends(choice, head_dim, dtype, CPU, lambda package: package in packages)


@pytest.mark.parametrize("choice", ["triton", "flashinfer"])
def test_what_needs_a_gpu_is_refused_on_cpus(choice: AttentionChoice) -> None:
    with pytest.raises(ConfigError, match=r"model\.attention.*on a GPU"):
        choose_backends(choice, 64)


class Wrapper:
    """What FlashInfer documents of its two wrappers, in plain torch: which keys each row has, by `indptr`, `indices`
    and `last_page_len`, and what is done with them."""

    def __init__(self, workspace: torch.Tensor, *, kv_layout: str, use_tensor_cores: bool = False) -> None:
        assert (workspace.dtype, kv_layout) == (torch.uint8, "HND")
        self.plans = 0

    def _take(self, rows: list[int], pages: tuple[torch.Tensor, ...], sizes: tuple[int, ...], asked: Any) -> None:
        indptr, indices, last_page_len = pages
        self._q_heads, self._kv_heads, self._head_dim, self._page_size = sizes
        for one in pages:
            assert (one.dtype, one.dim(), one.is_contiguous()) == (torch.int32, 1, True)
        assert len(indptr) == len(last_page_len) + 1 == len(rows) + 1
        assert len(indices) == indptr[-1]
        assert bool(((last_page_len >= 1) & (last_page_len <= self._page_size)).all())
        assert asked["q_data_type"] == asked["kv_data_type"] == BF16
        self._rows, self._pages, self._asked = rows, pages, asked
        self.plans += 1

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        assert q.is_contiguous()
        assert q.shape == (sum(self._rows), self._q_heads, self._head_dim)
        assert paged_kv_cache.shape[1:] == (2, self._kv_heads, self._page_size, self._head_dim)
        indptr, indices, last_page_len = self._pages
        first, found = 0, []
        for row, queries in enumerate(self._rows):
            cache = paged_kv_cache[indices[indptr[row] : indptr[row + 1]].long()]
            keys, values = cache.float().permute(1, 2, 0, 3, 4).flatten(2, 3)
            length = keys.shape[1] - self._page_size + int(last_page_len[row])
            keys, values = (
                one[:, :length].repeat_interleave(self._q_heads // self._kv_heads, 0) for one in (keys, values)
            )
            scores = q[first : first + queries].float().transpose(0, 1) @ keys.transpose(1, 2) * self._asked["sm_scale"]
            if cap := self._asked["logits_soft_cap"]:
                scores = torch.tanh(scores / cap) * cap
            hidden = torch.ones(queries, length, dtype=torch.bool).triu(length - queries + 1)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            found.append((weights @ values).transpose(0, 1))
            first += queries
        return torch.cat(found).to(q.dtype)


class DecodeWrapper(Wrapper):
    def plan(self, indptr: Any, indices: Any, last_page_len: Any, *sizes: int, **asked: Any) -> None:
        self._take([1] * len(last_page_len), (indptr, indices, last_page_len), sizes, asked)


class PrefillWrapper(Wrapper):
    def plan(self, qo_indptr: Any, *rest: Any, causal: bool, **asked: Any) -> None:
        assert causal
        self._take(qo_indptr.diff().tolist(), rest[:3], rest[3:], asked)


class Library:
    """FlashInfer's names. Keeps what was made of it."""

    def __init__(self) -> None:
        self.made: list[Wrapper] = []

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> Wrapper:
        self.made.append(DecodeWrapper(*args, **kwargs))
        return self.made[-1]

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> Wrapper:
        self.made.append(PrefillWrapper(*args, **kwargs))
        return self.made[-1]


@pytest.mark.skipif(not HAS_TRITON, reason=WITHOUT)
@pytest.mark.parametrize("rows", [((1, 1), (1, 16), (1, 33)), ((5, 5), (1, 20), (3, 32))], ids=["decode", "mixed"])
def test_flashinfer_is_asked_for_what_plain_torch_computes(rows: tuple[tuple[int, int], ...]) -> None:
    with interpreting():
        from baton.common.engine.gpu.flashinfer_attention import FlashInferAttention
        from baton.common.engine.gpu.plan import DevicePlan

        torch.manual_seed(2)
        plan = make_plan(rows, 16, shuffled_pages(9))
        on_device = DevicePlan(*(getattr(plan, name) for name in plan.__slots__), host=plan)
        library, tokens = Library(), sum(queries for queries, _ in rows)
        attention = FlashInferAttention(library, CPU)
        pool = torch.randn(9, 2, 2, 2, 16, 64).to(BF16)
        query, key, value = (torch.randn(heads, tokens, 64).to(BF16).transpose(0, 1) for heads in (6, 2, 2))
        for step in (1, 2):
            for layer, params in enumerate((AttentionParams(0.125), AttentionParams(0.125, softcap=20.0))):
                twin = pool.clone()
                ours = attention.attend(query, key, value, pool, layer, on_device, params)
                expected = TorchPagedAttention().attend(query, key, value, twin, layer, plan, params)
                assert torch.equal(pool, twin)
                torch.testing.assert_close(ours.float(), expected.float(), atol=4e-2, rtol=4e-2)
                attention.attend(query, key, value, pool, layer, on_device, params)  # another layer that asks the same
            assert [made.plans for made in library.made] == [step, step], "once for each step and kind of layer"
            on_device = DevicePlan(*(getattr(plan, name) for name in plan.__slots__), host=plan)


@pytest.mark.skipif(not HAS_TRITON, reason=WITHOUT)
def test_flashinfer_does_not_read_beside_a_window() -> None:
    """A dead page may be another request's, and full of NaN."""
    with interpreting():
        from baton.common.engine.gpu.flashinfer_attention import FlashInferAttention

        library, plan = Library(), make_plan(((1, 40),), 16, iter((1, 2, 3)))
        query, key, value = (torch.randn(1, heads, 64).to(BF16) for heads in (2, 1, 1))
        pool = torch.randn(4, 1, 2, 1, 16, 64).to(BF16)
        pool[1] = float("nan")
        out = FlashInferAttention(library, CPU).attend(query, key, value, pool, 0, plan, AttentionParams(0.125, 8))
        assert not library.made
        assert out.isfinite().all()


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
def test_the_real_flashinfer_takes_these_arguments() -> None:
    import flashinfer

    asked = dict.fromkeys(("sm_scale", "logits_soft_cap", "q_data_type", "kv_data_type"))
    decode = inspect.signature(flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan)
    decode.bind(*range(8), **asked)
    prefill = inspect.signature(flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan)
    assert list(prefill.bind(*range(9), causal=True, **asked).arguments)[1:9] == [
        "qo_indptr",
        "paged_kv_indptr",
        "paged_kv_indices",
        "paged_kv_last_page_len",
        "num_qo_heads",
        "num_kv_heads",
        "head_dim_qk",
        "page_size",
    ]
