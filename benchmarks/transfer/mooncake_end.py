"""One Mooncake transfer engine (TCP, peer-to-peer handshake): memory registered once, then batches of pages by address.
Runs in the peers' environment. The target reads, so that whoever owns the destination pages knows when they are filled.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.transfer import pages
from benchmarks.transfer.control import Control, Message, Meter

PAGES_IN_FLIGHT = 1024


class MooncakeEnd:
    """`spec`: side, page_bytes, pool_bytes."""

    def __init__(self, control: Control) -> None:
        from mooncake.engine import TransferEngine

        spec = control.spec
        self._side, self._page_bytes, pool_bytes = spec["side"], spec["page_bytes"], spec["pool_bytes"]
        self._pool = pages.new_pool(pool_bytes, self._page_bytes)
        if self._side == "source":
            pages.fill(self._pool)
        self._ids = {side: pages.scattered(pool_bytes, self._page_bytes, side) for side in ("source", "target")}
        self._engine: Any = TransferEngine()
        assert self._engine.initialize(f"127.0.0.1:{_free_port()}", "P2PHANDSHAKE", "tcp", "") == 0, "no engine"
        assert self._engine.register_memory(self._pool.ctypes.data, self._pool.nbytes) == 0, "no memory"
        self._meter = Meter()

    def hello(self) -> Message:
        address = f"127.0.0.1:{self._engine.get_rpc_port()}"
        return {"pid": os.getpid(), "address": address, "base": self._pool.ctypes.data}

    def meet(self, peer: Message) -> None:
        self._peer, self._peer_base = peer["address"], peer["base"]

    def commands(self) -> dict[str, Callable[[Message], Message]]:
        return {
            "begin": self._begin,
            "end": self._end,
            "move": self._move,
            "clear": self._clear,
            "check": self._check,
        }

    def _begin(self, message: Message) -> Message:
        self._meter.restart()
        return {}

    def _end(self, message: Message) -> Message:
        return {"cpu_s": self._meter.read()}

    def _move(self, message: Message) -> Message:
        """The engine fails with more than `PAGES_IN_FLIGHT` pages under way: the hand-offs share them."""
        self._meter.restart()
        count = message["pages"] * message["concurrent"]
        started = time.perf_counter()
        ours, theirs = (
            pages.stretch(self._ids[side], message["first"], count).astype(np.int64) for side in ("target", "source")
        )
        for at in range(0, count, PAGES_IN_FLIGHT):
            part = slice(at, at + PAGES_IN_FLIGHT)
            into = (self._pool.ctypes.data + ours[part] * self._page_bytes).tolist()
            out_of = (self._peer_base + theirs[part] * self._page_bytes).tolist()
            lengths = [self._page_bytes] * len(into)
            assert self._engine.batch_transfer_sync_read(self._peer, into, out_of, lengths) == 0, "the transfer failed"
        return {"started": started, "done": time.perf_counter(), "cpu_s": self._meter.read()}

    def _clear(self, message: Message) -> Message:
        self._pool[:] = 0
        return {}

    def _check(self, message: Message) -> Message:
        return pages.check(self._pool, self._ids, message["first"], message["pages"] * message["concurrent"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    control = Control()
    try:
        end = MooncakeEnd(control)
    except ImportError as error:
        hint = "; it needs Debian's libibverbs1" if "libibverbs" in str(error) else ""
        control.send({"failed": f"mooncake cannot be imported: {error}{hint}"})
        return
    control.send({"hello": end.hello()})
    end.meet(control.receive()["peer"])
    control.send({"ready": True})
    control.serve(end.commands())


if __name__ == "__main__":
    main()
