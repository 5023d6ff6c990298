"""A TCP proxy in a process of its own, between every two peers: it delays, stalls, cuts, truncates and damages.

A *door* is a port that stays the same while processes behind it come and go: that is how a successor sits on the same
address. Doors are made on request. Faults are drawn per portion of bytes, from a seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.context
import os
import random
import socket
import struct
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection

from baton.transfer.process import die_with_parent

PORTION_BYTES = 1 << 16
WAIT_S = 20.0
_LAST_WORDS_S = 0.05


@dataclass(frozen=True, slots=True)
class ByteFaults:
    """Chances per portion of at most PORTION_BYTES. `flip` turns one bit over; `double` sends the portion twice."""

    delay: float = 0.0
    stall: float = 0.0
    cut: float = 0.0
    truncate: float = 0.0
    flip: float = 0.0
    double: float = 0.0
    flip_from_bytes: int = 1  # only in portions so large
    delay_s: float = 0.02  # at most
    stall_s: float = 1.0  # at most


@dataclass(frozen=True, slots=True)
class Behind:
    """From now on this is behind the door; what was connected to another one is cut. Answered with the door's port."""

    door: str
    port: int


@dataclass(frozen=True, slots=True)
class SetFaults:
    """For all doors whose names end so."""

    ending: str
    faults: ByteFaults


@dataclass(frozen=True, slots=True)
class Cut:
    """Every connection through doors whose names begin so."""

    beginning: str


@dataclass(frozen=True, slots=True)
class Hold:
    """What comes out of the door stops after so many more bytes, until `Release`."""

    door: str
    after_bytes: int


@dataclass(frozen=True, slots=True)
class Release:
    """What was held goes on its way."""

    door: str


@dataclass(frozen=True, slots=True)
class Count:
    """Answered with what has been done so far."""


@dataclass(slots=True)
class _Door:
    name: str
    upstream: int
    port: int = 0
    connections: set[asyncio.StreamWriter] = field(default_factory=set)
    hold_after_bytes: int | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)


class _Proxy:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._doors: dict[str, _Door] = {}
        self._faults: dict[str, ByteFaults] = {}
        self._counts: Counter[str] = Counter()
        self._servers: list[asyncio.Server] = []

    async def do(self, command: object) -> object:
        match command:
            case Behind(name, port):
                door = self._doors.get(name)
                if door is None:
                    door = self._doors[name] = _Door(name, port)
                    server = await asyncio.start_server(lambda r, w: self._serve(door, r, w), "127.0.0.1", 0)
                    self._servers.append(server)
                    door.port = server.sockets[0].getsockname()[1]
                if door.upstream != port:
                    self._cut(door)
                    door.upstream = port
                return door.port
            case SetFaults(ending, faults):
                self._faults[ending] = faults
            case Cut(beginning):
                for name, door in self._doors.items():
                    if name.startswith(beginning):
                        self._counts["cut"] += len(door.connections) // 2
                        self._cut(door)
            case Hold(name, after_bytes):
                self._doors[name].hold_after_bytes = after_bytes
                self._doors[name].released.clear()
            case Release(name):
                self._doors[name].hold_after_bytes = None
                self._doors[name].released.set()
            case Count():
                return dict(self._counts)
        return None

    def _cut(self, door: _Door) -> None:
        for writer in list(door.connections):
            _reset(writer)

    def _faults_of(self, door: _Door) -> ByteFaults:
        return next((faults for end, faults in self._faults.items() if door.name.endswith(end)), ByteFaults())

    async def _serve(self, door: _Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", door.upstream)
        except OSError:
            _reset(writer)
            return
        door.connections |= {writer, back}
        try:
            await asyncio.gather(self._carry(door, reader, back, False), self._carry(door, there, writer, True))
        except (OSError, EOFError):
            pass
        finally:
            door.connections -= {writer, back}
            for end in (writer, back):
                _reset(end)

    async def _carry(
        self, door: _Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, comes_out: bool
    ) -> None:
        """One direction, to its end."""
        while data := await reader.read(PORTION_BYTES):
            if comes_out and door.hold_after_bytes is not None:
                data = await self._hold(door, door.hold_after_bytes, data, writer)
            await self._carry_portion(self._faults_of(door), data, writer)
        raise EOFError

    async def _hold(self, door: _Door, after_bytes: int, data: bytes, writer: asyncio.StreamWriter) -> bytes:
        """Returns what may go on now."""
        if len(data) <= after_bytes:
            door.hold_after_bytes = after_bytes - len(data)
            return data
        writer.write(data[:after_bytes])
        await writer.drain()
        door.hold_after_bytes = 0
        self._counts["held"] += 1
        await door.released.wait()
        return data[after_bytes:]

    async def _carry_portion(self, faults: ByteFaults, data: bytes, writer: asyncio.StreamWriter) -> None:
        dice = self._random
        if dice.random() < faults.delay:
            self._counts["delayed"] += 1
            await asyncio.sleep(dice.uniform(0, faults.delay_s))
        if dice.random() < faults.stall:
            self._counts["stalled"] += 1
            await asyncio.sleep(dice.uniform(0, faults.stall_s))
        if dice.random() < faults.cut:
            self._counts["cut"] += 1
            raise EOFError
        if dice.random() < faults.truncate:
            self._counts["truncated"] += 1
            writer.write(data[: dice.randrange(len(data))])
            await writer.drain()
            writer.write_eof()
            await asyncio.sleep(_LAST_WORDS_S)  # read there before the connection breaks
            raise EOFError
        if len(data) >= faults.flip_from_bytes and dice.random() < faults.flip:
            self._counts["flipped"] += 1
            at = dice.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]
        if dice.random() < faults.double:
            self._counts["doubled"] += 1
            writer.write(data)
        writer.write(data)
        await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """An abrupt end: RST, and nothing that waits is sent."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _run(pipe: Connection, seed: int) -> None:
    proxy, loop = _Proxy(seed), asyncio.get_running_loop()
    commands: asyncio.Queue[object] = asyncio.Queue()
    loop.add_reader(pipe.fileno(), lambda: commands.put_nowait(pipe.recv()))
    while (command := await commands.get()) is not None:
        pipe.send(await proxy.do(command))


def _main(pipe: Connection, seed: int) -> None:
    die_with_parent()
    asyncio.run(_run(pipe, seed))


@cache
def process_context() -> multiprocessing.context.ForkServerContext:
    """Processes come and go by the dozen: they begin as copies of one that has imported everything. It takes the path
    from the environment alone."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["chaos_peer", "chaos_proxy"])
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
    return context


class ProxyProcess:
    """From any thread."""

    def __init__(self, seed: int) -> None:
        context = process_context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, seed), daemon=True)
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()

    def door(self, name: str, upstream: int) -> int:
        """The port in front of local port `upstream`; the same for a name, always."""
        port = self._ask(Behind(name, upstream))
        assert isinstance(port, int)
        return port

    def set_faults(self, ending: str, faults: ByteFaults) -> None:
        self._ask(SetFaults(ending, faults))

    def cut(self, beginning: str) -> None:
        self._ask(Cut(beginning))

    def hold(self, door: str, after_bytes: int) -> None:
        self._ask(Hold(door, after_bytes))

    def release(self, door: str) -> None:
        self._ask(Release(door))

    def counts(self) -> dict[str, int]:
        counts = self._ask(Count())
        assert isinstance(counts, dict)
        return counts

    def close(self) -> None:
        self._process.kill()
        self._process.join(WAIT_S)
        self._pipe.close()

    def _ask(self, command: object) -> object:
        with self._lock:
            self._pipe.send(command)
            assert self._pipe.poll(WAIT_S), f"the proxy does not answer {command}"
            return self._pipe.recv()
