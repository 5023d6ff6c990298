"""`baton chat` against a served gateway: turns, sessions, commands, interrupts, and text that comes from a pipe."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from http_loopback import Loopback, Served, saying, serving
from rich.console import Console

from baton.client import Client
from baton.common.messages import unpack_tokens
from baton.deploy.chat import PROMPT, SETTABLE, Chat
from baton.deploy.cli import FAILED, OK

TEXT = "Hello wörld €😀!"


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(Loopback(script=saying(TEXT))) as served:
        yield served


class Terminal:
    """A chat, and what a person would see of it."""

    def __init__(self, client: Client, system: str = "") -> None:
        self.notes = io.StringIO()
        self.answers: list[str] = []
        console = Console(file=self.notes, width=200, no_color=True)
        self.chat = Chat(client, {}, system, self.answers.append, console)

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(message["role"], message["content"]) for message in self.chat.messages]


@pytest.fixture
def terminal(served: Served) -> Iterator[Terminal]:
    with Client(served.url) as client:
        terminal = Terminal(client, "Be brief.")
        yield terminal
        terminal.chat.close()


def prompts(served: Served) -> list[str]:
    tokens = (unpack_tokens(submit.prompt) for submit in served.worker.submits)
    return [bytes(token for token in prompt if token < 256).decode() for prompt in tokens]


def test_turns_are_one_conversation_in_one_session(served: Served, terminal: Terminal) -> None:
    assert terminal.chat.take("one")
    assert terminal.chat.take("two")
    assert "".join(terminal.answers) == f"{TEXT}\n" * 2
    assert terminal.said == [
        ("system", "Be brief."), ("user", "one"), ("assistant", TEXT), ("user", "two"), ("assistant", TEXT),
    ]  # fmt: skip
    first, second = prompts(served)
    assert "Be brief." in first
    assert all(text in second for text in ("one", TEXT, "two"))
    assert len({submit.session_id for submit in served.worker.submits}) == 1


def test_a_session_that_is_gone_is_opened_again(served: Served, terminal: Terminal) -> None:
    terminal.chat.take("one")
    session = served.worker.submits[0].session_id
    assert session
    gone = served.http.delete(f"/v1/sessions/{_public_session(terminal)}")
    assert gone.is_success
    assert terminal.chat.take("two")
    assert served.worker.submits[-1].session_id not in ("", session)
    assert "one" in prompts(served)[-1]


def _public_session(terminal: Terminal) -> str:
    session = terminal.chat.session
    assert session is not None
    return session


def test_a_turn_that_fails_is_not_part_of_the_conversation(served: Served, terminal: Terminal) -> None:
    terminal.chat.take("one")
    assert not terminal.chat.take("x" * 1000)
    assert "256" in terminal.notes.getvalue()
    assert [text for _, text in terminal.said] == ["Be brief.", "one", TEXT]


def test_retry_undo_and_beginning_anew(served: Served, terminal: Terminal) -> None:
    assert not terminal.chat.take("/retry")
    terminal.chat.take("one")
    assert terminal.chat.take("/retry")
    assert prompts(served)[0] == prompts(served)[1]
    assert terminal.chat.take("/undo")
    assert terminal.said == [("system", "Be brief.")]
    terminal.chat.take("/system Rhyme.")
    assert terminal.said == [("system", "Rhyme.")]
    terminal.chat.take("two")
    terminal.chat.take("/clear")
    assert terminal.said == [("system", "Rhyme.")]


def test_settings_reach_the_request_and_wrong_ones_are_told(served: Served, terminal: Terminal) -> None:
    assert all(terminal.chat.take(f"/set {name} 1") for name in SETTABLE)
    assert terminal.chat.take("hi")
    sampling = served.worker.submits[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (1, 1.0, 1)
    assert "cut at max_tokens" in terminal.notes.getvalue()
    for wrong, says in (("/set top_k x", "not a whole number"), ("/set speed 9", "cannot be set"), ("/sing", "/help")):
        assert not terminal.chat.take(wrong)
        assert says in terminal.notes.getvalue()


def test_the_conversation_is_saved_when_asked_for(terminal: Terminal, tmp_path: Path) -> None:
    terminal.chat.take("one")
    file = tmp_path / "talk.json"
    assert terminal.chat.take(f"/save {file}")
    assert msgspec.json.decode(file.read_bytes())[-1] == {"role": "assistant", "content": TEXT}
    assert not terminal.chat.take("/save /nowhere/talk.json")


def test_an_answer_that_is_interrupted_is_cancelled_and_kept_as_far_as_it_came() -> None:
    with serving(Loopback(script=saying("word " * 40), pace_s=0.01)) as served, Client(served.url) as client:
        terminal = Terminal(client)

        def interrupt(text: str) -> None:
            terminal.answers.append(text)
            if len(terminal.answers) == 5:
                raise KeyboardInterrupt

        terminal.chat = Chat(client, {}, "", interrupt, Console(file=terminal.notes, width=200))
        assert terminal.chat.take("go on")
        assert served.worker.cancelled.wait(5)
        (_, (role, said)) = terminal.said
        assert role == "assistant"
        assert "word " * 40 != said != ""
        assert "stopped" in terminal.notes.getvalue()
        terminal.chat.close()


def command(served: Served) -> list[str]:
    return [sys.executable, "-m", "baton.deploy.cli", "chat", "--url", served.url]


def test_a_file_on_stdin_is_a_turn_a_line(served: Served) -> None:
    done = subprocess.run(command(served), input="one\ntwo \\\nlines\n", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (OK, f"{TEXT}\n" * 2)
    assert "two \nlines" in prompts(served)[1]
    done = subprocess.run(command(served), input="/sing\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == FAILED
    assert "no such command: /sing" in done.stderr


def test_a_person_at_a_terminal_sees_a_prompt_and_ends_with_control_d(served: Served) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command(served), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown, seen = b"", 0
    try:
        for until, typed in ((PROMPT.encode(), b'"""a\nb"""\n'), (TEXT.encode(), b""), (PROMPT.encode(), b"\x04")):
            while (found := shown.find(until, seen)) < 0:
                shown += os.read(ours, 4096)
            seen = found + len(until)
            os.write(ours, typed)
        assert process.wait(20) == OK
    finally:
        process.kill()
        os.close(ours)
    assert "a\nb" in prompts(served)[0]
    assert b"fake" in shown
