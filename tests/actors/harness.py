"""What kill tests share: a cluster of paced fake workers, questions with known answers, and the books afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import ray

from baton.common.clock import MonotonicClock
from baton.common.config import (
    ClusterConfig,
    DecodeConfig,
    GatewayConfig,
    KvConfig,
    LivenessConfig,
    ModelConfig,
    PrefillConfig,
)
from baton.common.engine.fake_runner import fake_generate
from baton.common.errors import BatonError, ErrorCode, RequestError
from baton.common.ids import CONTROLLER, Stamp, WorkerId
from baton.common.messages import SamplingParams, Timeline
from baton.deploy.client import Client, ClusterUnreachable
from baton.deploy.launch import ClusterHandle
from baton.deploy.tokenizer import ByteTokenizer
from baton.transfer.process import actor_name, recorded_pid

WAIT_S = 60.0
REQUEST_TIMEOUT_S = 60.0
LATE_S = 10.0
"""How long after its deadline a request may take to tell so, on a busy machine."""
MAX_LEN = 1536
NO_WORKER_ERRORS = frozenset({ErrorCode.NO_WORKER, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.OVERLOADED})


def kill_config(name: str, lanes: tuple[str, ...] = ("local", "zmq")) -> ClusterConfig:
    config = ClusterConfig(
        cluster=name,
        prefill=2,
        decode=2,
        pin_cores=False,  # four workers on a machine that runs other things, too
        model=ModelConfig(model="fake", max_model_len=MAX_LEN),
        kv=KvConfig(num_pages=400),  # a few long requests fill it: admission, eviction and retraction take part
        prefill_worker=PrefillConfig(chunk_tokens=128),
        decode_worker=DecodeConfig(num_reserved_decode_tokens=32),
        liveness=LivenessConfig(restart_backoff_s=0.1, restart_forgiven_after_s=1.0, max_restarts_per_minute=1000),
        gateway=GatewayConfig(port=0, request_timeout_s=REQUEST_TIMEOUT_S),
    )
    return replace(config, transfer=replace(config.transfer, lanes=lanes, digest="full"))


@dataclass(frozen=True, slots=True)
class Question:
    """With the answer that a correct system gives, whatever dies meanwhile."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0

    @property
    def expected(self) -> str:
        sampling = SamplingParams(temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens)
        return ByteTokenizer().decode(fake_generate(list(self.prompt), sampling, self.max_tokens))


def question(rng: random.Random, *, prompt_tokens: int | None = None, max_tokens: int | None = None) -> Question:
    """One in two starts with a prefix that others share; one in three is sampled."""
    length = prompt_tokens or int(2 ** rng.uniform(0, 10))
    shared = rng.choice((0, 0, 32, 250, 600))
    prefix = [(shared * 7 + index) % 256 for index in range(min(shared, length - 1))]
    prompt = (*prefix, *(rng.randrange(256) for _ in range(length - len(prefix))))
    sampled = rng.random() < 1 / 3
    return Question(
        prompt,
        max_tokens or rng.randint(1, 100),
        temperature=0.8 if sampled else 0.0,
        seed=rng.randrange(1 << 62) if sampled else 0,
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    question: Question
    text: str | None
    error: BatonError | None
    took_s: float
    lane: str = ""  # of the last hand-off; "" when decode prefilled itself

    @property
    def right(self) -> bool:
        return self.text == self.question.expected

    @property
    def no_worker(self) -> bool:
        return isinstance(self.error, RequestError) and self.error.code in NO_WORKER_ERRORS

    @property
    def lost_gateway(self) -> bool:
        return isinstance(self.error, ClusterUnreachable)


def ask(client: Client, asked: Question) -> Outcome:
    clock = MonotonicClock()
    start_s = clock.now()
    text, error, lane = None, None, ""
    try:
        answer = client.complete(
            list(asked.prompt),
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            seed=asked.seed,
            ignore_eos=True,
        )
        text, lane = answer.text, answer.timeline.lane
        check_sources(answer.timeline, len(asked.prompt))
    except (RequestError, ClusterUnreachable) as failure:
        error = failure
    return Outcome(asked, text, error, clock.now() - start_s, lane)


def check_sources(timeline: Timeline, prompt_tokens: int) -> None:
    """Each token of the prompt came from one place, however often it was asked for, pushed back or moved. An answer
    that a worker found complete was filled in by nobody."""
    parts = (timeline.local_tokens, timeline.cached_tokens, timeline.restored_tokens, timeline.transferred_tokens)
    if timeline.decode_s > 0:
        assert sum(parts) == prompt_tokens, f"{parts} of {prompt_tokens}"
    assert timeline.prefill_cached_tokens <= timeline.transferred_tokens


def ask_all(client: Client, questions: list[Question], at_once: int = 8) -> list[Outcome]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda asked: ask(client, asked), questions))


def check(outcomes: list[Outcome]) -> None:
    """All answered rightly; the message of a failure says what came instead."""
    for outcome in outcomes:
        assert outcome.error is None, f"{outcome.error} after {outcome.took_s:.1f} s"
        assert outcome.right, (
            f"wrong text for prompt of {len(outcome.question.prompt)} tokens: "
            f"{outcome.text!r} != {outcome.question.expected!r}"
        )


def pid_of(cluster: ClusterHandle, worker: WorkerId) -> int | None:
    """Of the process that sits there; None while there is none."""
    for member in cluster.status().members:
        if member.stamp.worker == worker:
            return recorded_pid(cluster.plan.run_dir, actor_name(worker, member.stamp.incarnation))
    return None


AnswerT = TypeVar("AnswerT")


@dataclass(slots=True)
class Load(Generic[AnswerT]):
    """Clients that never stop asking, until told."""

    ask: Callable[[Question], AnswerT]
    seed: int
    stop: threading.Event = field(default_factory=threading.Event)
    done: list[AnswerT] = field(default_factory=list)

    def run(self, number: int) -> None:
        rng = random.Random(f"{self.seed}/{number}")
        while not self.stop.is_set():
            self.done.append(self.ask(question(rng)))


def kill(cluster: ClusterHandle, worker: WorkerId, number: int = signal.SIGKILL) -> bool:
    """False: nobody there to kill."""
    return bool(kill_together(cluster, (worker,), number))


def kill_together(cluster: ClusterHandle, workers: Sequence[WorkerId], number: int = signal.SIGKILL) -> list[WorkerId]:
    """Who was there to be killed. All are looked for first, while there is a controller to be asked."""
    pids = {
        worker: recorded_pid(cluster.plan.run_dir, CONTROLLER) if worker == CONTROLLER else pid_of(cluster, worker)
        for worker in workers
    }
    killed = []
    for worker, pid in pids.items():
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                killed.append(worker)
    return killed


def wait_settled(cluster: ClusterHandle) -> None:
    """Every seat is filled by a process that runs: also those whose death nobody has noticed yet are waited for."""
    clock = MonotonicClock()
    deadline_s = clock.now() + WAIT_S
    while True:
        status = cluster.wait_ready(WAIT_S)
        if all(_runs(cluster, member.stamp) for member in status.members):
            return
        assert clock.now() < deadline_s, status.seats
        cluster.wait_change(status, 0.5)


def _runs(cluster: ClusterHandle, stamp: Stamp) -> bool:
    pid = recorded_pid(cluster.plan.run_dir, actor_name(stamp.worker, stamp.incarnation))
    try:
        return pid is not None and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZT"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_clean(cluster: ClusterHandle) -> dict[WorkerId, dict[str, int]]:
    """Every worker is back and has only free and cached pages. Returns their books."""
    clock = MonotonicClock()
    deadline_s = clock.now() + WAIT_S
    wait_settled(cluster)
    workers = [seat.spec.worker for seat in cluster.plan.lasting if seat.spec.role != "gateway"]
    while True:
        books: dict[WorkerId, dict[str, int]] = {}
        for worker in workers:
            actor = cluster.actor(worker)
            assert actor is not None, worker
            books[worker] = ray.get(actor.kv_census.remote(), timeout=WAIT_S)
        if all(book["free"] + book["cached"] == book["total"] for book in books.values()):
            return books
        assert clock.now() < deadline_s, f"pages are held though nothing runs: {books}"
