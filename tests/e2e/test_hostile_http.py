"""What a client that means harm gets from the HTTP server: an error, or a closed connection, and a count in a metric.
Somebody else's stream goes on meanwhile, and afterwards everything is as it was."""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hostile import Raw, ask, counted, descriptors, ended, open_connections, status_of, undisturbed
from http_loopback import GIVE_UP_S, Loopback, Served, saying, serving, wait

from baton.common.http_config import HttpConfig

TEXT = "Nothing happened."
LIMITS = HttpConfig(
    max_connections=12,
    max_connections_per_address=10,
    header_timeout_s=0.3,
    max_header_bytes=8192,
    max_headers=50,
    keep_alive_s=0.3,
    stall_s=0.3,
    min_bytes_per_s=1000.0,
)
GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
SECRET = "sk-baton-do-not-tell"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Loopback(script=saying(TEXT), pace_s=0.002), http=LIMITS) as served:
        yield served


@pytest.fixture(autouse=True)
def leaves_nothing(served: Served) -> Iterator[None]:
    served.http.get("/live")
    before = descriptors()
    yield
    gc.collect()
    wait(lambda: open_connections(served) == 1)
    assert descriptors() <= before


# ------------------------------------------------------------------------------------------- who is slow


def test_headers_that_are_dribbled(served: Served) -> None:
    with counted(served, "header_time"), undisturbed(served, TEXT), Raw(served) as raw:
        raw.dribble(GET + b"X-A: b\r\n" * 100, 0.02)
        said = raw.read()
    assert status_of(said) == 408
    assert b"connection: close" in said.lower()
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["message"] == "the headers took too long"


def test_a_connection_that_says_nothing(served: Served) -> None:
    with counted(served, "header_time"), Raw(served) as raw:
        assert status_of(raw.read()) == 408


def test_a_second_request_that_is_dribbled(served: Served) -> None:
    with counted(served, "header_time"), Raw(served) as raw:
        raw.send(GET + b"\r\n")
        raw.read_until(b"true}")
        raw.dribble(GET + b"X-A: b\r\n" * 100, 0.02)
        assert status_of(raw.read()) == 408


def test_a_connection_without_a_request_is_closed_and_nothing_counted(served: Served) -> None:
    before = ended(served)
    with Raw(served) as raw:
        raw.send(GET + b"\r\n")
        assert raw.read().endswith(b"true}")
    assert ended(served) == before


@pytest.mark.parametrize("framing", [b"Content-Length: 9000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n2000\r\n"])
def test_a_body_that_is_dribbled(served: Served, framing: bytes) -> None:
    with counted(served, "body_rate"), undisturbed(served, TEXT), Raw(served) as raw:
        raw.send(POST + framing)
        raw.dribble(b'{"model": "fake", "prompt": "' + b"x" * 100, 0.02)
        assert status_of(raw.read()) == 408


def test_a_body_at_the_least_rate_is_waited_for(served: Served) -> None:
    """For longer than any one limit."""
    body = b'{"model": "fake", "prompt": "x", "max_tokens": 3' + b" " * 2000 + b"}"
    with Raw(served) as raw:
        raw.send(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 50):
            raw.dribble(body[start : start + 1], 0.02)
            raw.send(body[start + 1 : start + 50])
        assert status_of(raw.read()) == 200


def test_a_body_that_goes_on_after_its_answer(served: Served) -> None:
    """Who was refused may finish, so that it sees why; but not for ever."""
    before = ended(served)
    with Raw(served) as raw:
        raw.send(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert status_of(raw.read_until(b"\r\n\r\n")) == 404
        while raw.send(b"400\r\n" + b"x" * 1024 + b"\r\n"):
            pass
    assert ended(served)["body_rate"] == before["body_rate"] + 1


def test_a_stream_that_is_not_read() -> None:
    """It is cancelled: nobody computes for a client that does not listen."""
    with serving(Loopback(script=saying("x" * 5000), pace_s=0.01), http=LIMITS, max_model_len=1 << 20) as served:
        fields = {"model": "fake", "prompt": "y" * 400_000, "echo": True, "max_tokens": 5000, "stream": True}
        body = json.dumps(fields).encode()
        with counted(served, "read_rate"), Raw(served, receive_bytes=4096) as raw:
            raw.send(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert served.worker.cancelled.wait(GIVE_UP_S)
            assert not raw.read().endswith(b"[DONE]\n\n")


# ------------------------------------------------------------------------------------------- who is many


def test_too_many_connections_of_one_address(served: Served) -> None:
    """It stands at the connection that the test has open anyway."""
    with counted(served, "address", 3):
        held = [Raw(served) for _ in range(LIMITS.max_connections_per_address - 1)]
        for _ in range(3):
            said = ask(served, b"")
            assert status_of(said) == 503
            assert b"retry-after: 1" in said.lower()
        for raw in held:
            raw.__exit__()
        wait(lambda: open_connections(served) == 1)
    assert served.http.get("/live").status_code == 200


def test_too_many_connections_of_all() -> None:
    limits = HttpConfig(max_connections=3, trusted_proxies=("127.0.0.0/8",), max_connections_per_address=1)
    with serving(http=limits) as served, counted(served, "connections"), Raw(served), Raw(served):
        assert status_of(ask(served, b"")) == 503


# ------------------------------------------------------------------------------------- who is malformed


@pytest.mark.parametrize(
    "headers",
    [b"X-A: " + b"x" * 9000, b"X-A: b\r\n" * 51, b"X-A: " + b"x" * 300_000, b"x" * 9000 + b": y"],
    ids=["one long header", "many headers", "an endless header", "a long name"],
)
def test_more_headers_than_anybody_needs(served: Served, headers: bytes) -> None:
    with counted(served, "headers"), undisturbed(served, TEXT):
        assert status_of(ask(served, GET + headers + b"\r\n\r\n")) == 431


CHUNKS = b"5\r\nGET /\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS, 400),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + CHUNKS, 400),
        (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef", 400),
        (POST + b"Content-Length: 5, 6\r\n\r\nabcdef", 400),
        (POST + b"Content-Length: +5\r\n\r\nabcde", 400),
        (POST + b"Content-Length: 0x5\r\n\r\nabcde", 400),
        (POST + b"Content-Length: -1\r\n\r\n", 400),
        (POST + b"Content-Length: \r\n\r\n", 400),
        (POST + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS, 501),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS, 501),
        (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + CHUNKS, 501),
        (POST + b"Transfer-Encoding : chunked\r\n\r\n" + CHUNKS, 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\nx\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffffffffff\r\n", 400),
        (POST + b"X-A: b\x00c\r\n\r\n", 400),
        (POST + b"X-A: b\rc\r\n\r\n", 400),
        (GET + b"Host: y\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\n\r\n", 400),
        (b"GET /live\r\n\r\n", 400),
        (b"GET /live HTTP/1.1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /l\xffve HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET /live HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 400),
        (bytes(range(256)) * 4, 400),
    ],
)
def test_what_two_readers_could_understand_differently(served: Served, request_: bytes, status: int) -> None:
    """One answer, and the connection is closed: what follows is never taken for a request."""
    with counted(served, "malformed"):
        said = ask(served, request_ + GET + b"\r\n")
    assert status_of(said) == status, said
    assert said.count(b"HTTP/1.1 ") == 1


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    body = b'{"model": "fake", "prompt": "x", "max_tokens": 7}'
    answered = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    said = ask(served, answered + GET + b"\r\n" + answered + GET + b"Connection: close\r\n\r\n")
    assert re.findall(rb"Nothing|true", said) == [b"Nothing", b"true", b"Nothing", b"true"]


def test_http_1_0_is_answered_and_closed(served: Served) -> None:
    said = ask(served, b"GET /live HTTP/1.0\r\n\r\n")
    assert said.endswith(b'{"live":true}')
    body = b'{"model": "fake", "prompt": "x", "stream": true}'
    said = ask(served, b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert said.endswith(b"data: [DONE]\n\n")
    assert b"chunked" not in said


def test_no_other_protocol_is_spoken(served: Served) -> None:
    """Nor is one asked for past the door."""
    upgrade = (
        b"Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n"
    )
    assert status_of(ask(served, b"GET /ws HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"\r\n")) == 404
    assert status_of(ask(served, b"CONNECT x:1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")) == 404


# ------------------------------------------------------------------------------------- what it asks for

MANY = 1_300_000


@pytest.mark.parametrize(
    "prompt",
    ["[" + ",".join(["[]"] * MANY) + "]", "[" + ",".join("1" * MANY) + "]", '["' + '","'.join("x" * MANY) + '"]'],
    ids=["lists", "token ids", "texts"],
)
def test_a_body_of_a_million_values(served: Served, prompt: str) -> None:
    """It would take a second to read; a long text of any characters does not."""
    body = f'{{"model": "fake", "prompt": {prompt}}}'.encode()
    with undisturbed(served, TEXT):
        refused = served.http.post("/v1/completions", content=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_large")
        quoted = json.dumps({"model": "fake", "prompt": prompt[:1_500_000]}).encode()
        read = served.http.post("/v1/completions", content=quoted)
        assert (read.status_code, read.json()["error"]["code"]) == (400, "prompt_too_long"), read.text[:200]


MESSAGE = '{"role": "user", "content": ""}'
CALL = '{"type": "function_call", "call_id": "", "name": "a", "arguments": "{}"}'


@pytest.mark.parametrize(
    ("path", "field", "item"),
    [("responses", "input", MESSAGE), ("responses", "input", CALL), ("chat/completions", "messages", MESSAGE)],
    ids=["responses", "calls", "chat"],
)
def test_a_conversation_of_many_messages_without_a_word(served: Served, path: str, field: str, item: str) -> None:
    """It would keep the loop for seconds, with a copy of all for each; others are answered meanwhile."""
    body = f'{{"model": "fake", "{field}": [{",".join([item] * 20_000)}]}}'.encode()
    slowest_s = 0.0
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(served.http.post, f"/v1/{path}", content=body, timeout=3 * GIVE_UP_S)
        while not asking.done():
            asked_s = time.monotonic()
            assert httpx.get(f"{served.url}/live", timeout=3 * GIVE_UP_S).status_code == 200
            slowest_s = max(slowest_s, time.monotonic() - asked_s)
    refused = asking.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "prompt_too_long"), refused.text[:200]
    assert slowest_s < 3.0


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_body_that_is_nested_deeply(served: Served, opening: str) -> None:
    body = '{"model": "fake", "prompt": ' + opening * 20_000
    refused = served.http.post("/v1/completions", content=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")


def test_bodies_that_together_are_too_large() -> None:
    with serving(http=HttpConfig(max_receiving_bytes=50_000)) as served, Raw(served) as raw:
        raw.send(POST + b"Content-Length: 60000\r\n\r\n" + b"x" * 49_000)
        body = json.dumps({"model": "fake", "prompt": "x" * 2_000}).encode()

        def refused() -> bool:
            answer = served.http.post("/v1/completions", content=body)
            return answer.status_code == 429 and "Retry-After" in answer.headers

        wait(refused)
        raw.__exit__()
        wait(lambda: not refused())


ODD = [
    "..%2F..%2F..%2Fetc%2Fpasswd",
    "%2e%2e/%2e%2e/etc/passwd",
    "....//....//etc/passwd",
    "..%5c..%5cwindows",
    "file-%00.jsonl",
    "file-%0d%0aX-Injected:%20yes",
    "%27%20OR%201=1--",
    "%F0%9F%98%80",
    "%ff%fe",
    "a" * 2000,
    "-1",
    "999999999999999999999999999999",
    "%252e%252e%252f",
]


@pytest.mark.parametrize("odd", ODD)
def test_ids_that_are_none(served: Served, odd: str) -> None:
    """No id is ever a path or a part of a statement, and none comes back in a header."""
    asked = [
        ("GET", f"/v1/files/{odd}"),
        ("GET", f"/v1/files/{odd}/content"),
        ("DELETE", f"/v1/files/{odd}"),
        ("GET", f"/v1/files?after={odd}"),
        ("GET", f"/v1/batches/{odd}"),
        ("GET", f"/v1/batches/{odd}/events"),
        ("POST", f"/v1/batches/{odd}/cancel"),
        ("GET", f"/v1/batches?after={odd}"),
        ("DELETE", f"/v1/sessions/{odd}"),
        ("GET", f"/v1/models/{odd}"),
        ("GET", f"/kv/{odd}/{odd}"),
        ("GET", f"/handoffs/{odd}"),
        ("GET", f"/ui/{odd}"),
        ("GET", f"/docs/{odd}"),
    ]
    pipelined = b"".join(
        b"%s %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % (how.encode(), path.encode()) for how, path in asked
    )
    said = ask(served, pipelined + GET + b"Connection: close\r\n\r\n")
    statuses = re.findall(rb"HTTP/1\.1 (\d{3}) ", said)
    assert len(statuses) == len(asked) + 1
    for (_, path), status in zip(asked, statuses, strict=False):
        assert status in (b"400", b"404", b"405") or (b"200", "after=" in path) == (status, True), (path, status)
    assert not re.findall(rb'"data":\[[^]]', said)
    assert b"root:" not in said
    assert b"\r\nx-injected" not in said.lower()


def test_nothing_that_a_client_says_is_a_label(served: Served) -> None:
    def labels() -> set[str]:
        return set(re.findall(r"^[a-z_]\S*\{.*\}|^[a-z_]\w+", served.http.get("/metrics").text, re.MULTILINE))

    headers = {"Authorization": f"Bearer {SECRET}", "X-Request-Id": SECRET}
    served.http.post("/v1/completions", json={"model": "fake", "prompt": "x"}, headers=headers)
    served.http.post("/v1/completions", json={"model": "other", "prompt": "x"}, headers=headers)
    served.http.request(SECRET, "/")
    served.http.get("/v1/files/none", headers=headers)
    before = labels()
    for number in range(30):
        odd = f"{SECRET}-{number}"
        served.http.request(odd, f"/{odd}")
        served.http.get(f"/v1/files/{odd}", headers={"Authorization": f"Bearer {odd}"})
        body = {"model": "fake", "prompt": odd, "user": odd, "max_tokens": 1}
        served.http.post("/v1/completions", json=body, headers={"X-Request-Id": odd, "User-Agent": odd})
        served.http.post("/v1/completions", json={**body, "model": odd}, headers=headers)
    assert labels() - before == set()
    assert SECRET not in served.http.get("/metrics").text


def test_no_other_site_may_read(served: Served) -> None:
    asks = {"Origin": "https://other.example", "Access-Control-Request-Method": "POST"}
    for method in ("OPTIONS", "GET", "POST"):
        for path in ("/v1/completions", "/v1/models", "/status", "/ui"):
            answer = served.http.request(method, path, headers=asks)
            assert not [name for name in answer.headers if name.startswith("access-control")]
    for page in ("/ui", "/docs"):
        policy = served.http.get(page).headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy


def test_errors_tell_nothing_of_others_or_of_us(served: Served) -> None:
    headers = {"Authorization": f"Bearer {SECRET}"}
    answers = [
        served.http.get("/v1/files/file-0", headers=headers),
        served.http.get("/nothing", headers=headers),
        served.http.post("/v1/completions", content=b"{", headers=headers),
        served.http.post("/v1/completions", json={"model": "fake", "prompt": "x" * 10_000}, headers=headers),
    ]
    for answer in answers:
        assert 400 <= answer.status_code < 500
        said = f"{answer.headers}{answer.text}"
        for word in (SECRET, "Traceback", ".py", "uvicorn", "/root", "/home"):
            assert word not in said
