"""How an end hears from the benchmark: one JSON object a line, over a socket that it inherits.

Owns: the end's side of that socket, and its death with its parent. Imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import json
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

_PR_SET_PDEATHSIG = 1
Message = dict[str, Any]


class Control:
    """The first line is what the end is to be (`spec`); each further one is a command that wants one answer."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self._socket = socket.socket(fileno=int(sys.argv[1]))
        self._lines = self._socket.makefile("rb", buffering=0)
        self.spec = self.receive()

    def receive(self) -> Message:
        line = self._lines.readline()
        if not line:
            raise SystemExit(0)
        message: Message = json.loads(line)
        return message

    def send(self, message: Mapping[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def readable(self, wait_s: float) -> bool:
        """A command is there, or came within `wait_s`."""
        return bool(select.select([self._socket], [], [], wait_s)[0])

    def serve(self, commands: Mapping[str, Callable[[Message], Message]]) -> None:
        """Until the parent says "quit" or is gone."""
        while (message := self.receive())["op"] != "quit":
            self.send(commands[message["op"]](message))


class Meter:
    """CPU time of this process, all its threads, user and system."""

    def __init__(self) -> None:
        self._at_s = time.process_time()

    def restart(self) -> None:
        self._at_s = time.process_time()

    def read(self) -> float:
        return time.process_time() - self._at_s
