"""A trace on a cluster that is not there: queues, steps, hand-offs and caches on virtual time. Pure.

Owns the heap of events, and who serves whom. It is a model of Baton, not Baton: the real cores are in `deploy/sim`,
and `tests/sim/test_planner.py` compares the two. What it leaves out is listed in docs/PLANNER.md.

`prefill` 0 is a colocated cluster: decode workers compute prompts themselves, in chunks beside their streams.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from msgspec import structs

from baton.common.config import ClusterConfig, DecodeConfig, KvConfig, PrefillConfig
from baton.common.engine.chunk_predictor import pairs_of
from baton.common.engine.policy import AFFINITY_TOKENS, affinity_key, affinity_seeds, affinity_weights
from baton.common.ids import WorkerId
from baton.common.messages import Demand
from baton.common.resolve import decide_pace
from baton.common.routing_config import RoutingConfig
from baton.decode.filling import LOCAL_SHARE
from baton.deploy.planner.cost import CostModel
from baton.deploy.planner.outcome import Answer, Outcome, Slo
from baton.deploy.planner.traces import Trace, TraceRequest
from baton.deploy.planner.workers import DecodeWorker, Job, PrefillWorker
from baton.deploy.routing.own_policy import policy_of
from baton.deploy.routing.policies import U64, Choice, Role, mixed


@dataclass(frozen=True, slots=True)
class Split:
    """How many workers of each role. No prefill workers: colocated."""

    prefill: int
    decode: int

    @property
    def workers(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P+{self.decode}D" if self.prefill else f"{self.decode} colocated"


@dataclass(frozen=True, slots=True)
class Knobs:
    """What a worker may do at a time: the settings of the real ones."""

    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    kv: KvConfig = field(default_factory=KvConfig)

    @classmethod
    def of(cls, config: ClusterConfig) -> Knobs:
        """Of the workers that `config` starts."""
        decided, _ = decide_pace(config)
        return cls(decided.prefill_worker, decided.decode_worker, decided.routing, decided.kv)


class ModelCluster:
    """`serve` runs a trace to its end. Subject to `at`: whoever steers the cluster meanwhile. Without `knobs` workers
    are as `baton serve` starts them."""

    def __init__(self, cost: CostModel, split: Split, slo: Slo, knobs: Knobs | None = None) -> None:
        self.cost = cost
        self.now = 0.0
        self.outcome = Outcome(slo)
        self.prefill: dict[WorkerId, PrefillWorker] = {}
        self.decode: dict[WorkerId, DecodeWorker] = {}
        self.demand = Demand()  # as gateways count it
        self._knobs = knobs or Knobs.of(ClusterConfig())
        self._colocated = not split.prefill
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._ties = itertools.count()
        self._names = itertools.count()
        self._seeds: dict[Role, U64] = {}  # until who is there changes
        self._policy = policy_of(self._knobs.routing.policy)
        self._turns = itertools.count()
        self._strangers = itertools.count()
        self._unserved = 0
        for _ in range(split.prefill):
            self.add_prefill(0.0)
        for _ in range(split.decode):
            self.add_decode(0.0)

    # ------------------------------------------------------------------------------------------ workers

    def add_prefill(self, ready_s: float) -> None:
        name = WorkerId(f"prefill-{next(self._names)}")
        self.prefill[name] = PrefillWorker(name, self.cost, self._knobs.prefill, ready_s)
        self._seeds.clear()

    def add_decode(self, ready_s: float) -> None:
        name = WorkerId(f"decode-{next(self._names)}")
        knobs = self._knobs
        self.decode[name] = DecodeWorker(name, self.cost, knobs.decode, knobs.kv.page_size, self.outcome, ready_s)
        self._seeds.clear()

    def remove(self, worker: PrefillWorker | DecodeWorker) -> None:
        """It has nothing left to do."""
        assert worker.idle, worker.name
        (self.prefill if isinstance(worker, PrefillWorker) else self.decode).pop(worker.name)
        self._seeds.clear()

    def _choose(self, role: Role, request: TraceRequest) -> WorkerId:
        """As the gateway's router does, with news that are never late. Who still starts is chosen last."""
        workers: Mapping[WorkerId, PrefillWorker | DecodeWorker] = self.prefill if role == "prefill" else self.decode
        seeds = self._seeds.get(role)
        if seeds is None:
            seeds = self._seeds[role] = affinity_seeds(workers)
        news = [
            (one.requests, one.queued_tokens, one.room_tokens, one.matched_tokens(request)) for one in workers.values()
        ]
        requests, waiting_tokens, room_tokens, matched = np.array(news, dtype=np.int64).T
        takes = np.array([not one.draining and one.ready_s <= self.now for one in workers.values()])
        if not takes.any():
            takes = np.array([not one.draining for one in workers.values()])
        turn = next(self._turns)
        place = self._policy(
            Choice(
                role=role,
                prompt_tokens=request.prompt_tokens,
                page_size=1,
                takes=takes,
                matched=matched,
                current=np.ones(len(workers), dtype=np.bool_),
                requests=requests,
                waiting_tokens=waiting_tokens,
                free_pages=room_tokens,
                tokens_per_s=np.zeros(len(workers)),
                affinity=affinity_weights(affinity_key(self._first_tokens(request)), seeds),
                turn=turn,
                draw=mixed(turn),
            )
        )
        assert place is not None, f"every {role} worker drains"
        return next(itertools.islice(workers, place, None))

    def _first_tokens(self, request: TraceRequest) -> npt.NDArray[np.int32]:
        """What a prompt begins with, as far as the router looks: the same for the same blocks."""
        if not request.blocks:
            return np.array([-1 - next(self._strangers)], dtype=np.int32)
        count = -(-AFFINITY_TOKENS // request.block_tokens)
        return np.array(request.blocks[:count], dtype=np.int64).view(np.int32)

    # ------------------------------------------------------------------------------------------- events

    def at(self, time_s: float, action: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._heap, (max(time_s, self.now), next(self._ties), action, args))

    def serve(self, trace: Trace) -> Outcome:
        self._unserved = len(trace.requests)
        for request in trace.requests:
            answer = Answer(request.arrival_s, request.output_tokens)
            self.outcome.answers.append(answer)
            self.at(request.arrival_s + self.cost.overhead_s, self._arrive, request, answer)
        while self._unserved:
            self.now, _, action, args = heapq.heappop(self._heap)
            action(*args)
        return self.outcome

    @property
    def serving(self) -> bool:
        """Somebody has no answer yet."""
        return self._unserved > 0

    def _arrive(self, request: TraceRequest, answer: Answer) -> None:
        self._count(requests=1, tokens=request.prompt_tokens, squares=request.prompt_tokens**2)
        worker = self.decode[self._choose("decode", request)]
        worker.take(Job(request, answer, worker))
        self.at(worker.heard_s(self.now), self._admit, worker)

    def _admit(self, worker: DecodeWorker) -> None:
        while (job := worker.admit()) is not None:
            known, total = job.shipped, job.request.prompt_tokens
            most_here = max(
                self._knobs.decode.local_prefill_max_tokens, min(known // LOCAL_SHARE, self._knobs.decode.chunk_tokens)
            )
            if self._colocated or total - known <= most_here or not self.prefill:
                job.done = known
                worker.prefilling.append(job)
                self._wake(worker)
            else:
                self.at(self.now + self.cost.lane.latency_s / 2 + self._return_s(job), self._offer, job)

    def _return_s(self, job: Job) -> float:
        """A prefill worker that has less of the prompt than the decode worker gets it back, where that is faster."""
        request = job.request
        source = job.prefill = self.prefill[self._choose("prefill", request)]
        source.expect(request)
        has = source.cache.cached_tokens(request.blocks, request.block_tokens, request.prompt_tokens)
        if job.shipped <= has:
            return 0.0
        prefill = self.cost.prefill
        moved_s = self.cost.lane.latency_s + self.cost.transfer_s(job.shipped - has)
        if moved_s >= prefill.per_token_s * (job.shipped - has) + prefill.per_pair_s * pairs_of(has, job.shipped):
            return 0.0
        job.done = job.shipped
        return moved_s

    # ------------------------------------------------------------------------------------------ prefill

    def _offer(self, job: Job) -> None:
        worker = job.prefill
        assert worker is not None
        worker.expected -= 1
        if worker.draining:  # meanwhile
            worker.comes_no_more(job.request)
            worker = job.prefill = self.prefill[self._choose("prefill", job.request)]
            worker.coming.update(job.request.blocks)
        worker.take(job)
        self._prompt(worker)

    def _prompt(self, worker: PrefillWorker) -> None:
        if worker.busy:
            return
        if worker.ready_s > self.now:
            self.at(worker.ready_s, self._prompt, worker)
            return
        worker.admit()
        took_s = worker.begin_step()
        if took_s is not None:
            self.outcome.busy_s["prefill"] += took_s
            self.at(self.now + took_s, self._prefill_step_over, worker)

    def _prefill_step_over(self, worker: PrefillWorker) -> None:
        worker.busy = False
        for job in worker.end_step():
            landed_s = self._ship(job)
            if job.done == job.request.prompt_tokens:
                self.at(self.now + self.cost.lane.latency_s / 2, self._first_token, job)
                self.at(landed_s + self.cost.lane.latency_s / 2, self._landed, job, worker)
        self._prompt(worker)

    def _ship(self, job: Job) -> float:
        """What is new goes over the lane, behind what is on it already. Returns when it is there."""
        receiver = job.decode
        tokens, job.shipped = max(0, job.done - job.shipped), max(job.done, job.shipped)
        receiver.lane_free_s = max(receiver.lane_free_s, self.now) + self.cost.transfer_s(tokens)
        return receiver.lane_free_s

    def _first_token(self, job: Job) -> None:
        """From a prefill worker. The decode worker passes it on between two steps."""
        job.answer.first_s = job.decode.heard_s(self.now)
        self.outcome.said += 1

    def _landed(self, job: Job, source: PrefillWorker) -> None:
        source.release(job)
        self._prompt(source)
        self._runnable(job)

    # ------------------------------------------------------------------------------------------- decode

    def _runnable(self, job: Job) -> None:
        worker = job.decode
        worker.keep(job.request)
        if job.request.output_tokens == 1:
            job.answer.last_s = job.answer.first_s
            self._ended(job)
            self._admit(worker)
        else:
            worker.join(job)
            self._wake(worker)

    def _ended(self, job: Job) -> None:
        job.decode.leave(job)
        self._unserved -= 1
        request = job.request
        self._count(ended=1, outputs=request.output_tokens, prompts=request.prompt_tokens, computed=job.computed)

    def _count(self, **more: int) -> None:
        counted = {name: getattr(self.demand, name) + by for name, by in more.items()}
        self.demand = structs.replace(self.demand, **counted)

    def _wake(self, worker: DecodeWorker) -> None:
        """Somebody joins: at once, or behind the step that is under way."""
        if worker.busy:
            self._plan_end(worker, worker.cut(self.now))
        elif worker.ready_s > self.now:
            self.at(worker.ready_s, self._wake, worker)
        elif not worker.between_steps:
            self._plan_end(worker, worker.begin(self.now))

    def _plan_end(self, worker: DecodeWorker, end_s: float | None) -> None:
        """What was planned before is void."""
        worker.stretch_id += 1
        if end_s is not None:
            self.at(end_s, self._stretch_over, worker, worker.stretch_id)

    def _stretch_over(self, worker: DecodeWorker, stretch_id: int) -> None:
        if stretch_id != worker.stretch_id:
            return
        ended, complete = worker.end(self.now)
        for job in ended:
            self._ended(job)
        for job in complete:
            job.answer.first_s = self.now
            self._runnable(job)
        self._admit(worker)
        worker.between_steps = False
        self._plan_end(worker, worker.begin(self.now))


def serve(cost: CostModel, split: Split, slo: Slo, trace: Trace, knobs: Knobs | None = None) -> Outcome:
    """What comes of a trace on a cluster of that many workers."""
    return ModelCluster(cost, split, slo, knobs).serve(trace)
