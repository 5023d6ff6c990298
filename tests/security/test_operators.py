"""What shows everybody's requests wants a key of an operator's; and where there are no keys, other sites' pages get
nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from http_loopback import Loopback, Served, saying, serving
from typer.testing import CliRunner

from baton.common.config import ClusterConfig, GatewayConfig
from baton.common.config_checks import validate
from baton.common.errors import ConfigError, ErrorCode, RequestError
from baton.common.trace import ProcessTrace
from baton.deploy import api_keys
from baton.deploy.api_keys import ApiKey, Keyring, entry_line, new_key, parse_keys
from baton.deploy.cli import app, run_command
from baton.deploy.http_sites import Sites

OPERATORS = (
    ("GET", "/status"),
    ("GET", "/kv/decode-0/1"),
    ("GET", "/handoffs/decode-0"),
    ("POST", "/trace?seconds=0.1"),
)
SPELLINGS = ("/status/", "/%73tatus", "/./status", "/Status", "//status", "/v1/../status", "/status?x=1", "/status%2f")
BODY = {"model": "fake", "prompt": "a"}


@pytest.fixture(scope="module")
def keys() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, str]) -> Iterator[Served]:
    path, lines = tmp_path_factory.mktemp("keys") / "keys.yaml", []
    for name, admin in (("client", False), ("operator", True)):
        keys[name], entry = new_key(ApiKey(name=name, sha256="0" * 64, admin=admin))
        lines.append(entry_line(entry))
    path.write_text("".join(lines))
    with serving(Loopback(script=saying("abc")), api_keys_file=str(path)) as one:
        yield one


def asked(served: Served, key: str, method: str, path: str) -> httpx.Response:
    return httpx.request(method, served.url + path, headers={"Authorization": f"Bearer {key}"}, follow_redirects=True)


@pytest.mark.parametrize(("method", "path"), OPERATORS)
def test_a_client_is_told_that_it_is_for_operators_alone(
    served: Served, keys: dict[str, str], method: str, path: str
) -> None:
    refused = asked(served, keys["client"], method, path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")
    assert asked(served, keys["operator"], method, path).status_code in (200, 400)  # it has no workers to ask
    assert re.search(r'responses_total{path="/\w+[^"]*",status="403"} [1-9]', served.http.get("/metrics").text)


@pytest.mark.parametrize("path", SPELLINGS)
def test_no_other_spelling_leads_there(served: Served, keys: dict[str, str], path: str) -> None:
    with httpx.Client(base_url=served.url) as http:  # whose paths are sent as they are
        request = http.build_request("GET", "/", headers={"Authorization": f"Bearer {keys['client']}"})
        request.url = request.url.copy_with(raw_path=path.encode())
        response = http.send(request, follow_redirects=True)
    assert response.status_code in (403, 404), response.text
    assert "workers" not in response.text


def test_who_is_no_operator_any_more_gets_nothing_that_he_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.yaml"
    (key, one), (_, other) = (new_key(ApiKey(name=name, sha256="0" * 64, admin=True)) for name in ("one", "other"))
    path.write_text(entry_line(one) + entry_line(other))
    monkeypatch.setattr(api_keys, "RELOAD_S", 0.0)
    with serving(Loopback(script=saying("abc")), api_keys_file=str(path)) as served:

        async def record(seconds: float) -> list[ProcessTrace]:
            path.write_text(entry_line(other))
            return []

        monkeypatch.setattr(served.gateway.workers, "record", record)
        refused = asked(served, key, "POST", "/trace")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")


def test_what_a_client_asks_for_itself_it_gets(served: Served, keys: dict[str, str]) -> None:
    response = httpx.post(
        served.url + "/v1/completions", json=BODY, headers={"Authorization": f"Bearer {keys['client']}"}
    )
    assert response.status_code == 200


def test_a_command_says_which_key_is_needed(
    served: Served, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_API_KEY", keys["client"])
    assert run_command(["status", "--url", served.url]) != 0
    said = capfd.readouterr().err
    assert "baton keys new --admin" in said
    assert "operator" in said
    monkeypatch.setenv("BATON_API_KEY", keys["operator"])
    assert run_command(["status", "--url", served.url]) == 0


def test_keys_new_makes_an_operators_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    for arguments in (["--name", "one"], ["--name", "two", "--admin"]):
        assert CliRunner().invoke(app, ["keys", "new", *arguments, "--file", str(file)]).exit_code == 0
    ring = Keyring(parse_keys(file.read_text(), file))
    assert [ring.is_admin(owner) for owner in ("key:one", "key:two", "key:gone", "two")] == [False, True, False, False]


def test_without_keys_everybody_on_this_machine_is_an_operator() -> None:
    with serving(Loopback(script=saying("abc"))) as open_one:
        assert open_one.http.get("/status").status_code == 200


# ------------------------------------------------------------------------------------------------ other sites


def test_another_sites_page_gets_nothing_of_a_gateway_without_keys() -> None:
    with serving(Loopback(script=saying("abc"))) as open_one:
        port = open_one.url.rpartition(":")[2]
        rebound = {"Host": f"evil.example:{port}"}
        for method, path in (("GET", "/status"), ("GET", "/metrics"), ("GET", "/ui"), ("POST", "/v1/sessions")):
            refused = open_one.http.request(method, path, headers=rebound)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_site")
        for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"},
                        {"Sec-Fetch-Site": "cross-site"}, {"Origin": f"http://localhost:{port}"}):  # fmt: skip
            refused = open_one.http.post("/v1/completions", json=BODY, headers=headers)
            assert refused.json()["error"]["code"] == "foreign_site", headers
        assert open_one.http.get("/live", headers=rebound).status_code == 200  # a probe's name is the balancer's
        own = {"Origin": open_one.url, "Sec-Fetch-Site": "same-origin"}
        assert open_one.http.post("/v1/completions", json=BODY, headers=own).status_code == 200
        assert not open_one.worker.cancelled.is_set()
        assert len(open_one.worker.submits) == 1


def test_where_there_are_keys_they_decide(served: Served, keys: dict[str, str]) -> None:
    headers = {"Authorization": f"Bearer {keys['client']}", "Host": "anything", "Origin": "https://evil.example"}
    assert httpx.get(served.url + "/v1/models", headers=headers).status_code == 200


def refused(sites: Sites, method: str = "POST", **headers: str) -> bool:
    try:
        sites.check(method, [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()])
    except RequestError as error:
        return error.code is ErrorCode.FOREIGN_SITE
    return False


def test_names() -> None:
    local, named, anything = Sites(()), Sites(("Baton.example.org",)), Sites(None)
    for host in (
        "localhost",
        "LOCALHOST:8000",
        "a.localhost:1",
        "127.0.0.1:8000",
        "[::1]:8000",
        "10.1.2.3",
        "localhost.",
    ):
        assert not refused(local, host=host), host
    for host in (
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.nip.io:8000",
        "notlocalhost",
        "0x7f.1",
        "baton.example.org",
    ):
        assert refused(local, host=host), host
    assert not refused(named, host="baton.EXAMPLE.org:443")
    assert not refused(named, host="10.0.0.1:8000", origin="https://baton.example.org")  # a proxy stands in between
    assert refused(named, host="evil.example")
    assert not refused(anything, host="evil.example")
    assert refused(anything, host="evil.example", origin="https://other.example")
    assert not refused(local)  # no browser leaves its Host out
    assert refused(local, host="", origin="null")  # but a proxy of HTTP/1.0 may
    assert refused(local, origin="https://evil.example")
    assert not refused(local, "GET", host="localhost", origin="https://evil.example")  # it cannot read the answer


@pytest.mark.parametrize("host", ["", "a/b", "a:1", "*", "http://x"])
def test_allowed_hosts_are_names(host: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.allowed_hosts"):
        validate(ClusterConfig(gateway=GatewayConfig(allowed_hosts=(host,))))
