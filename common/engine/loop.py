"""The engine thread: feeds events to a core, runs the batches it plans, passes its effects on. The only thread that
touches a worker's KV state.

Owns: the thread, its inbox, the count of steps and what they take outside of the model. Never: decides anything about a
request, or waits for the network.

Inbox overflow: a peer's request-level message (`FromPeer`) is refused when `inbox_limit` of them wait (`deliver` says
so and counts it; the peer sends again). Transfer events and membership are never refused: each is about a hand-off
that this engine opened or accepted, so their number is bounded by the core's own limits.

An exception on this thread ends the *process*: a worker whose engine is gone must not go on answering heartbeats.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

import msgspec

from baton.common.asking import ResultT, question
from baton.common.clock import Clock
from baton.common.engine.batch import ModelRunner
from baton.common.engine.core_api import EngineCore, FromPeer
from baton.common.engine.trace import EngineTrace
from baton.common.log import EventLog
from baton.common.messages import Load

FATAL_EXIT_CODE = 70
CHECK_INTERVAL_S = 1.0
"""Least time between two invariant checks at idle moments."""
CHECK_SHARE = 50
"""And such checks take at most one part in so many of the time: a walk over a large cache takes a while."""

_log = EventLog("baton.engine")


def end_process() -> None:
    """No clean-up: whatever is broken here must not touch anything any more. The controller starts a successor."""
    os._exit(FATAL_EXIT_CODE)


@dataclass(frozen=True, slots=True)
class _Call:
    """Something another thread wants done between two steps."""

    run: Callable[[], None]


class Inbox:
    """What the engine has not looked at yet. Many writers, one reader."""

    def __init__(self, peer_limit: int) -> None:
        self._peer_limit = peer_limit
        self._items: deque[object] = deque()
        self._peer_items = 0
        self._filled = threading.Condition()
        self._closed = False
        self.refused = 0

    def put(self, item: object) -> bool:
        """False: refused, because too many peer messages wait, or because the engine has stopped."""
        with self._filled:
            if self._closed:
                return False
            if isinstance(item, FromPeer):
                if self._peer_items >= self._peer_limit:
                    self.refused += 1
                    return False
                self._peer_items += 1
            self._items.append(item)
            self._filled.notify()
            return True

    def take_all(self, timeout_s: float | None) -> list[object]:
        """Everything that waits; when nothing does, waits up to `timeout_s` (None: until something comes)."""
        with self._filled:
            self._filled.wait_for(lambda: bool(self._items) or self._closed, timeout_s)
            items = list(self._items)
            self._items.clear()
            self._peer_items = 0
            return items

    def close(self) -> None:
        """Refuses everything from now on and wakes the reader."""
        with self._filled:
            self._closed = True
            self._filled.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed


class EngineLoop:
    """Runs one core on one thread. `post` takes the core's effects (thread-safe, never blocks); `check` walks the
    invariants and raises on a violation."""

    def __init__(
        self,
        core: EngineCore,
        runner: ModelRunner,
        post: Callable[[object], None],
        clock: Clock,
        *,
        check: Callable[[], object],
        inbox_limit: int = 4096,
        on_fatal: Callable[[], None] = end_process,
    ) -> None:
        self._core = core
        self._runner = runner
        self._post = post
        self._clock = clock
        self._check = check
        self._on_fatal = on_fatal
        self._inbox = Inbox(inbox_limit)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._load = core.load()
        self._busy_since_s: float | None = None
        self._steps = 0
        self._step_overhead_s = 0.0
        self._unchecked = True
        self._check_due_s = float("-inf")
        self._core_idle = threading.Event()
        self._trace: EngineTrace | None = None

    # ------------------------------------------------------------------------------ from any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends after the current step. False when that step took longer than `timeout_s`."""
        self._inbox.close()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def deliver(self, event: object) -> bool:
        """An event for the core. False: refused (see the module's overflow rule)."""
        return self._inbox.put(event)

    def call(self, function: Callable[[], ResultT]) -> Future[ResultT]:
        """Runs `function` on the engine thread between two steps: the way to read KV state from outside. It must not
        change anything: what it raises is the asker's, the engine goes on."""
        future, answer = question(function)
        if not self._inbox.put(_Call(answer)):
            future.cancel()
        return future

    def wait_idle(self, timeout_s: float) -> bool:
        """Until the core has no request left, after everything that was delivered before this call."""
        deadline_s = self._clock.now() + timeout_s
        try:
            self.call(self._core_idle.clear).result(timeout_s)
        except (TimeoutError, CancelledError):
            return False
        return self._core_idle.wait(max(0.0, deadline_s - self._clock.now()))

    def load(self) -> Load:
        """The core's load at its last step boundary, with how long the engine has been away from it."""
        busy_since_s = self._busy_since_s
        age_s = 0.0 if busy_since_s is None else max(0.0, self._clock.now() - busy_since_s)
        return msgspec.structs.replace(
            self._load, steps=self._steps, step_age_s=age_s, step_overhead_s=self._step_overhead_s
        )

    def trace(self, trace: EngineTrace | None) -> Future[None]:
        """From the next step on this thread is recorded, or no more."""

        def switch() -> None:
            self._trace = trace
            if trace is not None:
                trace.begin(self._clock.now())

        return self.call(switch)

    @property
    def refused_messages(self) -> int:
        return self._inbox.refused

    # -------------------------------------------------------------------------------- engine thread

    def _run(self) -> None:
        try:
            wait_s: float | None = 0.0
            while not self._inbox.closed:
                wait_s = self._turn(self._inbox.take_all(wait_s))
                self._load = self._core.load()
                if self._core.idle:
                    self._core_idle.set()
                self._busy_since_s = None
        except BaseException:  # noqa: BLE001 - the thread's top frame
            # Nothing below catches a bug, and nothing above could repair it.
            _log.fatal("engine_failed", steps=self._steps)
            self._on_fatal()

    def _turn(self, events: list[object]) -> float | None:
        """Events, due timers, then at most one step. Returns how long nothing needs doing (None: until an event)."""
        now = self._busy_since_s = self._clock.now()
        if self._trace is not None:
            self._trace.begin(now)
        for event in events:
            self._unchecked = True
            if isinstance(event, _Call):
                event.run()
            else:
                if self._trace is not None:
                    self._trace.passes(event)
                self._dispatch(self._core.handle(event, now))
        deadline_s = self._core.next_deadline()
        if deadline_s is not None and deadline_s <= now:
            self._unchecked = True
            self._dispatch(self._core.on_timer(now))
        batch = self._core.next_batch(now)
        trace = self._trace
        if trace is not None and (events or batch is not None):
            trace.planned()
        if batch is None:
            return self._idle(self._clock.now())
        planned = self._clock.now()
        result = self._runner.collect(self._runner.launch(batch, self._on_layers))
        computed = self._clock.now()
        if trace is not None:
            trace.computed(batch)
        self._steps += 1
        self._unchecked = True
        self._dispatch(self._core.on_step(result, computed))
        self._step_overhead_s += self._clock.now() - computed + planned - now
        if trace is not None:
            trace.told()
        return 0.0

    def _on_layers(self, layers: int) -> None:
        """The runner calls it in the middle of a step: what is computed leaves while the rest is."""
        self._dispatch(self._core.on_layers(layers, self._clock.now()))

    def _idle(self, now: float) -> float | None:
        """Nothing to run: check the invariants if anything happened since the last time, and say how long to wait."""
        due_s = self._core.next_deadline()
        if self._unchecked:
            if now >= self._check_due_s:
                self._check()
                self._unchecked = False
                took_s = self._clock.now() - now
                self._check_due_s = now + max(CHECK_INTERVAL_S, CHECK_SHARE * took_s)
            else:
                due_s = self._check_due_s if due_s is None else min(due_s, self._check_due_s)
        return None if due_s is None else max(0.0, due_s - now)

    def _dispatch(self, effects: list[object]) -> None:
        for effect in effects:
            if self._trace is not None:
                self._trace.passes(effect)
            self._post(effect)
