"""What a process did for one traced request, as OpenTelemetry knows it: spans, and the W3C context they hang together
by. Pure.

Owns: the words, and the names (ids) of spans. Never: a clock, a random number, or a socket: whoever tells of a span
knows when it began, ids follow from the id above them, and `otlp.py` sends what is told.

A context is a W3C `traceparent` and travels as it is through messages and cores, which only hand it on; "" is that of a
request that nobody traces. It always names the span *above*: a span's own id is a function of that and of its name.
Whoever tells of a hand-off's end and whoever works for it need not talk to know one another's ids.

Never in a span: text or tokens of prompts and answers, keys, addresses of clients.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from msgspec import Meta, Struct

Context = Annotated[str, Meta(max_length=55, pattern="^(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?$")]

NOT_TRACED = ""

SpanKind = Literal["internal", "server", "client"]
Attribute = str | int | float | bool | tuple[str, ...]


class TracedSpan(Struct, frozen=True, kw_only=True):
    """Times are of the clock of the process that tells. `error` is an `ErrorCode`, "" where it ended well."""

    context: str
    parent: str  # its span id; "": it has none
    name: str
    begin_s: float
    end_s: float
    kind: SpanKind = "internal"
    attributes: dict[str, Attribute] = {}
    error: str = ""
    state: str = ""  # a W3C `tracestate`, as it came


def make_context(trace_id: str, span_id: str) -> str:
    """Of a span that is recorded; ids in hex."""
    return f"00-{trace_id}-{span_id}-01"


def trace_id_of(context: str) -> str:
    """ "" of none."""
    return context[3:35]


def span_id_of(context: str) -> str:
    return context[36:52]


def below(context: str, name: str, unique: str = "") -> str:
    """The context of the span of this name under that one. `unique` tells those apart that share a name there."""
    span_id = hashlib.blake2b(f"{context} {name} {unique}".encode(), digest_size=8).hexdigest()
    return f"{context[:36]}{span_id}{context[52:]}"


def span_below(
    context: str,
    name: str,
    begin_s: float,
    end_s: float,
    attributes: dict[str, Attribute] | None = None,
    *,
    kind: SpanKind = "internal",
    error: str = "",
    unique: str = "",
) -> TracedSpan:
    """One under `context`, told when it is over."""
    return TracedSpan(
        context=below(context, name, unique),
        parent=span_id_of(context),
        name=name,
        begin_s=begin_s,
        end_s=max(begin_s, end_s),
        kind=kind,
        attributes=attributes or {},
        error=error,
    )
