"""`baton.client` against a served gateway: answers, streams, errors, and hanging up. (Jobs: test_client_jobs.)"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest
from http_loopback import Loopback, Served, saying, serving

from baton.client import AsyncClient, Client, ClusterUnreachable, ErrorCode, RequestError
from baton.common.kv.layout import Component
from baton.common.messages import Load
from baton.deploy.cli import FAILED, OK, run_command

TEXT = "Hello wörld €😀!"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Loopback(script=saying(TEXT))) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url) as client:
        yield client


def test_chat_and_complete(client: Client) -> None:
    answer = client.chat([{"role": "user", "content": "hi"}])
    assert (answer.text, answer.finish_reason) == (TEXT, "stop")
    assert answer.completion_tokens == len(TEXT.encode()) + 1
    assert answer.timeline.lane == "local"
    assert answer.cached_tokens == 1
    assert client.chat("hi").text == TEXT
    assert client.complete("x", max_tokens=5).text == "Hello"
    assert client.complete([1, 2, 3], max_tokens=5).prompt_tokens == 3
    assert client.model() == "fake"


def test_a_stream_gives_text_as_it_comes_and_then_the_answer() -> None:
    with serving(Loopback(script=saying(TEXT), pace_s=0.01)) as served, Client(served.url) as client:
        stream = client.stream([{"role": "user", "content": "hi"}])
        parts = list(stream)
        assert len(parts) > 5
        assert "".join(parts) == stream.answer.text == TEXT


@pytest.mark.parametrize("pace_s", [0.0, 0.005])
def test_separators_of_unicode_are_text_like_any_other(pace_s: float) -> None:
    text = "one\u2028two\u2029three\x85four\r\nfive\x1csix\nseven"
    with serving(Loopback(script=saying(text), pace_s=pace_s)) as served, Client(served.url) as client:
        assert client.complete("x", max_tokens=100).text == text


def test_a_turn_that_is_still_being_answered_is_waited_for() -> None:
    worker = Loopback(script=saying(TEXT), pace_s=0.02)
    with serving(worker) as served, Client(served.url) as client, ThreadPoolExecutor(2) as pool:
        session = client.open_session()
        turns = [pool.submit(client.complete, text, session_id=session, max_tokens=100) for text in ("x", "xy")]
        assert [turn.result(20).text for turn in turns] == [TEXT, TEXT]
        running = pool.submit(client.complete, "x", session_id=session, max_tokens=100)
        while served.worker.submits[-1].session_turn < 2:
            pass
        with Client(served.url, retries=0) as impatient, pytest.raises(RequestError) as refused:
            impatient.complete("xy", session_id=session)
        assert refused.value.code is ErrorCode.SESSION_BUSY
        assert running.result(20).text == TEXT


def test_a_burst_is_taken_in_one_piece(client: Client) -> None:
    """What waits is taken together: a slow reader costs few events, and nobody else's time."""
    assert len(list(client.stream("x", max_tokens=100))) < 5


def test_threads_share_a_client(client: Client) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda n: client.generate(f"prompt {n}", max_tokens=100), range(20)))
    assert [answer.text for answer in answers] == [TEXT] * 20


def test_map_keeps_the_order(client: Client) -> None:
    answers = client.map([[65] * n for n in range(1, 30)], concurrency=4, max_tokens=3)
    assert [answer.prompt_tokens for answer in answers] == list(range(1, 30))


def test_who_wants_no_more_hangs_up() -> None:
    worker = Loopback(script=saying("x" * 200), pace_s=0.05)
    with serving(worker, keys={"linger_s": 60.0}) as served, Client(served.url) as client:
        stream = client.stream("y", max_tokens=100)
        next(iter(stream))
        stream.close()
        assert worker.cancelled.wait(5)
        worker.cancelled.clear()

        async def give_up() -> None:
            async with AsyncClient(served.url) as client, asyncio.timeout(0.3):
                await client.generate("x", max_tokens=100)

        with pytest.raises(TimeoutError):
            asyncio.run(give_up())
        assert worker.cancelled.wait(5)


def wait_until_nothing_runs(served: Served) -> None:
    """Long before an answer would have ended by itself: a gateway that was told ends it in a moment."""
    deadline_s = time.monotonic() + 2.0
    while served.gateway.load().running:
        assert time.monotonic() < deadline_s, "a request that nobody waits for runs on"
        time.sleep(0.001)


def test_closing_the_client_ends_what_runs() -> None:
    with serving(Loopback(script=saying("x" * 200), pace_s=0.05), keys={"linger_s": 60.0}) as served:
        client = Client(served.url)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.complete, "x", max_tokens=100)
            next(iter(client.stream("y", max_tokens=100)))
            client.close()
            client.close()
            with pytest.raises(CancelledError):
                running.result(5)
        wait_until_nothing_runs(served)  # both were told


@pytest.mark.parametrize("pause_ms", range(0, 12, 2))
def test_who_drops_a_stream_and_then_closes_the_client_has_hung_up(pause_ms: int) -> None:
    """Wherever in hanging up the end of the client comes."""
    with serving(Loopback(script=saying("x" * 200), pace_s=0.05), keys={"linger_s": 60.0}) as served:
        client = Client(served.url)
        next(iter(client.stream("y", max_tokens=100)))
        time.sleep(pause_ms / 1e3)
        client.close()
        wait_until_nothing_runs(served)


@pytest.mark.parametrize(
    ("prompt", "params", "code", "field"),
    [
        ("", {}, ErrorCode.INVALID_REQUEST, "prompt"),
        ("x", {"temperature": -1}, ErrorCode.INVALID_REQUEST, "temperature"),
        ("x" * 300, {}, ErrorCode.PROMPT_TOO_LONG, "prompt"),
        ("x", {"temprature": 1}, ErrorCode.INVALID_REQUEST, "temprature"),
    ],
)
def test_refusals_are_typed(client: Client, prompt: str, params: Any, code: ErrorCode, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        client.complete(prompt, **params)
    assert (caught.value.code, caught.value.field) == (code, field)


def test_an_unknown_model(served: Served) -> None:
    with Client(served.url, model="other") as client, pytest.raises(RequestError) as caught:
        client.chat("hi")
    assert caught.value.code is ErrorCode.MODEL_NOT_FOUND


def test_a_failure_in_the_middle_of_a_stream_is_raised() -> None:
    with serving(Loopback(script=saying(TEXT), failure_after=3)) as served, Client(served.url) as client:
        stream = client.stream("x")
        with pytest.raises(RequestError) as caught:
            list(stream)
        assert caught.value.code is ErrorCode.TRANSFER_CORRUPT


def test_nobody_there_is_said_in_words() -> None:
    with Client("http://127.0.0.1:9", timeout_s=2) as client, pytest.raises(ClusterUnreachable, match="nobody answers"):
        client.chat("hi")


def test_a_full_cluster_is_tried_again() -> None:
    with serving(Loopback(script=saying("abcdef"), pace_s=0.05), max_inflight_requests=1) as served:
        with Client(served.url, retries=5) as client:
            assert [answer.text for answer in client.map(["x", "x"], concurrency=2)] == ["abcdef"] * 2
        with Client(served.url, retries=0) as client:
            held = client.stream("x")
            next(iter(held))
            with pytest.raises(RequestError) as caught:
                client.complete("x")
            assert caught.value.code is ErrorCode.OVERLOADED
            assert caught.value.retry_after_s == 1
            held.close()


def test_status(served: Served, client: Client) -> None:
    served.worker.heartbeat(Load(running=2))
    status = client.status()
    assert status.ready
    assert {worker.worker: worker.load.running for worker in status.workers} == {"decode-0": 2, "prefill-0": 0}


def test_the_async_client(served: Served) -> None:
    async def use() -> None:
        async with AsyncClient(served.url) as client:
            assert (await client.chat("hi")).text == TEXT
            async with client.stream("x", max_tokens=100) as stream:
                assert "".join([text async for text in stream]) == TEXT
                assert stream.answer.text == TEXT
            answers = await client.map(["a", "b"], max_tokens=2)
            assert [answer.text for answer in answers] == ["He", "He"]
            assert (await client.status()).model == "fake"

    asyncio.run(use())


class OneWorker:
    """Tells of decode-0, whose model has sliding layers only: 12 pages."""

    async def statuses(self) -> Mapping[str, object]:
        return {}

    async def page_owner(self, worker: str, page: int, component: Component | None) -> str:
        if component not in (None, Component.SWA):
            raise RequestError(ErrorCode.INVALID_REQUEST, f"no {component}", "component")
        if page > 12:
            raise RequestError(ErrorCode.INVALID_REQUEST, "1 to 12", "page")
        return f"{worker}: {component or 'first'} page {page}: free"


def test_who_holds_a_page_of_any_component(capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as served, Client(served.url) as client:
        served.gateway.workers = OneWorker()
        assert client.page_owner("decode-0", 12) == "decode-0: first page 12: free"
        assert client.page_owner("decode-0", 3, "swa") == "decode-0: swa page 3: free"
        for page, component, field in ((13, "swa", "page"), (1, "state", "component"), (1, "mamba", "component")):
            with pytest.raises(RequestError) as refused:
                client.page_owner("decode-0", page, component)
            assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, field)

        look_up = ["kv", "--url", served.url, "--worker", "decode-0", "--page"]
        assert run_command([*look_up, "3", "--component", "swa"]) == OK
        assert capfd.readouterr().out == "decode-0: swa page 3: free\n"
        assert run_command([*look_up, "13"]) == FAILED
        assert "1 to 12" in capfd.readouterr().err
