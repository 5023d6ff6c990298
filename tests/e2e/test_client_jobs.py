"""Jobs of `baton.client` against a served gateway: status, progress, events, results, and being found again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_loopback import Loopback, Served, saying, serving

from baton.client import Answer, AsyncClient, BatonError, Client, ClusterUnreachable, ErrorCode, RequestError

NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Loopback(script=saying("Hello"))) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url) as client:
        yield client


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"model": "fake", "prompt": "hi", "max_tokens": 5, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def test_one_prompt(client: Client) -> None:
    job = client.submit("hi", max_tokens=4)
    answer = job.result(20)
    assert (answer.text, answer.finish_reason, answer.completion_tokens) == ("Hell", "length", 4)
    assert answer.timeline.lane == "local"
    assert answer.request_id
    assert client.submit([{"role": "user", "content": "hi"}]).result(20).text == "Hello"
    assert client.submit([1, 2, 3]).result(20).prompt_tokens == 3


def test_results_are_in_the_order_of_the_prompts_and_hold_what_failed(client: Client) -> None:
    job = client.submit([[65] * n for n in (5, 1, 300, 7)], max_tokens=2)
    results = job.results(20)
    assert [one.prompt_tokens if isinstance(one, Answer) else one.code for one in results] == [
        5,
        1,
        ErrorCode.PROMPT_TOO_LONG,
        7,
    ]
    with pytest.raises(BatonError, match="4 requests"):
        job.result(20)
    with pytest.raises(RequestError, match="prompt_too_long"):
        client.submit([65] * 300).result(20)


def test_progress_and_events_while_it_runs() -> None:
    worker = Loopback(script=saying("Hello"), pace_s=0.02)
    with serving(worker, jobs={"max_running_lines": 2}) as served, Client(served.url) as client:
        job = client.submit([f"prompt {n}" for n in range(6)])
        events = job.events(poll_s=0.01)
        first, second = next(events), next(events)
        counts = job.status().request_counts
        assert 2 <= counts.completed < counts.total == 6
        taken_up = list(client.job(job.id).events(after=second.place, poll_s=0.01))
        assert [event.place for event in (first, second, *taken_up)] == [1, 2, 3, 4, 5, 6]
        assert {event.custom_id for event in (first, second, *taken_up)} == set("012345")
        assert isinstance(first.outcome, Answer)
        seen = [status.request_counts.completed for status in job.progress()]
        assert (seen[-1], job.wait(5).status, len(list(events))) == (6, "completed", 4)


def test_cancelling() -> None:
    with serving(Loopback(silent=True)) as stuck, Client(stuck.url) as client:
        job = client.submit(["a", "b"])
        with pytest.raises(TimeoutError):
            job.results(0.05)
        with pytest.raises(TimeoutError):
            job.wait(0.05)
        with pytest.raises(BatonError, match="its files come at its end"):
            list(job.output())
        while job.status().status == "validating":
            pass
        assert job.cancel().status == job.cancel().status == "cancelled"
        assert [getattr(one, "code", None) for one in job.results(5)] == [ErrorCode.CANCELLED] * 2


def test_a_client_finds_its_job_again(served: Served) -> None:
    with Client(served.url) as client:
        job_id = client.submit(["a", "b"], metadata={"who": "me"}, key="mine", max_tokens=5).id
    with Client(served.url) as client:
        again = client.submit(["a", "b"], metadata={"who": "me"}, key="mine", max_tokens=5)
        assert again.id == job_id
        assert client.job(job_id).status().metadata == {"who": "me"}
        assert [one.text for one in again.results(20) if isinstance(one, Answer)] == ["Hello"] * 2
        assert job_id in [status.id for status in client.jobs()]
        with pytest.raises(RequestError) as other_work:
            client.submit(["a", "c"], metadata={"who": "me"}, key="mine", max_tokens=5)
        assert other_work.value.code is ErrorCode.IDEMPOTENCY_MISMATCH
        with pytest.raises(RequestError, match="no batch"):
            client.job("batch_x").status()


def test_lines_of_batches(served: Served, tmp_path: Path) -> None:
    with Client(served.url) as client:
        job = client.submit_lines([line("a"), line("b", temperature=-1)])
        assert job.wait(20).request_counts.failed == 1
        assert [one["response"]["body"]["choices"][0]["text"] for one in job.output()] == ["Hello"]
        assert [one["custom_id"] for one in job.errors()] == [one["custom_id"] for one in job.failures()] == ["b"]
        assert b"".join(job.content()).count(b"\n") == 1
        path = tmp_path / "in.jsonl"
        path.write_bytes(b"nonsense")
        with pytest.raises(RequestError, match="not JSON"):
            client.submit_lines(path).results(20)
        responses = client.submit_lines(
            [line("r") | {"url": "/v1/responses", "body": {"model": "fake", "input": "hi"}}]
        )
        with pytest.raises(BatonError, match="no completion"):
            responses.results(20)


def test_mixed_prompts_and_none(client: Client) -> None:
    for prompts in (["a", [{"role": "user", "content": "b"}]], []):
        with pytest.raises(RequestError) as refused:
            client.submit(prompts)
        assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, "prompts")


def test_a_map_with_a_key_is_a_job(served: Served) -> None:
    with Client(served.url) as client:
        before = len(served.worker.submits)
        answers = client.map([[65] * n for n in range(1, 20)], key="map", max_tokens=2)
        assert [answer.prompt_tokens for answer in answers] == list(range(1, 20))
        again = client.map(([65] * n for n in range(1, 20)), key="map", max_tokens=2)
        assert [answer.request_id for answer in again] == [answer.request_id for answer in answers]
        assert len(served.worker.submits) == before + 19
        with pytest.raises(RequestError, match="prompt_too_long"):
            client.map([[65], [65] * 300], key="one is too long")


def test_patience_ends() -> None:
    with Client(NOBODY, patience_s=0.3) as client, pytest.raises(ClusterUnreachable, match="nobody"):
        client.submit("a")


def test_the_async_job(served: Served) -> None:
    async def use() -> None:
        async with AsyncClient(served.url) as client:
            job = await client.submit(["a", "b"], max_tokens=2)
            assert [event.place async for event in job.events()] == [1, 2]
            assert [status.status async for status in job.progress()] == ["completed"]
            assert [one.text for one in await job.results() if isinstance(one, Answer)] == ["He", "He"]
            assert len([one async for one in job.output()]) == 2
            assert (await job.wait()).id == (await client.jobs(1))[0].id == job.id

    asyncio.run(use())
