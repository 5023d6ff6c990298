"""One NIXL agent (UCX backend), used as it is meant to be: memory registered and page descriptors prepared once, then
one transfer per hand-off by page indices, with a notification. Runs in the peers' environment.

Like for like: the time runs from asking for the transfer until whoever owns the destination pages knows that they are
filled. READ: the target asks, and is told. WRITE: the source asks, and the target sees the notification.
"""

from __future__ import annotations

import base64
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.transfer import pages
from benchmarks.transfer.control import Control, Message, Meter

WAIT_S = 60.0
SPIN_BYTES = 1 << 20
"""Up to here an end without a progress thread that only looks once in a while would add its own delay."""


class NixlEnd:
    """`spec`: side, operation (READ or WRITE), progress_thread, page_bytes, pool_bytes, environment."""

    def __init__(self, control: Control) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config  # after the environment is set

        self._control, self._spec = control, control.spec
        self._side, self._operation = self._spec["side"], self._spec["operation"]
        page_bytes, pool_bytes = self._spec["page_bytes"], self._spec["pool_bytes"]
        self._pool = pages.new_pool(pool_bytes, page_bytes)
        if self._side == "source":
            pages.fill(self._pool)
        self._ids = {side: pages.scattered(pool_bytes, page_bytes, side) for side in ("source", "target")}
        self._agent: Any = nixl_agent(
            f"{self._side}-{os.getpid()}", nixl_agent_config(enable_prog_thread=self._spec["progress_thread"])
        )
        self._registered = self._agent.register_memory([(self._pool.ctypes.data, self._pool.nbytes, 0, "")], "DRAM")
        self._is_initiator = self._side == ("target" if self._operation == "READ" else "source")
        self._meter = Meter()
        self._notified = 0
        self._last_notified_s = 0.0
        self._opened = 0

    def hello(self) -> Message:
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"pid": os.getpid(), "metadata": metadata, "base": self._pool.ctypes.data}

    def meet(self, peer: Message) -> None:
        self._peer = self._agent.add_remote_agent(base64.b64decode(peer["metadata"]))
        if self._is_initiator:
            self._local = self._agent.prep_xfer_dlist(
                "NIXL_INIT_AGENT", self._descriptors(self._pool.ctypes.data), "DRAM"
            )
            self._remote = self._agent.prep_xfer_dlist(self._peer, self._descriptors(peer["base"]), "DRAM")

    def commands(self) -> dict[str, Callable[[Message], Message]]:
        return {
            "begin": self._begin,
            "end": self._end,
            "move": self._move,
            "clear": self._clear,
            "check": self._check,
            "post": self._post,
            "stop_when": self._stop_when,
            "serve": self._serve,
            "reuse": self._reuse,
            "foreign": self._count_foreign,
        }

    # ------------------------------------------------------------------------------------- measurement

    def _begin(self, message: Message) -> Message:
        """Until "end" the passive end makes progress: so it is told, and over TCP it serves."""
        self._meter.restart()
        self._notified = 0
        self._wanted = message["concurrent"]
        self._control.send({})
        small = message["pages"] * message["concurrent"] * self._spec["page_bytes"] <= SPIN_BYTES
        spin = self._spec["spin"] or (small and not self._spec["progress_thread"])
        while not self._control.readable(0.0 if spin else 0.001):
            self._take_notifications()
        self._control.receive()
        return self._end(message)

    def _end(self, message: Message) -> Message:
        deadline_s = time.monotonic() + WAIT_S
        while self._notified < self._wanted:
            self._take_notifications()
            assert time.monotonic() < deadline_s, f"{self._notified} of {self._wanted} notifications"
        return {"cpu_s": self._meter.read(), "done": self._last_notified_s if self._operation == "WRITE" else None}

    def _move(self, message: Message) -> Message:
        self._meter.restart()
        count = message["pages"]
        chosen = [self._indices(message["first"] + number * count, count) for number in range(message["concurrent"])]
        started = time.perf_counter()
        open_handles = [self._start(*indices) for indices in chosen]
        while open_handles:
            open_handles = [handle for handle in open_handles if not self._finished(handle)]
        return {"started": started, "done": time.perf_counter(), "cpu_s": self._meter.read()}

    def _clear(self, message: Message) -> Message:
        self._pool[:] = 0
        return {}

    def _check(self, message: Message) -> Message:
        return pages.check(self._pool, self._ids, message["first"], message["pages"] * message["concurrent"])

    # -------------------------------------------------------------------------------------- late writes

    def _post(self, message: Message) -> Message:
        """Starts moving the first `pages` pages. Answers first: what follows may be stopped anywhere."""
        self._opened = message["pages"]
        if not self._is_initiator:
            return {}
        self._control.send({})
        handle = self._start(*self._indices(0, self._opened))
        while not self._finished(handle):
            pass
        return {"done": time.perf_counter()}

    def _stop_when(self, message: Message) -> Message:
        ids = pages.stretch(self._ids[self._side], 0, self._opened)
        deadline_s = time.monotonic() + WAIT_S
        while (landed := pages.landed_pages(self._pool, ids)) < message["landed"]:
            assert time.monotonic() < deadline_s, f"{landed} pages landed"
            self._take_notifications()
        os.kill(message["pid"], signal.SIGSTOP)
        return {"landed": landed}

    def _serve(self, message: Message) -> Message:
        """Until "end": as a live peer would."""
        self._control.send({})
        while not self._control.readable(0.0):
            self._take_notifications()
        self._control.receive()
        return {}

    def _reuse(self, message: Message) -> Message:
        """Gives the pages to somebody else; `deregister`: after withdrawing all memory from NIXL."""
        if message["deregister"]:
            self._agent.deregister_memory(self._registered)
        pages.reuse(self._pool, pages.stretch(self._ids[self._side], 0, self._opened))
        return {}

    def _count_foreign(self, message: Message) -> Message:
        return {"foreign": pages.foreign_pages(self._pool, pages.stretch(self._ids[self._side], 0, self._opened))}

    # ------------------------------------------------------------------------------------------ helpers

    def _descriptors(self, base: int) -> Any:
        page_bytes = self._spec["page_bytes"]
        table = np.zeros((len(self._pool), 3), dtype=np.uint64)
        table[:, 0] = base + np.arange(len(self._pool), dtype=np.uint64) * page_bytes
        table[:, 1] = page_bytes
        return table

    def _indices(self, first: int, count: int) -> tuple[pages.Ids, pages.Ids]:
        mine, other = ("target", "source") if self._side == "target" else ("source", "target")
        return pages.stretch(self._ids[mine], first, count), pages.stretch(self._ids[other], first, count)

    def _start(self, ours: pages.Ids, theirs: pages.Ids) -> Any:
        handle = self._agent.make_prepped_xfer(self._operation, self._local, ours, self._remote, theirs, b"done")
        assert self._agent.transfer(handle) != "ERR", "the transfer could not be posted"
        return handle

    def _finished(self, handle: Any) -> bool:
        state = self._agent.check_xfer_state(handle)
        assert state in ("DONE", "PROC"), state
        if state == "DONE":
            self._agent.release_xfer_handle(handle)
        return bool(state == "DONE")

    def _take_notifications(self) -> None:
        count = sum(map(len, self._agent.get_new_notifs().values()))
        if count:
            self._notified += count
            self._last_notified_s = time.perf_counter()


def main() -> None:
    control = Control()
    os.environ.update(control.spec["environment"])
    try:
        end = NixlEnd(control)
    except ImportError as error:
        control.send({"failed": f"nixl cannot be imported: {error}"})
        return
    control.send({"hello": end.hello()})
    end.meet(control.receive()["peer"])
    control.send({"ready": True})
    control.serve(end.commands())


if __name__ == "__main__":
    main()
