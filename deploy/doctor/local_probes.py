"""Probes as children of this process, on this machine: what `baton doctor` measures without a Ray.

Owns: the children, and the sockets on which they are asked (nobody else can reach those). Leaves nothing: a child ends
with its parent, when told to, or is killed.
"""

from __future__ import annotations

import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

import msgspec

from baton.common.ids import WorkerId
from baton.deploy.doctor.probes import Silent, decode_answer
from baton.deploy.doctor.shapes import Answer, Failed, ProbeSpec, Request, Stop

END_S = 3.0
BIRTH = 1
"""The number of its first question: what it is born with."""


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    socket: socket.socket
    said: IO[bytes]
    asked: int = 0
    received: bytearray = field(default_factory=bytearray)

    def ask(self, data: bytes) -> int:
        """The number under which it will answer. What it says to earlier questions is not listened to."""
        self.asked += 1
        self.socket.sendall(f"{self.asked} ".encode() + data + b"\n")
        return self.asked

    def last_words(self) -> str:
        """Of what it wrote to its standard error: why it has ended."""
        self.said.seek(0)
        lines = self.said.read().decode(errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"


class LocalProbes:
    """`Probes`, one child for each spec. `before`: what the command of one begins with, by its name: a container's."""

    def __init__(self, specs: Sequence[ProbeSpec], before: Mapping[WorkerId, Sequence[str]] | None = None) -> None:
        self._run_dir = specs[0].run_dir if specs else ""
        self._children: dict[WorkerId, _Child] = {}
        for spec in specs:
            child = _start((before or {}).get(spec.worker, ()))
            self._children[spec.worker] = child
            child.ask(msgspec.json.encode(spec))

    def pid(self, worker: WorkerId) -> int:
        return self._children[worker].process.pid

    def ask(self, requests: Mapping[WorkerId, Request], within_s: float) -> dict[WorkerId, Answer | Silent]:
        waiting: dict[WorkerId, int] = {}
        answers: dict[WorkerId, Answer | Silent] = {}
        with selectors.DefaultSelector() as selector:
            for worker, request in requests.items():
                child = self._children[worker]
                try:
                    waiting[worker] = child.ask(msgspec.json.encode(request))
                except OSError as error:
                    answers[worker] = Silent(f"its process has ended: {error.strerror}")
                    continue
                selector.register(child.socket, selectors.EVENT_READ, worker)
            until_s = time.monotonic() + within_s
            while waiting and (left_s := until_s - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    worker = key.data
                    answer = self._read(worker, waiting[worker])
                    if answer is not None:
                        answers[worker] = answer
                        del waiting[worker]
                        selector.unregister(self._children[worker].socket)
        return answers | {worker: Silent(f"no answer within {within_s:g} s") for worker in waiting}

    def _read(self, worker: WorkerId, number: int) -> Answer | Silent | None:
        """None: not yet."""
        child = self._children[worker]
        data = child.socket.recv(1 << 16)
        if not data:
            return Silent(f"its process has ended: {child.last_words()}")
        child.received += data
        while b"\n" in child.received:
            line, _, rest = bytes(child.received).partition(b"\n")
            child.received = bytearray(rest)
            answered, _, answer = line.partition(b" ")
            found = decode_answer(answer)
            if int(answered) == number:
                return found
            if int(answered) == BIRTH and isinstance(found, Failed):
                return Silent(found.reason)
        return None

    def close(self) -> tuple[WorkerId, ...]:
        for child in self._children.values():
            try:
                child.ask(msgspec.json.encode(Stop()))
                child.socket.shutdown(socket.SHUT_WR)
            except OSError:
                continue  # it has ended
        until_s = time.monotonic() + END_S
        for child in self._children.values():
            try:
                child.process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.socket.close()
            child.said.close()
        self._children.clear()
        shutil.rmtree(self._run_dir, ignore_errors=True)
        return ()


def _start(before: Sequence[str]) -> _Child:
    ours, theirs = socket.socketpair()
    said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
    with theirs:
        fd = theirs.fileno()
        command = [*before, sys.executable, "-m", "baton.deploy.doctor.probe", str(fd)]
        process = subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    return _Child(process, ours, said)
