"""Prefill and decode workers as queues: what a step takes comes from the cost model, what is in it from the rules of
the real cores. Pure; `cluster` holds the clock.

Decode steps in which nothing changes are not walked through one by one: B running requests that see K keys take
`a, a + b, a + 2b, …` with b = per_key_s B, until somebody ends or joins. A stretch of them is one event.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass

from baton.common.config import DecodeConfig, PrefillConfig
from baton.common.engine.chunk_predictor import pairs_of
from baton.common.engine.pacing import ItlPacer
from baton.common.engine.policy import chunk_end
from baton.common.ids import WorkerId
from baton.deploy.planner.caches import BlockCache
from baton.deploy.planner.cost import CostModel
from baton.deploy.planner.outcome import Answer, Outcome
from baton.deploy.planner.traces import TraceRequest

REMEMBERED_STEPS = 20
"""Of what a pacer knew before so many steps next to nothing is left in its estimates."""


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way. `done`: prompt tokens whose KV is there; `shipped`: of those, what is at its receiver or on
    the lane."""

    request: TraceRequest
    answer: Answer
    decode: DecodeWorker
    prefill: PrefillWorker | None = None
    done: int = 0
    shipped: int = 0
    stalls_before: int = 0  # of its worker, when it joined
    computed: int = 0  # prompt tokens, by a prefill worker

    @property
    def total_tokens(self) -> int:
        """KV that it may come to hold."""
        return self.request.prompt_tokens + self.request.output_tokens


def take_chunks(jobs: deque[Job], budget: int, page_size: int = 1) -> tuple[list[tuple[Job, int]], int, float]:
    """A step's chunks in order of arrival: each job with the length it will have reached; their tokens and pairs."""
    chunks: list[tuple[Job, int]] = []
    tokens, pairs = 0, 0.0
    for job in jobs:
        end = chunk_end(job.done, job.request.prompt_tokens, budget - tokens, page_size)
        if end <= job.done:
            break
        tokens += end - job.done
        pairs += pairs_of(job.done, end)
        chunks.append((job, end))
    return chunks, tokens, pairs


class PrefillWorker:
    """Computes prompts in chunks, in order of arrival. `jobs` have their pages, `queue` waits for them."""

    def __init__(self, name: WorkerId, cost: CostModel, config: PrefillConfig, ready_s: float = 0.0) -> None:
        self.name = name
        self.ready_s = ready_s
        self.draining = False
        self.queue: deque[Job] = deque()
        self.jobs: deque[Job] = deque()
        self.cache = BlockCache()
        self.busy = False
        self.held_tokens = 0
        self.handing_off = 0
        self.expected = 0  # was promised to it, and is not here yet
        self.queued_tokens = 0  # of prompts that are here, and not computed yet
        self.coming: Counter[int] = Counter()  # blocks of all that it was given and has not computed
        self._cost = cost
        self._budget = config.chunk_tokens
        self._chunks: list[tuple[Job, int]] = []

    @property
    def requests(self) -> int:
        return self.expected + len(self.queue) + len(self.jobs)

    @property
    def idle(self) -> bool:
        return not self.requests and not self.handing_off

    @property
    def room_tokens(self) -> int:
        return self._cost.pool_tokens - self.held_tokens

    def matched_tokens(self, request: TraceRequest) -> int:
        """Of its prompt, cached or coming: what a router counts on."""
        count = 0
        for block in request.blocks:
            if block not in self.coming and block not in self.cache:
                break
            count += 1
        return min(count * request.block_tokens, request.prompt_tokens - 1)

    def take(self, job: Job) -> None:
        """It is here."""
        self.queue.append(job)
        self.queued_tokens += job.request.prompt_tokens - job.done

    def expect(self, request: TraceRequest) -> None:
        """It is on its way here."""
        self.expected += 1
        self.coming.update(request.blocks)

    def comes_no_more(self, request: TraceRequest) -> None:
        """It is computed, or somewhere else."""
        self.coming.subtract(request.blocks)
        for block in request.blocks:
            if not self.coming[block]:
                del self.coming[block]

    def admit(self) -> None:
        """Those at the head of the queue whose prompts fit into the pool."""
        while self.queue:
            job = self.queue[0]
            need = job.request.prompt_tokens
            if self.held_tokens and self.held_tokens + need > self._cost.pool_tokens:
                return
            self.queue.popleft()
            self.held_tokens += need
            request = job.request
            cached = self.cache.cached_tokens(request.blocks, request.block_tokens, request.prompt_tokens)
            self.queued_tokens -= max(0, cached - job.done)
            job.done = max(job.done, cached)
            job.computed = need - job.done
            self.jobs.append(job)

    def begin_step(self) -> float | None:
        """Seconds that it takes; None: there is nothing to do."""
        self._chunks, tokens, pairs = take_chunks(self.jobs, self._budget)
        self.busy = bool(self._chunks)
        return self._cost.prefill_step_s(tokens, pairs) if self._chunks else None

    def end_step(self) -> list[Job]:
        """Those that it worked for, at their new lengths. Who is complete leaves."""
        for job, end in self._chunks:
            self.queued_tokens -= end - job.done
            job.done = end
            if end == job.request.prompt_tokens:
                self.jobs.remove(job)
                self.handing_off += 1
                self._keep(job.request)
                self.comes_no_more(job.request)
        return [job for job, _ in self._chunks]

    def release(self, job: Job) -> None:
        """Its KV is the receiver's."""
        self.handing_off -= 1
        self.held_tokens -= job.request.prompt_tokens

    def _keep(self, request: TraceRequest) -> None:
        self.cache.keep(request.blocks, request.block_tokens, max(0, self._cost.pool_tokens - self.held_tokens))


class DecodeWorker:
    """Continuous batching, with chunks of prompts in the same steps where it computes them itself.

    A request reserves its KV to the last token when it is admitted, so nobody is retracted. `slow_s`: a longer step is
    a stall. `lane_free_s`: until then the lane to here is busy. Chunks beside streams are paced by what the real
    worker's pacer has learned from the steps so far (ADR 0038), and end where its pages do."""

    def __init__(
        self,
        name: WorkerId,
        cost: CostModel,
        config: DecodeConfig,
        page_size: int,
        outcome: Outcome,
        ready_s: float = 0.0,
    ) -> None:
        self.name = name
        self.ready_s = ready_s
        self.draining = False
        self.queue: deque[Job] = deque()
        self.prefilling: deque[Job] = deque()
        self.cache = BlockCache()
        self.lane_free_s = 0.0
        self.queued_tokens = 0  # of prompts that wait to be let in
        self.held_tokens = 0
        self.active = 0
        self.stretch_id = 0
        self.busy = False
        self.between_steps = False  # the next one is planned when all that the last one did is known
        self.running = 0
        self._cost = cost
        self._budget = config.chunk_tokens
        self._page_size = page_size
        self._pacer = ItlPacer(config.itl_s) if config.itl_s and not config.chunk_target_s else None
        self._most_active = config.max_running_requests
        self._outcome = outcome
        self._slow_s = outcome.slo.itl_s
        self._joining: list[Job] = []
        self._joined: list[Job] = []  # with this stretch
        self._keys = 0  # of the running requests, after this step
        self._steps = 0
        self._stalls = 0
        self._ends: list[tuple[int, int, Job]] = []  # (step after which it ends, tie, job)
        self._ties = 0
        self._begun_s = 0.0
        self._planned = 0
        self._first_step_s = self._growth_s = 0.0
        self._chunks: list[tuple[Job, int]] = []

    @property
    def requests(self) -> int:
        return len(self.queue) + self.active

    def take(self, job: Job) -> None:
        """It is here."""
        self.queue.append(job)
        self.queued_tokens += job.request.prompt_tokens

    @property
    def room_tokens(self) -> int:
        return self._cost.pool_tokens - self.held_tokens

    def matched_tokens(self, request: TraceRequest) -> int:
        """Of its prompt, cached."""
        return self.cache.cached_tokens(request.blocks, request.block_tokens, request.prompt_tokens)

    @property
    def idle(self) -> bool:
        return not self.requests

    def admit(self) -> Job | None:
        """The head of the queue, when there is room for it."""
        if not self.queue or self.active >= self._most_active:
            return None
        job = self.queue[0]
        if self.active and self.held_tokens + job.total_tokens > self._cost.pool_tokens:
            return None
        self.queue.popleft()
        self.queued_tokens -= job.request.prompt_tokens
        self.active += 1
        self.held_tokens += job.total_tokens
        request = job.request
        job.shipped = self.cache.cached_tokens(request.blocks, request.block_tokens, request.prompt_tokens)
        return job

    def keep(self, request: TraceRequest) -> None:
        """Its prompt's KV is here."""
        self.cache.keep(request.blocks, request.block_tokens, max(0, self._cost.pool_tokens - self.held_tokens))

    def leave(self, job: Job) -> None:
        self.active -= 1
        self.held_tokens -= job.total_tokens

    def join(self, job: Job) -> None:
        """Its KV is here: it runs from the next step on."""
        self._joining.append(job)

    def begin(self, now: float) -> float | None:
        """Plans the next stretch of steps. Returns when it is over; None: there is nothing to do."""
        for job in self._joining:
            self._ties += 1
            heapq.heappush(self._ends, (self._steps + job.request.output_tokens - 1, self._ties, job))
            self.running += 1
            self._keys += job.request.prompt_tokens + 1
        self._joined, self._joining = self._joining, []
        self._chunks, tokens, pairs = take_chunks(self.prefilling, self._chunk_budget(), self._page_size)
        self.busy = bool(self.running or self._chunks)
        if not self.busy:
            return None
        self._begun_s = now
        self._first_step_s = self._cost.mixed_step_s(tokens, pairs, self.running, self._keys)
        self._growth_s = 0.0 if self.prefilling else self._cost.decode.per_key_s * self.running
        self._planned = 1 if self.prefilling else self._ends[0][0] - self._steps
        for job in self._joined:
            self._count_first_gap(job, now)
        return self._end_s(self._planned)

    def _chunk_budget(self) -> int:
        """Tokens of prompts in the next step; 0: it is the pacer's turn to see what streams take alone."""
        paced = self._budget if self._pacer is None else self._pacer.most_tokens(self.running)
        return max(min(paced, self._budget), self._page_size) if paced else 0

    def _learn(self, steps: int) -> None:
        """As a real worker does of each step with streams."""
        if self._pacer is None or not self.running:
            return
        tokens = sum(end - job.done for job, end in self._chunks)
        for step in range(max(0, steps - REMEMBERED_STEPS), steps):
            self._pacer.learn(tokens, self._first_step_s + self._growth_s * step)

    def _count_first_gap(self, job: Job, now: float) -> None:
        """It is longer than its step, which is counted for everybody who runs."""
        step_s, gap_s = self._first_step_s, now + self._first_step_s - job.answer.first_s
        slow = self._slow_s
        job.stalls_before = self._stalls + (step_s > slow) - (gap_s > slow)
        self._outcome.gaps.add(gap_s)

    def cut(self, now: float) -> float:
        """Somebody joins: the stretch ends with the step that is under way. Returns when."""
        self._planned = min(self._planned, self._steps_begun(now))
        return self._end_s(self._planned)

    def heard_s(self, now: float) -> float:
        """When it looks at what comes in now: not before the step that is under way is over."""
        return self._end_s(min(self._planned, self._steps_begun(now))) if self.busy else now

    def _steps_begun(self, now: float) -> int:
        """Of this stretch, the one under way included."""
        passed_s = now - self._begun_s
        a, b = self._first_step_s, self._growth_s
        real = passed_s / a if b <= 0 else (b / 2 - a + math.sqrt((a - b / 2) ** 2 + 2 * b * passed_s)) / b
        steps = max(1, math.ceil(real))
        while steps > 1 and self._end_s(steps - 1) >= now:
            steps -= 1
        while self._end_s(steps) < now:
            steps += 1
        return steps

    def _end_s(self, steps: int) -> float:
        """The same number whoever asks, so that the end of a step is not taken for the beginning of the next."""
        return self._begun_s + self._seconds(steps)

    def _seconds(self, steps: int) -> float:
        return steps * self._first_step_s + self._growth_s * steps * (steps - 1) / 2

    def end(self, now: float) -> tuple[list[Job], list[Job]]:
        """The stretch is over. Returns who has all of its answer, and whose prompt is complete."""
        self.busy, self.between_steps = False, True
        steps, took_s = self._planned, now - self._begun_s
        self._outcome.busy_s["decode"] += took_s
        self._learn(steps)
        if self.running:
            self._outcome.gaps.add(took_s / steps, steps * self.running - len(self._joined))
        self._outcome.said += steps * self.running
        self._steps += steps
        self._keys += steps * self.running
        self._stalls += self._slow_steps(steps)
        ended: list[Job] = []
        while self._ends and self._ends[0][0] <= self._steps:
            job = heapq.heappop(self._ends)[2]
            job.answer.last_s, job.answer.stalls = now, self._stalls - job.stalls_before
            self.running -= 1
            self._keys -= job.total_tokens
            ended.append(job)
        complete: list[Job] = []
        for job, end in self._chunks:
            job.done = end
            if end == job.request.prompt_tokens:
                self.prefilling.remove(job)
                complete.append(job)
        self._chunks = []
        return ended, complete

    def _slow_steps(self, steps: int) -> int:
        if self._growth_s <= 0:
            return steps if self._first_step_s > self._slow_s else 0
        if self._slow_s == math.inf:
            return 0
        first_slow = math.floor((self._slow_s - self._first_step_s) / self._growth_s) + 1
        return steps - min(max(first_slow, 0), steps)
