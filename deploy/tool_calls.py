"""One call of a tool as models write it, `{"name": ..., "arguments": {...}}`, read while it comes. Pure.

Owns: what can be told of it at each moment. Never: knows what is around it (`tool_formats.py`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import final

_STREAMED = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True, slots=True)
class Said:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The next call; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the last call's arguments, the text of a JSON object."""

    text: str


CallEvent = Said | CallBegun | Arguments


@final
class _Object:
    """Finds where a JSON object ends that comes in pieces."""

    __slots__ = ("_depth", "_escaped", "_quoted")

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def end_in(self, text: str) -> int | None:
        """Behind its last brace; None: it goes on."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


class NoCall(Exception):
    """What was read is not `{"name": ..., "arguments": {...}}`."""


@final
class Call:
    """Reads one call. Its arguments are told as they come where its name comes first, which is how models write it."""

    __slots__ = ("_arguments", "_begun", "_ended", "_object", "_raw")

    def __init__(self) -> None:
        self._raw = ""  # all of it, while it may still be none
        self._object = _Object()
        self._arguments: _Object | None = None
        self._begun = False
        self._ended = False

    @property
    def begun(self) -> bool:
        """It was told of."""
        return self._begun

    @property
    def raw(self) -> str:
        """What was read before that."""
        return self._raw

    def push(self, text: str) -> tuple[list[CallEvent], str | None]:
        """(what it tells, what is behind its end; None: it goes on). Raises NoCall when nothing of it was told: then
        `raw` has all that was pushed."""
        end = self._object.end_in(text)
        if end is None:
            return self._take(text, ended=False), None
        try:
            return self._take(text[:end], ended=True), text[end:]
        except NoCall:
            self._raw += text[end:]
            raise

    def _take(self, text: str, *, ended: bool) -> list[CallEvent]:
        if self._begun:
            return self._more(text)
        self._raw += text
        if self._raw.lstrip()[:1] not in ("", "{"):
            raise NoCall
        found = _STREAMED.match(self._raw)
        if found is not None:
            self._begun, self._arguments = True, _Object()
            return [CallBegun(json.loads(found[1])), *self._more(self._raw[found.end() :])]
        return self._whole() if ended else []

    def _more(self, text: str) -> list[CallEvent]:
        if self._ended or not text:
            return []
        assert self._arguments is not None
        end = self._arguments.end_in(text)
        self._ended = end is not None
        return [Arguments(text[:end])]

    def _whole(self) -> list[CallEvent]:
        """The name did not come first, or the arguments are no object."""
        try:
            call = json.loads(self._raw)
        except ValueError as error:
            raise NoCall from error
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if not isinstance(name, str) or not name:
            raise NoCall
        self._begun = True
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        return [CallBegun(name), Arguments(arguments)]
