"""What one key has made does not exist for another one: the same answer, to the letter, as for what nobody has made."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from http_loopback import Loopback, Served, saying, serving, wait

from baton.deploy.api_keys import ApiKey, entry_line, new_key

BODY = {"model": "fake", "prompt": "a", "max_tokens": 4}
LINE = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": BODY}
NOWHERE = {
    "file": "file-" + "0" * 24,
    "batch": "batch_" + "0" * 24,
    "session": "sess-" + "0" * 32,
}


@dataclass
class Both:
    served: Served
    owner: httpx.Client
    other: httpx.Client


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    path, keys, lines = tmp_path_factory.mktemp("keys") / "keys.yaml", [], []
    for name in ("owner", "other"):
        key, entry = new_key(ApiKey(name=name, sha256="0" * 64))
        keys.append(key)
        lines.append(entry_line(entry))
    path.write_text("".join(lines))
    with serving(Loopback(script=saying("abc")), api_keys_file=str(path)) as served:
        clients = [
            httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {key}"}, timeout=20) for key in keys
        ]
        yield Both(served, *clients)
        for client in clients:
            client.close()


@pytest.fixture(scope="module")
def made(both: Both) -> dict[str, str]:
    """By kind: what the owner has."""
    upload = {"file": ("in.jsonl", json.dumps(LINE) + "\n")}
    file = both.owner.post("/v1/files", files=upload, data={"purpose": "batch"}).json()["id"]
    fields = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = both.owner.post("/v1/batches", json=fields).json()["id"]
    wait(lambda: both.owner.get(f"/v1/batches/{batch}").json()["status"] == "completed")
    return {"file": file, "batch": batch, "session": both.owner.post("/v1/sessions").json()["id"]}


ASKED = [
    ("GET", "/v1/files/{file}", None),
    ("GET", "/v1/files/{file}/content", None),
    ("DELETE", "/v1/files/{file}", None),
    ("GET", "/v1/files?after={file}", None),
    ("GET", "/v1/batches/{batch}", None),
    ("GET", "/v1/batches/{batch}/events", None),
    ("GET", "/v1/batches/{batch}/failures", None),
    ("POST", "/v1/batches/{batch}/cancel", None),
    ("GET", "/v1/batches?after={batch}", None),
    ("POST", "/v1/batches", {"input_file_id": "{file}", "endpoint": "/v1/completions", "completion_window": "24h"}),
    ("DELETE", "/v1/sessions/{session}", None),
    ("POST", "/v1/completions", {**BODY, "session_id": "{session}"}),
    ("POST", "/v1/chat/completions", {"model": "fake", "messages": [], "session_id": "{session}"}),
    ("GET", "/v1/responses/{batch}", None),
]


def heard(client: httpx.Client, method: str, path: str, body: object, ids: dict[str, str]) -> tuple[object, ...]:
    """Status, headers and body, without the ids themselves, names of requests and dates."""

    def filled(text: str) -> str:
        for kind, name in ids.items():
            text = text.replace(f"{{{kind}}}", name)
        return text

    content = None if body is None else filled(json.dumps(body))
    response = client.request(method, filled(path), content=content, headers={"Content-Type": "application/json"})
    text = response.text
    for kind, name in ids.items():
        text = text.replace(name, kind)
    text = re.sub(r'"(id|created_at|request_id|failed_at|expires_at)":("[^"]*"|\d+)', "", text)
    said = {name: value for name, value in response.headers.items() if name not in _OWN}
    return response.status_code, said, text


_OWN = {"date", "x-request-id", "x-baton-request-id"}


@pytest.mark.parametrize(("method", "path", "body"), ASKED, ids=lambda value: str(value)[:40])
def test_anothers_is_nobodys(both: Both, made: dict[str, str], method: str, path: str, body: object) -> None:
    theirs, nobodys = (heard(both.other, method, path, body, ids) for ids in (made, NOWHERE))
    assert theirs == nobodys
    for kind, name in made.items():  # and nothing has happened to it
        if kind != "session":
            assert both.owner.get(f"/v1/{'files' if kind == 'file' else 'batches'}/{name}").status_code == 200
    used = both.owner.post("/v1/completions", json={**BODY, "session_id": made["session"]})
    assert used.status_code == 200, used.text


def test_it_is_in_no_list(both: Both, made: dict[str, str]) -> None:
    assert made["file"] in both.owner.get("/v1/files").text
    for path in ("/v1/files", "/v1/batches"):
        assert both.other.get(path).json()["data"] == []


def test_an_idempotency_key_means_something_else_to_another(both: Both) -> None:
    headers = {"Idempotency-Key": "the same"}
    first = both.owner.post("/v1/completions", json=BODY, headers=headers)
    other = both.other.post("/v1/completions", json={**BODY, "max_tokens": 2}, headers=headers)
    assert (first.status_code, other.status_code) == (200, 200)
    assert "idempotent-replayed" not in other.headers
    assert both.other.delete("/v1/idempotency/the same").status_code == 204
    assert both.owner.post("/v1/completions", json=BODY, headers=headers).headers["idempotent-replayed"] == "true"


def test_who_tries_is_counted_under_the_route(both: Both, made: dict[str, str]) -> None:
    def counted() -> float:
        page = both.served.http.get("/metrics").text
        found = re.search(r'baton_http_responses_total{path="/v1/files/{file_id}",status="404"} (\S+)', page)
        assert made["file"] not in page
        return float(found[1]) if found else 0.0

    before = counted()
    for _ in range(3):
        both.other.get(f"/v1/files/{made['file']}")
    assert counted() == before + 3
