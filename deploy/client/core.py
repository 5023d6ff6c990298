"""The client, on asyncio: prompts in, answers out; jobs; what a cluster tells of itself.

Owns: which verbs there are. Never: knows Ray or workers.

Leaving a stream early, or cancelling what waits for an answer, hangs up: the cluster drops the request within a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, Unpack, cast, overload

import msgspec

from baton.common.errors import ErrorCode, RequestError
from baton.deploy.client.connection import Connection
from baton.deploy.client.jobs import AsyncJob, Lines, newest, submit_lines
from baton.deploy.client.streams import Asking, AsyncStream
from baton.deploy.client.values import Answer, Message, Params, Prompt, is_one_prompt
from baton.deploy.client.wire import Collector, conversation, lines_for, request_of
from baton.deploy.jobs.shapes import BatchObject
from baton.deploy.status import GatewayStatus
from baton.transfer.reports import HandoffTimes

DEFAULT_CONCURRENCY = 16


class AsyncClient:
    """Talks to one gateway. Raises RequestError for what the cluster refuses or fails, ClusterUnreachable when there
    is nobody. `base_url` may end with the `/v1` that OpenAI's clients want; without one it is $BATON_URL, else
    http://127.0.0.1:8000. `api_key`: else $BATON_API_KEY. `ca_file`: the authorities that an `https://` gateway's
    certificate may be of, else $BATON_CA_FILE. `retries`: how often a request comes back when the cluster is full,
    after the time it names, or when the connection broke. `patience_s`: how long everything about jobs is tried again
    while nobody is there."""

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
        self._connection = Connection(base_url, api_key, timeout_s, patience_s, ca_file)
        self.base_url = self._connection.base_url
        self._model = model
        self._retries = retries

    # ------------------------------------------------------------------------------------------- answers

    async def generate(self, prompt: Prompt, *, key: str | None = None, **params: Unpack[Params]) -> Answer:
        """The whole answer to either kind of prompt. `key`: who asks again with it, also from another process, gets
        the answer of the first time, for as long as the gateway remembers it; see docs/CLIENT.md."""
        async with self.stream(prompt, key=key, **params) as stream:
            async for _ in stream:
                pass
            return stream.answer

    async def chat(
        self, messages: str | Sequence[Message], *, key: str | None = None, **params: Unpack[Params]
    ) -> Answer:
        """Answers a conversation; a bare text is one message of the user."""
        return await self.generate(conversation(messages), key=key, **params)

    async def complete(
        self, prompt: str | Sequence[int], *, key: str | None = None, **params: Unpack[Params]
    ) -> Answer:
        """Continues a text, or token ids."""
        return await self.generate(prompt, key=key, **params)

    def stream(self, prompt: Prompt, *, key: str | None = None, **params: Unpack[Params]) -> AsyncStream:
        """Text as it comes. A connection that breaks is made again, and the text goes on where it was."""
        collector = Collector()
        return AsyncStream(self._deltas(prompt, params, key, collector), collector)

    async def _deltas(
        self, prompt: Prompt, params: Params, key: str | None, collector: Collector
    ) -> AsyncGenerator[str, None]:
        path, body = request_of(prompt, await self.model(), params)
        async with aclosing(Asking(self._connection, path, body, key, self._retries, collector).deltas()) as deltas:
            async for text in deltas:
                yield text

    @overload
    async def map(
        self, prompts: Iterable[Prompt], *, concurrency: int = DEFAULT_CONCURRENCY, **params: Unpack[Params]
    ) -> list[Answer]: ...

    @overload
    async def map(self, prompts: Iterable[Prompt], *, key: str, **params: Unpack[Params]) -> list[Answer]: ...

    async def map(
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
            outcomes = await (await self.submit(list(prompts), key=key, **params)).results()
            for outcome in outcomes:
                if isinstance(outcome, RequestError):
                    raise outcome
            return cast(list[Answer], outcomes)
        if concurrency < 1:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"{concurrency} at a time is none", "concurrency")
        answers: dict[int, Answer] = {}
        numbered = enumerate(prompts)

        async def work() -> None:
            for place, prompt in numbered:  # shared: each takes the next one
                answers[place] = await self.generate(prompt, **params)

        tasks = [asyncio.ensure_future(work()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [answers[place] for place in range(len(answers))]

    # ---------------------------------------------------------------------------------------------- jobs

    async def submit(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        key: str | None = None,
        window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        **params: Unpack[Params],
    ) -> AsyncJob:
        """One prompt or several, to be answered whatever is restarted meanwhile, this process included: `job(id)` finds
        it again. Submitting with the same `key` and the same prompts gives the same job."""
        several = [cast(Prompt, prompts)] if is_one_prompt(prompts) else list(cast(Iterable[Prompt], prompts))
        lines = lines_for(several, await self._name(retries=None), params)
        return await self.submit_lines(lines, window=window, metadata=metadata, key=key)

    async def submit_lines(
        self,
        lines: Lines,
        *,
        endpoint: str | None = None,
        window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> AsyncJob:
        """The same for requests in the format of OpenAI's batches. `endpoint`: that of the first one, unless given."""
        return await submit_lines(self._connection, lines, endpoint, window, metadata, key)

    def job(self, job_id: str) -> AsyncJob:
        """One that was submitted before; whether it is there is found when it is asked."""
        return AsyncJob(self._connection, job_id)

    async def jobs(self, most: int = 20) -> list[BatchObject]:
        """The newest ones of this API key."""
        return await newest(self._connection, most)

    # ------------------------------------------------------------------------------------------ sessions

    async def open_session(self) -> str:
        """A conversation whose KV stays on its decode worker between turns: pass it as `session_id`."""
        return str(msgspec.json.decode(await self._connection.call("POST", "/v1/sessions"))["id"])

    async def close_session(self, session_id: str) -> None:
        """Gives its KV back. One that is forgotten is closed when it has not been used for a while."""
        await self._connection.call("DELETE", f"/v1/sessions/{session_id}")

    # --------------------------------------------------------------------------------------- the cluster

    async def model(self) -> str:
        """The name of the model that is served; asked once."""
        return await self._name(self._retries)

    async def _name(self, retries: int | None) -> str:
        if self._model is None:
            models = msgspec.json.decode(await self._connection.insist("GET", "/v1/models", retries=retries))
            self._model = str(models["data"][0]["id"])
        return self._model

    async def status(self) -> GatewayStatus:
        """Workers, load, lanes, page census."""
        return msgspec.json.decode(await self._connection.call("GET", "/status"), type=GatewayStatus)

    async def page_owner(self, worker: str, page: int, component: str | None = None) -> str:
        """Who holds one KV page (or state slot) of a worker, and since when; for people. `component`: "full", "swa" or
        "state"; without, the first of these that the model has."""
        query = "" if component is None else f"?component={component}"
        return str(msgspec.json.decode(await self._connection.call("GET", f"/kv/{worker}/{page}{query}"))["owner"])

    async def handoffs(self, worker: str) -> list[HandoffTimes]:
        """A worker's last hand-offs, oldest first, and the open ones."""
        return msgspec.json.decode(await self._connection.call("GET", f"/handoffs/{worker}"), type=list[HandoffTimes])

    async def trace(self, seconds: float) -> bytes:
        """What all workers do from now on for so long: Chrome trace events, for ui.perfetto.dev."""
        return await self._connection.call("POST", f"/trace?seconds={seconds:g}")

    async def aclose(self) -> None:
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()
