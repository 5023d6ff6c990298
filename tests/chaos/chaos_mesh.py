"""A mesh whose frames get lost, come twice, late, in another order or cut short, and that says what passes.

The control plane is encrypted: what happens to a *frame* must happen inside. Seeded; a frame is never altered so that
it still makes sense, since nobody without the keys could do that.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import zmq
from chaos_fuzz import damaged, encoded, odd_parts, varied

from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.messages import Body, Frame, Nack, encode_frame
from baton.transfer.keys import KeyPair
from baton.transfer.mesh import Mesh


@dataclass(frozen=True, slots=True)
class FrameFaults:
    """Shares of all frames that are sent."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    truncate: float = 0.0
    mad: float = 0.0  # followed by something that no honest member would send
    delay_s: float = 0.25  # at most


NO_FAULTS = FrameFaults()


class ChaosMesh(Mesh):
    """`saw` is told of each frame: ("send" | "sent" | "got", its kind); it may never return."""

    def __init__(
        self,
        stamp: Stamp,
        bind_host: str,
        keys: KeyPair | None,
        faults: FrameFaults,
        seed: int,
        saw: Callable[[str, Body], None],
    ) -> None:
        super().__init__(stamp, bind_host, keys)
        self.faults = faults
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._saw = saw
        self._late: list[tuple[float, int, WorkerId, Epoch, Body]] = []
        self._numbers = count()

    def send(self, worker: WorkerId, dst_epoch: Epoch, body: Body) -> bool:
        self._saw("send", body)
        self.counts["nacks"] += isinstance(body, Nack)
        faults, dice = self.faults, self._random.random()
        if dice < faults.drop:
            self.counts["dropped"] += 1
            return True
        dice -= faults.drop
        if dice < faults.delay:
            self.counts["delayed"] += 1
            due_s = time.monotonic() + self._random.uniform(0, faults.delay_s)
            heapq.heappush(self._late, (due_s, next(self._numbers), worker, dst_epoch, body))
            return True
        dice -= faults.delay
        if dice < faults.truncate:
            self.counts["truncated"] += 1
            data = encode_frame(Frame(self.stamp, dst_epoch, body))
            self.send_raw(worker, [data[: self._random.randrange(len(data))]])
            return True
        dice -= faults.truncate
        if dice < faults.duplicate:
            self.counts["duplicated"] += 1
            super().send(worker, dst_epoch, body)
        sent = super().send(worker, dst_epoch, body)
        self._saw("sent", body)
        if self._random.random() < faults.mad:
            self.counts["mad"] += 1
            data = encoded(self._random, self.stamp, dst_epoch, varied(self._random, body))
            dice = self._random.random()
            odd = (
                odd_parts(self._random, data) if dice < 0.1 else [damaged(self._random, data)] if dice < 0.3 else [data]
            )
            self.send_raw(worker, odd)
        return sent

    def send_raw(self, worker: WorkerId, parts: list[bytes]) -> None:
        """Anything, to a peer that is connected."""
        known = self._peers.get(worker)
        if known is not None:
            try:
                known[1].send_multipart(parts, zmq.NOBLOCK)
            except zmq.Again:
                self.counts["raw_lost"] += 1

    def poll(self, timeout_s: float) -> list[Frame]:
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            _, _, worker, dst_epoch, body = heapq.heappop(self._late)
            super().send(worker, dst_epoch, body)
        if self._late:
            timeout_s = min(timeout_s, max(0.0, self._late[0][0] - now))
        frames = super().poll(timeout_s)
        for frame in frames:
            self._saw("got", frame.body)
        return frames
