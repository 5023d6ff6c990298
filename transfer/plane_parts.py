"""What the two halves of a data plane have in common. Owns nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from baton.common.config import TransferConfig
from baton.transfer.caps import Caps
from baton.transfer.peer_lanes import PeerLanes
from baton.transfer.session.effects import DataEvent
from baton.transfer.staging import StagingHandler, StagingRing


@dataclass(frozen=True, slots=True)
class PlaneParts:
    """`answer` takes the events for the endpoint; `next_op` numbers operations, over both halves. `stalled_s`: of
    `stalls.Stalls`."""

    config: TransferConfig
    handler: StagingHandler
    lanes: PeerLanes
    answer: Callable[[DataEvent], None]
    next_op: Callable[[], int]
    stalled_s: float

    def new_caps(self) -> Caps:
        """Of one direction."""
        return Caps(self.config.max_gbps, asdict(self.config.lane_max_gbps))

    def new_ring(self) -> StagingRing:
        """Of one direction; copies may have their slots in it."""
        ring = StagingRing(self.config.staging_ring_bytes, self.config.region_bytes)
        self.handler.copier.use_staging(ring.memory)
        return ring
