"""The runner of batches over a real store and a gateway that is played here: whoever dies when, each line has one
outcome."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from baton.common.config import JobsConfig
from baton.common.errors import ErrorCode, RequestError
from baton.deploy.jobs.databases import SqliteDatabase
from baton.deploy.jobs.records import BatchRecord, ClaimedLine
from baton.deploy.jobs.runner import JobRunner, Reply
from baton.deploy.jobs.store import JobStore
from baton.deploy.jobs.store_thread import StoreThread

ME, PATH = "me", "/v1/completions"
SETTINGS = JobsConfig(max_running_lines=3, lease_s=30.0, poll_s=0.005)
LINES = 5
GIVE_UP_S = 20.0


@dataclass
class Steps:
    """Counts what a process does to the world, and lets it do nothing more from the given step on: as if it had been
    killed there, before or after the step took effect."""

    dies_at: int | None = None
    count: int = 0
    dead: asyncio.Event = field(default_factory=asyncio.Event)

    async def pass_one(self) -> None:
        self.count += 1
        if self.dies_at is not None and self.count >= self.dies_at:
            self.dead.set()
            await asyncio.Event().wait()


class Recorded(StoreThread):
    """Tells when the batch is over, and dies where it is told to."""

    def __init__(self, store: JobStore, steps: Steps) -> None:
        super().__init__(store)
        self.steps = steps
        self.over = asyncio.Event()
        self.down = False

    async def __call__(self, verb: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        await self.steps.pass_one()
        if self.down:
            raise RequestError(ErrorCode.STORE_UNAVAILABLE, "away")
        result = await super().__call__(verb, *arguments, **named)
        (batches, _) = await super().__call__(JobStore.batches, ME, None, 10)
        if all(batch.ended_at is not None for batch in batches):
            self.over.set()
        await self.steps.pass_one()
        return result


@dataclass
class World:
    path: Path
    store: JobStore = field(init=False)
    now_s: float = 0.0
    asked: list[str] = field(default_factory=list)
    runners: int = 0
    answer: Callable[[ClaimedLine], Awaitable[Reply]] = field(init=False)

    def __post_init__(self) -> None:
        self.store = self.open()
        self.answer = self.say_hello

    def open(self) -> JobStore:
        """As another process does."""
        return JobStore(SqliteDatabase(self.path))

    async def say_hello(self, line: ClaimedLine) -> Reply:
        self.asked.append(line.custom_id)
        return Reply("req", 200, b'{"text":"hello"}', 3, 2)

    def runner(self, thread: StoreThread, steps: Steps, settings: JobsConfig) -> JobRunner:
        async def answer(line: ClaimedLine) -> Reply:
            await steps.pass_one()
            reply = await self.answer(line)
            await steps.pass_one()
            return reply

        self.runners += 1
        return JobRunner(f"runner-{self.runners}", thread, answer, settings, 4096, lambda: self.now_s)

    def submit(self, count: int = LINES) -> BatchRecord:
        lines = [json.dumps({"custom_id": str(n), "method": "POST", "url": PATH, "body": {}}) for n in range(count)]
        file = self.store.add_file(ME, "batch", "in", ["\n".join(lines).encode()], self.now_s, 1 << 30)
        return self.store.create_batch(ME, PATH, file.id, ("24h", 86_400.0), {}, self.now_s, None)

    def outcomes(self, batch: BatchRecord) -> tuple[list[str], list[str]]:
        """The custom ids in the output and the error file."""
        ended = self.store.batch(ME, batch.id)
        return self._ids(ended.output_file_id), self._ids(ended.error_file_id)

    def _ids(self, file_id: str | None) -> list[str]:
        if file_id is None:
            return []
        content, _ = self.store.content(self.store.file(ME, file_id), -1)
        return [json.loads(line)["custom_id"] for line in content.splitlines()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "jobs.sqlite")
    yield world
    world.store.close()


async def work(
    world: World,
    dies_at: int | None = None,
    *,
    settings: JobsConfig = SETTINGS,
    meanwhile: Callable[[Recorded, JobRunner], Awaitable[None]] | None = None,
) -> Steps:
    """One process, until all batches are over or it has died."""
    steps = Steps(dies_at)
    thread = Recorded(world.open(), steps)
    runner = world.runner(thread, steps, settings)
    running = asyncio.create_task(runner.run())
    if meanwhile is not None:
        await meanwhile(thread, runner)
    ends = [asyncio.create_task(event.wait()) for event in (thread.over, steps.dead)]
    done, _ = await asyncio.wait({running, *ends}, timeout=GIVE_UP_S, return_when=asyncio.FIRST_COMPLETED)
    for task in (running, *ends):
        task.cancel()
    await asyncio.gather(running, *ends, return_exceptions=True)
    thread.close()
    assert done, "nothing came of it"
    assert running not in done, running.exception()
    return steps


def all_of(count: int = LINES) -> list[str]:
    return [str(n) for n in range(count)]


def test_every_line_is_answered(world: World) -> None:
    batch = world.submit()
    asyncio.run(work(world))
    assert world.outcomes(batch) == (all_of(), [])
    ended = world.store.batch(ME, batch.id)
    assert (ended.status, ended.completed, ended.output_tokens) == ("completed", LINES, 2 * LINES)
    assert sorted(world.asked) == all_of()


def test_wherever_it_dies_another_goes_on_and_nothing_is_lost_or_doubled(world: World) -> None:
    async def live_and_die() -> int:
        world.submit()
        steps = (await work(world)).count
        for dies_at in range(1, steps + 1):
            batch = world.submit()
            await work(world, dies_at)
            world.now_s += SETTINGS.lease_s
            await work(world)
            assert world.outcomes(batch) == (all_of(), []), f"died at step {dies_at}"
            ended = world.store.batch(ME, batch.id)
            assert (ended.completed, ended.output_tokens) == (LINES, 2 * LINES), f"died at step {dies_at}"
        return steps

    assert asyncio.run(live_and_die()) > 2 * LINES


def test_many_may_die_one_after_the_other(world: World) -> None:
    batch = world.submit()

    async def die_often() -> None:
        for dies_at in (3, 9, 14, 17, 20, 8, 12):
            await work(world, dies_at)
            world.now_s += SETTINGS.lease_s
        await work(world)

    asyncio.run(die_often())
    assert world.outcomes(batch) == (all_of(), [])


def test_several_share_a_batch_and_answer_each_line_once(world: World) -> None:
    batch = world.submit(40)

    async def together() -> None:
        await asyncio.gather(work(world), work(world), work(world))

    asyncio.run(together())
    assert world.outcomes(batch) == (all_of(40), [])
    assert sorted(world.asked, key=int) == all_of(40)


def test_one_that_was_slow_finds_that_it_lost_its_lines(world: World) -> None:
    """The other one answers them while the first still waits for its gateway."""
    batch = world.submit(2)
    hung = asyncio.Event()

    async def slow_then_quick(line: ClaimedLine) -> Reply:
        if line.attempts == 1:
            hung.set()
            await asyncio.Event().wait()
        return Reply("req", 200, b"{}")

    world.answer = slow_then_quick

    async def other_comes(thread: Recorded, runner: JobRunner) -> None:
        await hung.wait()
        await asyncio.sleep(0)
        thread.down = True  # it cannot renew
        world.now_s += SETTINGS.lease_s
        await work(world)
        thread.down = False

    asyncio.run(work(world, meanwhile=other_comes))
    assert world.outcomes(batch) == (all_of(2), [])


def test_leases_are_renewed_while_a_line_takes_long(world: World) -> None:
    batch = world.submit(1)
    renewed = asyncio.Event()

    async def slow(line: ClaimedLine) -> Reply:
        assert line.attempts == 1
        await renewed.wait()
        return Reply("req", 200, b"{}")

    world.answer = slow

    async def time_passes(thread: Recorded, runner: JobRunner) -> None:
        for _ in range(5):
            at = thread.steps.count
            while thread.steps.count < at + 8:  # tends and renews
                await asyncio.sleep(0.001)
            world.now_s += SETTINGS.lease_s * 0.6
            assert world.store.claim("other", 1, world.now_s, world.now_s + 1, {}) == []
        renewed.set()

    asyncio.run(work(world, meanwhile=time_passes))
    assert world.outcomes(batch) == (all_of(1), [])


def test_a_full_gateway_is_waited_for(world: World) -> None:
    batch = world.submit()
    at_once, most = 0, 0
    refusals = dict.fromkeys(all_of(), 2)

    async def often_full(line: ClaimedLine) -> Reply:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        if refusals[line.custom_id]:
            refusals[line.custom_id] -= 1
            status = 429 if refusals[line.custom_id] else 503
            return Reply("req", status, b"{}", retry_after_s=0.001)
        assert line.attempts == 1, "being told to wait is no attempt"
        return Reply("req", 200, b"{}")

    world.answer = often_full
    asyncio.run(work(world))
    assert world.outcomes(batch) == (all_of(), [])
    assert most <= SETTINGS.max_running_lines


def test_what_fails_is_tried_again_so_often_and_what_is_refused_is_not(world: World) -> None:
    batch = world.submit(3)
    tried: list[str] = []

    async def failing(line: ClaimedLine) -> Reply:
        tried.append(line.custom_id)
        if line.custom_id == "0":
            return Reply("req", 400, b'{"error":"bad"}')
        if line.custom_id == "1" and line.attempts < 3:
            return Reply("req", 500, b'{"error":"unlucky"}')
        return Reply("req", 504 if line.custom_id == "2" else 200, b'{"error":"late"}')

    async def pauses_end(thread: Recorded, runner: JobRunner) -> None:
        while not thread.over.is_set():
            world.now_s += 1.0
            await asyncio.sleep(0.001)

    world.answer = failing
    asyncio.run(work(world, settings=replace(SETTINGS, max_attempts=4, lease_s=1e6), meanwhile=pauses_end))
    assert world.outcomes(batch) == (["1"], ["0", "2"])
    assert [tried.count(name) for name in all_of(3)] == [1, 3, 4]
    told = [json.loads(line)["response"]["status_code"] for _, line in world.store.failures(ME, batch.id, 0, 9)]
    assert told == [400, 504], "the last answer is the outcome"


def test_a_line_that_ends_its_process_every_time_is_given_up(world: World) -> None:
    batch = world.submit(1)
    settings = replace(SETTINGS, max_attempts=2)

    async def deaths() -> None:
        for _ in range(2):
            steps = Steps()

            async def deadly(line: ClaimedLine, steps: Steps = steps) -> Reply:
                raise SystemError("the process is gone")

            world.answer = deadly
            thread = Recorded(world.open(), steps)
            with pytest.raises(ExceptionGroup):
                await world.runner(thread, steps, settings).run()
            thread.close()
            world.now_s += settings.lease_s
        await work(world, settings=settings)

    asyncio.run(deaths())
    assert world.outcomes(batch) == ([], ["0"])
    (_, told), *_ = world.store.failures(ME, batch.id, 0, 1)
    assert json.loads(told)["error"]["code"] == "attempts_exhausted"


def test_cancelling_ends_what_is_being_answered(world: World) -> None:
    batch = world.submit()
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless(line: ClaimedLine) -> Reply:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    world.answer = endless

    async def cancel(thread: Recorded, runner: JobRunner) -> None:
        await begun.wait()
        await thread(JobStore.cancel, ME, batch.id, world.now_s)
        runner.poke()
        await asyncio.wait_for(ended.wait(), GIVE_UP_S)

    asyncio.run(work(world, meanwhile=cancel))
    assert world.outcomes(batch) == ([], all_of())


def test_a_store_that_goes_away_is_waited_for_and_nothing_is_answered_twice(world: World) -> None:
    batch = world.submit()

    async def outage(thread: Recorded, runner: JobRunner) -> None:
        while len(world.asked) < 3:
            await asyncio.sleep(0.001)
        thread.down = True
        at = thread.steps.count
        while thread.steps.count < at + 3:
            await asyncio.sleep(0.001)
        thread.down = False

    asyncio.run(work(world, meanwhile=outage))
    assert world.outcomes(batch) == (all_of(), [])
    assert sorted(world.asked) == all_of()


def test_a_runner_that_is_stopped_leaves_its_lines_to_others_at_once(world: World) -> None:
    batch = world.submit()

    async def stop_and_go() -> None:
        begun = asyncio.Event()

        async def endless(line: ClaimedLine) -> Reply:
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError

        world.answer = endless
        thread = StoreThread(world.open())
        runner = world.runner(thread, Steps(), SETTINGS)
        running = asyncio.create_task(runner.run())
        await begun.wait()
        running.cancel()
        await asyncio.wait({running})
        await runner.give_back()
        thread.close()
        world.answer = world.say_hello
        await work(world)

    asyncio.run(stop_and_go())
    assert world.now_s == 0.0, "no lease had to end"
    assert world.outcomes(batch) == (all_of(), [])
