"""Submit prompts to a running cluster, stream or collect the answers. `from baton.client import Client`.

Owns: connections to one gateway, and the mapping of its answers and errors to Python values. Never: knows Ray or
workers. `AsyncClient` does the work; `Client` runs one on a thread of its own, so that plain code, threads and
notebooks can use it alike.

Leaving a stream early, or cancelling a job, hangs up: the cluster drops the request within a step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import httpx
import msgspec

from baton.common.errors import BatonError, ErrorCode, RequestError
from baton.common.messages import Timeline
from baton.deploy.status import GatewayStatus
from baton.transfer.reports import HandoffTimes

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_TIMEOUT_S = 5.0
_RETRIED = frozenset({ErrorCode.OVERLOADED, ErrorCode.DRAINING, ErrorCode.SESSION_BUSY})
"""The last: who hangs up on a turn and asks the next one at once may be faster than the news of it."""

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]
"""A text or token ids to continue, or the messages of a conversation to answer."""

ResultT = TypeVar("ResultT")


class Params(TypedDict, total=False):
    """How to answer. What is left out is the server's default."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: str | list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    timeout_s: float
    session_id: str
    priority: int  # smaller is sooner; 0 when not given
    response_format: dict[str, Any]  # OpenAI's: {"type": "json_schema", "json_schema": {"schema": ...}}
    structured_outputs: dict[str, Any]  # vLLM's: one of json, regex, choice, grammar


class ClusterUnreachable(BatonError):
    """Nobody answers at that address, or the connection broke."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer, and where its time went."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    request_id: str
    ttft_s: float | None
    total_s: float
    placements: int
    timeline: Timeline


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, int]


class _Extension(msgspec.Struct):
    request_id: str
    ttft_s: float | None
    total_s: float
    placements: int
    timeline: Timeline


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    delta: _Delta | None = None
    finish_reason: str | None = None


class _ErrorBody(msgspec.Struct):
    message: str
    code: str
    param: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    baton: _Extension | None = None
    error: _ErrorBody | None = None


_chunks = msgspec.json.Decoder(_Chunk)


class _Collector:
    """Turns the chunks of one stream into deltas and, at the end, an Answer."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._finish_reason = ""
        self._usage: _Usage | None = None
        self._extension: _Extension | None = None

    def feed(self, data: bytes) -> str:
        """The text in this chunk. Raises RequestError when the server says that the request failed."""
        chunk = _chunks.decode(data)
        if chunk.error is not None:
            raise _request_error(chunk.error, None)
        self._usage = chunk.usage or self._usage
        self._extension = chunk.baton or self._extension
        text = ""
        for choice in chunk.choices:
            text += choice.text if choice.delta is None else choice.delta.content or ""
            self._finish_reason = choice.finish_reason or self._finish_reason
        self._parts.append(text)
        return text

    def answer(self) -> Answer:
        usage, extension = self._usage, self._extension
        if usage is None or extension is None:
            raise ClusterUnreachable("the stream ended before the answer was complete")
        return Answer(
            text="".join(self._parts),
            finish_reason=self._finish_reason,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.prompt_tokens_details.get("cached_tokens", 0),
            request_id=extension.request_id,
            ttft_s=extension.ttft_s,
            total_s=extension.total_s,
            placements=extension.placements,
            timeline=extension.timeline,
        )


class AsyncStream:
    """`async for text in stream`; then `stream.answer`. Close it (or `async with`) to hang up early."""

    def __init__(self, deltas: AsyncGenerator[str, None], collector: _Collector) -> None:
        self._deltas = deltas
        self._collector = collector

    def __aiter__(self) -> AsyncIterator[str]:
        return self._deltas

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream is used up."""
        return self._collector.answer()

    async def aclose(self) -> None:
        await self._deltas.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()


def gateway_url(given: str) -> str:
    """With a scheme, without what lies below the gateway's root."""
    url = given if "://" in given else f"http://{given}"
    return url.rstrip("/").removesuffix("/v1")


class AsyncClient:
    """Talks to one gateway. Raises RequestError for what the cluster refuses or fails, ClusterUnreachable when there
    is nobody. `base_url` may end with the `/v1` that OpenAI's clients want. `retries`: how often to come back when the
    cluster is full, after the time it names."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 2,
    ) -> None:
        self.base_url = gateway_url(base_url)
        self._model = model
        self._retries = retries
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None),
        )

    async def chat(self, messages: str | Sequence[Message], **params: Unpack[Params]) -> Answer:
        """Answers a conversation; a bare text is one message of the user."""
        return await self.collect(_conversation(messages), **params)

    async def complete(self, prompt: str | Sequence[int], **params: Unpack[Params]) -> Answer:
        """Continues a text, or token ids."""
        return await self.collect(prompt, **params)

    async def collect(self, prompt: Prompt, **params: Unpack[Params]) -> Answer:
        """The whole answer to either kind of prompt."""
        async with self.stream(prompt, **params) as stream:
            async for _ in stream:
                pass
            return stream.answer

    def stream(self, prompt: Prompt, **params: Unpack[Params]) -> AsyncStream:
        """Text as it comes."""
        collector = _Collector()
        return AsyncStream(self._deltas(prompt, params, collector), collector)

    async def map(self, prompts: Iterable[Prompt], *, concurrency: int = 16, **params: Unpack[Params]) -> list[Answer]:
        """The answers, in the order of the prompts; at most `concurrency` at a time. The first failure ends all."""
        gate = asyncio.Semaphore(concurrency)

        async def one(prompt: Prompt) -> Answer:
            async with gate:
                return await self.collect(prompt, **params)

        tasks = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def status(self) -> GatewayStatus:
        """Workers, load, lanes, page census."""
        return msgspec.json.decode(await self._get("/status"), type=GatewayStatus)

    async def page_owner(self, worker: str, page: int, component: str | None = None) -> str:
        """Who holds one KV page (or state slot) of a worker, and since when; for people. `component`: "full", "swa" or
        "state"; without, the first of these that the model has."""
        query = "" if component is None else f"?component={component}"
        return str(msgspec.json.decode(await self._get(f"/kv/{worker}/{page}{query}"))["owner"])

    async def handoffs(self, worker: str) -> list[HandoffTimes]:
        """A worker's last hand-offs, oldest first, and the open ones."""
        return msgspec.json.decode(await self._get(f"/handoffs/{worker}"), type=list[HandoffTimes])

    async def trace(self, seconds: float) -> bytes:
        """What all workers do from now on for so long: Chrome trace events, for ui.perfetto.dev."""
        return await self._call("POST", f"/trace?seconds={seconds:g}")

    async def open_session(self) -> str:
        """A conversation whose KV stays on its decode worker between turns: pass it as `session_id`."""
        return str(msgspec.json.decode(await self._call("POST", "/v1/sessions"))["id"])

    async def close_session(self, session_id: str) -> None:
        """Gives its KV back. One that is forgotten is closed when it has not been used for a while."""
        await self._call("DELETE", f"/v1/sessions/{session_id}")

    async def model(self) -> str:
        """The name of the model that is served; asked once."""
        if self._model is None:
            models = msgspec.json.decode(await self._get("/v1/models"))
            self._model = str(models["data"][0]["id"])
        return self._model

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _get(self, path: str) -> bytes:
        return await self._call("GET", path)

    async def _call(self, method: str, path: str) -> bytes:
        try:
            response = await self._http.request(method, path)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise response_error(response)
        return response.content

    async def _deltas(self, prompt: Prompt, params: Params, collector: _Collector) -> AsyncGenerator[str, None]:
        path, body = _request(prompt, await self.model(), params)
        for left in range(self._retries, -1, -1):
            try:
                async with aclosing(self._stream_once(path, body, collector)) as deltas:
                    async for text in deltas:
                        yield text
                return
            except RequestError as error:
                # Only refusals at the door carry a time to come back: nothing has been streamed then.
                if not left or error.code not in _RETRIED or error.retry_after_s is None:
                    raise
                await asyncio.sleep(error.retry_after_s)

    async def _stream_once(self, path: str, body: dict[str, Any], collector: _Collector) -> AsyncGenerator[str, None]:
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.is_error:
                    await response.aread()
                    raise response_error(response)
                async for line in lines_of(response.aiter_bytes()):
                    if line.startswith(b"data: ") and line != b"data: [DONE]":
                        text = collector.feed(line.removeprefix(b"data: "))
                        if text:
                            yield text
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: httpx.HTTPError) -> ClusterUnreachable:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ClusterUnreachable(f"nobody answers at {self.base_url}: is `baton serve` running there?")
        return ClusterUnreachable(f"the connection to {self.base_url} broke: {error or type(error).__name__}")


class Stream:
    """`for text in stream`; then `stream.answer`. Close it (or `with`) to hang up early."""

    def __init__(self, client: Client, stream: AsyncStream) -> None:
        self._client = client
        self._stream = stream
        self._deltas = aiter(stream)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        text = self._client._run(_next_or_none(self._deltas))
        if text is None:
            raise StopIteration
        return text

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream is used up."""
        return self._stream.answer

    def close(self) -> None:
        self._client._run(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Job:
    """A submitted prompt. `result` waits for its answer, `cancel` drops it."""

    def __init__(self, future: Future[Answer]) -> None:
        self._future = future

    def result(self, timeout_s: float | None = None) -> Answer:
        """Raises RequestError or ClusterUnreachable; TimeoutError when it is not done in time;
        concurrent.futures.CancelledError after `cancel`."""
        return self._future.result(timeout_s)

    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> bool:
        """False: it was done already."""
        return self._future.cancel()


class Client:
    """`AsyncClient` for code that does not wait with `await`. Thread-safe."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 2,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="baton-client", daemon=True)
        self._thread.start()
        self._client = AsyncClient(base_url, api_key=api_key, model=model, timeout_s=timeout_s, retries=retries)
        self.base_url = self._client.base_url

    def chat(self, messages: str | Sequence[Message], **params: Unpack[Params]) -> Answer:
        """Answers a conversation; a bare text is one message of the user."""
        return self._run(self._client.chat(messages, **params))

    def complete(self, prompt: str | Sequence[int], **params: Unpack[Params]) -> Answer:
        """Continues a text, or token ids."""
        return self._run(self._client.complete(prompt, **params))

    def stream(self, prompt: Prompt, **params: Unpack[Params]) -> Stream:
        """Text as it comes."""
        return Stream(self, self._client.stream(prompt, **params))

    def submit(self, prompt: Prompt, **params: Unpack[Params]) -> Job:
        """Returns at once; many can run at a time."""
        return Job(self._begin(self._client.collect(prompt, **params)))

    def map(self, prompts: Iterable[Prompt], *, concurrency: int = 16, **params: Unpack[Params]) -> list[Answer]:
        """The answers, in the order of the prompts; at most `concurrency` at a time. The first failure ends all."""
        return self._run(self._client.map(prompts, concurrency=concurrency, **params))

    def status(self) -> GatewayStatus:
        """Workers, load, lanes, page census."""
        return self._run(self._client.status())

    def page_owner(self, worker: str, page: int, component: str | None = None) -> str:
        """Who holds one KV page (or state slot) of a worker, and since when; for people. `component`: "full", "swa" or
        "state"; without, the first of these that the model has."""
        return self._run(self._client.page_owner(worker, page, component))

    def handoffs(self, worker: str) -> list[HandoffTimes]:
        """A worker's last hand-offs, oldest first, and the open ones."""
        return self._run(self._client.handoffs(worker))

    def trace(self, seconds: float) -> bytes:
        """What all workers do from now on for so long: Chrome trace events, for ui.perfetto.dev."""
        return self._run(self._client.trace(seconds))

    def open_session(self) -> str:
        """A conversation whose KV stays on its decode worker between turns: pass it as `session_id`."""
        return self._run(self._client.open_session())

    def close_session(self, session_id: str) -> None:
        """Gives its KV back. One that is forgotten is closed when it has not been used for a while."""
        self._run(self._client.close_session(session_id))

    def model(self) -> str:
        """The name of the model that is served."""
        return self._run(self._client.model())

    def close(self) -> None:
        """Ends what still runs."""
        if self._loop.is_closed():
            return
        self._run(self._end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _begin(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        future = self._begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt here must not leave the request running
            raise

    async def _end_all(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()
        await self._loop.shutdown_asyncgens()


async def lines_of(parts: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Lines of a stream of server-sent events. Only line feeds end one: httpx, which splits text, would also cut at the
    separators that Unicode has, and JSON may hold those as they are."""
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r")


async def _next_or_none(deltas: AsyncIterator[str]) -> str | None:
    return await anext(deltas, None)


def _conversation(messages: str | Sequence[Message]) -> Sequence[Message]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def _request(prompt: Prompt, model: str, params: Params) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **params}
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
        return "/v1/chat/completions", {**body, "messages": list(prompt)}
    return "/v1/completions", {**body, "prompt": prompt if isinstance(prompt, str) else list(prompt)}


def _request_error(body: _ErrorBody, retry_after_s: float | None) -> RequestError:
    known = body.code in set(ErrorCode)
    return RequestError(
        ErrorCode(body.code) if known else ErrorCode.INVALID_REQUEST, body.message, body.param, retry_after_s
    )


def response_error(response: httpx.Response) -> RequestError:
    """What an answer that is an error says."""
    retry_after = response.headers.get("Retry-After", "")
    retry_after_s = float(retry_after) if retry_after.isdecimal() else None
    try:
        body = _chunks.decode(response.content).error
    except msgspec.DecodeError:
        body = None
    if body is None:  # not one of ours: a proxy in between
        return RequestError(ErrorCode.INTERNAL, f"HTTP {response.status_code} from {response.url}")
    return _request_error(body, retry_after_s)
