"""The items of a response while they come, and the events that tell of them, in OpenAI's order. Pure.

Owns: which item is open, and the numbers of events. Never: reads calls out of text (`tool_choices.py` does).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never, final

from msgspec import UNSET

from baton.deploy.openai_replies import CallDelta, Delta
from baton.deploy.responses_replies import (
    ArgumentsDeltaEvent,
    ArgumentsEvent,
    DeltaEvent,
    ItemEvent,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    PartEvent,
    ResponseEvent,
    ResponseObject,
    ResponseStreamEvent,
    TextEvent,
)


@dataclass(slots=True)
class _Message:
    """Text that goes on."""

    id: str
    parts: list[str] = field(default_factory=list)

    def item(self, status: str) -> OutputMessage:
        return OutputMessage(id=self.id, status=status, content=(self.content,))

    @property
    def content(self) -> OutputText:
        return OutputText(text="".join(self.parts))


@dataclass(slots=True)
class _Call:
    """A call that goes on."""

    id: str
    call_id: str
    name: str
    parts: list[str] = field(default_factory=list)

    def item(self, status: str) -> OutputCall:
        return OutputCall(
            id=self.id, call_id=self.call_id, name=self.name, arguments="".join(self.parts), status=status
        )


@final
class ResponseOutput:
    """Of one response. `begin`, then `push` as often as there is something, then `finish`; and `end` with the response
    that has it all."""

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._numbers = itertools.count()
        self._open: _Message | _Call | None = None
        self.items: tuple[OutputItem, ...] = ()

    def begin(self) -> list[ResponseStreamEvent]:
        return [self.about(f"response.{what}", self._response) for what in ("created", "in_progress")]

    def push(self, deltas: Sequence[Delta]) -> list[ResponseStreamEvent]:
        events: list[ResponseStreamEvent] = []
        for delta in deltas:
            if delta.content is not UNSET:
                events += self._say(delta.content)
            for call in delta.tool_calls or () if delta.tool_calls is not UNSET else ():
                events += self._call(call)
        return events

    def finish(self, status: str) -> list[ResponseStreamEvent]:
        """Nothing follows. A response that says nothing has an empty message."""
        begun = [] if self._open is not None or self.items else self._say("")
        return begun + self._close(status)

    def about(self, kind: str, response: ResponseObject) -> ResponseEvent:
        """It began, or it is over."""
        return ResponseEvent(type=kind, sequence_number=next(self._numbers), response=response)

    # ------------------------------------------------------------------------------------------- items

    def _say(self, text: str) -> list[ResponseStreamEvent]:
        events: list[ResponseStreamEvent] = []
        if not isinstance(self._open, _Message):
            events += self._close("completed")
            self._open = _Message(self._new_id("msg"))
            item = OutputMessage(id=self._open.id, status="in_progress", content=())
            events += [
                self._item("response.output_item.added", item),
                self._part("response.content_part.added", self._open),
            ]
        if text:
            self._open.parts.append(text)
            events.append(
                DeltaEvent(
                    type="response.output_text.delta",
                    sequence_number=next(self._numbers),
                    item_id=self._open.id,
                    output_index=len(self.items),
                    delta=text,
                )
            )
        return events

    def _call(self, delta: CallDelta) -> list[ResponseStreamEvent]:
        """A call begins with its name."""
        events: list[ResponseStreamEvent] = []
        if delta.function.name is not UNSET:
            events += self._close("completed")
            self._open = _Call(self._new_id("fc"), str(delta.id), delta.function.name)
            events.append(self._item("response.output_item.added", self._open.item("in_progress")))
        assert isinstance(self._open, _Call), "more of a call that is not open"
        if delta.function.arguments:
            self._open.parts.append(delta.function.arguments)
            events.append(
                ArgumentsDeltaEvent(
                    type="response.function_call_arguments.delta",
                    sequence_number=next(self._numbers),
                    item_id=self._open.id,
                    output_index=len(self.items),
                    delta=delta.function.arguments,
                )
            )
        return events

    def _close(self, status: str) -> list[ResponseStreamEvent]:
        """The item that is open is whole, or nothing follows."""
        match self._open:
            case None:
                return []
            case _Message():
                events = self._whole_text(self._open)
            case _Call():
                events = [self._whole_arguments(self._open)]
            case _:
                assert_never(self._open)
        item = self._open.item(status)
        events.append(self._item("response.output_item.done", item))
        self.items, self._open = (*self.items, item), None
        return events

    def _whole_text(self, message: _Message) -> list[ResponseStreamEvent]:
        text = TextEvent(
            type="response.output_text.done",
            sequence_number=next(self._numbers),
            item_id=message.id,
            output_index=len(self.items),
            text=message.content.text,
        )
        return [text, self._part("response.content_part.done", message)]

    def _whole_arguments(self, call: _Call) -> ArgumentsEvent:
        return ArgumentsEvent(
            type="response.function_call_arguments.done",
            sequence_number=next(self._numbers),
            item_id=call.id,
            output_index=len(self.items),
            name=call.name,
            arguments="".join(call.parts),
        )

    def _item(self, kind: str, item: OutputItem) -> ItemEvent:
        return ItemEvent(type=kind, sequence_number=next(self._numbers), output_index=len(self.items), item=item)

    def _part(self, kind: str, message: _Message) -> PartEvent:
        return PartEvent(
            type=kind,
            sequence_number=next(self._numbers),
            item_id=message.id,
            output_index=len(self.items),
            part=message.content,
        )

    def _new_id(self, prefix: str) -> str:
        """The response's, with the item's number from the second on."""
        first = self._response.id.replace("resp", prefix, 1)
        return f"{first}-{len(self.items)}" if self.items else first
