"""Which tools an answer may call, must call, and has called.

Owns: the reading of `tools`, `tool_choice` and `parallel_tool_calls`, the grammar that they amount to, and the pieces
of an answer that calls something. Never: knows how a family of models writes calls (`tool_formats.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never, final

from msgspec import UnsetType

from baton.common.messages import MAX_GRAMMAR_CHARS, Grammar
from baton.deploy.chat_messages import ChosenTool, Tool, ToolChoice
from baton.deploy.guided_api import Asked, schema_asked
from baton.deploy.json_bodies import refusal
from baton.deploy.openai_replies import CallDelta, Delta, FunctionDelta, MadeCall, MadeFunction
from baton.deploy.tool_calls import Arguments, CallBegun, CallEvent, Said
from baton.deploy.tool_formats import ToolFormat


class Callable(Protocol):
    """What requests that may call tools share."""

    @property
    def tools(self) -> Sequence[Tool] | None: ...

    @property
    def tool_choice(self) -> ToolChoice | None: ...

    @property
    def parallel_tool_calls(self) -> bool | None: ...


@dataclass(frozen=True, slots=True)
class Calling:
    """An answer that may call tools. `guided`: those whose arguments have to follow their schemas, with the fields of
    these; none where the model is free."""

    tools: tuple[Tool, ...]
    parallel: bool
    format: ToolFormat
    asked: Asked | None
    guided: tuple[Asked, ...]

    def writer(self) -> CallWriter:
        """For one answer."""
        return CallWriter(self.format, parallel=self.parallel)


def calling_asked(request: Callable, format: ToolFormat) -> Calling | None:
    """None: the answer calls nothing. Raises RequestError INVALID_REQUEST."""
    tools, choice = tuple(request.tools or ()), request.tool_choice
    names = [tool.function.name for tool in tools]
    twice = next((at for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise refusal(f"tools[{twice}].function.name", f"{names[twice]} is there twice")
    if not tools and choice not in (None, "none", "auto"):
        raise refusal("tool_choice", "needs tools")
    if not tools or choice == "none":
        return None
    parallel = request.parallel_tool_calls is not False
    functions = [tool.function for tool in tools]
    fields = [f"tools[{at}].function.parameters" for at in range(len(tools))]
    match choice:
        case None | "auto":
            guided = [at for at, function in enumerate(functions) if function.strict]
            grammar = format.strict(functions, parallel=parallel) if guided else ""
        case "required":
            guided = list(range(len(functions)))
            grammar = format.forced(functions, parallel=parallel)
        case ChosenTool(function=chosen):
            if chosen.name not in names:
                raise refusal("tool_choice.function.name", f"{chosen.name!r} is not among the tools")
            guided = [names.index(chosen.name)]
            grammar = format.forced([functions[guided[0]]], parallel=False)
        case _:
            assert_never(choice)
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise refusal("tools", f"are a grammar of {len(grammar)} characters; the limit is {MAX_GRAMMAR_CHARS}")
    asked = Asked("tools", Grammar(kind="lark", text=grammar)) if grammar else None
    return Calling(
        tools, parallel, format, asked, tuple(schema_asked(fields[at], functions[at].schema) for at in guided)
    )


class Writer(Protocol):
    """Turns the text of one answer into the pieces that a client gets. `called`: how many tools were."""

    called: int

    def push(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


@final
class PlainWriter:
    """Of an answer that calls nothing."""

    called = 0

    def push(self, text: str) -> list[Delta]:
        return [Delta(content=text)] if text else []

    def finish(self) -> list[Delta]:
        return []


@final
class CallWriter:
    """Of one that may."""

    __slots__ = ("_parallel", "_reader", "called")

    def __init__(self, format: ToolFormat, *, parallel: bool) -> None:
        self._reader = format.reader()
        self._parallel = parallel
        self.called = 0

    def push(self, text: str) -> list[Delta]:
        return self._deltas(self._reader.push(text))

    def finish(self) -> list[Delta]:
        return self._deltas(self._reader.finish())

    def _deltas(self, events: Sequence[CallEvent]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            match event:
                case Said(text):
                    deltas.append(Delta(content=text))
                case CallBegun(name):
                    self.called += 1
                    function = FunctionDelta(name=name, arguments="")
                    deltas += self._delta(CallDelta(self._index, f"call_{secrets.token_hex(12)}", "function", function))
                case Arguments(text):
                    deltas += self._delta(CallDelta(index=self._index, function=FunctionDelta(arguments=text)))
                case _:
                    assert_never(event)
        return deltas

    @property
    def _index(self) -> int:
        return self.called - 1

    def _delta(self, call: CallDelta) -> list[Delta]:
        """Nothing of a second call, where one was all that was wanted."""
        return [Delta(tool_calls=[call])] if self._parallel or call.index == 0 else []


def told(deltas: Sequence[Delta]) -> tuple[str, list[MadeCall]]:
    """What they are together: the text of the answer, and its calls."""
    text: list[str] = []
    calls: list[tuple[CallDelta, list[str]]] = []
    for delta in deltas:
        text += [] if isinstance(delta.content, UnsetType) else [delta.content]
        for call in () if isinstance(delta.tool_calls, UnsetType) else delta.tool_calls:
            if call.index == len(calls):
                calls.append((call, []))
            calls[call.index][1].append(call.function.arguments)
    made = [
        MadeCall(id=str(call.id), function=MadeFunction(name=str(call.function.name), arguments="".join(arguments)))
        for call, arguments in calls
    ]
    return "".join(text), made
