"""A child process that answers lines of JSON, one for each, and can be stopped while it is not its turn.

Owns: the process, its two descriptors, and its last words. Never: a measurement that outlives a command.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ANSWER_S = 120.0

Message = dict[str, Any]


class EndFailed(RuntimeError):
    """A child process went away or cannot be what it should be; says why."""


class ChildProcess:
    """`python -m module DESCRIPTOR`, told `spec` first. Commands are answered in order, each within `answer_s`."""

    def __init__(
        self,
        python: str,
        module: str,
        spec: Mapping[str, Any],
        environment: Mapping[str, str],
        *,
        name: str,
        answer_s: float = ANSWER_S,
    ) -> None:
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [python, "-m", module, str(theirs.fileno())],
            cwd=ROOT,
            env=os.environ | environment,
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )
        theirs.close()
        ours.settimeout(answer_s)
        self._answer_s = answer_s
        self._socket = ours
        self._lines = ours.makefile("rb", buffering=0)
        self.name = name
        self.pid = self._process.pid
        self.send(spec)

    def send(self, message: Mapping[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message:
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise EndFailed(f"{self.name} did not answer in {self._answer_s:.0f} s") from None
        if not line:
            raise EndFailed(f"{self.name} ended: {self._last_words()}")
        message: Message = json.loads(line)
        if "failed" in message:
            raise EndFailed(message["failed"])
        return message

    def ask(self, op: str, **arguments: Any) -> Message:
        self.send({"op": op, **arguments})
        return self.receive()

    @property
    def has_spoken(self) -> bool:
        """An answer is there, or the process is gone: `receive` will not wait."""
        return bool(select.select([self._socket], [], [], 0.0)[0])

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wait_stopped(self) -> None:
        """Until the kernel has it stopped, or it has answered instead."""
        stat = Path(f"/proc/{self.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T" and not self.has_spoken:
            time.sleep(0.001)

    def close(self) -> None:
        if self._process.poll() is None:
            self.resume()
            try:
                self.send({"op": "quit"})
                self._process.wait(15.0)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                self._process.kill()
                self._process.wait()
        self._lines.close()
        self._socket.close()
        self._errors.close()

    def _last_words(self) -> str:
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        return text.splitlines()[-1] if text else f"exit status {self._process.returncode}"
