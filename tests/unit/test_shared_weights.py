"""Packed weights in one file per host: made once, the same for everybody, and never the reason for a failed start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from disk_limit import no_more_than
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from baton.common.engine import backends, shared_weights, torch_runner
from baton.common.engine.kernels import Kernels
from baton.common.engine.linears import CompiledLinear, pack_linears
from baton.common.engine.shared_weights import SharedWeights
from baton.common.engine.torch_runner import TorchRunner
from baton.common.model.cache import Progress, silent
from baton.common.model.loading import Dtype, load_model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(shared_weights, "LEAST_SHARED_BYTES", 1)
    return tmp_path / "packed"


class Fill:
    """Writes a pattern; counts."""

    def __init__(self, value: int = 7) -> None:
        self.times = 0
        self.value = value

    def __call__(self, memory: torch.Tensor) -> None:
        self.times += 1
        memory.fill_(self.value)
        memory[-1] = 1


def held(fill: Callable[[torch.Tensor], None], nbytes: int = 5000, key: str = "model") -> torch.Tensor:
    return SharedWeights(key)("layout", nbytes, fill)


def file_of(folder: Path) -> Path:
    (path,) = folder.glob("*/weights")
    return path


def is_mapped_from(memory: torch.Tensor, path: Path) -> bool:
    """Whether the tensor's memory is that file's."""
    address = memory.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(one, 16) for one in line.split()[0].split("-"))
        if begin <= address < end:
            return line.endswith(str(path))
    return False


def test_the_second_worker_packs_nothing_and_maps_the_same_file(folder: Path) -> None:
    first, second = Fill(), Fill()
    one, other = held(first), held(second)
    assert (first.times, second.times) == (1, 0)
    assert torch.equal(one, other)
    assert is_mapped_from(one, file_of(folder))
    assert is_mapped_from(other, file_of(folder))


def test_who_writes_by_mistake_writes_into_its_own_copy() -> None:
    one, other = held(Fill()), held(Fill())
    one[0] = 99
    assert other[0] == 7
    assert held(Fill())[0] == 7


def test_other_weights_and_other_layouts_have_files_of_their_own(folder: Path) -> None:
    held(Fill(1))
    assert held(Fill(2), key="another")[0] == 2
    assert SharedWeights("model")("another-layout", 5000, Fill(3))[0] == 3
    assert len(list(folder.glob("*/weights"))) == 3


@pytest.mark.parametrize("damage", ["cut", "grown", "changed", "no digest", "digest changed", "gone"])
def test_a_damaged_file_is_made_again(folder: Path, damage: str) -> None:
    held(Fill())
    path = file_of(folder)
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[:-1])
        case "grown":
            path.write_bytes(path.read_bytes() + b"x")
        case "changed":
            path.write_bytes(path.read_bytes()[:-1] + b"x")
        case "no digest":
            (path.parent / "digest").unlink()
        case "digest changed":
            (path.parent / "digest").write_bytes(b"\xff" + (path.parent / "digest").read_bytes()[1:])
        case "gone":
            path.unlink()
    again = Fill()
    assert held(again)[0] == 7
    assert again.times == 1
    assert held(Fill(9))[0] == 7


def test_where_there_is_no_room_the_weights_are_in_own_memory(folder: Path) -> None:
    fill = Fill()
    with no_more_than(4000):
        memory = held(fill)
    assert (memory[0], memory[-1], fill.times) == (7, 1, 1)
    assert not list(folder.glob("*/weights")), "what was begun is gone"
    assert is_mapped_from(held(fill), file_of(folder)), "the next one that has room makes it"


def test_little_is_not_worth_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_weights, "LEAST_SHARED_BYTES", 5001)
    assert held(Fill())[0] == 7
    assert not folder.exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_over_a_shared_file_compute_the_same_bits(kernels: Kernels, folder: Path, dtype: torch.dtype) -> None:
    """Of two workers, the second of which never reads its own weights."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 50).to(dtype), nn.Linear(64, 16, bias=False).to(dtype)]
    own, first, second = (nn.Sequential(*layers) for _ in range(3))
    pack_linears(own, kernels)
    pack_linears(first, kernels, SharedWeights("model"))
    pack_linears(second, kernels, SharedWeights("model"))
    x = torch.randn(3, 64).to(dtype)
    with torch.inference_mode():
        for number in range(2):
            assert torch.equal(first[number](x), own[number](x))
            assert torch.equal(second[number](x), own[number](x))
    assert isinstance(second[0], CompiledLinear)
    assert is_mapped_from(second[0].packed.panels, file_of(folder))
    pack_linears(nn.Sequential(nn.Linear(64, 51).to(dtype)), kernels, SharedWeights("model"))
    assert len(list(folder.glob("*/weights"))) == 2, "other shapes are another layout"
    pack_linears(nn.Sequential(*layers), kernels, SharedWeights("model"), "int8")
    assert len(list(folder.glob("*/weights"))) == 3, "and so are int8 weights"


def save_model(directory: Path, seed: int) -> None:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)).save_pretrained(directory)


def head_of(directory: Path) -> torch.Tensor:
    runner = TorchRunner.load(str(directory), dtype="float32", num_pages=4, page_size=4)
    head = runner.model.get_output_embeddings()
    assert isinstance(head, CompiledLinear)
    return head.packed.panels.clone()


def test_a_model_replaced_while_it_is_loaded_is_not_kept_by_the_new_ones_name(
    kernels: Kernels, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "load_kernels", lambda progress: kernels)
    model = tmp_path / "model"
    save_model(model, 1)
    old = head_of(model)
    save_model(model, 0)

    def load_then_replace(spec: str, dtype: Dtype, progress: Progress = silent) -> PreTrainedModel:
        loaded = load_model(spec, dtype, progress)
        save_model(model, 2)
        return loaded

    with monkeypatch.context() as patch:
        patch.setattr(torch_runner, "load_model", load_then_replace)
        replaced = head_of(model)
    new = head_of(model)
    save_model(tmp_path / "other", 2)
    assert torch.equal(new, head_of(tmp_path / "other"))
    assert not torch.equal(new, replaced)
    assert not torch.equal(old, replaced)
