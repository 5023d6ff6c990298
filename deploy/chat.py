"""`baton chat`: a conversation in the terminal.

Owns: what has been said so far, the session that keeps its KV on a decode worker between turns, and how the next
answer is drawn. Never: keeps a word of it when it ends, unless it is told to save.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from baton.common.errors import BatonError, ErrorCode, RequestError
from baton.deploy.client import Client, Message, Params
from baton.deploy.show import Wrapped, timing_line

PROMPT, MORE = "› ", "… "
BLOCK = '"""'
SETTABLE: dict[str, type[int] | type[float]] = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "seed": int,
}
HELP = """\
/system TEXT     begin anew, with this instruction    /clear       begin anew
/retry           answer the last message once more    /undo        forget the last message and its answer
/set NAME VALUE  max_tokens, temperature, top_p, top_k or seed; /set alone shows them
/save FILE       the conversation, as JSON            /times       after each answer: where its time went
/quit            or Ctrl-D                            Ctrl-C       stop an answer
A line that ends with \\ goes on in the next one; \"\"\" begins and ends a longer text."""


class Chat:
    """One conversation. `shown` takes the answers, `console` all that is said about them."""

    def __init__(self, client: Client, params: Params, system: str, shown: Callable[[str], None], console: Console):
        self.messages: list[Message] = []
        self._client = client
        self._params = params
        self._shown = shown
        self._console = console
        self._times = False
        self.session: str | None = None
        self._begin(system)

    def take(self, text: str) -> bool:
        """What was typed, a message or a command: False when that went wrong. Raises EOFError after /quit."""
        if not text.startswith("/"):
            return not text.strip() or self._turn(text)
        name, _, rest = text[1:].partition(" ")
        rest = rest.strip()
        match name:
            case "system" if rest:
                self._begin(rest)
            case "clear":
                self._begin(self._system)
            case "retry" | "undo":
                return self._back(again=name == "retry")
            case "set":
                return self._set(*rest.partition(" ")[::2])
            case "save" if rest:
                return self._save(Path(rest).expanduser())
            case "times":
                self._times = not self._times
                self._note("times are shown" if self._times else "times are not shown")
            case "quit" | "exit":
                raise EOFError
            case "help":
                self._note(HELP)
            case _:
                return self._fail(f"no such command: /{name} {rest}".rstrip() + "; /help names them")
        return True

    def close(self) -> None:
        """Gives the session's KV back; one that cannot be reached is closed by its cluster after a while."""
        if self.session is not None:
            session, self.session = self.session, None
            with contextlib.suppress(BatonError):
                self._client.close_session(session)

    def _begin(self, system: str) -> None:
        self.close()
        self._system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def _turn(self, text: str) -> bool:
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            said = self._answer(asked)
        except BatonError as error:
            return self._fail(str(error))
        if said:
            self.messages = [*asked, {"role": "assistant", "content": said}]
        return True

    def _answer(self, asked: list[Message]) -> str:
        """As far as it came: an answer that is interrupted is kept, as the user has read it."""
        try:
            return self._stream(asked)
        except RequestError as error:
            if error.code is not ErrorCode.SESSION_NOT_FOUND:
                raise
            self.session = None  # not used for a while, or its worker died: nothing was said yet
            return self._stream(asked)

    def _stream(self, asked: list[Message]) -> str:
        if self.session is None:
            self.session = self._client.open_session()
        wrapped = Wrapped(self._shown, self._console.width)
        params: Params = {**self._params, "session_id": self.session}
        parts: list[str] = []
        with self._client.stream(asked, **params) as stream:
            try:
                for part in stream:
                    parts.append(part)
                    wrapped.write(part)
            except KeyboardInterrupt:
                self._note("\nstopped")
                return "".join(parts)
            finally:
                wrapped.finish()
            self._shown("\n")
            if self._times:
                self._note(timing_line(stream.answer))
            if stream.answer.finish_reason == "length":
                self._note("cut at max_tokens, or where the model's context ends")
        return "".join(parts)

    def _back(self, *, again: bool) -> bool:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return self._fail("nothing has been answered yet")
        text = self.messages[-2]["content"]
        self.messages = self.messages[:-2]
        return self._turn(text) if again else True

    def _set(self, name: str, value: str) -> bool:
        if name not in SETTABLE:
            if name:
                return self._fail(f"{name!r} cannot be set; {', '.join(SETTABLE)} can")
            self._note(
                ", ".join(f"{key} = {set_to}" for key, set_to in self._params.items()) or "the server's defaults"
            )
            return True
        chosen: dict[str, Any] = {**self._params}
        try:
            chosen[name] = SETTABLE[name](value)
        except ValueError:
            return self._fail(f"{name} = {value!r}: not {'a whole number' if SETTABLE[name] is int else 'a number'}")
        self._params = msgspec.convert(chosen, Params)
        return True

    def _save(self, file: Path) -> bool:
        try:
            file.write_bytes(msgspec.json.format(msgspec.json.encode(self.messages)) + b"\n")
        except OSError as error:
            return self._fail(f"cannot write {file}: {error.strerror}")
        self._note(f"{file}: {len(self.messages)} messages")
        return True

    def _note(self, text: str) -> None:
        self._console.print(f"[dim]{escape(text)}[/]")

    def _fail(self, text: str) -> bool:
        self._console.print(f"[red]{escape(text)}[/]")
        return False


def run_chat(url: str, params: Params, system: str, console: Console) -> bool:
    """Until the end of what is typed, or of a file on stdin. Whether all went well: always, with a person there, who
    has seen it."""
    typed = sys.stdin.isatty()
    with Client(url) as client:
        if typed:
            console.print(f"[bold]{escape(client.model())}[/] [dim]at {escape(client.base_url)}; /help, Ctrl-D ends[/]")
        chat = Chat(client, params, system, _to_stdout, console)
        try:
            results = [chat.take(text) for text in _texts(typed, console)]
        except EOFError:
            return True
        finally:
            chat.close()
    return typed or all(results)


def _texts(typed: bool, console: Console) -> Iterator[str]:
    """One message each, of one line or more."""
    if typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - editing and history, for as long as the process lives
    while True:
        try:
            text = _line(typed, PROMPT)
            if text.strip().startswith(BLOCK):
                yield _block(text.strip().removeprefix(BLOCK), typed)
                continue
            while text.endswith("\\"):
                text = text[:-1] + "\n" + _line(typed, MORE)
            yield text
        except EOFError:
            if typed:
                console.print()
            return
        except KeyboardInterrupt:  # while typing: drops the line
            console.print()


def _block(text: str, typed: bool) -> str:
    lines = [text]
    while not lines[-1].rstrip().endswith(BLOCK):
        lines.append(_line(typed, MORE))
    return "\n".join(lines).rstrip().removesuffix(BLOCK).strip("\n")


def _line(typed: bool, prompt: str) -> str:
    return input(prompt if typed else "")


def _to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
