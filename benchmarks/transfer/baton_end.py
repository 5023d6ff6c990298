"""One worker's I/O thread without an engine: a target opens hand-offs and times them, a source answers each offer at
once. A hand-off is measured whole: from posting OpenSink to SinkCommitted.

Run by `children.py` as `python -m benchmarks.transfer.baton_end <descriptor>`.
"""

from __future__ import annotations

import cProfile
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from baton.common.config import ClusterConfig, LivenessConfig, TransferConfig
from baton.common.engine.batch import KvMemory
from baton.common.engine.core_api import FromPeer, MembershipView, SendTo
from baton.common.ids import Epoch, HandoffId, HandoffKey, RequestId, Stamp, WorkerId
from baton.common.kv.buffers import NumpyKvBuffer
from baton.common.kv.layout import Component
from baton.common.messages import FinishAck, SamplingParams
from baton.transfer.api import (
    FinishSource,
    OfferReceived,
    OpenSink,
    PrefillResult,
    ShipRegion,
    SinkCommitted,
    SinkFailed,
    SourceAborted,
    SourceReleased,
    SourceStopping,
)
from baton.transfer.io import IoThread
from baton.transfer.keys import ControllerDoor, KeyPair
from benchmarks.transfer import pages
from benchmarks.transfer.control import Control, Message, Meter

WAIT_S = 60.0
EventT = TypeVar("EventT")
PING = FinishAck(request_id=RequestId("ping"), placement=0)


class BatonEnd:
    """`spec`: side, worker, peers, lane, keys (or null), hub, members, page_bytes, pool_bytes, dead_after_s,
    environment, profile (a folder, or "")."""

    def __init__(self, control: Control) -> None:
        spec = control.spec
        self.side = spec["side"]
        self._peers = [WorkerId(peer) for peer in spec["peers"]]
        page_bytes, pool_bytes = spec["page_bytes"], spec["pool_bytes"]
        buffer = NumpyKvBuffer(1 + pool_bytes // page_bytes, page_bytes, page_size=1, shared=True)
        self.pool = buffer.as_bytes()
        self.pool[:] = 0
        if self.side == "source":
            pages.fill(self.pool)
        self._ids = {side: pages.scattered(pool_bytes, page_bytes, side) for side in ("source", "target")}
        self._events: queue.Queue[object] = queue.Queue()
        self._views: queue.Queue[MembershipView] = queue.Queue()
        self._handoffs = 0
        self._meter = Meter()
        self._opened: Message = {}
        self._source_log: list[tuple[str, float]] = []
        self._source_over = threading.Event()
        self._reuse_when_over = False
        config = ClusterConfig(
            transfer=TransferConfig(lanes=(spec["lane"],)),
            liveness=LivenessConfig(
                heartbeat_interval_s=1.0, republish_interval_s=10.0, dead_after_s=spec["dead_after_s"]
            ),
        )
        self._lane = spec["lane"]
        self._profile = _profile_threads(spec["profile"])
        self._io = IoThread(
            Stamp(WorkerId(spec["worker"]), 1, Epoch(os.getpid())),
            "prefill" if self.side == "source" else "decode",
            config,
            KvMemory.full(buffer, page_size=1),
            KeyPair.generate() if spec["hub_key"] else None,
            self._deliver,
            controller=ControllerDoor(
                spec["hub"], spec["hub_key"], KeyPair(**spec["guest"]) if spec["guest"] else None
            ),
        )
        self._io.start()
        self._io.wait_admitted(WAIT_S)
        while len(self._views.get(timeout=WAIT_S).members) < spec["members"]:
            pass

    def commands(self) -> dict[str, Callable[[Message], Message]]:
        return {
            "begin": self._begin,
            "end": self._end,
            "move": self._move,
            "ping": self._ping,
            "clear": self._clear,
            "check": self._check,
            "open": self._open,
            "stop_when": self._stop_when,
            "outcome": self._outcome,
            "source_log": self._take_source_log,
            "forget_log": self._forget_source_log,
            "reuse_when_over": self._reuse_source_when_over,
            "reuse": self._reuse,
            "foreign": self._count_foreign,
        }

    def close(self) -> None:
        assert self._io.stop(WAIT_S)
        self._profile()

    # ------------------------------------------------------------------------------------- measurement

    def _begin(self, message: Message) -> Message:
        self._meter.restart()
        return {}

    def _end(self, message: Message) -> Message:
        return {"cpu_s": self._meter.read()}

    def _move(self, message: Message) -> Message:
        """`concurrent` hand-offs of `pages` pages from every peer, all at once, the next stretch of pages each."""
        self._meter.restart()
        count, per_peer = message["pages"], message["concurrent"]
        orders = [
            self._order(peer, message["first"] + number * count, count, WAIT_S)
            for number, peer in enumerate(self._peers * per_peer)
        ]
        started = time.perf_counter()
        for order in orders:
            self._io.post(order)
        for _ in orders:
            committed = self._wait_for(SinkCommitted)
            assert committed.lane == self._lane, committed
        return {"started": started, "done": time.perf_counter(), "cpu_s": self._meter.read()}

    def _ping(self, message: Message) -> Message:
        """A round trip of the control plane, engine to engine."""
        started = time.perf_counter()
        self._io.post(SendTo(self._peers[0], 0, PING))
        self._wait_for(FromPeer)
        return {"started": started, "done": time.perf_counter()}

    def _clear(self, message: Message) -> Message:
        self.pool[:] = 0
        return {}

    def _check(self, message: Message) -> Message:
        """After a `move` into cleared pages."""
        return pages.check(self.pool, self._ids, message["first"], message["pages"] * message["concurrent"])

    # -------------------------------------------------------------------------------------- late writes

    def _open(self, message: Message) -> Message:
        """Starts one hand-off of the first `pages` pages, to be over in `ttl_s`, and does not wait for it."""
        self._opened = message
        self._io.post(self._order(self._peers[0], 0, message["pages"], message["ttl_s"]))
        return {}

    def _stop_when(self, message: Message) -> Message:
        """SIGSTOP for process `pid` (perhaps this one) as soon as `landed` pages have been written. The answer says
        whether the hand-off was over before."""
        ids = self._my_opened()
        while (landed := pages.landed_pages(self.pool, ids)) < message["landed"]:
            if not self._events.empty():
                return {"landed": landed, "over": True}
            time.sleep(0.0002)  # leaves the interpreter to the I/O thread
        os.kill(message["pid"], signal.SIGSTOP)
        return {"landed": landed, "over": False}

    def _outcome(self, message: Message) -> Message:
        """How the opened hand-off ended, and how many of the pages that it says are valid are not."""
        event = self._events.get(timeout=WAIT_S)
        assert isinstance(event, SinkCommitted | SinkFailed), event
        valid = self._opened["pages"] if isinstance(event, SinkCommitted) else event.landed_until
        ours, theirs = (pages.stretch(self._ids[side], 0, valid) for side in ("target", "source"))
        wrong = pages.wrong_pages(self.pool, ours, theirs) if valid else 0
        how = "committed" if isinstance(event, SinkCommitted) else f"failed: {event.failure.code}"
        return {"how": how, "valid": valid, "wrong": wrong}

    def _take_source_log(self, message: Message) -> Message:
        """What the source's engine was told; waits up to `wait_s` for its pages to come back."""
        self._source_over.wait(message["wait_s"])
        return {"log": [name for name, _ in self._source_log], "over": self._source_over.is_set()}

    def _forget_source_log(self, message: Message) -> Message:
        """What follows is about the next hand-off."""
        self._source_log.clear()
        self._source_over.clear()
        return {}

    def _reuse_source_when_over(self, message: Message) -> Message:
        self._opened = message
        self._reuse_when_over = True
        return {}

    def _reuse(self, message: Message) -> Message:
        pages.reuse(self.pool, self._my_opened())
        return {}

    def _count_foreign(self, message: Message) -> Message:
        return {"foreign": pages.foreign_pages(self.pool, self._my_opened())}

    def _my_opened(self) -> pages.Ids:
        return pages.stretch(self._ids[self.side], 0, self._opened["pages"])

    # ------------------------------------------------------------------------------------------ helpers

    def _deliver(self, event: object) -> None:
        """On the I/O thread."""
        match event:
            case OfferReceived():
                ids = pages.stretch(self._ids["source"], int(event.request_id), len(event.tokens))
                self._io.post(ShipRegion(event.key, 0, len(event.tokens), ids))
                self._io.post(FinishSource(event.key, PrefillResult(-1, None, 0.0, 0)))
            case SourceReleased() | SourceAborted() | SourceStopping():
                over = not isinstance(event, SourceStopping)
                if over and self._reuse_when_over:
                    pages.reuse(self.pool, self._my_opened())
                self._source_log.append((type(event).__name__, time.perf_counter()))
                if over:
                    self._source_over.set()
            case FromPeer(sender, body) if self.side == "source":
                self._io.post(SendTo(sender.worker, sender.epoch, body))
            case MembershipView():
                self._views.put(event)
            case _:
                self._events.put(event)

    def _order(self, peer: WorkerId, first: int, count: int, ttl_s: float) -> OpenSink:
        self._handoffs += 1
        return OpenSink(
            key=HandoffKey(HandoffId(os.getpid() << 24 | self._handoffs), 1),
            peer=peer,
            request_id=RequestId(str(first)),
            tokens=np.zeros(count, dtype=np.int32),
            start=0,
            pages={Component.FULL: pages.stretch(self._ids["target"], first, count)},
            sample=False,
            sampling=SamplingParams(),
            deadline_s=time.monotonic() + ttl_s,
        )

    def _wait_for(self, kind: type[EventT]) -> EventT:
        event = self._events.get(timeout=WAIT_S)
        assert isinstance(event, kind), event
        return event


def _profile_threads(folder: str) -> Callable[[], None]:
    """Profiles every thread that starts from now on, each by itself. Returns what writes their files, for after their
    end. What waits costs nothing: the clock is the thread's own."""
    if not folder:
        return lambda: None
    profilers: list[tuple[str, cProfile.Profile]] = []

    def enable(*_: object) -> None:
        profilers.append((threading.current_thread().name, cProfile.Profile(time.thread_time)))
        profilers[-1][1].enable()

    def write() -> None:
        for name, profiler in profilers:
            profiler.dump_stats(Path(folder) / name)

    threading.setprofile(enable)
    return write


def main() -> None:
    control = Control()
    os.environ.update(control.spec["environment"])
    end = BatonEnd(control)
    control.send({"hello": {"pid": os.getpid()}})
    control.receive()
    control.send({"ready": True})
    control.serve(end.commands())
    end.close()


if __name__ == "__main__":
    main()
