"""What a person gives to be answered: a file, stdin or a prompt, as prompts or as the lines of a batch.

Owns: telling them apart. Never: a connection.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import typer

from baton.deploy.client import Prompt

STDIN = "-"
FILES = (".jsonl", ".json", ".txt")

Given = bytes | list[Prompt]
"""Lines of a batch, or prompts."""


def given(what: str, *, raw: bool) -> Given:
    """`raw`: the prompts are texts to continue instead of messages to answer. Raises BadParameter."""
    if what == STDIN:
        return _parsed(sys.stdin.buffer.read(), raw=raw)
    path = Path(what)
    if _is_file(path):
        content = path.read_bytes()
        return content if path.suffix == ".jsonl" else _parsed(content, raw=raw)
    if len(what.split()) == 1 and ("/" in what or path.suffix in FILES):
        raise typer.BadParameter(f"there is no file {what!r}")
    return [_prompt(what, raw=raw)]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a prompt may be too long for a file's name
        return False


def _parsed(content: bytes, *, raw: bool) -> Given:
    """What begins with a JSON object is a batch; else each line is a prompt."""
    lines = [line for line in content.split(b"\n") if line.strip()]
    if lines and _is_object(lines[0]):
        return content
    try:
        return [_prompt(line.decode(), raw=raw) for line in lines]
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"it is no text: {error}") from error


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _prompt(text: str, *, raw: bool) -> Prompt:
    return text if raw else [{"role": "user", "content": text}]
