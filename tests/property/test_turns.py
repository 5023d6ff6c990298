"""The order of regions: against a model, and for what it promises."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.common.ids import Epoch, HandoffId, HandoffKey, Stamp, WorkerId
from baton.transfer.caps import Caps
from baton.transfer.region_queue import RegionQueue
from baton.transfer.turns import LEVELS, TURN_BYTES, Turns

PRIORITIES = st.integers(-5, 5)
COSTS = st.sampled_from([1, 4096, TURN_BYTES // 3, TURN_BYTES, 4 * TURN_BYTES])


def key(number: int) -> HandoffKey:
    return HandoffKey(HandoffId(number), 1)


def stamp(number: int) -> Stamp:
    return Stamp(WorkerId(f"p{number}"), 0, Epoch(number))


class TurnsAgainstLists(RuleBasedStateMachine):
    """Each hand-off's items come out in order, all of them, and only while they wait."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: Turns[tuple[int, int]] = Turns()
        self.model: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.count = 0

    @rule(owner=st.integers(0, 6), priority=PRIORITIES, cost=COSTS)
    def put(self, owner: int, priority: int, cost: int) -> None:
        self.count += 1
        item = (owner, self.count)
        self.turns.put(key(owner), priority, item, cost)
        self.model[owner].append(item)

    @rule()
    def take(self) -> None:
        item = self.turns.take()
        if item is None:
            assert not any(self.model.values()), "work was left undone"
        else:
            assert self.model[item[0]].pop(0) == item

    @rule(owner=st.integers(0, 6))
    def forget(self, owner: int) -> None:
        self.turns.forget(key(owner))
        self.model[owner].clear()

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.turns) == sum(map(len, self.model.values()))


TestTurnsAgainstLists = TurnsAgainstLists.TestCase
TestTurnsAgainstLists.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def share(loads: list[tuple[int, int]], taken_bytes: int) -> Counter[int]:
    """Bytes that each of `loads` (priority, size of its regions) got, while all have more than enough waiting."""
    turns: Turns[int] = Turns()
    got: Counter[int] = Counter()
    for owner, (priority, cost) in enumerate(loads):
        for _ in range(2 * taken_bytes // cost + 1):
            turns.put(key(owner), priority, owner, cost)
    while got.total() < taken_bytes:
        owner = turns.take()
        assert owner is not None
        got[owner] += loads[owner][1]
    return got


@given(st.lists(st.sampled_from([TURN_BYTES // 8, TURN_BYTES, 3 * TURN_BYTES]), min_size=2, max_size=6))
@settings(max_examples=30, deadline=None)
def test_equals_get_equal_bytes_whatever_the_size_of_their_regions(costs: list[int]) -> None:
    taken = 60 * TURN_BYTES * len(costs)
    got = share([(0, cost) for cost in costs], taken)
    # Whoever has had its first turn first is alone in the other line, which gets half, until the rest have had theirs.
    head_start = (len(costs) + 3) * TURN_BYTES
    for owner in range(len(costs)):
        assert got[owner] == pytest.approx(taken / len(costs), abs=head_start)


@given(st.integers(-6, 6), st.integers(-6, 6))
@settings(max_examples=40, deadline=None)
def test_a_step_of_priority_doubles_the_share_up_to_a_bound(first: int, second: int) -> None:
    taken = 260 * TURN_BYTES
    got = share([(first, TURN_BYTES), (second, TURN_BYTES)], taken)
    steps = max(-LEVELS, min(LEVELS, second)) - max(-LEVELS, min(LEVELS, first))
    assert got[0] == pytest.approx(taken * 2.0**steps / (2.0**steps + 1), abs=3 * TURN_BYTES)
    assert min(got.values()) > 0, "starved"


@given(st.integers(1, 30), st.sampled_from([TURN_BYTES // 4, TURN_BYTES, 4 * TURN_BYTES]), PRIORITIES)
@settings(max_examples=40, deadline=None)
def test_a_new_hand_off_waits_for_two_regions_of_its_equals_at_most(others: int, cost: int, priority: int) -> None:
    turns: Turns[int] = Turns()
    for owner in range(others):
        for _ in range(30):
            turns.put(key(owner), priority, owner, cost)
    for _ in range(10 * others):  # all have had their first turn
        turns.take()
    turns.put(key(1000), priority, 1000, 4096)
    assert 1000 in [turns.take() for _ in range(2)]


def test_no_stream_of_new_or_urgent_hand_offs_starves_an_old_one() -> None:
    turns: Turns[int] = Turns()
    for _ in range(4):
        turns.put(key(0), LEVELS, 0, TURN_BYTES)
    waits, since = [], 0
    for number in range(1, 2000):
        turns.put(key(number), -LEVELS, number, TURN_BYTES)
        turns.put(key(-number), LEVELS, -number, TURN_BYTES)
        since += 1
        if turns.take() == 0:
            waits.append(since)
            since = 0
    assert len(waits) == 4, "starved"
    assert max(waits) <= 2 * (2 ** (2 * LEVELS) + 1)


def test_what_ended_leaves_nothing_behind() -> None:
    queue: RegionQueue[int] = RegionQueue(Caps(0, {}), 100)
    for number in range(50):
        queue.put("zmq", stamp(number % 5), key(number), 0, number, 10, 10)
    started = [queue.take(0.0) for _ in range(50)]
    assert sorted(number for number in started if number is not None) == list(range(50))
    assert queue.take(0.0) is None
    for number in range(50):
        queue.forget("zmq", stamp(number % 5), key(number))
        queue.ended("zmq", stamp(number % 5), 10)
    assert queue.wait_s(0.0) is None
    assert not queue.paths


def test_a_peer_whose_window_is_full_holds_up_nobody_else() -> None:
    queue: RegionQueue[str] = RegionQueue(Caps(0, {}), 2)
    for number in range(3):
        queue.put("zmq", stamp(1), key(1), 0, f"slow {number}", 10, 1)
    queue.put("zmq", stamp(2), key(2), 0, "other", 10, 1)
    queue.put("tcp", stamp(1), key(3), 0, "other lane", 10, 1)
    started = [queue.take(0.0) for _ in range(5)]
    assert sorted(what for what in started if what is not None) == ["other", "other lane", "slow 0", "slow 1"]
    queue.put("zmq", stamp(1), key(4), -3, "urgent", 10, 1)
    assert queue.take(0.0) is None, "the window holds for what comes later, too"
    queue.ended("zmq", stamp(1), 1)
    assert queue.take(0.0) == "urgent"


def test_peers_and_lanes_take_turns() -> None:
    queue: RegionQueue[tuple[str, int]] = RegionQueue(Caps(0, {}), 1 << 30)
    for lane in ("a", "b"):
        for peer in range(3):
            for _ in range(10):
                queue.put(lane, stamp(peer), key(peer), 0, (lane, peer), TURN_BYTES, 1)
    first = [queue.take(0.0) for _ in range(6)]
    assert len(set(first)) == 6


def test_a_capped_lane_waits_alone() -> None:
    queue: RegionQueue[str] = RegionQueue(Caps(0, {"slow": 0.001}), 1 << 30)
    for lane in ("slow", "fast"):
        for number in range(3):
            queue.put(lane, stamp(1), key(1), 0, f"{lane} {number}", 1_000_000, 1)
    started = [queue.take(0.0) for _ in range(5)]
    assert [what for what in started if what is not None] == ["slow 0", "fast 0", "fast 1", "fast 2"]
    wait = queue.wait_s(0.0)
    assert wait is not None
    assert wait == pytest.approx(1.0, rel=0.01)
    assert queue.take(wait) == "slow 1"
