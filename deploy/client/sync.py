"""The client for code that does not wait with `await`: plain code, threads and notebooks.

Owns: a thread with a loop on which an `AsyncClient` does the work. Never: any of the work.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from baton.deploy.client.core import DEFAULT_CONCURRENCY, AsyncClient
from baton.deploy.client.jobs import POLL_S, AsyncJob, JobEvent, Lines
from baton.deploy.client.streams import AsyncStream
from baton.deploy.client.values import Answer, Message, Outcome, Params, Prompt
from baton.deploy.jobs.shapes import BatchObject
from baton.deploy.status import GatewayStatus
from baton.transfer.reports import HandoffTimes

ResultT = TypeVar("ResultT")


class _Loop:
    """A thread that runs what is given to it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._running: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="baton-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._running.add(future)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt here must not leave the request running
            raise
        finally:
            self._running.discard(future)

    def each(self, items: AsyncGenerator[ResultT, None]) -> Iterator[ResultT]:
        try:
            while found := self.run(_next(items)):
                yield found[0]
        finally:
            if not self._loop.is_closed():  # not waited for: whoever drops an iterator may be the loop's own thread
                asyncio.run_coroutine_threadsafe(_close(items), self._loop)

    def end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Ends what still runs, then does the last thing."""
        if self._loop.is_closed():
            return
        for future in list(self._running):
            future.cancel()
        self.run(self._end_all(last))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_all(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}  # what was cancelled, and who hangs up: not cancelled
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()  # they hang up
        await last()


async def _next(items: AsyncIterator[ResultT]) -> list[ResultT]:
    """The next one, or none."""
    async for item in items:
        return [item]
    return []


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()


class Stream:
    """`for text in stream`; then `stream.answer`. Close it (or `with`) to hang up early."""

    def __init__(self, loop: _Loop, stream: AsyncStream) -> None:
        self._loop = loop
        self._stream = stream
        self._deltas = aiter(stream)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        for text in self._loop.run(_next(self._deltas)):
            return text
        raise StopIteration

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream is used up."""
        return self._stream.answer

    def close(self) -> None:
        self._loop.run(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Job:
    """`AsyncJob` for code that does not wait with `await`."""

    def __init__(self, loop: _Loop, job: AsyncJob) -> None:
        self.id = job.id
        self._loop = loop
        self._job = job

    def status(self) -> BatchObject:
        """How far it is: `status`, `request_counts`, `usage`, and when what happened."""
        return self._loop.run(self._job.status())

    def progress(self, poll_s: float = POLL_S) -> Iterator[BatchObject]:
        """Its status, again and again until it has ended, however it did; its end is the last one."""
        return self._loop.each(self._job.progress(poll_s))

    def wait(self, timeout_s: float | None = None) -> BatchObject:
        """Its end, however it ended. Raises TimeoutError."""
        return self._loop.run(self._job.wait(timeout_s))

    def cancel(self) -> BatchObject:
        """At once; what was answered is kept. Again: changes nothing."""
        return self._loop.run(self._job.cancel())

    def events(self, after: int = 0, poll_s: float = POLL_S) -> Iterator[JobEvent]:
        """Each request's outcome, in the order in which they came, until the job has ended. `after`: the place of the
        last one that was seen, also by a process that is gone."""
        return self._loop.each(self._job.events(after, poll_s))

    def results(self, timeout_s: float | None = None) -> list[Outcome]:
        """Of all requests, in the order in which they were given; waits for them. What was refused or failed is a
        RequestError in the list. Raises TimeoutError; RequestError when the job could not begin."""
        return self._loop.run(self._job.results(timeout_s))

    def result(self, timeout_s: float | None = None) -> Answer:
        """Of a job of one request; waits for it. Raises what it came to, when that is no answer; TimeoutError."""
        return self._loop.run(self._job.result(timeout_s))

    def failures(self) -> list[dict[str, Any]]:
        """What the error file has so far; at most a thousand lines."""
        return self._loop.run(self._job.failures())

    def output(self) -> Iterator[dict[str, Any]]:
        """The lines of the output file, as they are, in the order of the input. Raises BatonError while it runs."""
        return self._loop.each(self._job.output())

    def errors(self) -> Iterator[dict[str, Any]]:
        """The lines of the error file. Raises BatonError while it runs."""
        return self._loop.each(self._job.errors())

    def content(self, *, errors: bool = False) -> Iterator[bytes]:
        """The bytes of the output file, or of the error file, in pieces. Raises BatonError while it runs."""
        return self._loop.each(self._job.content(errors=errors))


class Client:
    """`AsyncClient` for code that does not wait with `await`. Thread-safe."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        ca_file: str | None = None,
        model: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 2,
        patience_s: float = 60.0,
    ) -> None:
        self._loop = _Loop()
        self._client = AsyncClient(
            base_url,
            api_key=api_key,
            ca_file=ca_file,
            model=model,
            timeout_s=timeout_s,
            retries=retries,
            patience_s=patience_s,
        )
        self.base_url = self._client.base_url

    def generate(self, prompt: Prompt, *, key: str | None = None, **params: Unpack[Params]) -> Answer:
        """The whole answer to either kind of prompt. `key`: who asks again with it, also from another process, gets
        the answer of the first time, for as long as the gateway remembers it; see docs/CLIENT.md."""
        return self._loop.run(self._client.generate(prompt, key=key, **params))

    def chat(self, messages: str | Sequence[Message], *, key: str | None = None, **params: Unpack[Params]) -> Answer:
        """Answers a conversation; a bare text is one message of the user."""
        return self._loop.run(self._client.chat(messages, key=key, **params))

    def complete(self, prompt: str | Sequence[int], *, key: str | None = None, **params: Unpack[Params]) -> Answer:
        """Continues a text, or token ids."""
        return self._loop.run(self._client.complete(prompt, key=key, **params))

    def stream(self, prompt: Prompt, *, key: str | None = None, **params: Unpack[Params]) -> Stream:
        """Text as it comes. A connection that breaks is made again, and the text goes on where it was."""
        return Stream(self._loop, self._client.stream(prompt, key=key, **params))

    @overload
    def map(
        self, prompts: Iterable[Prompt], *, concurrency: int = DEFAULT_CONCURRENCY, **params: Unpack[Params]
    ) -> list[Answer]: ...

    @overload
    def map(self, prompts: Iterable[Prompt], *, key: str, **params: Unpack[Params]) -> list[Answer]: ...

    def map(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        key: str | None = None,
        **params: Unpack[Params],
    ) -> list[Answer]:
        """The answers, in the order of the prompts. The first failure ends all, and is raised.

        Without a key, from here: at most `concurrency` at a time, and nothing outlives this process. With one, as a
        job: the cluster decides how many run, this process may crash, and whoever calls `map` with the same key and
        prompts goes on with what there is. Its first failure is raised when all have ended."""
        if key is not None:
            return self._loop.run(self._client.map(prompts, key=key, **params))
        return self._loop.run(self._client.map(prompts, concurrency=concurrency, **params))

    def submit(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        key: str | None = None,
        window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        **params: Unpack[Params],
    ) -> Job:
        """One prompt or several, to be answered whatever is restarted meanwhile, this process included: `job(id)` finds
        it again. Submitting with the same `key` and the same prompts gives the same job."""
        work = self._client.submit(prompts, key=key, window=window, metadata=metadata, **params)
        return Job(self._loop, self._loop.run(work))

    def submit_lines(
        self,
        lines: Lines,
        *,
        endpoint: str | None = None,
        window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> Job:
        """The same for requests in the format of OpenAI's batches. `endpoint`: that of the first one, unless given."""
        work = self._client.submit_lines(lines, endpoint=endpoint, window=window, metadata=metadata, key=key)
        return Job(self._loop, self._loop.run(work))

    def job(self, job_id: str) -> Job:
        """One that was submitted before; whether it is there is found when it is asked."""
        return Job(self._loop, self._client.job(job_id))

    def jobs(self, most: int = 20) -> list[BatchObject]:
        """The newest ones of this API key."""
        return self._loop.run(self._client.jobs(most))

    def open_session(self) -> str:
        """A conversation whose KV stays on its decode worker between turns: pass it as `session_id`."""
        return self._loop.run(self._client.open_session())

    def close_session(self, session_id: str) -> None:
        """Gives its KV back. One that is forgotten is closed when it has not been used for a while."""
        self._loop.run(self._client.close_session(session_id))

    def model(self) -> str:
        """The name of the model that is served."""
        return self._loop.run(self._client.model())

    def status(self) -> GatewayStatus:
        """Workers, load, lanes, page census."""
        return self._loop.run(self._client.status())

    def page_owner(self, worker: str, page: int, component: str | None = None) -> str:
        """Who holds one KV page (or state slot) of a worker, and since when; for people. `component`: "full", "swa" or
        "state"; without, the first of these that the model has."""
        return self._loop.run(self._client.page_owner(worker, page, component))

    def handoffs(self, worker: str) -> list[HandoffTimes]:
        """A worker's last hand-offs, oldest first, and the open ones."""
        return self._loop.run(self._client.handoffs(worker))

    def trace(self, seconds: float) -> bytes:
        """What all workers do from now on for so long: Chrome trace events, for ui.perfetto.dev."""
        return self._loop.run(self._client.trace(seconds))

    def close(self) -> None:
        """Ends what still runs. Jobs go on."""
        self._loop.end(self._client.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
