"""A collector: takes OTLP over HTTP, decodes it, and keeps the spans."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Received:
    trace_id: str
    span_id: str
    parent: str
    name: str
    kind: int
    begin_ns: int
    end_ns: int
    attributes: dict[str, Value]
    resource: dict[str, Value]
    error: str
    state: str

    @property
    def worker(self) -> Value:
        return self.resource["baton.worker"]


@dataclass
class Receiver:
    url: str = ""
    spans: list[Received] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self.changed:
            self.raw.append(body)
            for group in request.resource_spans:
                resource = _attributes(group.resource.attributes)
                self.spans += [_received(span, resource) for scope in group.scope_spans for span in scope.spans]
            self.changed.notify_all()

    def wait(self, trace_id: str, complete: Callable[[list[Received]], bool], timeout_s: float) -> list[Received]:
        """The spans of one trace, when they are complete, or all that came in time."""

        def found() -> list[Received]:
            return [span for span in self.spans if span.trace_id == trace_id]

        with self.changed:
            self.changed.wait_for(lambda: complete(found()), timeout_s)
            return found()


def _received(span: Span, resource: dict[str, Value]) -> Received:
    return Received(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        name=span.name,
        kind=span.kind,
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        resource=resource,
        error=span.status.message if span.status.code == Status.STATUS_CODE_ERROR else "",
        state=span.trace_state,
    )


def _attributes(pairs: Iterator[KeyValue]) -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Value:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(one.string_value for one in value.array_value.values)
    found: Value = getattr(value, kind)
    return found


def tree(spans: list[Received]) -> dict[str, object]:
    """{"name @worker": what is under it}, of all spans; an assertion where they are no one tree."""
    ids = {span.span_id for span in spans}
    assert len(ids) == len(spans), "a span came twice"
    roots = [span for span in spans if span.parent not in ids]
    assert len(roots) == 1, [(span.name, span.parent) for span in roots]

    def below(parent: Received) -> dict[str, object]:
        children = sorted((span for span in spans if span.parent == parent.span_id), key=lambda one: one.begin_ns)
        return {f"{one.name} @{one.worker}": below(one) for one in children}

    return {f"{roots[0].name} @{roots[0].worker}": below(roots[0])}


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces", self.path
            receiver.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
