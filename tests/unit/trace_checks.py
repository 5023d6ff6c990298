"""What a recording must be to be drawn: events well formed, threads that do one thing at a time, arcs with slices."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

PHASES = {"M", "X", "b", "e", "s", "t", "f"}
ROUNDED_US = 0.01


def check_chrome_trace(trace: dict[str, Any]) -> None:
    events = trace["traceEvents"]
    for event in events:
        assert event["ph"] in PHASES
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0.0
    slices = _slices_by_thread(events)
    for thread, found in slices.items():
        for before, after in itertools.pairwise(found):
            assert before["ts"] + before["dur"] <= after["ts"] + ROUNDED_US, (thread, before, after)
    _check_intervals(events)
    _check_arcs(events, slices)


def names_of(trace: dict[str, Any]) -> dict[int, str]:
    """Worker by pid."""
    return {one["pid"]: one["args"]["name"].split()[0] for one in trace["traceEvents"] if one["name"] == "process_name"}


def _slices_by_thread(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0.0
            slices[event["pid"], event["tid"]].append(event)
    for found in slices.values():
        found.sort(key=lambda event: (event["ts"], event["dur"]))
    return slices


def _check_intervals(events: list[dict[str, Any]]) -> None:
    begun: dict[tuple[object, ...], dict[str, Any]] = {}
    for event in events:
        key = (event["pid"], event.get("cat"), event.get("id"), event["name"])
        if event["ph"] == "b":
            assert key not in begun, "ids of intervals are unique"
            begun[key] = event
        elif event["ph"] == "e":
            assert begun.pop(key)["ts"] <= event["ts"]
    assert not begun, "every beginning has its end"


def _check_arcs(events: list[dict[str, Any]], slices: dict[tuple[int, int], list[dict[str, Any]]]) -> None:
    arcs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            arcs[event["id"]].append(event)
            around = slices[event["pid"], event["tid"]]
            assert any(
                one["ts"] - ROUNDED_US <= event["ts"] <= one["ts"] + one["dur"] + ROUNDED_US for one in around
            ), f"an end of an arc without a slice: {event}"
    for points in arcs.values():
        assert "".join(point["ph"] for point in points) == "s" + "t" * (len(points) - 2) + "f"
        assert [point["ts"] for point in points] == sorted(point["ts"] for point in points)
