"""What happened in one world, for people: a log of typed events (JSON lines), and a picture for ui.perfetto.dev.

Owns the notes it takes while the world runs. Never: changes what happens; a world that is recorded has the same trace.

A line of the log has `at_s`, `process`, `kind` (the probe, "event" for what was taken from the heap, "outcome" at the
end), and what the kind has to say: the type of the thing and its plain fields. Arrays and bytes are given by length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from baton.common.ids import HandoffKey, Stamp
from baton.common.messages import Failure, Frame
from baton.common.trace import ProcessTrace, Recorder
from baton.deploy.chrome_trace import chrome_trace
from baton.deploy.sim.clients import ClientRequest
from baton.deploy.sim.process import SimProcess
from baton.deploy.sim.world import World
from baton.transfer.api import OpenSink, SinkCommitted, SinkFailed

PROBES = (
    "sent",
    "frame_lost",
    "hand_off_frame",
    "frame_for_another_epoch",
    "frame_of_unlisted_process",
    "command",
    "engine_event",
    "land_region",
    "bytes_moving",
    "landing_ended",
    "late_region_dropped",
    "fence_sink",
    "tier_command",
    "stored",
    "restored",
    "layers_over",
    "step_over",
    "crash",
    "controller_crash",
    "client_gone",
)
DULL = ("tick", "Heartbeat", "> io")
"""Events that a log is better without."""
INSTANT_S = 1e-5
CLUSTER = "cluster"


class Recording:
    """Of `world`, from before it begins, which must keep its trace."""

    def __init__(self, world: World) -> None:
        assert world.schedule.trace is not None, "a world that keeps no trace cannot be recorded"
        self._world = world
        self._log: list[dict[str, Any]] = []
        self._threads: dict[str, tuple[Recorder, Recorder]] = {}  # engine and I/O, by process
        self._open: dict[HandoffKey, float] = {}
        for name in PROBES:
            world.on(name, partial(self._note, name))

    def write(self, path: Path) -> tuple[Path, Path]:
        """The log to `path`, the picture beside it. Returns where both are."""
        picture = path.with_name(path.name + ".perfetto.json")
        path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in self._lines()))
        processes = [
            ProcessTrace(process=name, pid=pid, wall_offset_s=0.0, threads={"engine": engine.take(), "io": io.take()})
            for pid, (name, (engine, io)) in enumerate(self._threads.items(), start=1)
        ]
        picture.write_bytes(msgspec.json.encode(chrome_trace(processes)))
        return path, picture

    # ------------------------------------------------------------------------------------------- notes

    def _note(self, kind: str, world: World, details: object) -> None:
        who, thing, rest = _parts(details)
        line = {"at_s": world.now, "process": who, "kind": kind, "what": type(thing).__name__, **rest, **_plain(thing)}
        self._log.append(line)
        self._draw(kind, who, thing)

    def _draw(self, kind: str, who: str, thing: object) -> None:
        now = self._world.now
        engine, io = self._threads.setdefault(who, (Recorder(), Recorder()))
        match thing:
            case OpenSink(key=key):
                self._open[key] = now
            case SinkCommitted(key=key) | SinkFailed(key=key):
                args: dict[str, int | str] = {"handoff": _name(key), "end": type(thing).__name__}
                io.interval("hand-offs", self._open.pop(key, now), now, args)
        if kind == "step_over" and isinstance(thing, float):
            engine.slice("step", thing, now, {})
        elif kind not in ("sent", "step_over"):
            args = {name: value for name, value in _plain(thing).items() if isinstance(value, int | str)}
            io.slice(f"{kind} {type(thing).__name__}", now, now + INSTANT_S, args)

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Events of the heap and notes, by time; at one moment, events first."""
        lines = [line for text in self._world.schedule.trace or () if (line := _event(text)) is not None]
        yield from sorted([*lines, *self._log], key=lambda line: float(line["at_s"]))
        for request in self._world.clients.requests.values():
            yield {
                "at_s": self._world.now,
                "process": CLUSTER,
                "kind": "outcome",
                "request": request.request_id,
                "outcome": request.outcome,
                "tokens": len(request.tokens),
            }


def _event(text: str) -> dict[str, Any] | None:
    at_s, process, what = text.split(" ", 2)
    if what.startswith(DULL):
        return None
    return {"at_s": float(at_s), "process": process, "kind": "event", "what": what}


def _parts(details: object) -> tuple[str, object, dict[str, Any]]:
    """Whose it is, the thing itself, and what else is to be said."""
    match details:
        case (SimProcess() as process, Frame() as frame, *_):
            return process.name, frame.body, {"from": frame.src.worker}
        case (SimProcess() as process, thing, *_):
            return process.name, thing, {}
        case (Stamp() as sender, worker, body):
            return f"{sender.worker}@{sender.incarnation}", body, {"to": worker}
        case Frame():
            return CLUSTER, details.body, {"from": details.src.worker}
        case SimProcess():
            return details.name, details.stamp, {}
        case ClientRequest():
            return CLUSTER, details, {"request": details.request_id}
        case _:
            return CLUSTER, details, {}


def _plain(thing: object) -> dict[str, Any]:
    """Its fields, as far as they are short."""
    if isinstance(thing, msgspec.Struct):
        names: tuple[str, ...] = thing.__struct_fields__
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, ClientRequest):
        names = tuple(field.name for field in dataclasses.fields(thing))
    else:
        return {"value": thing} if isinstance(thing, int | float | str) else {}
    return {name: _short(getattr(thing, name)) for name in names}


def _name(key: HandoffKey) -> str:
    return f"{key.handoff:x}/{key.attempt}"


def _short(value: object) -> int | float | str | bool | None:
    match value:
        case HandoffKey():
            return _name(value)
        case Failure():
            return f"{value.code.value}: {value.reason}"
        case Stamp():
            return f"{value.worker}@{value.incarnation}"
        case None | bool() | int() | float() | str():
            return value
        case bytes() | tuple() | np.ndarray():
            return f"{len(value)} x {type(value).__name__}"
        case _:
            return type(value).__name__
