"""A client that speaks no HTTP but what it is told to, and a stream beside it that must not notice."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Self

import httpx
from http_loopback import GIVE_UP_S, Served


class Raw:
    """One connection. Everything ends by itself: the server closes it, or the test fails."""

    def __init__(self, served: Served, receive_bytes: int = 0) -> None:
        self._socket = socket.socket()
        if receive_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._socket.settimeout(GIVE_UP_S)
        self._socket.connect(("127.0.0.1", port_of(served)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> bool:
        """False: the server is gone."""
        try:
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def dribble(self, data: bytes, every_s: float) -> None:
        """Byte by byte, until all is sent or the server has something to say."""
        self._socket.settimeout(every_s)
        for byte in data:
            if not self.send(bytes([byte])):
                break
            with contextlib.suppress(TimeoutError):
                self._socket.recv(1, socket.MSG_PEEK)
                break
        self._socket.settimeout(GIVE_UP_S)

    def read(self) -> bytes:
        """Until the server closes."""
        parts = []
        with contextlib.suppress(ConnectionResetError):
            while part := self._socket.recv(1 << 16):
                parts.append(part)
        return b"".join(parts)

    def read_until(self, wanted: bytes) -> bytes:
        """At least as far as this."""
        said = b""
        while wanted not in said:
            part = self._socket.recv(1 << 16)
            assert part, said
            said += part
        return said


def ask(served: Served, data: bytes) -> bytes:
    """All that is said until the server closes."""
    with Raw(served) as raw:
        raw.send(data)
        return raw.read()


def status_of(said: bytes) -> int:
    found = re.match(rb"HTTP/1\.1 (\d{3})", said)
    return int(found[1]) if found else 0


def port_of(served: Served) -> int:
    return int(served.url.rsplit(":", 1)[1])


def ended(served: Served) -> dict[str, float]:
    """Connections that broke a limit, by which."""
    page = served.http.get("/metrics").text
    found = re.findall(r'^baton_http_connections_ended_total\{reason="(\w+)"\} (\S+)$', page, re.MULTILINE)
    return {reason: float(count) for reason, count in found}


def open_connections(served: Served) -> int:
    found = re.search(r"^baton_http_connections (\S+)$", served.http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def counted(served: Served, reason: str, times: int = 1) -> Iterator[None]:
    """Such ends are counted, and no others."""
    before = ended(served)
    yield
    after = ended(served)
    assert {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name)} == {
        reason: times
    }


@contextlib.contextmanager
def undisturbed(served: Served, text: str, ca_file: str = "") -> Iterator[None]:
    """Meanwhile somebody reads a stream, over and over, and gets every word of it."""
    stop, answers = threading.Event(), [""]

    def read() -> None:
        body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        verify = ssl.create_default_context(cafile=ca_file) if ca_file else True
        with httpx.Client(timeout=GIVE_UP_S, verify=verify) as client:
            while len(answers) == 1 or not stop.is_set():
                with client.stream("POST", f"{served.url}/v1/chat/completions", json=body) as response:
                    events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
                deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
                answers.append("".join(delta.get("content") or "" for delta in deltas))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
    finally:
        stop.set()
        reader.join(GIVE_UP_S)
    assert len(answers) > 1
    assert set(answers[1:]) == {text}
