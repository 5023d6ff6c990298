"""Structured logs: one event per line, named after the process that wrote it."""

from __future__ import annotations

import io
import json
import logging

from baton.common.log import EventLog, configure_logging


def test_an_event_is_one_json_line_with_its_fields() -> None:
    stream = io.StringIO()
    configure_logging("decode-1@3", "info", stream=stream)
    EventLog("baton.test").info("admitted", request="r1", pages=12)
    line = json.loads(stream.getvalue())
    assert (line["process"], line["event"], line["request"], line["pages"]) == ("decode-1@3", "admitted", "r1", 12)
    assert line["level"] == "info"


def test_what_is_below_the_level_is_not_written() -> None:
    stream = io.StringIO()
    configure_logging("p", "warning", stream=stream)
    EventLog("baton.test").info("chatter")
    EventLog("baton.test").warning("trouble")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["trouble"]


def test_a_bug_is_logged_with_its_traceback_on_one_line() -> None:
    stream = io.StringIO()
    configure_logging("p", "info", stream=stream)
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        EventLog("baton.test").fatal("engine_failed", steps=3)
    [line] = stream.getvalue().splitlines()
    assert "RuntimeError: broken" in json.loads(line)["traceback"]


def test_lines_of_libraries_have_the_same_shape() -> None:
    stream = io.StringIO()
    configure_logging("p", "info", stream=stream)
    logging.getLogger("baton.somewhere").warning("plain %s", "line")
    assert json.loads(stream.getvalue())["event"] == "plain line"


def test_people_get_text() -> None:
    stream = io.StringIO()
    configure_logging("decode-1@3", "info", as_json=False, stream=stream)
    EventLog("baton.test").info("admitted", pages=12)
    assert stream.getvalue().rstrip().endswith("decode-1@3 info admitted pages=12")
