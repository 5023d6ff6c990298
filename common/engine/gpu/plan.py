"""A step's plan on a device, with the same on the host beside it. Owns nothing."""

from __future__ import annotations

from dataclasses import dataclass

from baton.common.engine.paged_attention import AttentionPlan


@dataclass(frozen=True, slots=True)
class DevicePlan(AttentionPlan):
    """`host` is for those who decide there how a kernel is launched. In a graph's steps `page_ids` is longer than what
    the offsets speak of."""

    host: AttentionPlan
