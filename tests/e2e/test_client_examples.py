"""Every example of docs/CLIENT.md, run as it stands there. (That of a Ray job: tests/actors/test_ray_job.)"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from http_loopback import Loopback, saying, serving

from baton.deploy.cli import OK, run_command

PAGE = Path(__file__).parents[2] / "docs" / "CLIENT.md"
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


def test_examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(Loopback(script=saying("Hello.")), max_model_len=4096) as served:
        names: dict[str, object] = {}
        for block in blocks("python"):
            exec(compile(block.replace(ADDRESS, served.url), str(PAGE), "exec"), names)
        said = capfd.readouterr().out
        assert "Hello. stop 7" in said
        assert "completed 20 20" in said
        assert "invalid_request temperature" in said

        monkeypatch.setenv("BATON_URL", served.url)
        monkeypatch.chdir(tmp_path)
        Path("prompts.txt").write_text("one\ntwo\n")
        Path("requests.jsonl").write_text(
            '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "fake", "prompt": "x"}}\n'
        )
        commands = [line for block in blocks("") for line in block.splitlines() if line.startswith("baton ")]
        assert len(commands) == 4
        for command in commands:
            assert run_command(shlex.split(command)[1:]) == OK, command
        said = capfd.readouterr().out
        assert "Hello.\n" in said
        assert '"status": "completed"' in said
