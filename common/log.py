"""Structured logs: one event per line, as JSON for machines or as text for people, each with the process it came from.

Owns: the format and the handler. Never logs prompt or output text, token ids, keys or addresses of clients: callers
pass names, counts and durations. Standard `logging` underneath, so that libraries' lines come out in the same shape.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

import msgspec

LogValue = str | int | float | bool | None

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_FIELDS = "baton_fields"


class EventLog:
    """Logs named events with typed fields: `log.info("admitted", worker=..., pages=12)`. Cheap when off."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: LogValue) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: LogValue) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: LogValue) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, **fields: LogValue) -> None:
        self._emit(logging.ERROR, event, fields)

    def fatal(self, event: str, **fields: LogValue) -> None:
        """An error with the traceback of the exception being handled."""
        self._logger.critical(event, extra={_FIELDS: fields}, exc_info=True)

    def _emit(self, level: int, event: str, fields: dict[str, LogValue]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: fields})


class JsonFormatter(logging.Formatter):
    """`{"ts": ..., "level": "info", "process": "decode-1@3", "event": ..., ...fields}`"""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, LogValue] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update(_fields_of(record))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class HumanFormatter(logging.Formatter):
    """`12:30:01.123 decode-1@3 info admitted pages=12`"""

    def __init__(self, process: str) -> None:
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


def configure_logging(process: str, level: str, *, as_json: bool = True, stream: TextIO | None = None) -> None:
    """Called once per process. `process` is "worker@incarnation". Replaces handlers that were there before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if as_json else HumanFormatter(process))
    root = logging.getLogger("baton")
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    root.propagate = False
