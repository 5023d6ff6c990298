"""Every bad request gets the right status, names what is wrong, and in OpenAI's error shape. Nothing hangs."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from http_loopback import MAX_MODEL_LEN, Loopback, Served, saying, serving

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Loopback(script=saying("ok")), max_body_bytes=100_000) as served:
        yield served


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def complete(served: Served, **fields: Any) -> httpx.Response:
    return served.http.post("/v1/completions", json={"model": "fake", "prompt": "x", **fields})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["x", ""]}, "prompt", "empty"),
        ({"prompt": [100_000]}, "prompt", "vocabulary"),
        ({"temperature": -0.1}, "temperature", "got -0.1"),
        ({"prompt": ["x", "y"], "n": 65}, "n", "more than 128 choices"),
        ({"logit_bias": {"258": 1}}, "logit_bias", "vocabulary of 258"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"tools": [{}]}, "tools", "not supported"),
        ({"temprature": 1}, "temprature", "did you mean temperature"),
        ({"max_tokens": 300}, "max_tokens", f"limit of {MAX_MODEL_LEN} tokens"),
    ],
)
def test_a_bad_parameter_is_named(served: Served, fields: dict[str, Any], param: str, says: str, stream: bool) -> None:
    error = error_of(complete(served, **fields, stream=stream), 400)
    assert error["param"] == param
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "fields", "param", "status"),
    [
        ("/tokenize", {}, "prompt", 400),
        ("/tokenize", {"prompt": 5}, "prompt", 400),
        ("/tokenize", {"prompt": "x", "modle": "fake"}, "modle", 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model", 404),
        ("/tokenize", {"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role", 400),
        ("/tokenize", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens", 400),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]", 400),
        ("/detokenize", {"tokens": [1, 258]}, "tokens", 400),
        ("/detokenize", {"model": "other", "tokens": []}, "model", 404),
    ],
)
def test_what_cannot_be_tokenized(served: Served, path: str, fields: dict[str, Any], param: str, status: int) -> None:
    assert error_of(served.http.post(path, json=fields), status)["param"] == param


def test_sessions_are_their_owners(served: Served) -> None:
    mine, theirs = ({"Authorization": f"Bearer {who}"} for who in ("me", "them"))
    opened = served.http.post("/v1/sessions", headers=mine)
    assert opened.status_code == 201
    session = opened.json()["id"]
    turn = {"model": "fake", "prompt": "x", "session_id": session}
    assert served.http.post("/v1/completions", json=turn, headers=mine).status_code == 200
    for asked in (
        served.http.post("/v1/completions", json=turn, headers=theirs),
        served.http.post("/v1/completions", json={**turn, "session_id": "sess-none"}, headers=mine),
        served.http.delete(f"/v1/sessions/{session}", headers=theirs),
    ):
        error = error_of(asked, 404)
        assert (error["code"], error["param"]) == ("session_not_found", "session_id")
    for several in ({"prompt": ["x", "y"]}, {"n": 2}):
        answer = served.http.post("/v1/completions", json={**turn, **several}, headers=mine)
        assert error_of(answer, 400)["param"] == "session_id"
    assert served.http.delete(f"/v1/sessions/{session}", headers=mine).status_code == 204
    error_of(served.http.delete(f"/v1/sessions/{session}", headers=mine), 404)


def test_an_over_length_prompt_names_the_limit(served: Served) -> None:
    for prompt in ("x" * MAX_MODEL_LEN, "x" * 50_000):
        error = error_of(complete(served, prompt=prompt), 400)
        assert error["code"] == "prompt_too_long"
        assert str(MAX_MODEL_LEN) in error["message"]
        assert str(len(prompt)) in error["message"]
    error = error_of(
        served.http.post(
            "/v1/chat/completions",
            json={"model": "fake", "messages": [{"role": "user", "content": "x" * MAX_MODEL_LEN}]},
        ),
        400,
    )
    assert error["param"] == "messages"


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"model": "fake", "prompt": }', b"\xff\xfe\x00", b"[1, 2]", b"[" * 50_000]
)
def test_a_body_that_is_no_json_object(served: Served, body: bytes) -> None:
    error = error_of(served.http.post("/v1/chat/completions", content=body), 400)
    assert "JSON" in error["message"]
    assert error["code"] == "invalid_request"


def test_an_unknown_model_is_not_found_and_the_known_one_is_named(served: Served) -> None:
    error = error_of(complete(served, model="gpt-5"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'fake'" in error["message"]
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="x")


def test_a_body_that_is_too_big(served: Served) -> None:
    error = error_of(complete(served, prompt="x" * 200_000), 413)
    assert "100000 bytes" in error["message"]

    def parts() -> Iterator[bytes]:
        yield b'{"model": "fake", "prompt": "'
        for _ in range(30):
            yield b"x" * 10_000

    error_of(served.http.post("/v1/completions", content=parts()), 413)
    error_of(served.http.post("/tokenize", content=b" " * 200_000), 413)
    assert complete(served).status_code == 200


def test_unknown_paths_and_methods(served: Served) -> None:
    assert "/v1/nothing" in error_of(served.http.get("/v1/nothing"), 404)["message"]
    error_of(served.http.get("/v1/completions"), 405)
    error_of(served.http.post("/v1/embeddings", json={}), 404)
    assert error_of(served.http.get("/kv/decode-0/first"), 400)["param"] == "page"
    assert error_of(served.http.get("/kv/decode-0/1?component=mamba"), 400)["param"] == "component"


def test_too_many_requests_are_told_when_to_come_back() -> None:
    with serving(Loopback(silent=True), max_inflight_requests=1) as served:
        body = {"model": "fake", "prompt": "x", "timeout_s": 5}
        held = served.http.build_request("POST", "/v1/completions", json=body)
        with socket.create_connection(("127.0.0.1", held.url.port or 0)) as connection:
            content = held.read()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
            # The second request may overtake the first: then it is the one that is held, until its own deadline.
            for _ in range(20):
                response = complete(served, timeout_s=0.2)
                if response.status_code != 504:
                    break
            error = error_of(response, 429)
            assert error["code"] == "overloaded"
            assert int(response.headers["Retry-After"]) >= 1


def test_no_decode_worker_is_a_503_with_the_reason() -> None:
    with serving(members=False) as served:
        for present in (None, False):
            if present is not None:
                served.worker.membership(present=present)
            response = complete(served)
            error = error_of(response, 503)
            assert error["code"] == "no_worker"
            assert "decode worker" in error["message"]
            assert "Retry-After" in response.headers
            ready = served.http.get("/ready")
            assert (ready.status_code, ready.json()["ready"]) == (503, False)
            assert "no decode worker" in ready.json()["reason"]
            assert served.http.get("/live").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request_that_nobody_answers(stream: bool) -> None:
    with serving(Loopback(silent=True)) as served:
        error = error_of(complete(served, timeout_s=0.2, stream=stream), 504)
        assert error["code"] == "deadline_exceeded"


def test_a_client_cannot_ask_for_more_time_than_the_server_gives() -> None:
    with serving(Loopback(silent=True), request_timeout_s=0.2) as served:
        error_of(complete(served, timeout_s=1e5), 504)


def test_a_half_sent_request_disturbs_nobody(served: Served) -> None:
    port = int(served.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"model":')
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"\x00\x01garbage\r\n\r\n")
        assert b"400" in connection.recv(1000)
    assert complete(served).status_code == 200


def test_chat_refuses_what_it_cannot_see(served: Served) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/x"}}]}]
    body = json.dumps({"model": "fake", "messages": image})
    error = error_of(served.http.post("/v1/chat/completions", content=body), 400)
    assert "image_url" in error["message"]
