"""The spans of one traced request on its decode worker, told when it has its outcome. Pure.

decode_worker ─┬─ queue         until its pages were promised; again after it was pushed back
               ├─ reserve       of that: pages were short
               ├─ restore       tiers below the pool were asked
               ├─ handoff       `transfer/handoff_spans.py`
               ├─ prefill       computed here
               ├─ decode_queue  all KV was here, and the step that ran had to end
               └─ decode
"""

from __future__ import annotations

from baton.common.messages import Output
from baton.common.spans import Attribute, TracedSpan, span_below
from baton.decode.request import DecodeRequest


def request_spans(request: DecodeRequest, final: Output, now: float) -> list[TracedSpan]:
    timeline = final.timeline
    assert timeline is not None, f"{request.key} ended without an account"
    attributes: dict[str, Attribute] = {
        "baton.request_id": request.key[0],
        "baton.placement": request.key[1],
        "baton.prompt.tokens": len(request.prompt),
        "baton.prompt.local_tokens": timeline.local_tokens,
        "baton.prompt.cached_tokens": timeline.cached_tokens,
        "baton.prompt.restored_tokens": timeline.restored_tokens,
        "baton.prompt.transferred_tokens": timeline.transferred_tokens,
        "baton.output.tokens": len(request.outputs) - request.inherited,
        "baton.handoff.attempts": timeline.attempts,
        "baton.retractions": timeline.retractions,
    }
    whole = TracedSpan(
        context=request.trace,
        parent=request.trace_parent,
        name="decode_worker",
        begin_s=request.arrived_s,
        end_s=now,
        kind="server",
        attributes=attributes,
        error="" if final.failure is None else str(final.failure.code),
    )
    stages = enumerate(request.times.stages_until(now))
    return [whole, *(span_below(request.trace, one, begin, end, unique=str(n)) for n, (one, begin, end) in stages)]
