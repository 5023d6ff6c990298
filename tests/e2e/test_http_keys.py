"""`Idempotency-Key` over HTTP: one computation, whoever asks how often, and whatever becomes of connections."""

from __future__ import annotations

import contextlib
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from http_loopback import GIVE_UP_S, Loopback, Served, saying, serving, wait

from baton.client import Client

TEXT = "Hello wörld €😀!"
LONG = "x" * 100
KEY = {"Idempotency-Key": "once"}


def post(
    served: Served, key: str = "once", path: str = "/v1/completions", owner: str = "", **body: Any
) -> httpx.Response:
    headers = {"Idempotency-Key": key} | ({"Authorization": f"Bearer {owner}"} if owner else {})
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    return served.http.post(path, json={"model": "fake", "max_tokens": 100, **prompt, **body}, headers=headers)


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def said_in(stream: bytes) -> str:
    """Words that came while the gateway had other things to do are in one event."""
    return b"".join(re.findall(rb'"text":"(x*)"', stream)).decode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_is_told_again_to_the_byte(path: str, stream: bool) -> None:
    with serving(Loopback(script=saying(TEXT))) as served:
        first, again = post(served, path=path, stream=stream), post(served, path=path, stream=stream)
        assert first.content == again.content
        assert TEXT in first.text or stream
        assert first.headers["x-request-id"] == again.headers["x-request-id"]
        assert first.headers["content-type"] == again.headers["content-type"]
        assert "idempotent-replayed" not in first.headers
        assert again.headers["idempotent-replayed"] == "true"
        assert len(served.worker.submits) == 1
        assert post(served, "another", path=path, stream=stream).content != first.content
        assert len(served.worker.submits) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_many_at_once_share_one_computation(stream: bool) -> None:
    with serving(Loopback(script=saying(TEXT), pace_s=0.01)) as served, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(served, stream=stream), range(8)))
        assert len({answer.content for answer in answers}) == 1
        assert sum("idempotent-replayed" in answer.headers for answer in answers) == 7
        assert len(served.worker.submits) == 1


def test_a_key_is_its_owners_and_for_one_body() -> None:
    with serving(Loopback(script=saying(TEXT))) as served:
        assert post(served).status_code == 200
        assert error_of(post(served, max_tokens=99)) == (422, "idempotency_mismatch")
        assert error_of(post(served, path="/v1/chat/completions")) == (422, "idempotency_mismatch")
        assert post(served, owner="somebody else", max_tokens=99).status_code == 200
        assert error_of(post(served, key="k" * 257)) == (400, "invalid_request")
        assert error_of(post(served, key="")) == (400, "invalid_request")


def test_who_was_cut_off_comes_back_and_hears_all_of_it() -> None:
    with serving(Loopback(script=saying(LONG), pace_s=0.01)) as served:
        body = {"model": "fake", "prompt": "hi", "max_tokens": 200, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body, headers=KEY) as response:
            before = next(response.iter_bytes())
        again = served.http.post("/v1/completions", json=body, headers=KEY)
        assert again.content.startswith(before)
        assert again.text.endswith("data: [DONE]\n\n")
        assert said_in(again.content) == LONG
        assert (len(served.worker.submits), served.worker.cancelled.is_set()) == (1, False)


@pytest.mark.parametrize("stream", [False, True])
def test_nobody_comes_back(stream: bool) -> None:
    with serving(Loopback(script=saying(LONG), pace_s=0.05), keys={"linger_s": 0.1}) as served:
        body = {"model": "fake", "prompt": "hi", "max_tokens": 200, "stream": stream}
        asking = served.http.stream("POST", "/v1/completions", json=body, headers=KEY, timeout=0.2)
        with contextlib.suppress(httpx.ReadTimeout), asking as response:
            next(response.iter_bytes())
        assert served.worker.cancelled.wait(GIVE_UP_S)
        assert served.http.get("/live").status_code == 200
        served.worker.pace_s = 0.0
        assert served.http.post("/v1/completions", json=body, headers=KEY).status_code == 200
        assert len(served.worker.submits) == 2


def test_what_failed_is_tried_anew() -> None:
    with serving(Loopback(script=saying(TEXT), failure_after=0)) as served:
        assert error_of(post(served)) == (500, "transfer_corrupt")
        served.worker.failure_after = None
        assert post(served).status_code == 200
        assert error_of(post(served, "other", temperature=-1)) == (400, "invalid_request")
        assert post(served, "other").status_code == 200


def test_cancelling_what_runs_under_a_key() -> None:
    with serving(Loopback(script=saying(LONG), pace_s=0.05)) as served, ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, served)
        wait(lambda: bool(served.worker.submits))
        assert served.http.delete("/v1/idempotency/once", headers={"Authorization": "Bearer other"}).status_code == 204
        assert not served.worker.cancelled.is_set()
        assert served.http.delete("/v1/idempotency/once").status_code == 204
        assert served.worker.cancelled.wait(GIVE_UP_S)
        assert error_of(running.result(GIVE_UP_S)) == (499, "cancelled")
        served.worker.pace_s = 0.0
        assert post(served).status_code == 200
        assert served.http.delete("/v1/idempotency/once").status_code == 204
        assert post(served).status_code == 200
        assert len(served.worker.submits) == 3


@pytest.mark.parametrize("key", ["a/b?c d", "%2F..", "schlüssel", "ключ"])
def test_keys_of_any_characters_are_kept_and_forgotten(key: str) -> None:
    with serving(Loopback(script=saying(TEXT))) as served, Client(served.url) as client:
        for _ in range(2):
            assert client.generate("hi", max_tokens=4, seed=1, key=key).text == TEXT[:4]
        assert len(served.worker.submits) == 1
        served.http.delete(f"/v1/idempotency/{quote(key, safe='')}")
        client.generate("hi", max_tokens=4, seed=1, key=key)
        assert len(served.worker.submits) == 2


def test_a_stream_whose_key_is_cancelled_breaks_off_and_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving(Loopback(script=saying(LONG), pace_s=0.05)) as served:
        body = {"model": "fake", "prompt": "hi", "max_tokens": 200, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body, headers=KEY) as response:
            parts = response.iter_bytes()
            next(parts)
            assert httpx.delete(f"{served.url}/v1/idempotency/once").status_code == 204
            with pytest.raises(httpx.RemoteProtocolError):
                list(parts)
        wait(lambda: "request" in caplog.messages)
    lines = [record.__dict__ for record in caplog.records if record.name == "baton.http"]
    assert [record["msg"] for record in lines if record["levelno"] > logging.INFO] == []


def test_the_oldest_answers_make_room_and_old_ones_go() -> None:
    with serving(Loopback(script=saying(TEXT)), keys={"max_bytes": 8_000}) as served:
        for key in ("a", "b", "c", "d"):
            post(served, key)
        assert "idempotent-replayed" in post(served, "d").headers
        assert "idempotent-replayed" not in post(served, "a").headers
    with serving(Loopback(script=saying(TEXT)), keys={"keep_s": 0.05}) as served:
        post(served)
        wait(lambda: "idempotent-replayed" not in post(served).headers)


def test_an_answer_that_is_too_large_to_remember_is_told_once() -> None:
    with serving(Loopback(script=saying(LONG), pace_s=0.01), keys={"max_bytes": 4_000}) as served:
        body = {"model": "fake", "prompt": "hi", "max_tokens": 200, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body, headers=KEY) as response:
            parts = response.iter_bytes()
            text = b""
            while text.count(b"\n\n") < 30:
                text += next(parts)
            refused = served.http.post("/v1/completions", json=body, headers=KEY)
            assert error_of(refused) == (409, "idempotency_running")
            assert refused.headers["retry-after"] == "1"
            text += b"".join(parts)
        assert said_in(text) == LONG
        assert text.endswith(b"data: [DONE]\n\n")
        served.worker.pace_s = 0.0
        assert "idempotent-replayed" not in served.http.post("/v1/completions", json=body, headers=KEY).headers
        assert len(served.worker.submits) == 2
