"""How models write the calls of tools, as pure functions of text: one format for each family of models.

Owns: `ToolFormat` and its implementations, chosen by name (`gateway.tool_parser`) or by the model's chat template.
Never: knows HTTP, tokens, or whether an answer must call something.

A reader gets the text of an answer piece by piece and tells what can be told: text that is no call, a call that begins,
more of its arguments. What looked like a call and is none is text: nothing of an answer is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, final

from baton.deploy.chat_messages import Function, TemplateMessage
from baton.deploy.tool_calls import Call, CallBegun, CallEvent, NoCall, Said

MAX_FORCED_CALLS = 16
"""A small model that may call once more would do so until its tokens are used up."""
JSON_WHITESPACE = {"whitespace_pattern": r"[ \t\r\n]{0,20}"}


class CallReader(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> list[CallEvent]: ...

    def finish(self) -> list[CallEvent]:
        """After the last piece: what was held back."""


class ToolFormat(Protocol):
    """A family's way to write calls. `markers`: texts around them that may be special tokens, and are read as text."""

    @property
    def markers(self) -> tuple[str, ...]: ...

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """What a system message says of them, for chat templates that know no tools."""

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Calls that were made, for such templates."""

    def forced(self, tools: Sequence[Function], *, parallel: bool) -> str:
        """A grammar (Lark) of answers that call one of `tools`, or several, and say nothing else."""

    def strict(self, tools: Sequence[Function], *, parallel: bool) -> str:
        """A grammar (Lark) of answers that say what they want; but a call's arguments follow its schema."""

    def reader(self) -> CallReader: ...


def _call_rules(tools: Sequence[Function], key: str) -> str:
    """Lark: `body` is one call."""
    names = " | ".join(f"call_{at}" for at in range(len(tools)))
    rules = [f"body: {names}"]
    for at, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        schema = json.dumps({"x-guidance": JSON_WHITESPACE, **tool.schema})
        rules.append(f'call_{at}: {head} %json {schema} "}}"')
    return "\n".join(rules)


def _loosened(tools: Sequence[Function]) -> list[Function]:
    """Those that are not strict take any object."""
    return [tool if tool.strict else Function(name=tool.name, parameters={"type": "object"}) for tool in tools]


# ------------------------------------------------------------------------------------------------ formats


@final
@dataclass(frozen=True, slots=True)
class Hermes:
    """`<tool_call>` and `</tool_call>` around each call, as Hermes and Qwen models write them. `own_tokens`: the model
    has a token for each: then it is this token that a grammar has to ask for, not its text."""

    BEGIN: ClassVar = "<tool_call>"
    END: ClassVar = "</tool_call>"

    own_tokens: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.BEGIN, self.END)

    @property
    def _begin(self) -> str:
        """In a grammar."""
        return self.BEGIN if self.own_tokens else f'"{self.BEGIN}"'

    @property
    def _end(self) -> str:
        return self.END if self.own_tokens else f'"{self.END}"'

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            "You may call one or more functions to help with the user's request. They are described as JSON within "
            f"<tools></tools>:\n<tools>\n{described}\n</tools>\nTo call one, answer with its name and its arguments as "
            f"JSON within {self.BEGIN}{self.END}:\n"
            f'{self.BEGIN}\n{{"name": <name>, "arguments": <arguments>}}\n{self.END}'
        )

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return "\n".join(f"{self.BEGIN}\n{_written(call, 'arguments')}\n{self.END}" for call in calls)

    def forced(self, tools: Sequence[Function], *, parallel: bool) -> str:
        more = f'("\\n" call){{0,{MAX_FORCED_CALLS - 1}}}' if parallel else ""
        rules = _call_rules(tools, "arguments")
        return f'start: call {more}\ncall: {self._begin} "\\n" body "\\n" {self._end}\n{rules}'

    def strict(self, tools: Sequence[Function], *, parallel: bool) -> str:
        rules = _call_rules(_loosened(tools), "arguments")
        calls = "call*" if parallel else "call?"
        begin = f"(begin | TEXT {self._begin})" if self.own_tokens else "begin"
        return (
            f'start: {calls} rest\nrest: TEXT\nTEXT: /(.|\\n)*/\nbegin[lazy]: TEXT "{self.BEGIN}"\n'
            f'call: {begin} "\\n" body "\\n" {self._end}\n{rules}'
        )

    def reader(self) -> CallReader:
        return _HermesReader()


@final
class _HermesReader:
    """Whitespace that is all there is before, between or after calls is not text of the answer."""

    __slots__ = ("_call", "_called", "_closing", "_gap", "_spoke", "_text")

    def __init__(self) -> None:
        self._text = ""  # not looked at yet
        self._gap = ""  # whitespace, and nothing else since the last call
        self._call: Call | None = None
        self._closing = False  # a call has ended, its marker has not come
        self._called = self._spoke = False  # at all; since the last call

    def push(self, text: str) -> list[CallEvent]:
        self._text += text
        events: list[CallEvent] = []
        while self._text and (found := self._step()) is not None:
            events += found
        return events

    def finish(self) -> list[CallEvent]:
        rest, self._text = self._text, ""
        if self._closing:
            return []
        if self._call is not None:
            rest = "" if self._call.begun else Hermes.BEGIN + self._call.raw
        events = self._say(rest)
        return [*events, Said(self._gap)] if self._gap and not self._called else events

    def _step(self) -> list[CallEvent] | None:
        """What the next stretch of text tells; None: more is needed."""
        if self._call is not None:
            return self._read(self._call)
        if self._closing:
            return self._close()
        at = self._text.find(Hermes.BEGIN)
        if at >= 0:
            said, self._text = self._text[:at], self._text[at + len(Hermes.BEGIN) :]
            self._call = Call()
            return self._say(said)
        held = _begun_at_end(self._text, Hermes.BEGIN)
        said, self._text = self._text[: len(self._text) - held], self._text[len(self._text) - held :]
        return self._say(said) if said else None

    def _read(self, call: Call) -> list[CallEvent]:
        text, self._text = self._text, ""
        try:
            events, rest = call.push(text)
        except NoCall:
            self._call, self._text = None, call.raw
            return self._say(Hermes.BEGIN)
        if call.begun:
            self._gap, self._called, self._spoke = "", True, False
        if rest is not None:
            self._call, self._closing, self._text = None, True, rest
        return events

    def _close(self) -> list[CallEvent] | None:
        """The end marker of a call, unless the model forgot it."""
        text = self._text.lstrip()
        if text.startswith(Hermes.END):
            self._closing, self._text = False, text[len(Hermes.END) :]
            return []
        if Hermes.END.startswith(text):
            return None
        self._closing = False
        return []

    def _say(self, text: str) -> list[CallEvent]:
        text = self._gap + text
        if not self._spoke and not text.strip():
            self._gap = text
            return []
        self._gap, self._spoke = "", True
        return [Said(text)] if text else []


@final
class Json:
    """The whole answer is one call as a JSON object, or several in a list or one after the other: what is left of most
    other families' formats. Arguments may be called `parameters`, as Llama 3 does. Tokens that say that a call comes
    (`<|python_tag|>`, `[TOOL_CALLS]`) are special ones: nothing of them is in the text."""

    markers = ()

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            f"You have access to these functions:\n{described}\nTo call one, answer with nothing but JSON: "
            '{"name": <name>, "arguments": <arguments>}'
        )

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return "\n".join(_written(call, "arguments") for call in calls)

    def forced(self, tools: Sequence[Function], *, parallel: bool) -> str:
        several = f' | "[" body (", " body){{1,{MAX_FORCED_CALLS - 1}}} "]"' if parallel else ""
        return f"start: body{several}\n{_call_rules(tools, 'arguments')}"

    def strict(self, tools: Sequence[Function], *, parallel: bool) -> str:
        return (
            f"start: (TEXT | calls)\nTEXT: /([^\\{{\\[\\s](.|\\n)*)?/\n"
            f"calls: {self.forced(_loosened(tools), parallel=parallel).removeprefix('start: ')}"
        )

    def reader(self) -> CallReader:
        return _JsonReader()


@final
class _JsonReader:
    __slots__ = ("_call", "_calls", "_lead", "_speaks", "_text")

    def __init__(self) -> None:
        self._text = ""  # not looked at yet
        self._lead = ""  # what was read before the first call: text, if there is none
        self._call: Call | None = None
        self._calls = 0
        self._speaks = False  # it is text from here on

    def push(self, text: str) -> list[CallEvent]:
        self._text += text
        events: list[CallEvent] = []
        while self._text:
            events += self._step()
        return events

    def finish(self) -> list[CallEvent]:
        unread = "" if self._call is None or self._call.begun else self._call.raw
        rest = self._lead + unread if not self._calls else unread
        return [Said(rest)] if rest else []

    def _step(self) -> list[CallEvent]:
        text, self._text = self._text, ""
        if self._speaks:
            return [Said(text)]
        if self._call is None:
            call_at = len(text) - len(text.lstrip(" \t\r\n" + ("[" if not self._calls else ",;]")))
            self._lead += text[:call_at]
            if call_at == len(text):
                return []
            self._call, text = Call(), text[call_at:]
        try:
            events, rest = self._call.push(text)
        except NoCall:
            said = self._call.raw if self._calls else self._lead + self._call.raw
            self._call, self._speaks, self._lead = None, True, ""
            return [Said(said)]
        if rest is not None:
            self._call, self._text = None, rest
        if events and isinstance(events[0], CallBegun):
            self._calls += 1
        return events


# ------------------------------------------------------------------------------------------------- parts


def spelled_out(
    messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]], format: ToolFormat
) -> list[TemplateMessage]:
    """The conversation for a chat template that knows no tools: a system message describes them, calls are text of the
    assistant, and what tools answered is said by the user."""
    spelled: list[TemplateMessage] = []
    for at, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if at and messages[at - 1]["role"] == "tool":
                content = f"{spelled.pop()['content']}\n{content}"
        elif "tool_calls" in message:
            content = "\n".join(filter(None, (content, format.write(message["tool_calls"]))))
        spelled.append({"role": role, "content": content})
    if tools:
        described = format.describe(tools)
        if spelled and spelled[0]["role"] == "system":
            described = f"{spelled.pop(0)['content']}\n\n{described}"
        spelled.insert(0, {"role": "system", "content": described})
    return spelled


def _written(call: Mapping[str, Any], key: str) -> str:
    function = call["function"]
    return json.dumps({"name": function["name"], key: function["arguments"]}, ensure_ascii=False)


def _begun_at_end(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)


ToolFormatName = Literal["hermes", "json"]
FORMATS: Mapping[ToolFormatName, ToolFormat] = {"hermes": Hermes(), "json": Json()}
"""Of models that spell everything out."""


def format_named(name: ToolFormatName, has_token: Callable[[str], bool]) -> ToolFormat:
    """Of a model of which `has_token` says whether it has a token of its own for a text."""
    own = name == "hermes" and has_token(Hermes.BEGIN) and has_token(Hermes.END)
    return Hermes(own_tokens=True) if own else FORMATS[name]


def format_of_template(template: str) -> ToolFormatName:
    """Which one a chat template speaks of."""
    return "hermes" if Hermes.BEGIN in template or '"parameters"' not in template else "json"
