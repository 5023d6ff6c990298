"""Worlds of any size for as long as wanted: a thousand workers, a million requests, in bounded memory.

Requests come one after the other from a trace (`Trace`), each made when it arrives, judged when it ends, and forgotten.
Owns the workload and the sizes. Nothing goes wrong in such a world on purpose: it shows that cores and simulator bear
its size, with every check after every event.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from random import Random

import numpy as np
import numpy.typing as npt

from baton.common.config import DecodeConfig, GatewayConfig, LivenessConfig, PrefillConfig, TransferConfig
from baton.common.engine.fake_runner import StepCost
from baton.common.ids import RequestId
from baton.common.messages import SamplingParams
from baton.deploy.planner.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest
from baton.deploy.sim.clients import ClientRequest, Clients, judge
from baton.deploy.sim.settings import WorldSettings
from baton.deploy.sim.world import World

FIRST_S = 4.0
"""Everything is up by then."""
SHRINK = 64
"""What has so many tokens in a trace has one here: steps of the fake model cost what is computed in them."""
RATE_PER_WORKER = 16.0
MAX_CONTEXT = 2304
LOOKED_FOR = 4
"""Of what has ended, so many requests are looked for in all caches at a time."""
NEW_TOKEN_FACTOR = 0x9E3779B1


def made_up_trace(requests: int = 2000) -> list[TraceRequest]:
    """Where no trace is at hand: lengths and sharing like those of a conversation trace."""
    rng = Random(17)
    lines = []
    for number in range(requests):
        blocks = 1 + min(200, int(rng.expovariate(1 / 20)))
        own = [1_000_000 + 1000 * number + at for at in range(blocks)]
        shared = rng.randrange(blocks)
        begins = [1000 * rng.randrange(50) + at for at in range(shared)]
        outputs = 1 + int(rng.expovariate(1 / 340))
        lines.append(
            TraceRequest(0.3 * number, MOONCAKE_BLOCK_TOKENS * blocks - 100, outputs, (*begins, *own[shared:]))
        )
    return lines


def sized(workers: int) -> WorldSettings:
    """Two of five compute prompts."""
    prefill = max(1, 2 * workers // 5)
    return WorldSettings(
        prefill=prefill,
        decode=workers - prefill,
        gateways=max(1, workers // 100),
        page_size=16,
        prefill_pages=400,
        decode_pages=400,
        rows=16,
        max_context_len=MAX_CONTEXT,
        staging_slots=8,
        region_pages=64,
        region_s=0.002,
        step=StepCost(0.002, 0.00002),
        prefill_config=PrefillConfig(chunk_tokens=512),
        decode_config=DecodeConfig(num_reserved_decode_tokens=4, chunk_tokens=64, max_queued_requests=256),
        transfer=TransferConfig(credit_regions=2, tombstone_ttl_s=10.0, max_tombstones=64),
        liveness=LivenessConfig(
            heartbeat_interval_s=0.4, dead_after_s=2.0, republish_interval_s=0.8, start_deadline_s=60.0
        ),
    )


class PassingClients(Clients):
    """Each request is judged when it ends, and forgotten."""

    def __init__(self, settings: WorldSettings) -> None:
        super().__init__()
        self._settings = settings

    def over(self, request: ClientRequest, outcome: str) -> None:
        super().over(request, outcome)
        judge(request, self._settings, faulty=False)
        del self.requests[request.request_id]

    def newly_over(self) -> list[ClientRequest]:
        """A few of them: every worker is asked about each."""
        return super().newly_over()[:LOOKED_FOR]


class LargeWorld:
    """`requests` in all, at a rate that keeps the workers busy; the trace comes again when it is over, with other
    tokens."""

    def __init__(
        self,
        workers: int,
        requests: int,
        trace: Sequence[TraceRequest],
        seed: int = 0,
        settings: WorldSettings | None = None,
    ) -> None:
        settings = settings or sized(workers)
        self.world = World(settings, seed)
        self.world.gateway_config = GatewayConfig(max_inflight_requests=1 << 16)
        self.world.clients = PassingClients(settings)
        self.world.clients.planned = requests
        duration_s = requests / (RATE_PER_WORKER * workers)
        self.world.calm_s = FIRST_S + duration_s
        self._trace = trace
        self._speed = (trace[-1].arrival_s - trace[0].arrival_s) * requests / (len(trace) * duration_s)
        self._left = requests
        self._number = 0
        self._lines = self._scaled()

    def start(self) -> None:
        """Everything comes up, without requests. A thousand workers are millions of objects that stay; the collector of
        cycles would walk them again and again, for a third of all time."""
        self._enter_next()
        self.world.schedule.run_until(FIRST_S)
        gc.collect()
        gc.freeze()

    def every(self, seconds: float, tell: Callable[[], None]) -> None:
        """Calls `tell` in virtual time for as long as there are requests."""

        def again() -> None:
            tell()
            if not self.world.clients.all_ended:
                self.world.schedule.after(seconds, again)

        self.world.schedule.after(seconds, again)

    def _scaled(self) -> Iterator[tuple[float, TraceRequest, int]]:
        """When, what, and in which round of the trace."""
        first_s, length_s = self._trace[0].arrival_s, self._trace[-1].arrival_s - self._trace[0].arrival_s
        turn = 0
        for place, line in cycle(enumerate(self._trace)):
            turn += place == 0
            yield FIRST_S + ((turn - 1) * length_s + line.arrival_s - first_s) / self._speed, line, turn

    def _enter_next(self) -> None:
        if self._left:
            self._left -= 1
            at_s, line, turn = next(self._lines)
            self.world.schedule.at(at_s, self._arrive, line, turn)

    def _arrive(self, line: TraceRequest, turn: int) -> None:
        self._enter_next()
        self._number = number = self._number + 1
        sampling = SamplingParams(temperature=0.7, seed=number, max_tokens=max(1, line.output_tokens // SHRINK))
        request = ClientRequest(RequestId(f"r{number}"), prompt_of(line, turn, number), sampling, None)
        self.world.submit(request, number % self.world.settings.gateways)


def prompt_of(line: TraceRequest, turn: int, number: int) -> npt.NDArray[np.int32]:
    """Requests with the same first blocks, in one round of the trace, begin with the same tokens; what no block tells
    is the request's own."""
    length, block = max(1, line.prompt_tokens // SHRINK), max(1, line.block_tokens // SHRINK)
    told = np.array(line.blocks, dtype=np.int64) * block + (turn << 40)
    own = np.arange(max(0, -(-length // block) - len(told)), dtype=np.int64) * block - (number << 20)
    places = np.concatenate((told, own))[:, None] + np.arange(block)
    return ((places * NEW_TOKEN_FACTOR >> 13) % 258).ravel()[:length].astype(np.int32)
