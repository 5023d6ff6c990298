"""Who is let in at a gateway: shares, priorities, limits, what is refused, and what is known of speeds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs
from test_gateway_core import A, B, Driver, P, stamp, view

from baton.common.config import DecodeConfig, GatewayConfig, LivenessConfig, TransferConfig
from baton.common.engine.core_api import FromPeer, MembershipView
from baton.common.errors import ErrorCode
from baton.common.ids import RequestId
from baton.common.messages import Heartbeat, Load, Output, SamplingParams, Submit, Submitted, pack_tokens
from baton.deploy.admission_limits import QueueSpeed, RateLimits
from baton.deploy.admission_queue import EVERYBODY, FairQueue, Tenant
from baton.deploy.gateway_core import GatewayCore

ONE, TWO = Tenant(name="one"), Tenant(name="two")
WORKER_WAIT_S = 4 * LivenessConfig().dead_after_s


def named(name: str) -> RequestId:
    return RequestId(name)


def drained(queue: FairQueue, count: int) -> list[str]:
    return [queue.pop()[0] for _ in range(count)]


# ------------------------------------------------------------------------------------------------ the queue


def test_keys_take_turns_whoever_came_first() -> None:
    queue = FairQueue()
    for number in range(6):
        queue.join(named(f"a{number}"), ONE, 0, 10)
    for number in range(3):
        queue.join(named(f"b{number}"), TWO, 0, 10)
    assert drained(queue, 6) == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert drained(queue, 3) == ["a3", "a4", "a5"]
    assert not queue
    assert queue.tokens == 0


def test_a_weight_is_a_share_of_the_work() -> None:
    queue = FairQueue()
    heavy = Tenant(name="heavy", weight=3.0)
    for number in range(40):
        queue.join(named(f"a{number}"), ONE, 0, 30)
        queue.join(named(f"h{number}"), heavy, 0, 30)
    assert Counter(name[0] for name in drained(queue, 40)) == {"h": 30, "a": 10}


def test_an_answer_is_work_too() -> None:
    queue = FairQueue()
    for number in range(25):
        queue.join(named(f"a{number}"), ONE, 0, 10)
        queue.join(named(f"b{number}"), TWO, 0, 10)
    assert drained(queue, 2) == ["a0", "b0"]
    queue.said(ONE, 100)
    assert set(drained(queue, 20)) == {f"b{number}" for number in range(1, 21)}, "200 tokens' worth, ten at a time"


def test_priorities_order_one_key_and_give_it_no_more() -> None:
    queue = FairQueue()
    for name, tenant, priority in (("a0", ONE, 0), ("a1", ONE, -9), ("a2", ONE, -9), ("b0", TWO, 50)):
        queue.join(named(name), tenant, priority, 10)
    assert drained(queue, 4) == ["a1", "b0", "a2", "a0"]


def test_who_was_quiet_has_saved_up_nothing() -> None:
    queue = FairQueue()
    for number in range(100):
        queue.join(named(f"a{number}"), ONE, 0, 10)
    drained(queue, 80)
    for number in range(20):
        queue.join(named(f"b{number}"), TWO, 0, 10)
    assert Counter(name[0] for name in drained(queue, 20)) == {"a": 10, "b": 10}


def test_who_leaves_is_not_waited_for() -> None:
    queue = FairQueue()
    for name in ("a0", "a1", "a2"):
        queue.join(named(name), ONE, 0, 10)
    queue.leave(named("a1"))
    queue.leave(named("a1"))
    assert named("a1") not in queue
    assert drained(queue, 2) == ["a0", "a2"]


def test_the_last_of_the_longest_gives_way() -> None:
    queue = FairQueue()
    for number in range(4):
        queue.join(named(f"a{number}"), ONE, -number, 10)
    assert queue.last_of_longest(TWO) == "a0", "the least urgent"
    assert queue.last_of_longest(ONE) is None
    for number in range(3):
        queue.join(named(f"b{number}"), TWO, 0, 10)
    assert queue.last_of_longest(TWO) is None, "four each would be no better"
    assert queue.last_of_longest(Tenant(name="two", weight=2.0)) == "a0"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=120),
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
)
@example([(1, 20), (1, 0), (1, 0)] * 40, (1, 1, 1))  # where answers do not count, one key alone has them
def test_no_key_gets_ahead_of_another_that_waits(steps: list[tuple[int, int]], weights: tuple[int, ...]) -> None:
    """All wait all the time: at each turn, what each has had for its weight differs by two prompts and answers."""
    tenants = [Tenant(name=f"k{number}", weight=weight) for number, weight in enumerate(weights)]
    queue, served, prompts = FairQueue(), Counter[str](), iter(range(10_000))
    cost: dict[str, tuple[Tenant, int, int]] = {}

    def join(which: int, tokens: int, answer: int) -> None:
        name = f"r{next(prompts)}"
        cost[name] = tenants[which], tokens, answer
        queue.join(named(name), tenants[which], 0, tokens)

    for which in (0, 1, 2) * 2:  # two of each: one still waits when the other has its turn
        join(which, 1, 0)
    for tokens, answer in steps:
        name, _ = queue.pop()
        tenant, prompt, said = cost[name]
        queue.said(tenant, said)
        served[tenant.name] += prompt + 2 * said  # type: ignore[assignment]
        join(tenants.index(tenant), tokens, answer)
        levels = [served[tenant.name] / tenant.weight for tenant in tenants]
        assert max(levels) - min(levels) <= 2 * (50 + 40) / min(weights)


# --------------------------------------------------------------------------------------- limits and speeds


def test_requests_of_a_minute_and_when_to_come_back() -> None:
    limits, tenant = RateLimits(), Tenant(name="x", requests_per_minute=3)
    for _ in range(3):
        assert limits.wait_s(tenant, 0.0) == (0.0, "3 requests per minute")
        limits.admitted(tenant, 1000, 0.0)
    wait_s, what = limits.wait_s(tenant, 0.0)
    assert (wait_s, what) == (pytest.approx(20.0), "3 requests per minute")
    assert limits.wait_s(tenant, 20.0)[0] == 0.0
    assert limits.wait_s(EVERYBODY, 0.0) == (0.0, "")


def test_less_than_one_request_of_a_minute_comes_in_its_time() -> None:
    limits, tenant = RateLimits(), Tenant(name="x", requests_per_minute=0.5)
    assert limits.wait_s(tenant, 0.0)[0] == 0.0
    limits.admitted(tenant, 1000, 0.0)
    assert limits.wait_s(tenant, 0.0)[0] == pytest.approx(120.0)
    assert limits.wait_s(tenant, 120.0)[0] == 0.0


def test_tokens_of_answers_count_against_the_limit() -> None:
    limits, tenant = RateLimits(), Tenant(name="x", tokens_per_minute=600)
    limits.admitted(tenant, 500, 0.0)
    assert limits.wait_s(tenant, 0.0)[0] == 0.0
    limits.said(tenant, 199, 0.0)
    assert limits.wait_s(tenant, 0.0)[0] == pytest.approx(10.0)


def test_a_speed_is_known_after_a_while_and_forgotten_after_a_pause() -> None:
    speed = QueueSpeed()
    speed.waits(0.0)
    for number in range(1, 8):
        speed.left(100, 0.5 * number, waiting=True)
        assert speed.tokens_per_s is None
    speed.left(100, 4.0, waiting=False)
    assert speed.tokens_per_s == pytest.approx(200, rel=0.1)
    speed.left(10_000, 5.0, waiting=False)  # nobody waited: it says nothing about the speed
    assert speed.tokens_per_s == pytest.approx(200, rel=0.1)
    speed.waits(100.0)
    assert speed.tokens_per_s is None


# ------------------------------------------------------------------------------------------- at the gateway


class Door(Driver):
    """One decode worker of two rows, one request ahead: room for three."""

    def __init__(self, rows: int = 2, **settings: int) -> None:
        super().__init__()
        chosen = GatewayConfig(**{"dispatch_ahead_requests": 1, "max_inflight_requests": 64, **settings})  # type: ignore[arg-type]
        decode = DecodeConfig(max_running_requests=rows)
        self.core = GatewayCore(chosen, TransferConfig(resend_after_s=1.0), LivenessConfig(), 64, decode=decode)
        self.view(A, P)

    def ask(self, name: str, tenant: Tenant = EVERYBODY, timeout_s: float = 60.0, priority: int = 0) -> list[str]:
        """Who is let in at once."""
        prompt = np.arange(20, dtype=np.int32)
        sampling = SamplingParams(max_tokens=8)
        effects = self.core.submit(
            RequestId(name), prompt, sampling, timeout_s, self.now, priority=priority, tenant=tenant
        )
        return submitted(self.take(effects))

    def answer(self, name: str, worker: object = A) -> list[str]:
        """It is answered with one token. Who is let in then."""
        self.tokens.clear()
        body = Output(
            request_id=RequestId(name), placement=0, first_index=0, tokens=pack_tokens([1]), finish_reason="length"
        )
        return submitted(self.tell(worker, body))  # type: ignore[arg-type]

    def refused(self) -> dict[str, ErrorCode]:
        return {end.request_id: end.failure.code for end in self.ended if end.failure is not None}


def submitted(sent: list[object]) -> list[str]:
    return [one.body.request_id for one in sent if isinstance(one.body, Submit)]  # type: ignore[attr-defined]


def test_where_there_is_room_nobody_waits() -> None:
    door = Door(rows=64)
    assert [door.ask(f"r{number}") for number in range(40)] == [[f"r{number}"] for number in range(40)]
    assert door.core.load().queued == 0


def test_what_has_no_room_waits_here_and_keys_take_turns() -> None:
    door = Door()
    assert [door.ask(f"a{number}", ONE) for number in range(5)] == [["a0"], ["a1"], ["a2"], [], []]
    assert door.ask("b0", TWO) == []
    assert door.core.load().queued == 3
    assert door.answer("a0") == ["b0"], "the other key has had nothing yet"
    assert door.answer("a1") == ["a3"]
    assert door.take(door.core.cancel(RequestId("a4"), door.now)) == []
    assert door.answer("a2") == []
    door.now = 2.5
    assert door.ask("b1", TWO) == ["b1"]
    assert door.ask("b2", TWO) == []
    door.now = 4.0
    assert door.answer("b1") == ["b2"]
    door.answer("b2")
    assert [end.waited_s for end in door.ended[-2:]] == [0.0, 1.5]


def test_a_worker_with_a_queue_of_its_own_is_given_what_it_runs_and_one_more() -> None:
    door = Door(rows=10)
    for number in range(4):
        door.ask(f"r{number}")
    door.tell(A, Heartbeat(load=Load(queued=2, running=2)))
    assert door.ask("r4") == []
    assert door.answer("r0") == []
    assert door.answer("r1") == ["r4"], "two run, one is ahead"
    assert door.ask("r5") == []
    assert submitted(door.tell(A, Heartbeat(load=Load(queued=0, running=3)))) == ["r5"]


def test_a_worker_that_comes_or_goes_changes_the_room() -> None:
    door = Door()
    for number in range(8):
        door.ask(f"r{number}")
    assert submitted(door.view(A, B, P)) == ["r3", "r4", "r5"]
    door.tell(B, Heartbeat(load=Load(draining=True)))
    assert door.answer("r0") == []


def test_nobody_there_is_told_in_time_and_a_successor_finds_them_waiting() -> None:
    door = Door()
    for number in range(4):
        door.ask(f"r{number}", timeout_s=600.0)
    for number in range(3):
        door.tell(A, Submitted(request_id=RequestId(f"r{number}"), placement=0))
    door.pass_time(3 * WORKER_WAIT_S)
    assert not door.refused(), "there is somebody: it waits for its turn"
    door.view(P)
    door.pass_time(WORKER_WAIT_S - 1.0)
    assert not door.refused()
    successor = stamp("decode-a", 2)
    assert set(submitted(door.view(successor, P))) == {"r0", "r1", "r2"}
    door.view(P)
    door.pass_time(WORKER_WAIT_S + 1.0)
    assert door.refused() == {f"r{number}": ErrorCode.NO_WORKER for number in range(4)}
    assert door.core.idle


def test_the_deadline_of_one_who_waits_is_kept() -> None:
    door = Door()
    for number in range(4):
        door.ask(f"r{number}", timeout_s=5.0 if number == 3 else 60.0)
    door.pass_time(5.0)
    assert door.refused() == {"r3": ErrorCode.DEADLINE_EXCEEDED}


def test_a_full_gateway_lets_the_key_with_fewer_in() -> None:
    door = Door(max_inflight_requests=6)
    for number in range(6):
        door.ask(f"a{number}", ONE)
    door.ask("a6", ONE)
    door.ask("b0", TWO)
    assert door.refused() == {"a6": ErrorCode.OVERLOADED, "a5": ErrorCode.OVERLOADED}
    assert all(end.retry_after_s == 1.0 for end in door.ended)
    assert door.answer("a0") == ["b0"]


def test_too_many_tokens_are_refused_and_one_that_waits_alone_never_is() -> None:
    door = Door(max_queued_tokens=30)
    for number in range(5):
        door.ask(f"r{number}")
    assert door.refused() == {"r4": ErrorCode.OVERLOADED}


def test_a_key_that_holds_all_the_tokens_gives_way() -> None:
    door = Door(max_queued_tokens=100)
    for number in range(9):
        door.ask(f"a{number}", ONE)
    assert door.refused() == {"a8": ErrorCode.OVERLOADED}, "its own are no reason for another"
    door.ask("b0", TWO)
    door.ask("b1", TWO)
    assert door.refused().keys() == {"a8", "a7", "a6"}
    door.ask("b2", TWO)
    assert door.refused().keys() == {"a8", "a7", "a6", "b2"}, "three each would be no better"
    assert all(end.retry_after_s == 1.0 for end in door.ended)
    assert [door.answer(f"a{number}") for number in range(3)] == [["b0"], ["a3"], ["b1"]]


def test_nobody_ends_for_a_prompt_that_has_no_room_all_the_same() -> None:
    queue = FairQueue()
    for number in range(3):
        queue.join(named(f"a{number}"), ONE, 0, 10)
    queue.join(named("c"), Tenant(name="three"), 0, 12)
    assert queue.last_of_heaviest(TWO, 5, 8, ()) == ["a2"]
    assert queue.last_of_heaviest(TWO, 5, 8, ["a2"]) == ["a1"], "who leaves anyway has left"
    assert queue.last_of_heaviest(TWO, 11, 25, ()) == ["a2", "a1", "c"]
    assert queue.last_of_heaviest(TWO, 30, 25, ()) is None, "no key has more than that"
    assert queue.last_of_heaviest(Tenant(name="two", weight=10.0), 30, 41, ()) == ["a2", "a1", "c", "a0"]
    assert len(queue) == 4


def test_a_deadline_that_cannot_be_met_is_told_at_once() -> None:
    door = Door()
    for number in range(20):
        door.ask(f"r{number}", ONE)
    assert not door.refused(), "no speed is known"
    for number in range(10):
        door.now += 1.0
        door.answer(f"r{number}")
    door.ask("hurried", ONE, timeout_s=4.0)
    door.ask("patient", ONE, timeout_s=9.0)
    door.ask("urgent", ONE, timeout_s=1.0, priority=-1)
    door.ask("other", TWO, timeout_s=1.0)
    assert door.refused() == {"hurried": ErrorCode.DEADLINE_UNREACHABLE}
    [refused] = door.ended[-1:]
    assert refused.retry_after_s == pytest.approx(3.0, abs=0.5)
    door.view(A, B, P)  # another speed from now on
    for number in range(30):
        door.ask(f"s{number}", ONE, timeout_s=0.5)
    assert len(door.refused()) == 1


def test_a_key_over_its_limit_is_told_when_to_come_back() -> None:
    door, tenant = Door(rows=64), Tenant(name="x", requests_per_minute=2)
    for number in range(3):
        door.ask(f"r{number}", tenant)
    assert door.refused() == {"r2": ErrorCode.RATE_LIMITED}
    assert door.ended[-1].retry_after_s == pytest.approx(30.0)
    door.now += 30.0
    assert door.ask("r3", tenant) == ["r3"]


def test_a_key_is_no_more_urgent_than_it_may_be() -> None:
    door = Door(rows=64)
    effects = door.core.submit(
        RequestId("r"), np.arange(5, dtype=np.int32), SamplingParams(max_tokens=1), 60.0, 0.0, priority=-50,
        tenant=Tenant(name="x", top_priority=10),
    )  # fmt: skip
    [sent] = door.take(effects)
    assert isinstance(sent.body, Submit)
    assert sent.body.priority == 10


def test_who_drains_has_no_room_whoever_told_so_and_whatever_is_heard_after() -> None:
    told = Door()
    members = [structs.replace(one, load=Load(draining=one.stamp == A)) for one in view(2, A, P).members]
    told.take(told.core.handle(MembershipView(2, tuple(members), frozenset()), told.now))
    assert told.ask("r0") == []
    assert told.core.load().queued == 1
    told.tell(A, Heartbeat(load=Load()))  # said before
    assert told.core.load().queued == 1
    heard = Door()
    heard.tell(A, Heartbeat(load=Load(draining=True)))
    heard.tell(A, Heartbeat(load=Load()))
    heard.view(A, P)
    assert heard.ask("r0") == []
    assert heard.core.load().queued == 1


def test_heartbeats_of_strangers_are_no_room() -> None:
    door = Door()
    for number in range(4):
        door.ask(f"r{number}")
    assert door.take(door.core.handle(FromPeer(stamp("decode-z"), Heartbeat(load=Load())), 0.0)) == []
    assert door.take(door.core.handle(view(1, A, P), 0.0)) == []
