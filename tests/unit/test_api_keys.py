"""API keys: only hashes are kept, strangers are told nothing, and a change of the file is a change of who may ask."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from baton.common.clock import VirtualClock
from baton.common.config import ClusterConfig, GatewayConfig
from baton.common.config_checks import validate
from baton.common.errors import ConfigError, ErrorCode, RequestError
from baton.deploy.admission_queue import EVERYBODY, Tenant
from baton.deploy.api_keys import RELOAD_S, ApiKey, KeyFile, NoKeys, entry_line, keys_of, new_key, read_keys
from baton.deploy.cli import run_command


def made(name: str, **fields: float) -> tuple[str, str]:
    """(a key, its line)."""
    key, entry = new_key(ApiKey(name=name, sha256="0" * 64, **fields))  # type: ignore[arg-type]
    return key, entry_line(entry)


def code_of(ask: object, *arguments: str) -> ErrorCode:
    with pytest.raises(RequestError) as caught:
        ask(*arguments)  # type: ignore[operator]
    return caught.value.code


def test_a_key_is_known_by_its_hash_and_means_its_entry(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    one, first = made("one", weight=2.5, requests_per_minute=10, tokens_per_minute=1000, top_priority=5)
    two, second = made("two")
    path.write_text(first + second)
    assert one not in path.read_text()
    assert hashlib.sha256(one.encode()).hexdigest() in path.read_text()
    keys = keys_of(str(path), VirtualClock())
    assert (keys.owner_of(f"Bearer {one}"), keys.owner_of(f"bearer {two}")) == ("key:one", "key:two")
    assert keys.tenant_of("key:one") == Tenant(
        name="one", weight=2.5, requests_per_minute=10, tokens_per_minute=1000, top_priority=5
    )
    for header in (
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {one}x",
        f"Bearer {one[:-1]}",
        f"Basic {one}",
        one,
        "Bearer key:one",
    ):
        assert code_of(keys.owner_of, header) is ErrorCode.UNAUTHENTICATED, header
    assert code_of(keys.tenant_of, "key:three") is ErrorCode.UNAUTHENTICATED
    assert code_of(keys.tenant_of, NoKeys().owner_of(f"Bearer {one}")) is ErrorCode.UNAUTHENTICATED


def test_two_keys_of_one_name_are_one_client(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    old, first = made("one", weight=2)
    new, second = made("one")
    path.write_text(first + second)
    keys = keys_of(str(path), VirtualClock())
    assert keys.owner_of(f"Bearer {old}") == keys.owner_of(f"Bearer {new}") == "key:one"
    assert keys.tenant_of("key:one").weight == 2


def test_without_a_file_all_share_as_one_and_own_what_they_made() -> None:
    keys = keys_of("", VirtualClock())
    assert keys.owner_of("Bearer a") != keys.owner_of("Bearer b")
    assert keys.tenant_of(keys.owner_of("Bearer a")) is EVERYBODY


def test_a_change_is_seen_and_a_broken_file_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "keys.yaml", VirtualClock()
    one, first = made("one")
    two, second = made("two")
    path.write_text(first)
    keys = KeyFile(path, clock)

    def turn_into(text: str) -> None:
        (tmp_path / "next").write_text(text)
        os.replace(tmp_path / "next", path)
        clock.advance_to(clock.now() + RELOAD_S)

    turn_into(first + second)
    assert keys.owner_of(f"Bearer {two}") == "key:two"
    with caplog.at_level(logging.ERROR):
        turn_into(f"- {{name: one, key: {one}}}\n")
    assert keys.owner_of(f"Bearer {two}") == "key:two"
    path.unlink()
    clock.advance_to(clock.now() + RELOAD_S)
    assert keys.owner_of(f"Bearer {one}") == "key:one"
    turn_into(second)
    assert code_of(keys.owner_of, f"Bearer {one}") is ErrorCode.UNAUTHENTICATED
    assert code_of(keys.tenant_of, "key:one") is ErrorCode.UNAUTHENTICATED
    assert one not in caplog.text


def test_a_file_that_can_be_read_again_is_though_it_looks_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "keys.yaml", VirtualClock()
    taken_out, first = made("one")
    _, second = made("two")
    path.write_text(first)
    keys = KeyFile(path, clock)
    path.write_text(second + second)  # another size: within one tick of the clock nothing else may differ

    def refuse(self: Path) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(Path, "read_text", refuse)
        for _ in range(3):  # made by somebody whose files are his alone, until he changes its mode
            clock.advance_to(clock.now() + RELOAD_S)
            assert keys.owner_of(f"Bearer {taken_out}") == "key:one"
    assert caplog.text.count("api_keys_not_reloaded") == 1
    clock.advance_to(clock.now() + RELOAD_S)
    assert code_of(keys.owner_of, f"Bearer {taken_out}") is ErrorCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is no list of keys"),
        ("[]", "names no key"),
        ("{", "not valid YAML"),
        ("- {name: 2026-13-99}", "not valid YAML"),  # scalars that YAML itself reads, and fails on with its own errors
        ("- !!int x", "not valid YAML"),
        ("- !!bool x", "not valid YAML"),
        ("- " + "9" * 5000, "not valid YAML"),
        ("- {name: a}", "sha256"),
        ("- {name: a b, sha256: x}", "regex"),
        (f"- {{name: a, sha256: {'a' * 64}, weight: 0}}", ">= 1e-06"),
        (f"- {{name: a, sha256: {'a' * 64}, wieght: 1}}", "wieght"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="api_keys_file") as caught:
        read_keys(path)
    assert says in str(caught.value)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.yaml", VirtualClock()
    key, line = made("one")
    path.write_text(line)
    keys = KeyFile(path, clock)
    path.unlink()
    os.mkfifo(path)
    clock.advance_to(clock.now() + RELOAD_S)
    assert keys.owner_of(f"Bearer {key}") == "key:one"
    for odd in (path, tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is no file"):
            read_keys(odd)


def test_keys_new_prints_the_key_once_and_files_its_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    assert run_command(["keys", "new", "--name", "one", "--file", str(path)]) == 0
    first = capsys.readouterr().out.strip()
    assert run_command(["keys", "new", "--name", "two", "--weight", "3"]) == 0
    said = capsys.readouterr()
    path.write_text(path.read_text() + next(line for line in said.err.splitlines() if line.startswith("- ")) + "\n")
    keys = keys_of(str(path), VirtualClock())
    assert keys.owner_of(f"Bearer {first}") == "key:one"
    assert keys.owner_of(f"Bearer {said.out.strip()}") == "key:two"
    assert keys.tenant_of("key:two").weight == 3
    assert len({first, said.out.strip()}) == 2


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gateway.example.com"])
def test_a_gateway_is_not_open_to_the_network_by_itself(host: str) -> None:
    with pytest.raises(ConfigError, match="without an API key"):
        validate(ClusterConfig(gateway=GatewayConfig(host=host)))
    validate(ClusterConfig(gateway=GatewayConfig(host=host, open_to_network=True)))
    validate(ClusterConfig(gateway=GatewayConfig(host=host, api_keys_file="/etc/baton/keys.yaml")))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_this_machine_alone_needs_no_key(host: str) -> None:
    validate(ClusterConfig(gateway=GatewayConfig(host=host)))


def test_an_entry_is_added_only_where_it_can_be_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(made("one")[1].rstrip("\n"))  # as some editors end a file
    assert run_command(["keys", "new", "--name", "two", "--file", str(path)]) == 0
    assert [key.name for key in read_keys(path)] == ["one", "two"]
    path.write_text(before := f"[{made('one')[1].removeprefix('- ')}]")  # JSON, where no line can follow
    capfd.readouterr()
    assert run_command(["keys", "new", "--name", "two", "--file", str(path)]) == 2
    assert (path.read_text(), capfd.readouterr().out) == (before, "")
