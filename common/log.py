"""Structured logs: one event per line, as JSON for machines or as text for people, each with the process it came from.

Owns: the format and the handler. Never logs prompt or output text, token ids, keys or addresses of clients: callers
pass names, counts and durations, and of an exception that met a request `where_of`, not its message, which may quote
what was asked. Standard `logging` underneath, so that libraries' lines come out in the same shape.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec

from baton.common.config import LoggingConfig

LogValue = str | int | float | bool | dict[str, float] | None

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_FIELDS = "baton_fields"
_FRAMES = 12
SELDOM_S = 10.0


@dataclass(frozen=True, slots=True)
class ProcessName:
    """Who writes. Incarnation 0: it has none."""

    worker: str
    role: str
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.worker}@{self.incarnation}" if self.incarnation else self.worker


class EventLog:
    """Logs named events with typed fields: `log.info("admitted", worker=..., pages=12)`. Cheap when off."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._told_s: dict[str, float] = {}

    def debug(self, event: str, **fields: LogValue) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: LogValue) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: LogValue) -> None:
        self._emit(logging.WARNING, event, fields)

    def seldom(self, event: str, **fields: LogValue) -> None:
        """A warning of what strangers can cause as often as they like: at most one in SELDOM_S of each kind. How often
        it was is in the metrics."""
        now = time.monotonic()
        if now - self._told_s.get(event, -SELDOM_S) >= SELDOM_S:
            self._told_s[event] = now
            self.warning(event, **fields)

    def error(self, event: str, **fields: LogValue) -> None:
        self._emit(logging.ERROR, event, fields)

    def fatal(self, event: str, **fields: LogValue) -> None:
        """An error with the traceback of the exception being handled."""
        self._logger.critical(event, extra={_FIELDS: fields}, exc_info=True)

    def _emit(self, level: int, event: str, fields: dict[str, LogValue]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: fields})


def where_of(error: BaseException) -> str:
    """Of what kind it is and where it was raised, innermost last; not what it says."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    places = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    return " > ".join([*places, type(error).__name__])


class JsonFormatter(logging.Formatter):
    """`{"ts": ..., "level": "info", "process": "decode-1@3", "worker": "decode-1", "role": "decode", "event": ...}`"""

    def __init__(self, process: ProcessName) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, LogValue] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": str(self._process),
            "worker": self._process.worker,
            "role": self._process.role,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update(_fields_of(record))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class HumanFormatter(logging.Formatter):
    """`12:30:01.123 decode-1@3 info admitted pages=12`"""

    def __init__(self, process: ProcessName) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        head = f"{clock}.{int(record.msecs):03d} {self._process} {record.levelname.lower()} {record.getMessage()}"
        tail = "".join(f" {name}={value}" for name, value in _fields_of(record).items())
        if record.exc_info:
            tail += "\n" + self.formatException(record.exc_info)
        return head + tail


def _fields_of(record: logging.LogRecord) -> dict[str, LogValue]:
    fields: dict[str, LogValue] = getattr(record, _FIELDS, {})  # set by EventLog; absent on lines of libraries
    return fields


def configure_logging(process: ProcessName, config: LoggingConfig, *, stream: TextIO | None = None) -> None:
    """Called once per process. Replaces handlers that were there before. Libraries are heard from warnings on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if config.format == "json" else HumanFormatter(process))
    for name, level in (("", logging.WARNING), ("baton", _LEVELS[config.level])):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
    logging.getLogger("baton").propagate = False
