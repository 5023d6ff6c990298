"""What a gateway tells of traced requests, and says of each in its log. The decode worker is played."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from http_loopback import Loopback, Served, saying, serving

from baton.common.log import JsonFormatter, ProcessName
from baton.common.spans import TracedSpan, span_id_of

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01", "tracestate": "vendor=1"}
WAIT_S = 10.0
SECRET = "not-for-any-log"


@dataclass
class Heard:
    """Grows on the gateway's thread."""

    items: list[Any] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, item: object) -> None:
        with self.changed:
            self.items.append(item)
            self.changed.notify_all()

    def wait(self, found: Callable[[list[Any]], bool]) -> list[Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: found(self.items), WAIT_S), self.items
            return list(self.items)


class KeptSpans(Heard):
    """A `SpanSink` that keeps what it is told."""

    takes = True

    def tell(self, span: TracedSpan) -> None:
        self.add(span)

    def counts(self) -> dict[str, int]:
        return {"sent": 7, "dropped": 1, "failed": 0}

    def flush(self, timeout_s: float) -> bool:
        return True

    def by_name(self) -> dict[str, TracedSpan]:
        """When the request's own is there: it is the last."""
        spans = self.wait(lambda spans: any(span.name.startswith("POST") for span in spans))
        return {span.name: span for span in spans}


@pytest.fixture
def lines() -> Iterator[Heard]:
    heard, formatter = Heard(), JsonFormatter(ProcessName("gateway-0", "gateway", 1))

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.add(json.loads(formatter.format(record)))

    logger, handler = logging.getLogger("baton.http"), Handler()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield heard
    logger.removeHandler(handler)
    logger.setLevel(before)


def ask(served: Served, headers: dict[str, str] = SAMPLED, **body: object) -> httpx.Response:
    asked = {"model": "fake", "prompt": SECRET, "max_tokens": 5, **body}
    return served.http.post("/v1/completions", json=asked, headers=headers)


def test_each_choice_is_under_the_request_and_the_worker_is_told_where(lines: Heard) -> None:
    spans = KeptSpans()
    with serving(spans=spans) as served:
        answer = ask(served, n=2, temperature=0.5)
        told = spans.by_name()
        page = served.http.get("/metrics").text
    root = told["POST /v1/completions"]
    assert (root.parent, root.state, root.error) == ("00f067aa0ba902b7", "vendor=1", "")
    assert answer.headers["traceparent"] == root.context
    choices = [span for span in spans.items if span.name == "text_completion fake"]
    assert [span.parent for span in choices] == [span_id_of(root.context)] * 2
    assert choices[0].attributes["gen_ai.request.temperature"] == 0.5
    assert {submit.trace for submit in served.worker.submits} == {
        span.context for span in spans.items if span.name == "placement"
    }
    assert not any(SECRET in repr(span) for span in spans.items)
    assert 'baton_trace_spans_total{outcome="dropped",worker="gateway"} 1.0' in page.splitlines()
    [line] = [line for line in lines.items if line["method"] == "POST"]
    assert (line["trace"], line["choices"], line["worker"]) == (TRACE_ID, 2, "gateway-0")


@pytest.mark.parametrize(
    ("worker", "body", "status", "code"),
    [
        (Loopback(failure_after=0), {}, 500, "transfer_corrupt"),
        (Loopback(silent=True), {"timeout_s": 0.05}, 504, "deadline_exceeded"),
        (Loopback(failure_after=2), {"stream": True}, 200, "transfer_corrupt"),
        (Loopback(), {"prompt": SECRET * 100}, 400, "prompt_too_long"),
        (Loopback(), {"model": SECRET}, 404, "model_not_found"),
    ],
)
def test_what_goes_wrong_is_in_log_and_trace(
    lines: Heard, worker: Loopback, body: dict[str, object], status: int, code: str
) -> None:
    spans = KeptSpans()
    with serving(worker, spans=spans) as served:
        assert ask(served, **body).status_code == status
        told = spans.by_name()
        [line] = lines.wait(lambda lines: len(lines) == 1)
    assert (line["status"], line["reason"]) == (status, code)
    refused = 400 <= status < 500
    assert told["POST /v1/completions"].error == ("" if refused else code), "a client's mistake is no server's error"
    if not refused:
        assert told["text_completion fake"].error == code
    assert SECRET not in json.dumps(lines.items)
    assert not any(SECRET in repr(span) for span in spans.items)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_is_a_499_and_its_spans_say_cancelled(lines: Heard, stream: bool) -> None:
    spans = KeptSpans()
    with serving(Loopback(saying("word " * 40, "length"), pace_s=0.02), spans=spans) as served:
        if stream:
            body = {"model": "fake", "prompt": SECRET, "max_tokens": 200, "stream": True}
            with served.http.stream("POST", "/v1/completions", json=body, headers=SAMPLED) as response:
                next(response.iter_lines())
        else:
            body = {"model": "fake", "prompt": SECRET, "max_tokens": 200}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{served.url}/v1/completions", json=body, headers=SAMPLED, timeout=0.2)
        [line] = lines.wait(lambda lines: len(lines) == 1)
        told = spans.by_name()
    assert (line["status"], line["reason"]) == (499, "cancelled")
    for name in ("POST /v1/completions", "text_completion fake", "placement"):
        assert told[name].error == "cancelled", name


def test_a_client_that_hangs_up_before_it_has_asked_is_a_499(lines: Heard) -> None:
    with serving() as served:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        [line] = lines.wait(lambda lines: len(lines) == 1)
    assert (line["status"], line["reason"]) == (499, "cancelled")


def test_a_line_of_a_batch_is_a_request_of_its_own(lines: Heard) -> None:
    spans = KeptSpans()
    body = {"model": "fake", "prompt": SECRET, "max_tokens": 3}
    asked = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(2)]
    with serving(spans=spans) as served:
        uploaded = "\n".join(map(json.dumps, [*asked, asked[0] | {"custom_id": "2", "body": body | {"model": SECRET}}]))
        file = served.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x.jsonl", uploaded.encode())})
        batch = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = served.http.post("/v1/batches", json=batch).json()["id"]
        told = spans.wait(lambda spans: sum(span.name == "BATCH /v1/completions" for span in spans) == 3)
    roots = {span.context: span for span in told if span.name == "BATCH /v1/completions"}
    assert {span.parent for span in roots.values()} == {""}
    answers = [span for span in told if span.name == "text_completion fake"]
    assert {span.parent for span in answers} <= {span_id_of(context) for context in roots}
    assert len(answers) == 2
    said = [line for line in lines.items if line["method"] == "BATCH"]
    assert sorted((line["line"], line["status"]) for line in said) == [(1, 200), (2, 200), (3, 404)]
    assert {(line["batch"], line["level"]) for line in said} == {(batch_id, "debug")}
    assert SECRET not in json.dumps(lines.items)


def test_who_is_not_sampled_leaves_a_trace_id_in_the_log_alone(lines: Heard) -> None:
    spans = KeptSpans()
    with serving(spans=spans) as served:
        answer = ask(served, {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-00"})
        [line] = lines.wait(lambda lines: len(lines) == 1)
        assert {submit.trace for submit in served.worker.submits} == {""}
    assert "traceparent" not in answer.headers
    assert line["trace"] == TRACE_ID
    assert not spans.items


@pytest.mark.parametrize("traceparent", [f"00-{TRACE_ID}-00f067aa0ba902b7-01", SECRET * 50])
def test_what_a_stranger_writes_into_malformed_headers_is_in_no_log(
    traceparent: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(spans=KeptSpans()) as served:
        for state in (SECRET, f"{SECRET}!=1", "x" * 9_000):
            assert ask(served, {"traceparent": traceparent, "tracestate": state}).status_code == 200
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []
    assert SECRET not in caplog.text


def test_a_bug_is_told_by_its_place_and_not_by_what_it_says(lines: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise ValueError(f"cannot do {SECRET}")

    with serving() as served:
        monkeypatch.setattr(served.gateway, "_dispatch", broken)
        assert ask(served).status_code == 500
        failed, line = lines.wait(lambda lines: len(lines) == 2)
    assert (failed["event"], failed["request"]) == ("request_failed", line["request"])
    assert "broken > ValueError" in failed["where"]
    assert (line["status"], line["reason"]) == (500, "internal")
    assert SECRET not in json.dumps(lines.items)


def test_probes_are_not_worth_a_line_and_strange_paths_are_not_repeated(lines: Heard) -> None:
    with serving() as served:
        assert served.http.get("/live").status_code == 200
        assert served.http.post(f"/{SECRET}").status_code == 404
        probe, strange = lines.wait(lambda lines: len(lines) == 2)
    assert (probe["level"], probe["path"]) == ("debug", "/live")
    assert (strange["status"], strange.get("path")) == (404, None)
