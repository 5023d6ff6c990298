"""Where the time and the bytes of one request went, on its decode worker: what becomes its `Timeline`.

Owns the sums, since when what is not over yet has gone on, and for traces the stages one by one. Never: reads a clock,
or decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.common.ids import WorkerId
from baton.common.messages import Timeline

MAX_STAGES = 64
"""Of a request that is retracted again and again the later ones are not kept."""


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
    computing_since_s: float | None = None
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    scatter_s: float = 0.0
    landed_since_s: float | None = None
    decode_queue_s: float = 0.0
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
    stages: list[tuple[str, float, float]] = field(default_factory=list)  # those that are over

    def refused(self, now: float) -> None:
        """There are no pages for it yet."""
        if self.refused_since_s is None:
            self.refused_since_s = now

    def admitted(self, queued_since_s: float, now: float) -> None:
        self.queue_s += now - queued_since_s
        self._over("queue", queued_since_s, now)
        if self.refused_since_s is not None:
            self._over("reserve", self.refused_since_s, now)
            self.reserve_wait_s += now - self.refused_since_s
            self.refused_since_s = None

    def restored(self, now: float) -> None:
        assert self.restoring_since_s is not None
        self.restore_s += now - self.restoring_since_s
        self._over("restore", self.restoring_since_s, now)
        self.restoring_since_s = None

    def asked(self, now: float) -> None:
        """A prefill worker is to hand the KV over."""
        self.handing_over_since_s = now

    def handed_over(self, now: float) -> None:
        """It did, or will not."""
        assert self.handing_over_since_s is not None
        self.handoff_s += now - self.handing_over_since_s
        self.handing_over_since_s = None

    def computes(self, now: float) -> None:
        """The rest of its prompt, on this worker."""
        self.computing_since_s = now

    def computed(self, now: float) -> None:
        if self.computing_since_s is not None:
            self._over("prefill", self.computing_since_s, now)
            self.computing_since_s = None

    def runs(self, now: float, landed_s: float) -> None:
        """All KV is there, since `landed_s`: the engine had a step to finish before it heard of it."""
        self.running_since_s = now
        self.landed_since_s = landed_s
        self.counted = True

    def steps(self, now: float) -> None:
        """Its first step begins."""
        if self.landed_since_s is not None:
            self._over("decode_queue", self.landed_since_s, now)
            self.decode_queue_s += now - self.landed_since_s
            self.landed_since_s = None

    def retracted(self, now: float) -> None:
        self.retractions += 1
        self.landed_since_s = None
        self.computed(now)
        if self.running_since_s is not None:
            self._over("decode", self.running_since_s, now)
            self.decode_s += now - self.running_since_s
            self.running_since_s = None

    def _over(self, stage: str, since_s: float, now: float) -> None:
        if len(self.stages) < MAX_STAGES:
            self.stages.append((stage, since_s, now))

    def stages_until(self, now: float) -> list[tuple[str, float, float]]:
        """Also what the end cut short."""
        open_ones = (
            ("restore", self.restoring_since_s),
            ("prefill", self.computing_since_s),
            ("decode", self.running_since_s),
        )
        return [*self.stages, *((stage, since_s, now) for stage, since_s in open_ones if since_s is not None)]

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
            decode_queue_s=self.decode_queue_s,
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
