"""Compiling on first use: what decides that something is compiled again, and what is said when it cannot be."""

from __future__ import annotations

import ctypes
import dataclasses
import stat
import textwrap
from pathlib import Path

import pytest

from baton.common.native import BuildError, NativeLibrary, built


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NativeLibrary:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "answer.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    (sources / "answer.h").write_text("#define ANSWER 1\n")
    return NativeLibrary("test", "a test", sources, ("-O1",))


def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = tmp_path / "fake-c++"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(path))


def test_it_is_compiled_once_and_again_when_a_source_or_a_flag_changes(
    library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = tmp_path / "count"
    script = f"""
        echo x >> {count}
        while [ "$1" != -o ]; do shift; done
        echo made > "$2"
    """
    fake_compiler(tmp_path, monkeypatch, textwrap.dedent(script))
    first = built(library)
    assert first.read_text() == "made\n"
    assert built(library) == first
    assert len(count.read_text().split()) == 1
    assert built(dataclasses.replace(library, flags=("-O2",))) != first
    (library.sources / "answer.h").write_text("#define ANSWER 2\n")
    assert built(library) != first
    assert len(count.read_text().split()) == 3


def test_what_is_compiled_can_be_called(library: NativeLibrary) -> None:
    said: list[str] = []
    try:
        path = built(library, said.append)
    except BuildError as error:
        pytest.skip(str(error))
    assert ctypes.CDLL(str(path)).answer() == 1
    assert said == ["compiling a test"]


def test_without_a_compiler_the_error_names_it(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler is not on PATH"):
        built(library)


def test_the_error_has_what_the_compiler_said_and_nothing_is_kept(
    library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path, monkeypatch, "echo no such header >&2; exit 1\n")
    for _ in range(2):
        with pytest.raises(BuildError, match="no such header"):
            built(library)


def test_a_cache_folder_that_cannot_be_used_is_said(
    library: NativeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path, monkeypatch, "exit 0\n")
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="cannot be used"):
        built(library)
