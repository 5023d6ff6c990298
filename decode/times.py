"""Where the time and the bytes of one request went, on its decode worker: what becomes its `Timeline`.

Owns the sums, and since when what is not over yet has gone on. Never: reads a clock, or decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.common.ids import WorkerId
from baton.common.messages import Timeline


@dataclass(slots=True)
class Times:
    """Token counts are of the first pass that got to the end of the prompt, so that they add up to it."""

    queue_s: float = 0.0
    reserve_wait_s: float = 0.0
    refused_since_s: float | None = None
    restore_s: float = 0.0
    restoring_since_s: float | None = None
    handoff_s: float = 0.0
    handing_over_since_s: float | None = None
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    scatter_s: float = 0.0
    running_since_s: float | None = None
    decode_s: float = 0.0
    transfer_bytes: int = 0
    lane: str = ""
    prefill_worker: str = ""
    local_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    transferred_tokens: int = 0
    prefill_cached_tokens: int = 0
    attempts: int = 0
    retractions: int = 0
    counted: bool = False  # the token counts are complete

    def refused(self, now: float) -> None:
        """There are no pages for it yet."""
        if self.refused_since_s is None:
            self.refused_since_s = now

    def admitted(self, queued_since_s: float, now: float) -> None:
        self.queue_s += now - queued_since_s
        if self.refused_since_s is not None:
            self.reserve_wait_s += now - self.refused_since_s
            self.refused_since_s = None

    def restored(self, now: float) -> None:
        assert self.restoring_since_s is not None
        self.restore_s += now - self.restoring_since_s
        self.restoring_since_s = None

    def asked(self, now: float) -> None:
        """A prefill worker is to hand the KV over."""
        self.handing_over_since_s = now

    def handed_over(self, now: float) -> None:
        """It did, or will not."""
        assert self.handing_over_since_s is not None
        self.handoff_s += now - self.handing_over_since_s
        self.handing_over_since_s = None

    def runs(self, now: float) -> None:
        self.running_since_s = now
        self.counted = True

    def retracted(self, now: float) -> None:
        self.retractions += 1
        if self.running_since_s is not None:
            self.decode_s += now - self.running_since_s
            self.running_since_s = None

    def begin_count(self) -> None:
        """A pass over the prompt begins; an earlier one that was cut short does not count."""
        if not self.counted:
            self.cached_tokens = self.restored_tokens = self.local_tokens = 0
            self.transferred_tokens = self.prefill_cached_tokens = 0

    def timeline(self, now: float, worker: WorkerId) -> Timeline:
        running_s = 0.0 if self.running_since_s is None else now - self.running_since_s
        return Timeline(
            queue_s=self.queue_s,
            reserve_wait_s=self.reserve_wait_s,
            restore_s=self.restore_s,
            handoff_s=self.handoff_s,
            prefill_s=self.prefill_s,
            transfer_s=self.transfer_s,
            scatter_s=self.scatter_s,
            decode_s=self.decode_s + running_s,
            transfer_bytes=self.transfer_bytes,
            lane=self.lane,
            prefill_worker=self.prefill_worker,
            decode_worker=worker,
            local_tokens=self.local_tokens,
            cached_tokens=self.cached_tokens,
            restored_tokens=self.restored_tokens,
            transferred_tokens=self.transferred_tokens,
            prefill_cached_tokens=self.prefill_cached_tokens,
            attempts=self.attempts,
            retractions=self.retractions,
        )
