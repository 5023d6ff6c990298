"""The stages of a request, by one name each wherever they are told: `Server-Timing`, the log, the page. Pure."""

from __future__ import annotations

from baton.common.messages import Timeline


def stages_of(timeline: Timeline) -> dict[str, float]:
    """Seconds. `reserve` is a part of `queue`, `scatter` of `transfer`, and what there is of `prefill` and `transfer`
    lies in `handoff`, if there was one."""
    return {
        "gateway": timeline.gateway_s,
        "queue": timeline.queue_s,
        "reserve": timeline.reserve_wait_s,
        "restore": timeline.restore_s,
        "handoff": timeline.handoff_s,
        "prefill": timeline.prefill_s,
        "transfer": timeline.transfer_s,
        "scatter": timeline.scatter_s,
        "decode_queue": timeline.decode_queue_s,
        "decode": timeline.decode_s,
    }
