"""Where frames wait whose grammar this process has not compiled yet: for the engine that looks like a slow network.

Owns: the one thread that compiles, and the frames that wait for it, at most MAX_WAITING. Never: what a frame means, or
whether a grammar is good (the cores ask, and it is known by then).

Overflow: a frame that finds no room is dropped; like any other it is sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from baton.common.engine.guiding import Guides
from baton.common.messages import Frame, Grammar, Offer, Submit

MAX_WAITING = 256


class Compiling:
    """Used on one thread. `wake` is called on another when `take` has something."""

    def __init__(self, guides: Guides, wake: Callable[[], None]) -> None:
        self._guides = guides
        self._wake = wake
        self._compiler: ThreadPoolExecutor | None = None  # whoever guides nobody needs no thread
        self._waiting: deque[tuple[Frame, Future[str]]] = deque()  # in the order in which they are compiled
        self.dropped = 0

    def holds(self, frame: Frame) -> bool:
        """True: it waits here, or was dropped."""
        grammar = _grammar_of(frame)
        if grammar is None or self._guides.knows(grammar):
            return False
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return True
        if self._compiler is None:
            self._compiler = ThreadPoolExecutor(1, "compile")
        compiled = self._compiler.submit(self._guides.explain, grammar)
        self._waiting.append((frame, compiled))
        compiled.add_done_callback(lambda _: self._wake())
        return True

    def take(self) -> list[Frame]:
        """Those whose grammar is known now. Raises what compiling raised: a bug."""
        frames: list[Frame] = []
        while self._waiting and self._waiting[0][1].done():
            frame, compiled = self._waiting.popleft()
            compiled.result()
            frames.append(frame)
        return frames

    def stop(self) -> None:
        """What waits is lost."""
        if self._compiler is not None:
            self._compiler.shutdown(wait=True, cancel_futures=True)


def _grammar_of(frame: Frame) -> Grammar | None:
    match frame.body:
        case Submit(sampling=sampling) | Offer(sampling=sampling, sample=True):
            return sampling.grammar
        case _:
            return None
