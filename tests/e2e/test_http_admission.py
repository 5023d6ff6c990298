"""Who is let in, over HTTP: a test for each row of the table in docs/ADMISSION.md, and what keys keep apart."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from http_loopback import MAX_MODEL_LEN, Loopback, Served, saying, serving, wait

from baton.common.messages import Load
from baton.deploy.api_keys import ApiKey, entry_line, new_key
from baton.deploy.cli import FAILED, run_command

ROWS = {"model": "fake", "prompt": "x"}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def ask(served: Served, **fields: Any) -> httpx.Response:
    return served.http.post("/v1/completions", json={**ROWS, "max_tokens": 1, **fields})


def waiting(served: Served) -> int:
    return int(served.http.get("/status").json()["requests"]["queued"])


# ------------------------------------------------------------------------------------------------- statuses


def test_400_for_what_can_never_fit() -> None:
    with serving() as served:
        error = error_of(ask(served, prompt="x" * MAX_MODEL_LEN), 400)
    assert (error["code"], error["type"]) == ("prompt_too_long", "invalid_request_error")


def test_429_when_full_and_when_to_come_back() -> None:
    with serving(Loopback(silent=True), max_inflight_requests=1) as served, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, served, timeout_s=1)
        wait(lambda: served.gateway.load().running)
        response = ask(served)
        error = error_of(response, 429)
        assert (error["code"], response.headers["Retry-After"]) == ("overloaded", "1")
        assert error_of(first.result(), 504)["code"] == "deadline_exceeded"


def test_503_when_there_is_nobody() -> None:
    with serving(members=False) as served:
        response = ask(served)
    assert error_of(response, 503)["code"] == "no_worker"
    assert response.headers["Retry-After"] == "1"


def test_504_for_one_who_waits_for_his_turn() -> None:
    with (
        serving(Loopback(silent=True), rows=1, dispatch_ahead_requests=1) as served,
        ThreadPoolExecutor(3) as pool,
    ):
        for _ in range(2):
            pool.submit(ask, served, timeout_s=0.8)
        wait(lambda: served.gateway.load().running == 2)
        assert error_of(ask(served, timeout_s=0.2), 504)["code"] == "deadline_exceeded"


def test_429_at_once_when_the_deadline_cannot_be_met() -> None:
    """Some requests show how fast the queue moves; until then nobody is refused for it."""
    worker = Loopback(script=saying("abc"), pace_s=0.05)
    with serving(worker, rows=1, dispatch_ahead_requests=1) as served, ThreadPoolExecutor(24) as pool:
        many = [pool.submit(ask, served, prompt="x" * 100, max_tokens=4) for _ in range(24)]
        wait(lambda: ask(served, prompt="x" * 100, timeout_s=0.05).status_code == 429)
        response = ask(served, prompt="x" * 100, timeout_s=0.05)
        assert error_of(response, 429)["code"] == "deadline_unreachable"
        assert int(response.headers["Retry-After"]) >= 1
        assert all(one.result().status_code == 200 for one in many)


def test_499_is_counted_for_a_client_that_is_gone_and_its_place_is_free() -> None:
    worker = Loopback(silent=True)
    with serving(worker, rows=1, dispatch_ahead_requests=1) as served, ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            pool.submit(ask, served, timeout_s=0.8)
        wait(lambda: served.gateway.load().running == 2)
        with pytest.raises(httpx.ReadTimeout):
            served.http.post("/v1/completions", json=ROWS, timeout=0.2)
        wait(lambda: 'baton_http_responses_total{path="/v1/completions",status="499"} 1.0' in metrics_of(served))
        assert waiting(served) == 0


def metrics_of(served: Served) -> str:
    return served.http.get("/metrics").text


# ----------------------------------------------------------------------------------------------------- keys


@dataclass
class Keyed:
    served: Served
    path: Path
    keys: dict[str, str]

    def http(self, name: str) -> httpx.Client:
        return httpx.Client(
            base_url=self.served.url, headers={"Authorization": f"Bearer {self.keys[name]}"}, timeout=20
        )

    def write(self) -> None:
        """Keys of these names and no others."""
        lines = []
        for name, fields in (("a", {}), ("b", {}), ("slow", {"requests_per_minute": 1.0, "top_priority": 7})):
            self.keys[name], entry = new_key(ApiKey(name=name, sha256="0" * 64, **fields))  # type: ignore[arg-type]
            lines.append(entry_line(entry))
        self.path.write_text("".join(lines))


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    keyed = Keyed(served=None, path=tmp_path_factory.mktemp("keys") / "keys.yaml", keys={})  # type: ignore[arg-type]
    keyed.write()
    with serving(Loopback(script=saying("abc")), api_keys_file=str(keyed.path)) as keyed.served:
        yield keyed


def test_401_without_a_key_and_with_a_wrong_one(keyed: Keyed) -> None:
    http = keyed.served.http
    for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": "Basic YTpi"}):
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/files"),
                             ("GET", "/status"), ("GET", "/version"), ("POST", "/v1/sessions"), ("GET", "/nowhere"),
                             ("GET", "/ui/../status"), ("GET", "//live")):  # fmt: skip
            response = http.request(method, f"{keyed.served.url}{path}", headers=headers)
            assert error_of(response, 401)["code"] == "invalid_api_key", (method, path)
            assert response.headers["WWW-Authenticate"] == "Bearer"
    twice = [("Authorization", f"Bearer {keyed.keys['a']}")] * 2
    assert error_of(http.get("/v1/models", headers=twice), 401)["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{keyed.served.url}/v1", api_key="sk-wrong").models.list()


def test_who_runs_a_command_without_a_key_is_told_where_it_belongs(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_API_KEY", "sk-wrong")
    assert run_command(["jobs", "status", "--url", keyed.served.url]) == FAILED
    assert "BATON_API_KEY" in capfd.readouterr().err


def test_a_stranger_is_refused_before_his_body_is_read(keyed: Keyed) -> None:
    sent = threading.Event()

    def body() -> Iterator[bytes]:
        yield b"{"
        sent.wait(10)  # until the answer is there
        yield b"}"

    url = f"{keyed.served.url}/v1/completions"
    with httpx.stream("POST", url, content=_first_of(body(), sent), timeout=10) as found:
        assert found.status_code == 401


def _first_of(parts: Iterator[bytes], sent: threading.Event) -> Iterator[bytes]:
    yield next(parts)
    sent.set()


def test_probes_and_what_is_the_same_for_all_are_open(keyed: Keyed) -> None:
    for path in ("/live", "/ready", "/health", "/metrics", "/ui", "/ui/app.js", "/docs", "/openapi.json"):
        assert keyed.served.http.get(path).status_code == 200, path
    assert keyed.served.http.get("/").headers["location"] == "/ui"


def test_metrics_can_be_closed(keyed: Keyed) -> None:
    with serving(api_keys_file=str(keyed.path), open_metrics=False) as served:
        assert served.http.get("/metrics").status_code == 401


def test_the_real_client_with_a_key_is_answered(keyed: Keyed) -> None:
    client = openai.OpenAI(base_url=f"{keyed.served.url}/v1", api_key=keyed.keys["a"])
    assert client.completions.create(model="fake", prompt="x", max_tokens=3).choices[0].text == "abc"


def test_what_one_key_has_made_is_not_there_for_another(keyed: Keyed) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {**ROWS, "max_tokens": 3}}
    with keyed.http("a") as mine, keyed.http("b") as other:
        session = mine.post("/v1/sessions").json()["id"]
        file = mine.post("/v1/files", files={"file": ("x.jsonl", json.dumps(line))}, data={"purpose": "batch"}).json()[
            "id"
        ]
        wanted = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = mine.post("/v1/batches", json=wanted).json()["id"]
        paths = (
            ("GET", f"/v1/files/{file}"), ("GET", f"/v1/files/{file}/content"), ("DELETE", f"/v1/files/{file}"),
            ("GET", f"/v1/batches/{batch}"), ("POST", f"/v1/batches/{batch}/cancel"),
            ("GET", f"/v1/batches/{batch}/failures"), ("DELETE", f"/v1/sessions/{session}"),
        )  # fmt: skip
        for method, path in paths:
            assert other.request(method, path).status_code == 404, path
        assert other.post("/v1/batches", json=wanted).status_code == 404
        assert error_of(other.post("/v1/completions", json={**ROWS, "session_id": session}), 404)
        assert other.get("/v1/files").json()["data"] == other.get("/v1/batches").json()["data"] == []
        wait(lambda: mine.get(f"/v1/batches/{batch}").json()["status"] == "completed")
        assert mine.get(f"/v1/batches/{batch}").json()["request_counts"]["completed"] == 1


def test_429_beyond_a_keys_limit_and_its_priority_is_no_higher_than_it_may_be(keyed: Keyed) -> None:
    with keyed.http("slow") as http:
        assert http.post("/v1/completions", json={**ROWS, "max_tokens": 1, "priority": -50}).status_code == 200
        assert keyed.served.worker.submits[-1].priority == 7
        response = http.post("/v1/completions", json=ROWS)
    assert error_of(response, 429)["code"] == "rate_limit_exceeded"
    assert 1 <= int(response.headers["Retry-After"]) <= 60


def test_metrics_and_logs_have_names_and_no_keys(keyed: Keyed, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), keyed.http("a") as http:
        assert http.post("/v1/completions", json={**ROWS, "max_tokens": 1}).status_code == 200
        page = metrics_of(keyed.served)
    assert 'baton_key_requests_total{key="a",outcome="length"}' in page
    told = [getattr(record, "baton_fields", {}) for record in caplog.records]
    assert "a" in [fields.get("key") for fields in told]
    for key in keyed.keys.values():
        assert key not in f"{page} {caplog.text} {told}"


def test_the_batch_of_a_key_that_is_gone_is_not_answered(tmp_path: Path) -> None:
    """Whoever takes a key away ends what was asked with it, too."""
    path = tmp_path / "keys.yaml"
    keyed = Keyed(served=None, path=path, keys={})  # type: ignore[arg-type]
    keyed.write()
    with serving(Loopback(script=saying("abc")), members=False, api_keys_file=str(path)) as keyed.served:
        line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {**ROWS, "max_tokens": 3}}
        with keyed.http("a") as mine:
            content = json.dumps(line)
            upload = mine.post("/v1/files", files={"file": ("x.jsonl", content)}, data={"purpose": "batch"}).json()
            wanted = {"input_file_id": upload["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            assert mine.post("/v1/batches", json=wanted).status_code == 200
            keyed.path.write_text(
                "".join(one for one in keyed.path.read_text().splitlines(keepends=True) if '"name":"a"' not in one)
            )
            wait(lambda: mine.get("/v1/models").status_code == 401)
        # An attempt that began before is still made: so nobody is there to take it until one has been refused.
        refused = 'baton_http_responses_total{path="batch:/v1/completions",status="401"} 1.0'
        wait(lambda: refused in metrics_of(keyed.served))
        keyed.served.worker.membership()
        keyed.served.worker.heartbeat(Load())
        with keyed.http("b") as theirs:
            assert theirs.post("/v1/completions", json={**ROWS, "max_tokens": 3}).status_code == 200
        assert len(keyed.served.worker.submits) == 1, "theirs"
