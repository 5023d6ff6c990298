"""Batches from outside: `JobsClient(url).submit(...)` gives a `BatchJob`, which is found again by its id.

Owns: what is said over HTTP, and patience with a gateway that is being replaced. Never: the state of a job, which is
the cluster's: this process may end, and another ask for the same id.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from baton.common.errors import BatonError
from baton.deploy.client import CONNECT_TIMEOUT_S, DEFAULT_URL, ClusterUnreachable, gateway_url, response_error
from baton.deploy.jobs.records import OPEN
from baton.deploy.jobs.shapes import BatchObject, FileObject

PATIENCE_S = 60.0
PAUSE_S = 0.5
AWAY = 503
"""The job store or the gateway is not there just now."""

KindT = TypeVar("KindT")

Lines = Path | bytes | Iterable[Mapping[str, Any]]
"""A JSONL file, its content, or its lines."""


class _BatchPage(msgspec.Struct):
    data: list[BatchObject]


class JobsClient:
    """Talks to one gateway. Raises RequestError for what it refuses, ClusterUnreachable when nobody has answered for
    `patience_s`. Batches are seen by the API key that made them."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        patience_s: float = PATIENCE_S,
        timeout_s: float = 60.0,
    ) -> None:
        self.base_url = gateway_url(base_url)
        self._patience_s = patience_s
        self._http = httpx.Client(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
        )

    def submit(
        self,
        lines: Lines,
        *,
        endpoint: str | None = None,
        window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> BatchJob:
        """Uploads and begins. `endpoint`: that of the first line, unless given. Submitting with the same `key` again,
        also after a crash of this process, gives the same job."""
        content = lines if isinstance(lines, bytes | Path) else b"".join(msgspec.json.encode(x) + b"\n" for x in lines)
        file = self.call("POST", "/v1/files", FileObject, lambda: _upload(content))
        body = {
            "input_file_id": file.id,
            "endpoint": endpoint or _first_url(content),
            "completion_window": window,
            "metadata": dict(metadata or {}),
        }
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}  # also when the answer to the first try is lost
        batch = self.call("POST", "/v1/batches", BatchObject, lambda: {"json": body, "headers": headers})
        return BatchJob(self, batch.id)

    def job(self, batch_id: str) -> BatchJob:
        """One that was submitted before; whether it is there is found when it is asked."""
        return BatchJob(self, batch_id)

    def jobs(self, most: int = 20) -> list[BatchObject]:
        """The newest."""
        return self.call("GET", f"/v1/batches?limit={most}", _BatchPage).data

    def call(self, method: str, path: str, kind: type[KindT], options: Callable[[], dict[str, Any]] = dict) -> KindT:
        """The answer, tried again while nobody is there. `options` are made anew for each try."""
        return msgspec.json.decode(self._ask(method, path, options), type=kind)

    def failures(self, batch_id: str) -> list[dict[str, Any]]:
        lines = self._ask("GET", f"/v1/batches/{batch_id}/failures?limit=1000", dict).splitlines()
        return [msgspec.json.decode(line) for line in lines]

    def _ask(self, method: str, path: str, options: Callable[[], dict[str, Any]]) -> bytes:
        give_up_s = time.monotonic() + self._patience_s
        while True:
            try:
                response = self._http.request(method, path, **options())
                if response.status_code != AWAY or time.monotonic() >= give_up_s:
                    break
            except httpx.TransportError as error:
                if time.monotonic() >= give_up_s:
                    raise ClusterUnreachable(f"nobody answers at {self.base_url}: {error}") from error
            time.sleep(PAUSE_S)
        if response.is_error:
            raise response_error(response)
        return response.content

    @contextmanager
    def download(self, file_id: str) -> Iterator[Iterator[bytes]]:
        """The content of a file, in pieces."""
        try:
            with self._http.stream("GET", f"/v1/files/{file_id}/content") as response:
                if response.is_error:
                    response.read()
                    raise response_error(response)
                yield response.iter_bytes()
        except httpx.TransportError as error:
            raise ClusterUnreachable(f"the connection to {self.base_url} broke: {error}") from error

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class BatchJob:
    """One batch."""

    def __init__(self, client: JobsClient, batch_id: str) -> None:
        self.id = batch_id
        self._client = client

    def status(self) -> BatchObject:
        return self._client.call("GET", f"/v1/batches/{self.id}", BatchObject)

    def wait(self, on_status: Callable[[BatchObject], None] = lambda status: None, poll_s: float = 0.5) -> BatchObject:
        """Until it has ended, however it did. `on_status` hears how far it is."""
        while True:
            status = self.status()
            on_status(status)
            if status.status not in OPEN:
                return status
            time.sleep(poll_s)

    def cancel(self) -> BatchObject:
        return self._client.call("POST", f"/v1/batches/{self.id}/cancel", BatchObject)

    def results(self) -> Iterator[dict[str, Any]]:
        """The lines of the output file, in the order of the input. Raises BatonError while it runs."""
        return self._lines(self._ended().output_file_id)

    def errors(self) -> Iterator[dict[str, Any]]:
        """The lines of the error file. Raises BatonError while it runs."""
        return self._lines(self._ended().error_file_id)

    def failures(self) -> list[dict[str, Any]]:
        """What the error file has so far; at most a thousand lines."""
        return self._client.failures(self.id)

    def write(self, out: Callable[[bytes], object], *, errors: bool = False) -> None:
        """The bytes of the output file, or of the error file. Raises BatonError while it runs."""
        ended = self._ended()
        file_id = ended.error_file_id if errors else ended.output_file_id
        if file_id is not None:
            with self._client.download(file_id) as parts:
                for part in parts:
                    out(part)

    def _ended(self) -> BatchObject:
        status = self.status()
        if status.status in OPEN:
            counts = status.request_counts
            done = counts.completed + counts.failed
            raise BatonError(f"{self.id} is {status.status}: {done} of {counts.total} lines; its files come at its end")
        return status

    def _lines(self, file_id: str | None) -> Iterator[dict[str, Any]]:
        if file_id is None:
            return
        rest = b""
        with self._client.download(file_id) as parts:
            for part in parts:
                *whole, rest = (rest + part).split(b"\n")
                yield from map(msgspec.json.decode, whole)


def _upload(content: Path | bytes) -> dict[str, Any]:
    name, data = ("lines.jsonl", content) if isinstance(content, bytes) else (content.name, content.read_bytes())
    return {"files": {"file": (name, data)}, "data": {"purpose": "batch"}}


def _first_url(content: Path | bytes) -> str:
    """What the first line asks for; the server says what is wrong with a file that has none."""
    if isinstance(content, Path):
        with content.open("rb") as file:
            content = file.readline()
    try:
        url = msgspec.json.decode(content.partition(b"\n")[0])["url"]
    except (msgspec.DecodeError, KeyError, TypeError):
        url = None
    return url if isinstance(url, str) else "/v1/chat/completions"
