"""HTTPS at the gateway: who may speak, how long a handshake may take, and certificates that are renewed."""

from __future__ import annotations

import json
import logging
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority
from cryptography import x509
from hostile import Raw, port_of, undisturbed
from http_loopback import GIVE_UP_S, Loopback, Served, saying, serving
from prometheus_client.parser import text_string_to_metric_families as families

from baton.client import Client, ClusterUnreachable, Message
from baton.common.config import ClusterConfig, GatewayConfig
from baton.common.config_checks import validate
from baton.common.errors import ConfigError
from baton.common.http_config import HttpConfig
from baton.deploy.tls import TlsFiles

TEXT = "Nobody else reads this."
LIMITS = HttpConfig(header_timeout_s=0.4, stall_s=0.4, min_bytes_per_s=1000.0)
AUTHORITY = Authority()
CHAT: list[Message] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ca.crt").write_bytes(AUTHORITY.certificate)
    return tmp_path


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    cert, key = AUTHORITY.pair().write(folder)
    worker = Loopback(script=saying(TEXT), pace_s=0.002)
    with serving(worker, http=LIMITS, tls_cert=cert, tls_key=key, ca_file=str(folder / "ca.crt")) as served:
        yield served


def test_what_a_client_with_the_authority_gets(served: Served, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.url.startswith("https://")
    assert served.http.get("/live").json() == {"live": True}
    with Client(served.url, ca_file=str(folder / "ca.crt"), model="fake") as client:
        assert client.chat("hi").text == TEXT
    monkeypatch.setenv("BATON_CA_FILE", str(folder / "ca.crt"))
    with Client(served.url, model="fake") as client, client.stream(CHAT) as stream:
        assert "".join(stream) == TEXT


def test_a_client_that_does_not_trust_it_says_so(served: Served) -> None:
    with (
        Client(served.url, retries=0, model="fake") as client,
        pytest.raises(ClusterUnreachable, match="BATON_CA_FILE"),
    ):
        client.chat("hi")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        bytes(100_000),
    ],
    ids=["nothing", "HTTP in the clear", "half a greeting", "no greeting"],
)
def test_who_does_not_come_to_an_agreement_is_let_go(served: Served, folder: Path, said: bytes) -> None:
    with undisturbed(served, TEXT, str(folder / "ca.crt")), Raw(served) as raw:
        raw.send(said)
        assert b"HTTP/1.1" not in raw.read()
    assert metric(served, "baton_http_connections_ended_total") == 1
    assert metric(served, "baton_http_connections") == 1


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_old_versions_are_not_spoken(served: Served) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", port_of(served)), GIVE_UP_S) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain)


def test_a_request_that_comes_with_the_end_of_the_handshake(served: Served, folder: Path) -> None:
    """In one segment with it: nothing of it is lost."""
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    encrypted = context.wrap_bio(coming, going, server_hostname="127.0.0.1")
    with socket.create_connection(("127.0.0.1", port_of(served)), GIVE_UP_S) as plain:
        while True:
            try:
                encrypted.do_handshake()
                break
            except ssl.SSLWantReadError:
                plain.sendall(going.read())
                coming.write(plain.recv(1 << 16))
        encrypted.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        plain.sendall(going.read())
        heard = b""
        while not heard.endswith(b"}"):
            try:
                heard += encrypted.read(1 << 16)
            except ssl.SSLWantReadError:
                coming.write(plain.recv(1 << 16))
    assert heard.endswith(b'{"live":true}')


def test_a_stream_that_is_not_read(folder: Path) -> None:
    cert, key = AUTHORITY.pair().write(folder)
    ca = str(folder / "ca.crt")
    worker = Loopback(script=saying("x" * 5000), pace_s=0.01)
    with serving(worker, http=LIMITS, max_model_len=1 << 20, tls_cert=cert, tls_key=key, ca_file=ca) as served:
        fields = {"model": "fake", "prompt": "y" * 900_000, "echo": True, "max_tokens": 5000, "stream": True}
        body = json.dumps(fields).encode()
        context = ssl.create_default_context(cafile=ca)
        with (
            socket.create_connection(("127.0.0.1", port_of(served)), GIVE_UP_S) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as encrypted,
        ):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            encrypted.sendall(head + body)
            assert served.worker.cancelled.wait(GIVE_UP_S)
        assert metric(served, "baton_http_connections_ended_total", reason="read_rate") == 1


def test_a_renewed_certificate_is_that_of_the_next_connection(served: Served, folder: Path) -> None:
    first = serial(served)
    stream = served.http.stream("POST", "/v1/completions", json={"model": "fake", "prompt": "x", "stream": True})
    with stream as response:
        renewed, other = AUTHORITY.pair(), AUTHORITY.pair()
        (folder / "tls.crt").write_bytes(renewed.certificate)
        assert serial(served) == first  # the key is still that of the old one
        (folder / "tls.key").write_bytes(renewed.key)
        assert serial(served) == renewed.serial
        (folder / "tls.key").unlink()
        assert serial(served) == renewed.serial
        assert list(response.iter_lines())[-2] == "data: [DONE]"
    other.write(folder)
    assert serial(served) == other.serial


def test_a_pair_that_cannot_be_used_is_an_error_before_anything_listens(folder: Path) -> None:
    first, second = AUTHORITY.pair(), AUTHORITY.pair()
    cert, key = first.write(folder)
    for content in (second.key, first.encrypted_key, b"", b"no key"):
        Path(key).write_bytes(content)
        with pytest.raises(ConfigError, match="tls_cert") as failed:
            TlsFiles(cert, key)
        assert "PRIVATE" not in str(failed.value)
    with pytest.raises(ConfigError, match="No such file"):
        TlsFiles(cert, str(folder / "nothing"))


def test_a_pair_that_can_be_read_again_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = TlsFiles(*AUTHORITY.pair().write(folder))
    before = files.context()
    AUTHORITY.pair().write(folder)

    def refuse(self: ssl.SSLContext, *files: str, password: str) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(ssl.SSLContext, "load_cert_chain", refuse)
        assert [files.context() for _ in range(3)] == [before] * 3  # each connection asks
    assert caplog.text.count("certificate_unusable") == 1
    renewed = files.context()
    assert renewed is not before
    assert files.context() is renewed


@pytest.mark.parametrize(("setting", "value"), [("tls_cert", "/a"), ("tls_key", "/a"), ("tls_cert", "a")])
def test_a_certificate_and_its_key_go_together(setting: str, value: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.tls_"):
        validate(ClusterConfig(gateway=GatewayConfig(**{setting: value})))  # type: ignore[arg-type]


def serial(served: Served) -> int:
    return x509.load_pem_x509_certificate(
        ssl.get_server_certificate(("127.0.0.1", port_of(served))).encode()
    ).serial_number


def metric(served: Served, name: str, **labels: str) -> float:
    page = served.http.get("/metrics").text
    samples = [sample for family in families(page) for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())
