"""What one request came to: its line in the log, and its span.

Owns: the account of each request from its first byte to its last (`accounting.py`), or of each line of a batch, and the
ids that go with it. Never: decides anything about a request, or keeps what it or its answer says.

Whatever a request comes by on its way (routes, choices, the gateway) finds its account in `CURRENT`, which asyncio
hands on to every task that a request starts: nobody has to pass it through.

A client may name its request (`X-Request-Id`): it gets that name back, and finds it in log and trace. Inside it has
another one, ours (`X-Baton-Request-Id`, `baton.request_id`): a client's need not be unique.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from baton.common.clock import Clock
from baton.common.errors import ErrorCode
from baton.common.ids import RequestId
from baton.common.log import EventLog, LogValue
from baton.common.messages import Timeline
from baton.common.spans import Attribute, TracedSpan
from baton.common.tracing import SpanSink
from baton.deploy.stages import stages_of
from baton.deploy.tracing import Beginning, begin_trace

CLIENT_CLOSED_REQUEST = 499
BATCH = "BATCH"
"""Stands for the method of a request that is a line of a batch."""
QUIET = frozenset({"GET", BATCH})
"""Probes, scrapes, and what its batch tells of."""
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

_log = EventLog("baton.http")


@dataclass(slots=True)
class Account:
    """`reason` is the `ErrorCode` of what went wrong, if anything did."""

    request_id: RequestId
    client_id: str
    beginning: Beginning
    begun_s: float
    status: int = 0
    complete: bool = False  # the whole response was sent
    reason: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    placements: int = 0
    slowest_s: float = -1.0
    timeline: Timeline | None = None  # of the choice that took longest
    labels: dict[str, LogValue] = field(default_factory=dict)  # beside all that, in the log

    @property
    def trace_id(self) -> str | None:
        """For the log."""
        return self.beginning.trace_id or None

    def answered(
        self,
        finish_reason: str,
        prompt_tokens: int,
        completion_tokens: int,
        ttft_s: float | None,
        total_s: float,
        placements: int,
        timeline: Timeline,
    ) -> None:
        """One of its choices."""
        self.finish_reasons.append(finish_reason)
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self.placements += placements
        if ttft_s is not None and (self.ttft_s is None or ttft_s < self.ttft_s):
            self.ttft_s = ttft_s
        if total_s > self.slowest_s:
            self.slowest_s, self.timeline = total_s, timeline


CURRENT: ContextVar[Account | None] = ContextVar("account", default=None)


def failed(reason: str) -> None:
    """The request that this is about ended so. What is told first stays."""
    account = CURRENT.get()
    if account is not None and not account.reason:
        account.reason = reason


def asked_by(key: str) -> None:
    """The request that this is about comes from the API key of this name."""
    account = CURRENT.get()
    if account is not None:
        account.labels["key"] = key


def new_request_id() -> RequestId:
    """Ours, never a client's."""
    return RequestId(secrets.token_hex(12))


def current_request_id() -> RequestId:
    """Of the HTTP request that is being answered."""
    account = CURRENT.get()
    return new_request_id() if account is None else account.request_id


class Books:
    """Of one gateway. `sample_ratio`: of the requests whose client does not say whether they are traced."""

    def __init__(self, clock: Clock, spans: SpanSink, sample_ratio: float) -> None:
        self._clock = clock
        self._spans = spans
        self._sample_ratio = sample_ratio if spans.takes else None

    def open(self, path: str, headers: Mapping[str, str]) -> Account:
        given = headers.get("x-request-id", "")
        beginning = begin_trace(path, headers, self._sample_ratio)
        client_id = given if _CLIENT_ID.fullmatch(given) else ""
        return Account(new_request_id(), client_id, beginning, self._clock.now())

    def close(self, account: Account, method: str, route: str) -> None:
        """Nothing more will be said of it."""
        if account.status != CLIENT_CLOSED_REQUEST and not account.complete and not account.reason:
            account.status = CLIENT_CLOSED_REQUEST  # it hung up in the middle of a stream
        if account.status == CLIENT_CLOSED_REQUEST:
            account.reason = account.reason or str(ErrorCode.CANCELLED)
        now = self._clock.now()
        _write(account, method, route, now - account.begun_s)
        if account.beginning.context:
            self._spans.tell(_span(account, method, route, now))


def _write(account: Account, method: str, route: str, took_s: float) -> None:
    """Not what was asked for by whom: no path that is no route of ours, no query, no address, no key."""
    fields: dict[str, LogValue] = {
        "request": account.request_id,
        "client_request": account.client_id or None,
        "trace": account.trace_id,
        "method": method,
        "path": route or None,
        "status": account.status,
        "reason": account.reason or ",".join(sorted(set(account.finish_reasons))) or None,
        "ms": round(took_s * 1e3, 3),
        **account.labels,
    }
    timeline = account.timeline
    if timeline is not None:
        fields |= {
            "ttft_ms": None if account.ttft_s is None else round(account.ttft_s * 1e3, 3),
            "prompt_tokens": account.prompt_tokens,
            "completion_tokens": account.completion_tokens,
            "choices": len(account.finish_reasons),
            "placements": account.placements,
            "decode_worker": timeline.decode_worker,
            "prefill_worker": timeline.prefill_worker or None,
            "lane": timeline.lane or None,
            "transfer_bytes": timeline.transfer_bytes,
            "stages_ms": {name: round(seconds * 1e3, 3) for name, seconds in stages_of(timeline).items()},
        }
    kept = {name: value for name, value in fields.items() if value is not None}
    if account.status >= 500:
        _log.warning("request", **kept)
    elif method in QUIET:
        _log.debug("request", **kept)
    else:
        _log.info("request", **kept)


def _span(account: Account, method: str, route: str, now: float) -> TracedSpan:
    attributes: dict[str, Attribute] = {
        "http.response.status_code": account.status,
        "baton.request_id": account.request_id,
    }
    if method != BATCH:
        attributes |= {"http.request.method": method, "http.route": route}
    if account.client_id:
        attributes["baton.client_request_id"] = account.client_id
    refused = 400 <= account.status < 500 and account.status != CLIENT_CLOSED_REQUEST
    return TracedSpan(
        context=account.beginning.context,
        parent=account.beginning.parent,
        name=f"{method} {route}",
        begin_s=account.begun_s,
        end_s=now,
        kind="server",
        attributes=attributes,
        error="" if refused else account.reason,  # by the conventions a client's mistake is no error of a server
        state=account.beginning.state,
    )
