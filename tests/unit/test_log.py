"""Structured logs: one event per line, named after the process that wrote it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from baton.common.config import LoggingConfig
from baton.common.log import EventLog, ProcessName, configure_logging, where_of

DECODE = ProcessName("decode-1", "decode", 3)


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    kept = [(logger, logger.handlers[:], logger.level) for logger in map(logging.getLogger, ("", "baton"))]
    yield
    for logger, handlers, level in kept:
        logger.handlers[:] = handlers
        logger.setLevel(level)
    logging.getLogger("baton").propagate = True


def configured(config: LoggingConfig = LoggingConfig()) -> io.StringIO:  # noqa: B008 - frozen
    stream = io.StringIO()
    configure_logging(DECODE, config, stream=stream)
    return stream


def test_an_event_is_one_json_line_with_its_fields() -> None:
    stream = configured()
    EventLog("baton.test").info("admitted", request="r1", pages=12, stages_ms={"queue": 1.5})
    line = json.loads(stream.getvalue())
    assert (line["process"], line["worker"], line["role"]) == ("decode-1@3", "decode-1", "decode")
    assert (line["event"], line["request"], line["pages"], line["stages_ms"]) == ("admitted", "r1", 12, {"queue": 1.5})
    assert line["level"] == "info"


def test_what_is_below_the_level_is_not_written() -> None:
    stream = configured(LoggingConfig(level="warning"))
    EventLog("baton.test").info("chatter")
    EventLog("baton.test").warning("trouble")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["trouble"]


def test_a_bug_is_logged_with_its_traceback_on_one_line() -> None:
    stream = configured()
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        EventLog("baton.test").fatal("engine_failed", steps=3)
    [line] = stream.getvalue().splitlines()
    assert "RuntimeError: broken" in json.loads(line)["traceback"]


def test_where_an_error_was_raised_is_told_without_what_it_says() -> None:
    def parse(text: str) -> int:
        return int(text)

    try:
        parse("a secret")
    except ValueError as error:
        told = where_of(error)
    assert told.endswith("parse > ValueError")
    assert "test_log.py:" in told
    assert "secret" not in told


def test_lines_of_libraries_have_the_same_shape_and_are_heard_from_warnings_on() -> None:
    stream = configured(LoggingConfig(level="debug"))
    logging.getLogger("baton.somewhere").warning("plain %s", "line")
    logging.getLogger("a.library").info("chatter")
    logging.getLogger("a.library").warning("trouble")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["logger"], line["event"]) for line in lines] == [
        ("baton.somewhere", "plain line"),
        ("a.library", "trouble"),
    ]


def test_people_get_text() -> None:
    stream = configured(LoggingConfig(format="text"))
    EventLog("baton.test").info("admitted", pages=12)
    assert stream.getvalue().rstrip().endswith("decode-1@3 info admitted pages=12")
