"""Exit codes and messages of `baton`: 0 done, 1 failed, 2 asked wrongly; never a traceback for what is expected."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from baton.deploy.cli import FAILED, MISUSED, OK, run_command

NOBODY = "http://127.0.0.1:9"


def outcome(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """(exit code, everything that was said)."""
    code = run_command(list(arguments))
    said = capfd.readouterr()
    assert "Traceback" not in said.err + said.out
    return code, " ".join((said.out + said.err).split())


def test_version_and_help(capfd: pytest.CaptureFixture[str]) -> None:
    code, said = outcome(capfd, "version")
    assert (code, said.split()[0]) == (OK, "baton")
    for command in ("serve", "run", "status", "kv", "demo"):
        assert outcome(capfd, command, "--help")[0] == OK


OPEN = ("serve", "--model", "fake", "--set", "gateway.open_to_network=true")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["serve", "--frob"], "No such option: --frob"),
        (["serve", "--prefill", "many"], "valid integer"),
        (["run"], "Missing argument"),
        (["run", "x", "--model", "fake"], "need --local"),
        (["kv", "--page", "3"], "belong together"),
        (["kv", "--component", "swa"], "needs --worker and --page"),
        (["kv", "--worker", "decode-0", "--page", "x"], "valid integer"),
        (["kv", "--worker", "decode-0", "--page", "1", "--component", "mamba"], "not one of 'full', 'swa', 'state'"),
        (["serve", "--set", "kv.pagesize=3"], "did you mean kv.page_size?"),
        (["serve", "--set", "page_size"], "expected key=value"),
        (["serve", "--set", "kv.page_size=5"], "must be one of 1, 2, 4"),
        (["serve", "--decode", "0"], "at least one decode worker"),
        (["serve", "--model", "smollm"], "did you mean smollm2-135m-instruct?"),
        (["serve", "--model", "./nowhere/model"], "there is no such directory"),
        (["serve", "--model", "nowhere.gguf"], "there is no such file"),
        (["serve", "--config", "/nowhere.yaml"], "No such file"),
        (["demo", "--set", "kv.pool_bytes=big"], "expected int"),
        (["serve", "--set", "transfer.lanes=local"], "for example [a,b]"),
        (["serve", "--set", "transfer.lanes=[]"], "of local, ucx, tcp, zmq"),
        ([*OPEN, "--host", "192.0.2.1"], "gateway.host = '192.0.2.1': this machine has no such"),
        ([*OPEN, "--host", "no.invalid"], "gateway.host = 'no.invalid': this machine has no such"),
        (["serve", "--model", "fake", "--host", "0.0.0.0"], "others could use the cluster without an API key"),
        (["serve", "--model", "fake", "--set", "gateway.api_keys_file=keys.yaml"], "must be an absolute path"),
        (["serve", "--model", "fake", "--set", "gateway.api_keys_file=/nowhere/keys"], "No such file"),
        (["keys", "new", "--name", "no spaces"], "matching regex"),
    ],
)
def test_misuse_is_told_in_words(capfd: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    code, said = outcome(capfd, *arguments)
    assert code == MISUSED
    assert says in said


def test_a_config_file_is_named_in_its_error(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("model:\n  modle: fake\n")
    code, said = outcome(capfd, "serve", "--config", str(path))
    assert code == MISUSED
    assert "cluster.yaml" in said
    assert "did you mean model.model?" in said


def test_an_empty_model_directory_is_named(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, said = outcome(capfd, "serve", "--model", str(tmp_path))
    assert code == MISUSED
    assert "config.json" in said


def test_a_taken_port_is_found_before_anything_starts(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = outcome(capfd, "serve", "--model", "fake", "--port", str(port))
    assert code == MISUSED
    assert f"gateway.port = {port}" in said
    assert said.count(f"127.0.0.1:{port}: Address already in use (0 takes any free port)") == 1
    assert "starting Ray" not in said


@pytest.mark.parametrize("command", [["status"], ["kv"], ["run", "hi"], ["kv", "--worker", "decode-0", "--page", "1"]])
def test_nobody_there_is_a_failure(capfd: pytest.CaptureFixture[str], command: list[str]) -> None:
    code, said = outcome(capfd, *command, "--url", NOBODY)
    assert code == FAILED
    assert f"nobody answers at {NOBODY}" in said


@pytest.mark.parametrize("given", ["127.0.0.1:9", f"{NOBODY}/", f"{NOBODY}/v1", f"{NOBODY}/v1/"])
def test_a_url_may_lack_its_scheme_or_be_that_of_an_openai_client(
    capfd: pytest.CaptureFixture[str], given: str
) -> None:
    assert f"nobody answers at {NOBODY}:" in outcome(capfd, "status", "--url", given)[1]


def test_the_url_may_come_from_the_environment(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_URL", "http://127.0.0.1:10")
    assert "http://127.0.0.1:10" in outcome(capfd, "status")[1]
