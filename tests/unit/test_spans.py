"""Contexts and spans of traced requests: what W3C says of headers, ids that follow from those above, and bounds."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from msgspec import structs
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from baton.common.clock import MonotonicClock, wall_offset_s
from baton.common.config import ClusterConfig, TracingConfig
from baton.common.config_checks import validate
from baton.common.errors import ConfigError
from baton.common.ids import Epoch, RequestId, Stamp, WorkerId
from baton.common.messages import Frame, MalformedFrame, SamplingParams, Submit, decode_frame, encode_frame
from baton.common.otlp import Exporter, traces_url
from baton.common.resolve import environment_layer
from baton.common.spans import TracedSpan, below, span_below, span_id_of, trace_id_of
from baton.deploy.tracing import AnswerSpans, Beginning, begin_trace

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
CHAT = "/v1/chat/completions"
WAIT_S = 10.0


def submit(trace: str, placement: int = 0) -> Submit:
    return Submit(
        request_id=RequestId("r"),
        placement=placement,
        prompt=b"\0\0\0\0",
        sampling=SamplingParams(),
        ttl_s=1.0,
        trace=trace,
    )


# ------------------------------------------------------------------------------------------------ headers


def test_whoever_sends_a_traceparent_decides() -> None:
    sampled = begin_trace(CHAT, {"traceparent": PARENT, "tracestate": "vendor=1"}, 0.0)
    assert (sampled.trace_id, sampled.parent, sampled.state) == (TRACE_ID, SPAN_ID, "vendor=1")
    assert trace_id_of(sampled.context) == TRACE_ID
    assert span_id_of(sampled.context) != SPAN_ID
    unsampled = begin_trace(CHAT, {"traceparent": PARENT[:-1] + "0"}, 1.0)
    assert (unsampled.trace_id, unsampled.context) == (TRACE_ID, "")


@pytest.mark.parametrize(
    "header",
    ["", "00", PARENT + "x", PARENT.upper(), f"ff-{TRACE_ID}-{SPAN_ID}-01", f"00-{'0' * 32}-{SPAN_ID}-01", "0" * 9999],
)
def test_a_malformed_header_was_not_sent(header: str) -> None:
    assert begin_trace(CHAT, {"traceparent": header, "tracestate": "x=1"}, 0.0) == Beginning()
    begun = begin_trace(CHAT, {"traceparent": header}, 1.0)
    assert begun.context
    assert begun.trace_id != TRACE_ID


def test_of_the_others_the_ratio_is_traced_and_only_what_generates() -> None:
    traced = sum(bool(begin_trace(CHAT, {}, 0.25).context) for _ in range(2000))
    assert 380 < traced < 620
    assert begin_trace("/v1/models", {"traceparent": PARENT}, 1.0) == Beginning()


def test_without_a_collector_the_log_still_has_the_clients_trace() -> None:
    assert begin_trace(CHAT, {"traceparent": PARENT}, None) == Beginning(TRACE_ID)
    assert begin_trace(CHAT, {}, None) == Beginning()


# --------------------------------------------------------------------------------------------- on the wire


@pytest.mark.parametrize("trace", ["x", PARENT + "\n", PARENT[:-1], PARENT.replace("a", "A"), PARENT * 2])
def test_no_frame_carries_what_is_no_context(trace: str) -> None:
    sender = Stamp(WorkerId("gateway-0"), 1, Epoch(1))
    assert decode_frame(encode_frame(Frame(sender, Epoch(0), submit(PARENT)))).body == submit(PARENT)
    with pytest.raises(MalformedFrame):
        decode_frame(encode_frame(Frame(sender, Epoch(0), submit(trace))))


def test_ids_follow_from_the_one_above_and_the_name() -> None:
    ids = {below(PARENT, name, unique) for name in ("a", "b") for unique in ("", "1")}
    assert len(ids) == 4
    assert below(PARENT, "a") == below(PARENT, "a")
    assert all(trace_id_of(one) == TRACE_ID and len(one) == len(PARENT) for one in ids)


# ------------------------------------------------------------------------------------------ of an answer


def test_an_answer_that_moves_has_a_placement_for_each_worker() -> None:
    spans = AnswerSpans(Beginning(TRACE_ID, PARENT, operation="chat"), "r", 1.0)
    first = spans.placed(submit(""), "decode-0", 2.0)
    assert spans.placed(submit(""), "decode-0", 2.5).trace == first.trace, "said again"
    spans.first_token(3.0)
    second = spans.placed(submit("", 1), "decode-1", 4.0)
    told = {(span.name, span.attributes.get("baton.peer")): span for span in spans.ended(5.0, "", "fake", {})}
    whole = told["chat fake", None]
    assert whole.parent == SPAN_ID
    assert {span.parent for span in told.values() if span is not whole} == {span_id_of(whole.context)}
    old, new = told["placement", "decode-0"], told["placement", "decode-1"]
    assert (old.context, old.begin_s, old.end_s, old.error) == (first.trace, 2.0, 4.0, "moved")
    assert (new.context, new.begin_s, new.end_s, new.error) == (second.trace, 4.0, 5.0, "")
    assert (told["queue", None].end_s, told["first_token", None].end_s) == (2.0, 3.0)


def test_an_answer_that_nobody_took_waited_all_the_time() -> None:
    spans = AnswerSpans(Beginning(TRACE_ID, PARENT, operation="chat"), "r", 1.0)
    whole, queue = spans.ended(5.0, "no_worker", "fake", {})
    assert (whole.error, queue.name, queue.begin_s, queue.end_s) == ("no_worker", "queue", 1.0, 5.0)


# --------------------------------------------------------------------------------------------- the exporter


class PlayedCollector:
    """Takes spans when it is let, and says `result`."""

    def __init__(self, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.result = result
        self.open = threading.Event()
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan], /) -> SpanExportResult:
        assert self.open.wait(WAIT_S)
        self.spans += spans
        return self.result


def span(number: int = 0, **changes: str) -> TracedSpan:
    return structs.replace(span_below(PARENT, "stage", 1.0, 2.0, {"n": number}, unique=str(number)), **changes)


def test_a_collector_that_hangs_makes_nobody_wait_and_memory_has_a_bound() -> None:
    collector = PlayedCollector()
    exporter = Exporter(collector, Resource({}), MonotonicClock(), capacity=8)
    for number in range(1000):  # on this thread: it would hang here
        exporter.tell(span(number))
    assert not exporter.flush(0.01)
    collector.open.set()
    assert exporter.flush(WAIT_S)
    counts = exporter.counts()
    assert counts["sent"] == len(collector.spans)
    assert counts["sent"] + counts["dropped"] == 1000
    assert counts["dropped"] > 500


def test_what_a_collector_refuses_is_counted() -> None:
    collector = PlayedCollector(SpanExportResult.FAILURE)
    collector.open.set()
    exporter = Exporter(collector, Resource({}), MonotonicClock())
    exporter.tell(span())
    exporter.tell(span(state="not a tracestate at all,,,=", error="cancelled"))
    assert exporter.flush(WAIT_S)
    assert exporter.counts() == {"sent": 0, "dropped": 0, "failed": 2}


def test_times_are_sent_by_the_wall_clock() -> None:
    collector, clock = PlayedCollector(), MonotonicClock()
    collector.open.set()
    exporter = Exporter(collector, Resource({}), clock)
    exporter.tell(span())
    assert exporter.flush(WAIT_S)
    [sent] = collector.spans
    assert sent.start_time is not None
    assert sent.end_time is not None
    assert sent.end_time - sent.start_time == pytest.approx(1e9, abs=1000)
    assert abs(sent.start_time / 1e9 - (1.0 + wall_offset_s(clock))) < 1.0


# ---------------------------------------------------------------------------------------------- settings


def test_the_collector_is_named_by_a_setting_or_by_opentelemetrys_own_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def endpoint() -> object:
        return environment_layer().values.get("tracing", {}).get("endpoint")

    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    assert endpoint() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://one:4318/")
    assert endpoint() == "http://one:4318/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://two/path")
    assert endpoint() == "http://two/path"
    monkeypatch.setenv("BATON_SET_TRACING__ENDPOINT", "http://three")
    assert endpoint() == "http://three"
    monkeypatch.delenv("BATON_SET_TRACING__ENDPOINT")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert endpoint() is None
    assert traces_url("http://three:4318") == traces_url("http://three:4318/") == "http://three:4318/v1/traces"
    assert traces_url("http://three:4318/of/ours") == "http://three:4318/of/ours"


@pytest.mark.parametrize("setting", [{"endpoint": "collector:4318"}, {"sample_ratio": 1.5}, {"endpoint": "http://a@b"}])
def test_settings_that_cannot_work_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="tracing"):
        validate(ClusterConfig(tracing=TracingConfig(**setting)))  # type: ignore[arg-type]
