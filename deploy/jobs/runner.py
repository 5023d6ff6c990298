"""Answers the lines of batches, as many at a time as it may, until there are none.

Owns: which lines this process has claimed, the leases on them, and what they came to until it is recorded. Never: how a
line is answered (`answering.py`) or anything that must survive: that is in the store.

Several runners may work on one store. When one dies, its lines are free as soon as their leases end; one that was
merely slow finds that it has lost them. A line may be *answered* twice so, but its first outcome counts.

A gateway that is full, or has nobody to answer, is waited for, by each line that met it: so there are never more
requests than lines that may run. A line that fails otherwise goes back, to be tried again later, so many times.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import final

from baton.common.config import JobsConfig
from baton.common.errors import ErrorCode, RequestError
from baton.common.log import EventLog
from baton.deploy.jobs.lines import answered, unanswered
from baton.deploy.jobs.records import ClaimedLine, LineKey, Outcome
from baton.deploy.jobs.store import JobStore
from baton.deploy.jobs.store_thread import StoreThread

BACK_PRESSURE = (429, 503)
TRIED_AGAIN = (499, 500, 504)
LONGEST_PAUSE_S = 60.0
SWEEP_EVERY_S = 3600.0

_log = EventLog("baton.jobs")


@dataclass(frozen=True, slots=True)
class Reply:
    """What a gateway said to a line, as HTTP would say it."""

    request_id: str
    status: int
    body: bytes
    input_tokens: int = 0
    output_tokens: int = 0
    retry_after_s: float | None = None


AnswerLine = Callable[[ClaimedLine], Awaitable[Reply]]


@final
class JobRunner:
    """`run` until it is cancelled. `wall`: seconds of the wall clock, which leases of several hosts are told in."""

    def __init__(
        self,
        name: str,
        store: StoreThread,
        answer: AnswerLine,
        settings: JobsConfig,
        max_line_bytes: int,
        wall: Callable[[], float],
    ) -> None:
        """`name`: nobody else's, also not an earlier runner's."""
        self._name = name
        self._store = store
        self._answer = answer
        self._settings = settings
        self._max_line_bytes = max_line_bytes
        self._wall = wall
        self._claimed: dict[LineKey, asyncio.Task[None]] = {}
        self._done: list[Outcome] = []  # not recorded yet
        self._back: list[tuple[LineKey, float]] = []  # to be given back, until then
        self._wake = asyncio.Event()
        self._tend_at_s = self._sweep_at_s = float("-inf")
        self._dry = False  # there was nothing to claim when it last looked

    def poke(self) -> None:
        """There is a new batch, or one was cancelled: looks at once. On the loop."""
        self._tend_at_s = float("-inf")
        self._wake.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as lines:  # a bug in one of them ends all, loudly
            while True:
                try:
                    await self._turn(lines)
                except RequestError as error:
                    if error.code != ErrorCode.STORE_UNAVAILABLE:
                        raise
                    _log.warning("job_store_unavailable", reason=error.message[:200])
                await self._rest()

    async def give_back(self) -> None:
        """After `run` was cancelled: others need not wait for the leases to end."""
        await self._record()
        await self._store(JobStore.release, self._name, list(self._claimed), self._wall())

    async def _turn(self, lines: asyncio.TaskGroup) -> None:
        await self._record()
        if asyncio.get_running_loop().time() >= self._tend_at_s:
            await self._tend(self._wall())
        free = self._settings.max_running_lines - len(self._claimed)
        if free <= 0 or self._dry:
            return
        now_s = self._wall()
        running = Counter(batch_id for batch_id, _ in self._claimed)
        claimed = await self._store(JobStore.claim, self._name, free, now_s, now_s + self._settings.lease_s, running)
        self._dry = len(claimed) < free
        for line in claimed:
            self._claimed[line.key] = lines.create_task(self._work(line))

    async def _rest(self) -> None:
        try:
            await asyncio.wait_for(self._wake.wait(), self._settings.poll_s)
        except TimeoutError:
            return
        self._wake.clear()

    async def _record(self) -> None:
        """What is over is the store's to know before its lines are ours no more."""
        done, back = tuple(self._done), tuple(self._back)
        if done:
            await self._store(JobStore.record, done, self._wall())
        for until_s in {until_s for _, until_s in back}:
            keys = [key for key, until in back if until == until_s]
            await self._store(JobStore.release, self._name, keys, until_s)
        del self._done[: len(done)], self._back[: len(back)]
        for key in (*((outcome.batch_id, outcome.line) for outcome in done), *(key for key, _ in back)):
            self._claimed.pop(key, None)

    async def _tend(self, now_s: float) -> None:
        """Begins and ends batches, keeps the leases, and drops lines that are not ours any more."""
        settings = self._settings
        await self._store(JobStore.tend, now_s, settings.max_lines, self._max_line_bytes)
        held = {key for key, task in self._claimed.items() if not task.done()}
        kept = await self._store(JobStore.renew, self._name, held, now_s + settings.lease_s) if held else set()
        for key in held - kept:
            self._claimed.pop(key).cancel()
        loop_s = asyncio.get_running_loop().time()  # the wall clock may be set back
        if loop_s >= self._sweep_at_s:
            await self._store(JobStore.sweep, now_s - settings.keep_s)
            self._sweep_at_s = loop_s + SWEEP_EVERY_S
        self._tend_at_s = loop_s + settings.poll_s
        self._dry = False

    # -------------------------------------------------------------------------------------------- a line

    async def _work(self, line: ClaimedLine) -> None:
        most = self._settings.max_attempts
        if line.attempts > most:
            reason = f"{most} attempts to answer this line ended with the process that made them (jobs.max_attempts)"
            self._done.append(unanswered(line.batch_id, line.line, line.custom_id, "attempts_exhausted", reason))
        else:
            reply = await self._reply(line)
            if reply.status in TRIED_AGAIN and line.attempts < most:
                self._back.append((line.key, self._wall() + min(line.attempts, LONGEST_PAUSE_S)))
            else:
                tokens = (reply.input_tokens, reply.output_tokens)
                self._done.append(answered(line, reply.request_id, reply.status, reply.body, tokens))
        self._wake.set()

    async def _reply(self, line: ClaimedLine) -> Reply:
        while True:
            reply = await self._answer(line)
            if reply.status not in BACK_PRESSURE:
                return reply
            await asyncio.sleep(min(reply.retry_after_s or 1.0, LONGEST_PAUSE_S))
