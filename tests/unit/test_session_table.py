"""The generated part of the protocol document: found, replaced, compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.transfer.session import table

DOCUMENT = Path(__file__).parents[2] / "docs" / "TRANSFER-PROTOCOL.md"


def test_the_published_document_is_what_the_machines_do() -> None:
    assert table.main(["--check", str(DOCUMENT)]) == 0


def test_a_stale_table_is_noticed_and_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "doc.md"
    path.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nbehind\n")
    assert table.main(["--check", str(path)]) == 1
    assert "make docs" in capsys.readouterr().err
    assert table.main(["--write", str(path)]) == 0
    assert table.main(["--check", str(path)]) == 0
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nbehind\n")
    assert "| SinkFenced | Aborted | send Cancel, **SinkFailed** |" in text


def test_a_document_without_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match="no <!-- transition table"):
        table.replace_generated("nothing here")


def test_bad_arguments_print_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main([]) == 2
    assert "--write|--check" in capsys.readouterr().err
