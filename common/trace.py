"""What one thread of a process did, span by span, for a picture of the cluster at work (`baton trace`).

Owns: the words of a recording and its bound: of more than `capacity` spans the oldest are forgotten, and counted.
Never: reads a clock (whoever records knows when), or runs unless somebody asked: code holds `Recorder | None` and
looks once.

Times are of the process's monotonic clock (`common/clock.py`), in seconds. `time.perf_counter` reads the same one on
Linux, so shells may use either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from msgspec import Struct

CAPACITY = 1 << 16
"""About 10 MB in the worst case; some seconds of a thread that never rests."""

Args = dict[str, int | str]


class Slice(Struct, frozen=True, array_like=True, tag="slice"):
    """The thread did this and nothing else."""

    name: str
    begin_s: float
    end_s: float
    args: Args


class Interval(Struct, frozen=True, array_like=True, tag="interval"):
    """Something went on meanwhile, on a track of its own; intervals of one track may overlap."""

    track: str
    begin_s: float
    end_s: float
    args: Args


class Passage(Struct, frozen=True, array_like=True, tag="passage"):
    """The thread had `flow` in its hands, within one of its slices: what joins the slices of one hand-off."""

    flow: str
    at_s: float


Recorded = Slice | Interval | Passage


class Recorder:
    """Used from the thread that it records."""

    __slots__ = ("_items", "_seen")

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._items: deque[Recorded] = deque(maxlen=capacity)
        self._seen = 0

    def slice(self, name: str, begin_s: float, end_s: float, args: Args) -> None:
        self._add(Slice(name, begin_s, end_s, args))

    def interval(self, track: str, begin_s: float, end_s: float, args: Args) -> None:
        self._add(Interval(track, begin_s, end_s, args))

    def passage(self, flow: str, at_s: float) -> None:
        self._add(Passage(flow, at_s))

    def take(self) -> ThreadTrace:
        """Everything so far."""
        return ThreadTrace(items=tuple(self._items), forgotten=self._seen - len(self._items))

    def _add(self, item: Recorded) -> None:
        self._seen += 1
        self._items.append(item)


class ThreadTrace(Struct, frozen=True, kw_only=True):
    """What one thread recorded, in the order in which it ended."""

    items: tuple[Recorded, ...]
    forgotten: int = 0


class ProcessTrace(Struct, frozen=True, kw_only=True):
    """`wall_offset_s`: add it to a time and it is one of the wall clock, by which processes are laid side by side."""

    process: str
    pid: int
    wall_offset_s: float
    threads: Mapping[str, ThreadTrace]
