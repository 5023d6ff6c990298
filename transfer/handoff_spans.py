"""The spans of one traced hand-off, on either side, made from its account in the ledger. Pure.

    decode worker:   handoff ─┬─ staging            no lane and no slots yet
                              └─ transfer ── scatter
    prefill worker:  prefill_worker ─┬─ queue       its engine has no pages for it yet
                                     ├─ prefill     until all is computed; others' prompts in the same steps included
                                     └─ transfer    first region announced until committed

`prefill_worker` is under `handoff`, whose id both sides know. Writing into pages goes on during the whole transfer:
`scatter` is as long as all of it together, and drawn up to the transfer's end.
"""

from __future__ import annotations

from baton.common.spans import Attribute, TracedSpan, below, span_below
from baton.transfer.reports import HandoffTimes


def handoff_spans(times: HandoffTimes) -> list[TracedSpan]:
    """Of a hand-off that has ended; none when nobody traces its request."""
    if not times.trace:
        return []
    return _received(times) if times.direction == "in" else _sent(times)


def _received(times: HandoffTimes) -> list[TracedSpan]:
    over_s = times.begun_at_s + times.marks["over"]
    whole = span_below(
        times.trace,
        "handoff",
        times.begun_at_s,
        over_s,
        _attributes(times) | {"baton.prompt.handed_over_tokens": times.tokens},
        kind="client",
        error=times.code,
        unique=times.handoff,
    )
    spans = [whole]
    offered_s = _at(times, "offered")
    spans.append(span_below(whole.context, "staging", times.begun_at_s, over_s if offered_s is None else offered_s))
    for transfer in _transfer(times, whole):
        spans.append(transfer)
        if times.scatter_s > 0:
            scattering_s = max(transfer.begin_s, transfer.end_s - times.scatter_s)
            spans.append(span_below(transfer.context, "scatter", scattering_s, transfer.end_s))
    return spans


def _sent(times: HandoffTimes) -> list[TracedSpan]:
    over_s = times.begun_at_s + times.marks["over"]
    asked = below(times.trace, "handoff", times.handoff)
    whole = span_below(
        asked, "prefill_worker", times.begun_at_s, over_s, _attributes(times), kind="server", error=times.code
    )
    spans = [whole]
    computed_s = _at(times, "all computed")
    if times.queued_s is not None and computed_s is not None:
        admitted_s = times.begun_at_s + times.queued_s
        spans.append(span_below(whole.context, "queue", times.begun_at_s, admitted_s))
        spans.append(span_below(whole.context, "prefill", admitted_s, computed_s))
    return spans + _transfer(times, whole)


def _transfer(times: HandoffTimes, whole: TracedSpan) -> list[TracedSpan]:
    """None where nothing has travelled. What was not committed has ended with the hand-off."""
    begun_s, committed_s = _at(times, "first region"), _at(times, "committed")
    if begun_s is None:
        return []
    end_s = whole.end_s if committed_s is None else committed_s
    return [span_below(whole.context, "transfer", begun_s, end_s, _attributes(times), error=times.code)]


def _at(times: HandoffTimes, mark: str) -> float | None:
    since_s = times.marks.get(mark)
    return None if since_s is None else times.begun_at_s + since_s


def _attributes(times: HandoffTimes) -> dict[str, Attribute]:
    return {
        "baton.request_id": times.request_id,
        "baton.handoff": times.handoff,
        "baton.peer": times.peer,
        "baton.lane": times.lane,
        "baton.transfer.bytes": times.nbytes,
        "baton.transfer.regions": times.region_count,
        "baton.transfer.damaged_regions": times.damaged_regions,
    }
