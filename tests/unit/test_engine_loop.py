"""The engine thread: what reaches the core, what comes out, and how it ends."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from baton.common.clock import MonotonicClock, VirtualClock
from baton.common.engine.batch import Batch, BatchRow, StepResult, Ticket, pack_batch
from baton.common.engine.core_api import Drain, FromPeer
from baton.common.engine.fake_runner import FakeRunner, fake_runner
from baton.common.engine.loop import EngineLoop, Inbox
from baton.common.engine.trace import EngineTrace
from baton.common.ids import Epoch, RequestId, Stamp, WorkerId
from baton.common.kv.checker import Holding
from baton.common.messages import FinishAck, Load
from baton.common.trace import Passage, Recorder, Slice

WAIT_S = 10.0
SENDER = Stamp(WorkerId("gateway-0"), 1, Epoch(5))


def ack(index: int) -> FromPeer:
    return FromPeer(SENDER, FinishAck(request_id=RequestId(f"r{index}"), placement=0))


class ScriptedCore:
    """Answers each event with its name; runs one step for each "step" it was handed; fails on "fail"."""

    def __init__(self) -> None:
        self.steps_wanted = 0
        self.report_after: tuple[int, ...] = ()
        self.deadline_s: float | None = None
        self.threads: set[str] = set()

    def handle(self, event: object, now: float) -> list[object]:
        self.threads.add(threading.current_thread().name)
        if event == "fail":
            raise RuntimeError("a bug")
        if event == "step":
            self.steps_wanted += 1
        return [("handled", event)]

    def next_batch(self, now: float) -> Batch | None:
        if not self.steps_wanted:
            return None
        self.steps_wanted -= 1
        row = BatchRow(1, np.array([7], np.int32), 1, np.array([1], np.int32), None)
        return pack_batch([row], 16, report_after=self.report_after)

    def on_layers(self, layers: int, now: float) -> list[object]:
        return [("layers", layers)]

    def on_step(self, result: StepResult, now: float) -> list[object]:
        return [("stepped", result.keys)]

    def on_timer(self, now: float) -> list[object]:
        self.deadline_s = None
        return ["timer"]

    def next_deadline(self) -> float | None:
        return self.deadline_s

    def load(self) -> Load:
        return Load(queued=3)

    def holdings(self) -> Iterable[Holding]:
        return ()

    @property
    def idle(self) -> bool:
        return True


class GatedRunner(FakeRunner):
    """Waits in `collect` until it is let through."""

    def __init__(self) -> None:
        super().__init__(fake_runner(4, 16).memory)
        self.entered = threading.Event()
        self.gate = threading.Event()

    def collect(self, ticket: Ticket) -> StepResult:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        return super().collect(ticket)


class Bench:
    """A loop over a scripted core; what it posts can be waited for."""

    def __init__(self, runner: FakeRunner | None = None) -> None:
        self.core = ScriptedCore()
        self.posted: queue.Queue[object] = queue.Queue()
        self.checks: queue.Queue[int] = queue.Queue()
        self.fatal = threading.Event()
        self.loop = EngineLoop(
            self.core,
            runner or fake_runner(4, 16),
            self.posted.put,
            MonotonicClock(),
            check=lambda: self.checks.put(1),
            inbox_limit=4,
            on_fatal=self.fatal.set,
        )
        self.loop.start()

    def next(self) -> object:
        return self.posted.get(timeout=WAIT_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    assert made.loop.stop(WAIT_S)


def test_events_reach_the_core_in_order_on_the_engine_thread(bench: Bench) -> None:
    for event in ("a", "b", Drain()):
        assert bench.loop.deliver(event)
    assert [bench.next() for _ in range(3)] == [("handled", "a"), ("handled", "b"), ("handled", Drain())]
    assert bench.core.threads == {"engine"}


def test_a_recorded_thread_tells_its_slices_one_after_the_other(bench: Bench) -> None:
    recorder = Recorder()
    clock = MonotonicClock()
    trace = EngineTrace(recorder, clock, lambda item: "h1" if item == "step" or item == ("stepped", (1,)) else "")
    bench.loop.trace(trace).result(WAIT_S)
    bench.loop.deliver("step")
    assert bench.next() == ("handled", "step")
    assert bench.next() == ("stepped", (1,))
    bench.loop.trace(None).result(WAIT_S)
    bench.loop.deliver("step")
    assert [bench.next() for _ in range(2)] == [("handled", "step"), ("stepped", (1,))]
    bench.loop.call(lambda: None).result(WAIT_S)
    items = recorder.take().items
    slices = [item for item in items if isinstance(item, Slice)]
    assert [one.name for one in slices if one.name != "plan"] == ["decode", "outcome"], "and nothing after the end"
    [step] = [one for one in slices if one.name == "decode"]
    assert step.args == {"rows": 1, "tokens": 1}
    for before, after in itertools.pairwise(slices):
        assert before.begin_s <= before.end_s <= after.begin_s
    passages = [item for item in items if isinstance(item, Passage)]
    assert [one.flow for one in passages] == ["h1", "h1"]  # the event that came in, the effect that went out
    assert all(any(one.begin_s <= passage.at_s <= one.end_s for one in slices) for passage in passages)


def test_layers_are_told_and_acted_on_before_the_step_is_over() -> None:
    runner = GatedRunner()
    bench = Bench(runner)
    bench.core.report_after = (1,)
    bench.loop.deliver("step")
    assert [bench.next() for _ in range(2)] == [("handled", "step"), ("layers", 1)]
    assert not runner.gate.is_set()
    runner.gate.set()
    assert bench.next() == ("stepped", (1,))
    assert bench.loop.stop(WAIT_S)


def test_steps_run_and_are_counted(bench: Bench) -> None:
    bench.loop.deliver("step")
    assert bench.next() == ("handled", "step")
    assert bench.next() == ("stepped", (1,))
    load = bench.loop.call(bench.loop.load).result(WAIT_S)
    assert (load.steps, load.queued) == (1, 3)


def test_the_age_of_a_running_step_can_be_read_from_outside() -> None:
    runner = GatedRunner()
    bench = Bench(runner)
    bench.loop.deliver("step")
    assert runner.entered.wait(WAIT_S)
    first = bench.loop.load().step_age_s
    assert 0 < first <= bench.loop.load().step_age_s
    runner.gate.set()
    assert bench.next() == ("handled", "step")
    assert bench.next() == ("stepped", (1,))
    assert bench.loop.stop(WAIT_S)
    assert bench.loop.load().step_age_s == 0.0


def test_what_steps_spend_outside_of_the_model_is_told() -> None:
    clock = VirtualClock()

    class SlowCore(ScriptedCore):
        def next_batch(self, now: float) -> Batch | None:
            clock.advance_to(clock.now() + 2.0)
            return super().next_batch(now)

        def on_step(self, result: StepResult, now: float) -> list[object]:
            clock.advance_to(clock.now() + 3.0)
            return super().on_step(result, now)

    class SlowRunner(FakeRunner):
        def collect(self, ticket: Ticket) -> StepResult:
            clock.advance_to(clock.now() + 100.0)
            return super().collect(ticket)

    runner = SlowRunner(fake_runner(4, 16).memory)
    loop = EngineLoop(SlowCore(), runner, lambda effect: None, clock, check=lambda: None)
    for _ in range(2):
        loop._turn(["step"])
    loop._turn([])  # no step: idle time is none
    assert (loop.load().steps, loop.load().step_overhead_s) == (2, 10.0)


def test_a_deadline_wakes_a_core_that_nobody_talks_to(bench: Bench) -> None:
    def set_deadline() -> None:
        bench.core.deadline_s = MonotonicClock().now() + 0.01

    bench.loop.call(set_deadline).result(WAIT_S)
    assert bench.next() == "timer"


def test_invariants_are_checked_when_it_falls_idle(bench: Bench) -> None:
    bench.loop.deliver("a")
    assert bench.checks.get(timeout=WAIT_S) == 1


def test_a_long_check_is_made_seldom() -> None:
    """Nobody is served meanwhile: it may take a fiftieth of the time, however large the cache has grown."""
    clock, starts = VirtualClock(), []

    def check() -> None:
        starts.append(clock.now())
        clock.advance_to(clock.now() + 2.0)

    loop = EngineLoop(ScriptedCore(), fake_runner(4, 16), lambda effect: None, clock, check=check)
    for _ in range(500):
        loop._turn(["a"])
        clock.advance_to(clock.now() + 0.5)
    assert starts == [0.0, 100.0, 200.0]


def test_a_bug_in_the_core_ends_the_process(bench: Bench) -> None:
    bench.loop.deliver("fail")
    assert bench.fatal.wait(WAIT_S)


def test_a_question_that_fails_is_the_askers_problem(bench: Bench) -> None:
    def ask() -> int:
        raise ValueError("there is no such page")

    with pytest.raises(ValueError, match="no such page"):
        bench.loop.call(ask).result(WAIT_S)
    assert bench.loop.deliver("a")
    assert bench.next() == ("handled", "a")
    assert not bench.fatal.is_set()


def test_idle_is_told_after_everything_that_was_delivered(bench: Bench) -> None:
    bench.loop.deliver("a")
    assert bench.loop.wait_idle(WAIT_S)
    assert bench.next() == ("handled", "a")


def test_a_call_after_the_end_does_not_hang() -> None:
    bench = Bench()
    assert bench.loop.stop(WAIT_S)
    assert bench.loop.call(lambda: 1).cancelled()
    assert not bench.loop.deliver("late")


def test_peer_messages_beyond_the_limit_are_refused_and_counted_but_transfer_events_never() -> None:
    inbox = Inbox(peer_limit=3)
    assert [inbox.put(ack(index)) for index in range(5)] == [True, True, True, False, False]
    assert all(inbox.put(index) for index in range(100))
    assert inbox.refused == 2
    assert len(inbox.take_all(0.0)) == 103
    assert inbox.put(ack(9))
