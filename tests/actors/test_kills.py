"""kill -9 and SIGSTOP on real actors under load: answers stay right, and afterwards every page is free or cached."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import ray
from harness import (
    LATE_S,
    REQUEST_TIMEOUT_S,
    WAIT_S,
    Outcome,
    Question,
    ask,
    ask_all,
    check,
    kill,
    kill_config,
    question,
    wait_clean,
    wait_settled,
)
from otlp_receiver import Received, Receiver, receiving
from paced import PACED

from baton.common.clock import MonotonicClock
from baton.common.config import TracingConfig
from baton.common.ids import CONTROLLER, WorkerId
from baton.deploy.client import Client
from baton.deploy.launch import ClusterHandle, launch
from baton.transfer.reports import WorkerStatus

pytestmark = pytest.mark.ray

P0, P1, D0, D1 = WorkerId("prefill-0"), WorkerId("prefill-1"), WorkerId("decode-0"), WorkerId("decode-1")
WORKERS = (P0, P1, D0, D1)


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def shared_cluster(ray_session: str, collector: Receiver) -> Iterator[ClusterHandle]:
    config = replace(kill_config("kills"), tracing=TracingConfig(endpoint=collector.url))
    handle = launch(config, class_paths=PACED)
    yield handle
    handle.shutdown()


@pytest.fixture
def cluster(shared_cluster: ClusterHandle) -> Iterator[ClusterHandle]:
    wait_settled(shared_cluster)
    yield shared_cluster
    wait_clean(shared_cluster)


@pytest.fixture
def client(cluster: ClusterHandle) -> Iterator[Client]:
    with Client(cluster.gateway_url) as made:
        yield made


def status_of(cluster: ClusterHandle, worker: WorkerId) -> WorkerStatus:
    actor = cluster.actor(worker)
    assert actor is not None
    status: WorkerStatus = ray.get(actor.status.remote(), timeout=WAIT_S)
    return status


def find(cluster: ClusterHandle, workers: tuple[WorkerId, ...], busy: Callable[[WorkerStatus], bool]) -> WorkerId:
    """The first worker that is seen to be busy."""
    clock = MonotonicClock()
    deadline_s = clock.now() + WAIT_S
    while clock.now() < deadline_s:
        for worker in workers:
            if busy(status_of(cluster, worker)):
                return worker
    raise AssertionError("nobody is busy")


def begin(client: Client, questions: list[Question]) -> tuple[ThreadPoolExecutor, list[Future[Outcome]]]:
    pool = ThreadPoolExecutor(len(questions))
    return pool, [pool.submit(ask, client, asked) for asked in questions]


def test_answers_are_right_and_the_books_are_clean(cluster: ClusterHandle, client: Client) -> None:
    rng = random.Random(1)
    check(ask_all(client, [question(rng) for _ in range(40)]))


def test_prefill_killed_while_nothing_runs(cluster: ClusterHandle, client: Client) -> None:
    assert kill(cluster, P0)
    rng = random.Random(2)
    check(ask_all(client, [question(rng, prompt_tokens=300, max_tokens=20) for _ in range(8)]))


def test_prefill_killed_while_it_computes_and_sends(cluster: ClusterHandle, client: Client) -> None:
    rng = random.Random(3)
    pool, futures = begin(client, [question(rng, prompt_tokens=1400, max_tokens=10) for _ in range(6)])
    worker = find(cluster, (P0, P1), lambda status: status.census["outgoing"] > 0)
    assert kill(cluster, worker)
    check([future.result() for future in futures])
    pool.shutdown()


def test_prefill_killed_after_the_hand_off(cluster: ClusterHandle, client: Client) -> None:
    asked = question(random.Random(4), prompt_tokens=200, max_tokens=100)
    stream = client.stream(list(asked.prompt), max_tokens=100, temperature=0.0, ignore_eos=True)
    first = next(iter(stream))
    assert kill(cluster, P0)
    assert kill(cluster, P1)
    expected = Question(asked.prompt, 100).expected
    assert first + "".join(stream) == expected


def test_every_prefill_gone_means_decode_prefills_itself(cluster: ClusterHandle, client: Client) -> None:
    assert kill(cluster, P0)
    assert kill(cluster, P1)
    check([ask(client, question(random.Random(5), prompt_tokens=500, max_tokens=10))])


def test_decode_killed_in_the_middle_of_its_streams(
    cluster: ClusterHandle, client: Client, collector: Receiver
) -> None:
    rng = random.Random(6)
    pool, futures = begin(client, [question(rng, prompt_tokens=150, max_tokens=300) for _ in range(8)])
    worker = find(cluster, (D0, D1), lambda status: status.load.running > 0 and status.load.steps > 30)
    assert kill(cluster, worker)
    check([future.result() for future in futures])
    pool.shutdown()
    check_moved_trace(collector, worker)


def check_moved_trace(collector: Receiver, dead: WorkerId) -> None:
    """A request that lost its decode worker: what that had to tell died with it, all else hangs together."""

    def moved(spans: list[Received]) -> bool:
        return any(span.name == "placement" and span.error == "moved" for span in spans)

    with collector.changed:
        assert collector.changed.wait_for(lambda: moved(collector.spans), WAIT_S)
    trace_id = next(span.trace_id for span in collector.spans if span.error == "moved")

    def complete(spans: list[Received]) -> bool:
        ids = {span.parent for span in spans if span.name == "decode_worker"}
        return any(span.name == "placement" and span.error == "" and span.span_id in ids for span in spans)

    spans = collector.wait(trace_id, complete, WAIT_S)
    assert complete(spans), [(span.name, span.worker) for span in spans]
    ids = {span.span_id for span in spans}
    [root] = [span for span in spans if not span.parent]
    assert root.name == "POST /v1/completions"
    lost, served = sorted((span for span in spans if span.name == "placement"), key=lambda span: span.begin_ns)
    assert (lost.attributes["baton.peer"], lost.error, served.error) == (dead, "moved", "")
    [decode] = [span for span in spans if span.name == "decode_worker"]
    assert (decode.parent, decode.worker) == (served.span_id, served.attributes["baton.peer"])
    orphans = [span for span in spans if span.parent not in ids and span is not root]
    assert {span.name for span in orphans} <= {"prefill_worker"}, "who served the hand-off of the dead"


def test_a_hung_decode_worker_is_replaced_and_its_streams_go_on(cluster: ClusterHandle, client: Client) -> None:
    rng = random.Random(7)
    pool, futures = begin(client, [question(rng, prompt_tokens=150, max_tokens=300) for _ in range(4)])
    worker = find(cluster, (D0, D1), lambda status: status.load.running > 0)
    assert kill(cluster, worker, signal.SIGSTOP)
    check([future.result() for future in futures])
    pool.shutdown()


def test_a_hung_prefill_worker_is_replaced_and_its_prompts_go_elsewhere(cluster: ClusterHandle, client: Client) -> None:
    rng = random.Random(8)
    pool, futures = begin(client, [question(rng, prompt_tokens=1400, max_tokens=10) for _ in range(4)])
    worker = find(cluster, (P0, P1), lambda status: status.load.running > 0)
    assert kill(cluster, worker, signal.SIGSTOP)
    check([future.result() for future in futures])
    pool.shutdown()


def test_requests_do_not_notice_that_the_controller_was_killed(cluster: ClusterHandle, client: Client) -> None:
    rng = random.Random(9)
    pool, futures = begin(client, [question(rng, prompt_tokens=150, max_tokens=200) for _ in range(6)])
    find(cluster, (D0, D1), lambda status: status.load.running > 0)
    assert kill(cluster, CONTROLLER)
    check([future.result() for future in futures])
    check(ask_all(client, [question(rng) for _ in range(8)]))
    pool.shutdown()


def test_a_killed_gateway_comes_back_on_its_port_and_what_it_ran_is_released(cluster: ClusterHandle) -> None:
    """A client that comes back goes on there where it was; one that does not is told."""
    rng = random.Random(10)
    with Client(cluster.gateway_url, retries=0) as client, Client(cluster.gateway_url, retries=100) as patient:
        pool, futures = begin(client, [question(rng, prompt_tokens=150, max_tokens=1000) for _ in range(4)])
        asked = question(rng, prompt_tokens=150, max_tokens=300)
        stream = patient.stream(list(asked.prompt), max_tokens=300, temperature=0.0, ignore_eos=True)
        text = next(stream)
        assert kill(cluster, WorkerId("gateway-0"))
        assert all(future.result().lost_gateway for future in futures)
        assert text + "".join(stream) == Question(asked.prompt, 300).expected
        pool.shutdown()
    wait_clean(cluster)
    with Client(cluster.gateway_url) as client:
        check(ask_all(client, [question(rng) for _ in range(4)]))


def test_everything_dies_at_once(cluster: ClusterHandle, client: Client) -> None:
    """No worker is left, until successors have loaded: late answers, or a typed error, but no silence."""
    rng = random.Random(11)
    pool, futures = begin(client, [question(rng, prompt_tokens=400, max_tokens=150) for _ in range(8)])
    find(cluster, (D0, D1), lambda status: status.load.running > 0)
    for worker in WORKERS:
        kill(cluster, worker)
    for outcome in [future.result() for future in futures]:
        assert outcome.right or outcome.no_worker, outcome.error
        assert outcome.took_s < REQUEST_TIMEOUT_S + LATE_S
    pool.shutdown()
    wait_settled(cluster)
    check(ask_all(client, [question(rng) for _ in range(4)]))


def test_after_all_that_a_drained_cluster_finishes_what_runs_and_takes_nothing_new(
    cluster: ClusterHandle, client: Client
) -> None:
    """The last one here: a drained cluster is good for nothing else."""
    asked = Question(tuple(range(200)), max_tokens=100)
    stream = client.stream(list(asked.prompt), max_tokens=asked.max_tokens, temperature=0, ignore_eos=True)
    first = next(stream)
    assert cluster.drain(WAIT_S)
    assert first + "".join(stream) == asked.expected
    for worker in WORKERS:
        status = status_of(cluster, worker)
        assert status.load.draining
        assert (status.load.running, status.load.queued) == (0, 0)
