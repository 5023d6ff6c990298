"""Files and batches as the real `openai` package and plain HTTP see them. The decode worker is played by the test."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from http_loopback import Loopback, Served, saying, serving
from openai.types import Batch

TEXT = "Hello wörld €😀, and good bye!"
GIVE_UP_S = 30.0
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Loopback(script=saying(TEXT)), max_body_bytes=100_000) as served:
        yield served


def client_of(served: Served, key: str = "mine") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return client_of(served)


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    if url == CHAT:
        body = {"messages": [{"role": "user", "content": "hi"}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "fake", **body}}


def submit(client: openai.OpenAI, lines: list[dict[str, Any]], **options: Any) -> Batch:
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    options = {"endpoint": lines[0]["url"], "completion_window": "24h", **options}
    return client.batches.create(input_file_id=file.id, **options)


def wait(client: openai.OpenAI, batch: Batch) -> Batch:
    give_up_s = time.monotonic() + GIVE_UP_S
    while batch.status in ("validating", "in_progress"):
        assert time.monotonic() < give_up_s, batch
        batch = client.batches.retrieve(batch.id)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """By custom id; none is there twice."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines)
    return found


def test_a_batch_of_chats(client: openai.OpenAI) -> None:
    batch = submit(client, [line(f"chat-{n}") for n in range(100)], metadata={"for": "test"})
    assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", CHAT, "24h")
    assert batch.expires_at == batch.created_at + 86_400
    done = wait(client, batch)
    assert (done.status, done.metadata, done.error_file_id, done.errors) == ("completed", {"for": "test"}, None, None)
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (100, 100, 0)
    assert done.usage is not None
    assert done.usage.output_tokens == 100 * (len(TEXT.encode()) + 1)
    found = results(client, done.output_file_id)
    assert list(found) == [f"chat-{n}" for n in range(100)], "in the order of the input"
    response = found["chat-7"]["response"]
    assert (response["status_code"], found["chat-7"]["error"]) == (200, None)
    assert response["body"]["choices"][0]["message"]["content"] == TEXT
    assert response["request_id"] in response["body"]["id"]
    for at in (done.in_progress_at, done.finalizing_at, done.completed_at):
        assert at is not None
        assert at >= batch.created_at


def test_completions_and_responses(served: Served, client: openai.OpenAI) -> None:
    completions = submit(client, [line("a", "/v1/completions", prompt=["x", "y"], max_tokens=4)])
    responses = submit(client, [line("b", "/v1/responses", input="hi")])
    body = results(client, wait(client, completions).output_file_id)["a"]["response"]["body"]
    assert [choice["text"] for choice in body["choices"]] == ["Hell", "Hell"]
    done = wait(client, responses)
    body = results(client, done.output_file_id)["b"]["response"]["body"]
    assert (body["status"], body["output"][0]["content"][0]["text"]) == ("completed", TEXT)
    assert done.usage is not None
    assert done.usage.input_tokens > 0
    counted = 'baton_http_responses_total{path="batch:/v1/responses",status="200"}'
    assert f"{counted} 1.0" in served.http.get("/metrics").text


def test_lines_that_fail_are_in_the_error_file(client: openai.OpenAI) -> None:
    wrong = [line("model") | {"body": {"model": "other", "messages": [{"role": "user", "content": "hi"}]}}]
    wrong += [line("typo", temprature=1), line("streamed", stream=True), line("too long", max_tokens=100_000)]
    done = wait(client, submit(client, [line("good"), *wrong]))
    assert done.status == "completed"
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 4)
    assert list(results(client, done.output_file_id)) == ["good"]
    found = results(client, done.error_file_id)
    said = {name: (one["response"]["status_code"], one["response"]["body"]["error"]) for name, one in found.items()}
    assert [(name, status, error["param"]) for name, (status, error) in said.items()] == [
        ("model", 404, "model"),
        ("typo", 400, "temprature"),
        ("streamed", 400, "stream"),
        ("too long", 400, "max_tokens"),
    ]
    assert "did you mean temperature?" in said["typo"][1]["message"]


def test_a_file_that_is_none_fails_the_batch(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", b'{"custom_id": "a"}\nnonsense'), purpose="batch")
    done = wait(
        client, client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    )
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    assert done.errors is not None
    assert done.errors.data is not None
    assert [(fault.code, fault.line) for fault in done.errors.data] == [("invalid_line", 1), ("invalid_json_line", 2)]
    assert done.failed_at is not None


def test_files(client: openai.OpenAI) -> None:
    content = "wörd\n".encode() * 500_000
    file = client.files.create(file=("big.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(content), "big.jsonl", "batch", "processed")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content
    small = [client.files.create(file=("small", b"x"), purpose="batch").id for _ in range(3)]
    assert [one.id for one in client.files.list(limit=2)][:4] == [*reversed(small), file.id], "all pages of it"
    assert client.files.list(order="asc", limit=2).data[0].id != small[-1]
    assert client.files.delete(file.id).deleted
    for gone in (lambda: client.files.retrieve(file.id), lambda: client.files.delete(file.id)):
        with pytest.raises(openai.NotFoundError):
            gone()


def test_batches_are_listed_newest_first(client: openai.OpenAI) -> None:
    ids = [wait(client, submit(client, [line("a")])).id for _ in range(3)]
    listed = [batch.id for batch in client.batches.list(limit=2)]
    assert listed[:3] == ids[::-1]
    page = client.batches.list(limit=1)
    assert (page.data[0].id, page.has_more) == (ids[2], True)


def test_everybody_sees_their_own_alone(served: Served, client: openai.OpenAI) -> None:
    batch = wait(client, submit(client, [line("a")]))
    other = client_of(served, "not mine")
    assert list(other.batches.list()) == []
    assert list(other.files.list()) == []
    for work in (
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.files.content(batch.output_file_id or ""),
        lambda: other.files.delete(batch.input_file_id),
        lambda: (
            submit(other, [line("a")])
            and other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        ),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            work()
        assert caught.value.code == "not_found"


def test_a_key_makes_submitting_again_harmless(client: openai.OpenAI) -> None:
    first = submit(client, [line("a")], extra_headers={"Idempotency-Key": "once"})
    again = submit(client, [line("a")], extra_headers={"Idempotency-Key": "once"})
    assert again.id == first.id


def test_a_key_is_for_one_body(served: Served, client: openai.OpenAI) -> None:
    keyed = {"Idempotency-Key": "one body"}
    first = submit(client, [line("a")], extra_headers=keyed)
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        submit(client, [line("b")], extra_headers=keyed)
    assert caught.value.code == "idempotency_mismatch"
    assert first.id in caught.value.message
    file = upload(served, headers=keyed).json()
    assert upload(served, headers=keyed).json() == file
    other = upload(served, headers=keyed, files={"file": ("a", b"y")})
    assert error_of(other, 422)["code"] == "idempotency_mismatch"
    assert error_of(upload(served, headers={"Idempotency-Key": "k" * 257}), 400)["param"] == "idempotency-key"


def test_events_are_taken_up_where_they_were_left(served: Served, client: openai.OpenAI) -> None:
    wrong = line("wrong") | {"body": {"model": "other", "messages": [{"role": "user", "content": "hi"}]}}
    batch = submit(client, [line("a"), wrong, line("b")])
    auth = {"Authorization": "Bearer mine"}
    seen: list[dict[str, Any]] = []
    while True:
        after = seen[-1]["place"] if seen else 0
        url = f"/v1/batches/{batch.id}/events?after={after}&limit=1&answers={bool(after)}"
        page = served.http.get(url, headers=auth).json()
        if not page["data"] and page["batch"]["status"] == "completed":
            break
        seen += page["data"]
    assert [event["place"] for event in seen] == [1, 2, 3]
    assert {event["custom_id"]: event["result"] for event in seen} == {
        "a": "completed",
        "wrong": "failed",
        "b": "completed",
    }
    assert "answer" not in seen[0]
    assert all(event["answer"]["custom_id"] == event["custom_id"] for event in seen[1:])
    assert error_of(served.http.get(f"/v1/batches/{batch.id}/events"), 404)["param"] == "batch_id"


def test_cancelling(served: Served) -> None:
    with serving(Loopback(silent=True)) as stuck:
        client = client_of(stuck)
        batch = submit(client, [line(str(n)) for n in range(10)])
        while client.batches.retrieve(batch.id).status == "validating":
            pass
        cancelled = client.batches.cancel(batch.id)
        assert cancelled.status == "cancelled"
        assert cancelled.cancelled_at is not None
        found = results(client, cancelled.error_file_id)
        assert len(found) == 10
        assert found["3"]["error"]["code"] == "batch_cancelled"
        assert found["3"]["response"] is None
    client = client_of(served)
    done = wait(client, submit(client, [line("a")]))
    with pytest.raises(openai.ConflictError) as caught:
        client.batches.cancel(done.id)
    assert caught.value.code == "conflict"


def test_a_batch_waits_until_somebody_can_answer() -> None:
    with serving(Loopback(script=saying(TEXT)), members=False) as served:
        client = client_of(served)
        batch = submit(client, [line("a")])
        while client.batches.retrieve(batch.id).status == "validating":
            pass
        served.worker.membership()
        assert wait(client, batch).status == "completed"


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def upload(served: Served, **options: Any) -> httpx.Response:
    options = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}, **options}
    return served.http.post("/v1/files", **options)


def test_bad_uploads(served: Served) -> None:
    assert error_of(upload(served, data={"purpose": "fine-tune"}), 400)["param"] == "purpose"
    assert error_of(upload(served, data={}), 400)["param"] == "purpose"
    assert error_of(upload(served, data={"purpose": "batch", "expires_after[seconds]": "9"}), 400)["param"]
    assert error_of(upload(served, files={"other": ("a", b"x")}), 400)["param"] == "other"
    assert error_of(upload(served, files=None), 400)["param"] == "file"
    assert error_of(served.http.post("/v1/files", json={}), 400)["param"] == "file"
    multipart = {"content-type": "multipart/form-data"}
    error_of(served.http.post("/v1/files", content=b"nonsense", headers=multipart), 400)
    multipart["content-type"] += "; boundary=x"
    error_of(served.http.post("/v1/files", content=b"nonsense", headers=multipart), 400)


def test_uploads_are_bounded() -> None:
    with serving(jobs={"max_file_bytes": 1000, "max_stored_bytes": 2500}) as served:
        assert upload(served, files={"file": ("a", b"x" * 1000)}).status_code == 200
        assert error_of(upload(served, files={"file": ("a", b"x" * 1001)}), 413)["code"] == "too_large"
        huge = b"x" * (3 << 20)
        assert "jobs.max_file_bytes" in error_of(upload(served, files={"file": ("a", huge)}), 413)["message"]

        def chunked() -> Iterator[bytes]:
            yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            for _ in range(40):
                yield b"x" * 100_000

        multipart = {"content-type": "multipart/form-data; boundary=x"}
        error_of(served.http.post("/v1/files", content=chunked(), headers=multipart), 413)
        assert upload(served, files={"file": ("a", b"x" * 1000)}).status_code == 200
        assert "is full" in error_of(upload(served, files={"file": ("a", b"x" * 1000)}), 429)["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
        ({"frob": 1}, "frob"),
    ],
)
def test_bad_batches(served: Served, fields: dict[str, Any], param: str) -> None:
    body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", **fields}
    assert error_of(served.http.post("/v1/batches", json=body), 400)["param"] == param


def test_what_is_not_there(served: Served) -> None:
    body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}
    assert error_of(served.http.post("/v1/batches", json=body), 404)["message"] == "there is no file 'file-x'"
    assert error_of(served.http.get("/v1/batches/batch_x"), 404)["param"] == "batch_id"
    error_of(served.http.get("/v1/files/file-x/content"), 404)
    error_of(served.http.get("/v1/batches/batch_x/failures"), 404)
    assert error_of(served.http.get("/v1/batches?limit=0"), 400)["param"] == "limit"
    assert served.http.get("/v1/batches?after=batch_x").json()["data"] == []


def test_the_document_has_them(served: Served) -> None:
    document = served.http.get("/openapi.json").json()
    assert {"/v1/files", "/v1/files/{file_id}/content", "/v1/batches/{batch_id}/cancel"} <= document["paths"].keys()
    assert "BatchRequest" in document["components"]["schemas"]
