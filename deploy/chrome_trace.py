"""A cluster's recording as Chrome trace events: one JSON object that ui.perfetto.dev and chrome://tracing open. Pure.

One process per worker; its threads as they are; of what overlaps (regions on a lane, hand-offs) a row per track, which
the viewer makes as high as it must; and an arc through the slices of all threads that had one hand-off in their hands.

Format: the "Trace Event Format" document of Chromium's tracing; times in it are microseconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from baton.common.trace import Interval, Passage, ProcessTrace, Slice, ThreadTrace

_THREAD_ORDER = {"engine": 1, "io": 2}


def chrome_trace(processes: Sequence[ProcessTrace]) -> dict[str, Any]:
    """Ready for JSON. Times count from the millisecond in which the first thing that was recorded began."""
    first_s = min((begin_s for process in processes for begin_s in _begins(process)), default=0.0)
    begin_s = math.floor(first_s * 1000) / 1000  # below it, however seconds since 1970 are rounded
    events: list[dict[str, Any]] = []
    passages: dict[str, list[dict[str, Any]]] = {}
    for pid, process in enumerate(processes, start=1):
        shift_s = process.wall_offset_s - begin_s
        events.append(_meta("process_name", pid, 0, name=f"{process.process} (pid {process.pid})"))
        for name, thread in process.threads.items():
            tid = _THREAD_ORDER[name]
            events.append(_meta("thread_name", pid, tid, name=name))
            events += _thread_events(thread, pid, tid, shift_s, passages)
    events += _arcs(passages)
    forgotten = sum(thread.forgotten for process in processes for thread in process.threads.values())
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"began_at_s": begin_s, "forgotten_spans": forgotten},
    }


def _begins(process: ProcessTrace) -> Iterator[float]:
    """By the wall clock."""
    for thread in process.threads.values():
        for item in thread.items:
            if not isinstance(item, Passage):
                yield item.begin_s + process.wall_offset_s


def _thread_events(
    thread: ThreadTrace, pid: int, tid: int, shift_s: float, passages: dict[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    slices = sorted((item for item in thread.items if isinstance(item, Slice)), key=lambda item: item.begin_s)
    begins_s = [item.begin_s for item in slices]
    for item in thread.items:
        match item:
            case Slice():
                at = {"ts": _us(item.begin_s + shift_s), "dur": _us(item.end_s - item.begin_s)}
                events.append({"ph": "X", "name": item.name, "pid": pid, "tid": tid, **at, "args": item.args})
            case Interval():
                events += _interval_events(item, f"{pid}.{tid}.{len(events)}", pid, shift_s)
            case Passage():
                index = bisect_right(begins_s, item.at_s) - 1
                if index >= 0 and item.at_s <= slices[index].end_s:  # an arc is bound to the slice around its end
                    where = {"pid": pid, "tid": tid, "ts": _us(item.at_s + shift_s)}
                    passages.setdefault(item.flow, []).append(where)
    return events


def _interval_events(item: Interval, unique: str, pid: int, shift_s: float) -> list[dict[str, Any]]:
    """A beginning and an end, joined by an id of their own; the viewer puts equal names on one track."""
    common = {"cat": item.track, "name": item.track, "id": unique, "pid": pid, "tid": 0}
    return [
        {"ph": "b", **common, "ts": _us(item.begin_s + shift_s), "args": item.args},
        {"ph": "e", **common, "ts": _us(item.end_s + shift_s)},
    ]


def _arcs(passages: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """From the first thread that had the hand-off through every later one to the last."""
    events: list[dict[str, Any]] = []
    for flow, points in passages.items():
        if len(points) < 2:
            continue
        points.sort(key=lambda point: float(point["ts"]))
        for index, point in enumerate(points):
            phase = "s" if index == 0 else "f" if index == len(points) - 1 else "t"
            ends = {"bp": "e"} if phase == "f" else {}
            events.append({"ph": phase, "cat": "hand-off", "name": "hand-off", "id": flow, **point, **ends})
    return events


def _meta(kind: str, pid: int, tid: int, **args: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
