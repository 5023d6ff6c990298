"""Where the spans of a process go: to a collector when one is named, else nowhere, at no cost but a look.

Owns the choice. Never: imports OpenTelemetry where nobody wants it.
"""

from __future__ import annotations

from typing import Protocol

from baton.common.clock import Clock
from baton.common.config import ClusterConfig
from baton.common.log import ProcessName
from baton.common.spans import TracedSpan

FLUSH_S = 2.0
"""What a process that ends waits for its last spans to leave."""


class SpanSink(Protocol):
    """`baton.common.otlp.Exporter`, or nobody."""

    @property
    def takes(self) -> bool:
        """Whether anybody looks at what is told."""

    def tell(self, span: TracedSpan) -> None:
        """From any thread. Never waits."""

    def counts(self) -> dict[str, int]:
        """Spans by what became of them: `sent`, `dropped` for want of room, `failed` at the collector."""

    def flush(self, timeout_s: float) -> bool:
        """What was told so far is on its way or given up. False: not in time."""


class Nobody:
    """Takes no spans."""

    takes = False

    def tell(self, span: TracedSpan) -> None:
        pass

    def counts(self) -> dict[str, int]:
        return {}

    def flush(self, timeout_s: float) -> bool:
        return True


NOBODY = Nobody()


def open_sink(config: ClusterConfig, process: ProcessName, clock: Clock) -> SpanSink:
    """Once per process."""
    if not config.tracing.endpoint:
        return NOBODY
    from baton.common.otlp import open_exporter  # OpenTelemetry's SDK, which takes a tenth of a second to import

    return open_exporter(config.tracing, config.cluster, process, clock)
