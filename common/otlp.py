"""Sends what processes tell of traced requests to an OpenTelemetry collector, over OTLP/HTTP.

Owns: one queue and one thread of this process, and the count of what became of each span. Never: makes anybody wait. A
collector that is slow or down costs this thread's time and the spans that do not fit the queue; those are counted.

Spans are told in the process's monotonic clock and sent in that of the wall. The difference stays what it was found to
be at first, so that within a process nothing is shifted against anything, unless the wall's clock was set meanwhile
(docs/OBSERVABILITY.md says what that means between hosts).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib.metadata import version
from queue import Empty, Full, Queue
from typing import Protocol

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from baton.common import env
from baton.common.clock import Clock, wall_offset_s
from baton.common.config import TracingConfig
from baton.common.log import EventLog, ProcessName, where_of
from baton.common.spans import TracedSpan, span_id_of, trace_id_of

CAPACITY = 4096
"""Spans that wait; about 4 MB."""
BATCH = 256
LINGER_S = 0.5
CLOCK_SET_S = 0.01
"""By so much the wall's clock runs away from ours only when somebody sets it: both are slewed alike."""
TRACES_PATH = "/v1/traces"

_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}

_log = EventLog("baton.otlp")


class Collector(Protocol):
    """`OTLPSpanExporter`, or what a test puts in its place."""

    def export(self, spans: Sequence[ReadableSpan], /) -> SpanExportResult: ...


class Exporter:
    """A `baton.common.tracing.SpanSink`."""

    takes = True

    def __init__(self, collector: Collector, resource: Resource, clock: Clock, *, capacity: int = CAPACITY) -> None:
        self._collector = collector
        self._resource = resource
        self._scope = InstrumentationScope("baton", version("baton-pd"))
        self._clock = clock
        self._offset_s = wall_offset_s(clock)
        self._waiting: Queue[TracedSpan | threading.Event] = Queue(capacity)
        self._counting = threading.Lock()
        self._dropped = 0
        self._sent = 0
        self._failed = 0
        threading.Thread(target=self._run, name="otlp", daemon=True).start()

    def tell(self, span: TracedSpan) -> None:
        try:
            self._waiting.put_nowait(span)
        except Full:
            with self._counting:
                self._dropped += 1

    def counts(self) -> dict[str, int]:
        return {"sent": self._sent, "dropped": self._dropped, "failed": self._failed}

    def flush(self, timeout_s: float) -> bool:
        done = threading.Event()
        try:
            self._waiting.put(done, timeout=timeout_s)
        except Full:
            return False
        return done.wait(timeout_s)

    def _run(self) -> None:
        while True:
            spans, flushed = self._take()
            if spans:
                self._send(spans)
            if flushed is not None:
                flushed.set()

    def _take(self) -> tuple[list[TracedSpan], threading.Event | None]:
        """What came, up to BATCH, within LINGER_S of the first."""
        spans: list[TracedSpan] = []
        item = self._waiting.get()
        until_s = self._clock.now() + LINGER_S
        while True:
            if isinstance(item, threading.Event):
                return spans, item
            spans.append(item)
            if len(spans) == BATCH:
                return spans, None
            try:
                item = self._waiting.get(timeout=max(0.0, until_s - self._clock.now()))
            except Empty:
                return spans, None

    def _send(self, spans: list[TracedSpan]) -> None:
        offset_s = wall_offset_s(self._clock)
        if abs(offset_s - self._offset_s) > CLOCK_SET_S:
            self._offset_s = offset_s
        try:
            result = self._collector.export([self._made(span) for span in spans])
        except Exception as error:  # noqa: BLE001 - the thread's top frame: no trace is worth a process
            _log.error("spans_failed", spans=len(spans), where=where_of(error))
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self._sent += len(spans)
        else:
            self._failed += len(spans)

    def _made(self, span: TracedSpan) -> ReadableSpan:
        """The SDK's own tracer draws ids and takes times by itself; ours are given."""
        state = TraceState.from_header([span.state]) if span.state else None
        return ReadableSpan(
            span.name,
            context=_span_context(trace_id_of(span.context), span_id_of(span.context), state),
            parent=_span_context(trace_id_of(span.context), span.parent, state) if span.parent else None,
            resource=self._resource,
            attributes=span.attributes | ({"error.type": span.error} if span.error else {}),
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=self._wall_ns(span.begin_s),
            end_time=self._wall_ns(span.end_s),
            instrumentation_scope=self._scope,
        )

    def _wall_ns(self, at_s: float) -> int:
        return round((at_s + self._offset_s) * 1e9)


def _span_context(trace_id: str, span_id: str, state: TraceState | None) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), False, TraceFlags(TraceFlags.SAMPLED), state)


def open_exporter(config: TracingConfig, cluster: str, process: ProcessName, clock: Clock) -> Exporter:
    """To the collector that is named."""
    resource = Resource.create(
        {
            "service.name": config.service_name or env.service_name(),
            "service.namespace": cluster,
            "service.instance.id": str(process),
            "service.version": version("baton-pd"),
            "baton.worker": process.worker,
            "baton.role": process.role,
        }
    )
    return Exporter(OTLPSpanExporter(endpoint=traces_url(config.endpoint)), resource, clock)


def traces_url(endpoint: str) -> str:
    """An address without a path is that of a collector, and means its traces."""
    scheme, _, rest = endpoint.partition("://")
    host, _, path = rest.partition("/")
    return f"{scheme}://{host}{TRACES_PATH}" if not path else endpoint
