"""Which workers a request is sent to. Pure: loads in, a choice out. Owns no state, knows no socket.

Policy: least loaded, with prefix affinity as the tie breaker. A worker that prefers a prompt (rendezvous hash of its
beginning) gets it as long as it has at most `slack` more requests than the least loaded one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.common.engine.policy import affinity_key, rendezvous_order
from baton.common.ids import WorkerId
from baton.common.messages import Load


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could take a request. `placed` is what this gateway has there itself: heartbeats lag behind."""

    worker: WorkerId
    load: Load
    placed: int

    @property
    def requests(self) -> int:
        """Requests there, as far as can be known."""
        return max(self.load.queued + self.load.running, self.placed)


def choose(candidates: Iterable[Candidate], tokens: npt.NDArray[np.int32], slack: int = 4) -> WorkerId | None:
    """The worker for a prompt, or None when there is no candidate. A worker that drains is no candidate."""
    requests = {one.worker: one.requests for one in candidates if not one.load.draining}
    if not requests:
        return None
    limit = min(requests.values()) + slack
    order = rendezvous_order(affinity_key(tokens), requests)
    return next(worker for worker in order if requests[worker] <= limit)
