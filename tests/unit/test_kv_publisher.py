"""KV events on the wire, read as vLLM's subscribers read them: with their structures, old and new, and a replay."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import zmq
from kv_events_rig import make_pool, use
from vllm_events import END, Subscriber

from baton.common.engine.kv_feed import KvFeed, PublishPages
from baton.common.errors import ConfigError
from baton.common.ids import WorkerId
from baton.common.routing_config import MOST_WORKERS_PER_ROLE, KvEventsConfig
from baton.deploy.listener import draw_port
from baton.deploy.sim.watch_caches import names_in
from baton.transfer.kv_publisher import KvPublisher, publishing_ports

PAGE = 4
WORKER = WorkerId("decode-0")


def free_ports() -> KvEventsConfig:
    port, replay_port = draw_port("127.0.0.1") - 1, draw_port("127.0.0.1") - 1
    return KvEventsConfig(
        publish=True, port=port, replay_port=replay_port, topic="kv@{worker}@{model}", buffer_batches=16
    )


def make(config: KvEventsConfig) -> KvPublisher:
    def fail() -> None:
        raise AssertionError("the publisher failed")

    return KvPublisher(WORKER, "fake", config, PAGE, lambda: 12.5, fail)


@pytest.fixture
def config() -> KvEventsConfig:
    return free_ports()


@pytest.fixture
def publisher(config: KvEventsConfig) -> Iterator[KvPublisher]:
    publisher = make(config)
    publisher.start()
    yield publisher
    assert publisher.stop(10.0)


@pytest.fixture
def subscriber(config: KvEventsConfig) -> Iterator[Subscriber]:
    subscriber = Subscriber(config.host, *publishing_ports(WORKER, config), topic="kv@")
    yield subscriber
    subscriber.close()


def test_a_subscriber_comes_to_know_what_is_cached_also_what_it_missed(
    publisher: KvPublisher, subscriber: Subscriber
) -> None:
    pool, rng = make_pool(), Random(4)
    feed = KvFeed.of(pool, indexed=False, published=True)
    assert feed is not None
    published = 0

    def work() -> None:
        nonlocal published
        use(pool, rng)
        for effect in feed.take():
            assert isinstance(effect, PublishPages)
            publisher.publish(effect.events)
            published += 1

    while published < 5:  # before anybody listens, perhaps
        work()
    while subscriber.next_number < 5:
        subscriber.replay()
    while subscriber.topics == set():  # a subscription takes a moment
        work()
        if subscriber.replay() and subscriber.waits(20):
            subscriber.hear()
    for _ in range(10):
        work()
    while subscriber.next_number < published:
        subscriber.hear()
    assert subscriber.topics == {b"kv@decode-0@fake"}
    assert set(subscriber.tokens) == names_in(pool)
    assert publisher.dropped == 0


def test_only_the_last_batches_can_be_replayed_and_nonsense_is_not_answered(
    config: KvEventsConfig, publisher: KvPublisher
) -> None:
    for _ in range(20):
        publisher.publish([])
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.linger, reader.rcvtimeo = 0, 20_000
        reader.connect(f"tcp://{config.host}:{publishing_ports(WORKER, config)[1]}")
        numbers: list[int] = []
        while numbers[-1:] != [19]:
            reader.send_multipart((b"nonsense",))
            reader.send_multipart((b"", (0).to_bytes(8, "big")))
            numbers = []
            while (frames := reader.recv_multipart())[1] != END:
                numbers.append(int.from_bytes(frames[1], "big"))
        assert numbers == list(range(4, 20))


def test_each_seat_has_ports_of_its_own_and_a_port_that_is_taken_is_named(
    config: KvEventsConfig, publisher: KvPublisher
) -> None:
    seats = [WorkerId(f"{role}-{number}") for role in ("prefill", "decode") for number in range(5)]
    ports = [port for seat in seats for port in publishing_ports(seat, KvEventsConfig())]
    assert len(set(ports)) == 20
    with pytest.raises(ConfigError, match=r"kv_events\.publish"):
        publishing_ports(WorkerId(f"decode-{MOST_WORKERS_PER_ROLE}"), config)
    with pytest.raises(ConfigError, match=r"kv_events\.port"):
        make(config)
