"""Nothing waits for ever: hand-offs in both directions between workers with tiny rings, in every order that a seed can
think of. The parts are the real ones (slot shares, region queues, turns); what moves is counted, not copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from baton.common.ids import Epoch, HandoffId, HandoffKey, Stamp, WorkerId
from baton.transfer.caps import Caps
from baton.transfer.region_queue import RegionQueue
from baton.transfer.slot_shares import SlotShares

REGION = 1000


@dataclass
class Worker:
    """Both roles of a process: a ring of slots for each."""

    stamp: Stamp
    slots: int
    window: int
    shares: SlotShares = field(default_factory=SlotShares)
    held: dict[HandoffKey, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free_send = self.slots
        self.to_send: RegionQueue[HandOff] = RegionQueue(Caps(0, {}), max(1, self.slots // 2))
        self.to_receive: RegionQueue[HandOff] = RegionQueue(Caps(0, {}), self.window)

    @property
    def free_receive(self) -> int:
        return self.slots - sum(self.held.values())


@dataclass
class HandOff:
    key: HandoffKey
    source: Worker
    sink: Worker
    regions: int
    priority: int
    credit: int = 0
    sent: int = 0
    landed: int = 0
    gathered: int = 0  # in send slots, or on their way


class World:
    """Steps that could be taken are found anew each time; one is taken at random, until there is none."""

    def __init__(self, seed: int, workers: int, hand_offs: int) -> None:
        self.random = Random(seed)
        self.workers = [
            Worker(
                Stamp(WorkerId(f"w{n}"), 0, Epoch(n)),
                self.random.choice((1, 2, 5)),
                self.random.choice((1, 2 * REGION)),
            )
            for n in range(workers)
        ]
        self.all: list[HandOff] = []
        for number in range(hand_offs):
            source, sink = self.random.sample(self.workers, 2)
            key, priority = HandoffKey(HandoffId(number), 1), self.random.choice((-3, 0, 0, 3))
            self.all.append(HandOff(key, source, sink, self.random.choice((1, 2, 9)), priority))
        self.by_key = {one.key: one for one in self.all}
        self.arriving: list[HandOff] = []  # asked for, and gathered
        for one in self.all:
            one.sink.shares.ask(one.key, one.priority, min(4, one.regions))

    def run(self) -> None:
        while steps := self.steps():
            self.random.choice(steps)()
            self.check()

    def steps(self) -> list[Callable[[], None]]:
        steps: list[Callable[[], None]] = []
        for worker in self.workers:
            if worker.shares.waiting and worker.free_receive:
                steps.append(lambda worker=worker: self.grant(worker))
            if worker.free_send and worker.to_send.wait_s(0.0) is not None:
                steps.append(lambda worker=worker: self.gather(worker))
            if worker.to_receive.wait_s(0.0) is not None:
                steps.append(lambda worker=worker: self.receive(worker))
        return steps + [lambda one=one: self.arrive(one) for one in self.arriving]

    def grant(self, worker: Worker) -> None:
        granted = worker.shares.grant(worker.free_receive)
        assert granted is not None
        key, count = granted
        worker.held[key] = count
        assert worker.free_receive >= 0, "overcommitted"
        self.give_credit(self.by_key[key], count)

    def give_credit(self, one: HandOff, count: int) -> None:
        one.credit += count
        while one.sent < min(one.credit, one.regions):
            one.sent += 1
            one.source.to_send.put("lane", one.sink.stamp, one.key, one.priority, one, REGION, 1)

    def gather(self, worker: Worker) -> None:
        one = worker.to_send.take(0.0)
        assert one is not None
        worker.free_send -= 1
        one.sink.to_receive.put("lane", worker.stamp, one.key, one.priority, one, REGION, REGION)

    def receive(self, worker: Worker) -> None:
        one = worker.to_receive.take(0.0)
        assert one is not None
        self.arriving.append(one)

    def arrive(self, one: HandOff) -> None:
        self.arriving.remove(one)
        one.source.free_send += 1
        one.source.to_send.ended("lane", one.sink.stamp, 1)
        one.sink.to_receive.ended("lane", one.source.stamp, REGION)
        one.landed += 1
        slots = one.sink.shares.landed(one.key, one.sink.free_receive)
        one.sink.held[one.key] += slots - 1
        if one.landed < one.regions:
            self.give_credit(one, slots)
        else:
            del one.sink.held[one.key]
            one.sink.shares.close(one.key)
            one.source.to_send.forget("lane", one.sink.stamp, one.key)
            one.sink.to_receive.forget("lane", one.source.stamp, one.key)

    def check(self) -> None:
        for worker in self.workers:
            assert worker.free_receive >= 0
            assert worker.free_send >= 0
            assert all(count >= 1 for count in worker.held.values()), "a hand-off without a slot cannot finish"
            assert len(worker.held) <= worker.slots


@pytest.mark.parametrize("workers", [2, 3, 6])
def test_every_hand_off_finishes_whatever_the_order(workers: int) -> None:
    for seed in range(60):
        world = World(seed, workers, hand_offs=workers * 6)
        world.run()
        stuck = [one for one in world.all if one.landed < one.regions]
        assert not stuck, f"seed {seed}: {len(stuck)} of {len(world.all)} are stuck"
        for worker in world.workers:
            assert (worker.free_receive, worker.free_send) == (worker.slots, worker.slots)
            assert worker.to_send.paths == worker.to_receive.paths == 0


def test_a_thousand_at_once_hold_no_more_than_the_rings() -> None:
    world = World(1, workers=4, hand_offs=1000)
    world.run()
    assert all(one.landed == one.regions for one in world.all)


def test_who_waits_gets_slots_of_those_that_have_many() -> None:
    shares = SlotShares()
    held = {}
    for number in range(3):
        key = HandoffKey(HandoffId(number), 1)
        shares.ask(key, 0, 8)
        granted = shares.grant(8 - sum(held.values()))
        assert granted is not None
        held[granted[0]] = granted[1]
    assert list(held.values()) == [4, 2, 1], "never all, while others may come"
    late = HandoffKey(HandoffId(9), 1)
    first = next(iter(held))
    shares.ask(late, 0, 1)
    assert shares.landed(first, 0) == 0, "what came free is for the one that waits"
    assert shares.grant(1) == (late, 1)
    shares.close(late)
    assert shares.landed(first, 2) == 2, "and comes back when nobody waits"
