"""The page at /ui in a real browser: a chat with timelines, the cluster, and text that stays text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from browser import CHROMIUM, DRIVER, ENTER, Browser, browsing
from http_loopback import Loopback, Served, saying, serving

from baton.common.messages import Load, unpack_tokens
from baton.deploy.gateway_shell import UnknownWorkers
from baton.transfer.reports import Flow, HandoffTimes, Latencies

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")

TEXT = "Look:\n```python\nprint('<b>')\n```\n<img src=x onerror=alert(1)> <script>alert(2)</script>"
CENSUS = {
    "free": 60, "cached": 20, "cached_locked": 0, "request": 15, "session": 0, "incoming": 5, "outgoing": 0,
    "quarantined": 0, "total": 100,
}  # fmt: skip


class Workers(UnknownWorkers):
    """What two workers would tell."""

    async def statuses(self) -> Mapping[str, object]:
        flow = Flow(
            peer="prefill-0", lane="tcp", direction="in", nbytes=3 << 20, recent_gbps=1.25,
            handoff=Latencies(counts=(0,) * 10 + (7,) + (0,) * 8),
        )  # fmt: skip
        return {"decode-0": {"census": CENSUS, "flows": [msgspec.to_builtins(flow)]}, "prefill-0": {"census": CENSUS}}

    async def handoffs(self, worker: str) -> list[HandoffTimes]:
        def one(name: str, **more: object) -> HandoffTimes:
            values = {"handoff": name, "direction": "in", "request_id": "r1", "peer": "prefill-0", "lane": "tcp"}
            times = {"tokens": 300, "begun_at_s": 1.0, "marks": {"asked": 0.0, "committed": 0.25}}
            return msgspec.convert({**values, **times, **more}, HandoffTimes)

        done = one("h1/0", outcome="committed")
        return [done, one("h2/0", outcome="failed", reason="<i>lost</i>"), one("h3/0", outcome="open")]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser) -> Browser:
    """Without what the test before made it complain of."""
    window.complaints()
    return window


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(Loopback(script=saying(TEXT))) as served:
        yield served


def ask(browser: Browser, text: str) -> None:
    browser.type("#text", text + ENTER)


def answers(browser: Browser) -> list[str]:
    """Those that are complete."""
    return browser.texts("article.assistant:not(.waiting) .text")


def test_an_answer_is_text_and_has_a_timeline(browser: Browser, served: Served, tmp_path: Path) -> None:
    browser.open(f"{served.url}/ui")
    browser.wait(lambda: browser.texts("#model") == ["fake"])
    ask(browser, "hello")
    browser.wait(lambda: browser.texts(".timeline"))
    assert browser.texts(".text pre") == ["print('<b>')"]
    (said,) = answers(browser)
    assert "<img src=x onerror=alert(1)> <script>alert(2)</script>" in said
    assert browser.run("return document.querySelectorAll('#talk img, #talk script, #talk b').length") == 0
    parts = browser.run("return [...document.querySelectorAll('.timeline .bar i')].map((one) => one.dataset.name)")
    assert {"queue", "prefill", "decode"} <= set(parts)
    widths = browser.run("return [...document.querySelectorAll('.timeline .bar i')].map((one) => one.offsetWidth)")
    assert widths[parts.index("decode")] == max(widths)  # a tenth of a second, of little more
    (facts,) = [text for text in browser.texts(".timeline .times") if "tokens out" in text]
    assert "4.0 KiB over local, prefill-0 → decode-0" in facts
    browser.screenshot(tmp_path / "chat.png")
    assert (tmp_path / "chat.png").stat().st_size > 10_000
    assert browser.complaints() == []


def test_turns_are_one_session_and_beginning_anew_ends_it(browser: Browser, served: Served) -> None:
    browser.open(f"{served.url}/ui")
    browser.run("document.querySelector('details').open = true")
    browser.type("#system", "Be brief.")
    browser.type("#max_tokens", "7")
    for number, text in enumerate(("one", "two"), 1):
        ask(browser, text)
        browser.wait(lambda number=number: len(answers(browser)) == number)
    first, second = served.worker.submits
    assert first.session_id == second.session_id != ""
    assert first.sampling.max_tokens == 7
    prompt = bytes(token for token in unpack_tokens(second.prompt) if token < 256).decode()
    assert all(part in prompt for part in ("Be brief.", "one", TEXT[:7], "two"))
    browser.click("#anew")
    assert answers(browser) == []
    ask(browser, "three")
    browser.wait(lambda: len(answers(browser)) == 1)
    assert served.worker.submits[-1].session_id != first.session_id


def test_stop_cancels_and_a_refusal_is_told(browser: Browser) -> None:
    with serving(Loopback(script=saying("word " * 40), pace_s=0.02)) as served:
        browser.open(f"{served.url}/ui")
        ask(browser, "go on")
        browser.wait(lambda: "word" in "".join(browser.texts(".assistant .text")))
        browser.click("#stop")
        assert served.worker.cancelled.wait(10)
        browser.wait(lambda: browser.texts(".assistant .times") == ["stopped"])
        ask(browser, "x" * 300)
        (told,) = browser.wait(lambda: browser.texts(".failed"))
        assert "256" in told
        ask(browser, "after")  # what was refused is not part of the conversation
        browser.wait(lambda: len(answers(browser)) == 3)


def test_the_cluster_is_drawn_as_it_is(browser: Browser, served: Served, tmp_path: Path) -> None:
    served.gateway.workers = Workers()
    served.worker.heartbeat(Load(running=3, queued=1, queued_tokens=99, total_pages=100, free_pages=80, steps=7))
    served.http.post("/v1/completions", json={"model": "fake", "prompt": "hi", "max_tokens": 3})
    browser.open(f"{served.url}/ui#cluster")
    browser.wait(lambda: len(browser.texts("#handoffs tr")) == 4)
    workers = [row.split() for row in browser.texts("#workers tr")]
    assert next(row for row in workers if row[0] == "decode-0@1")[:5] == ["decode-0@1", "ok", "3", "1", "99"]
    widths = browser.run(
        "return [...document.querySelectorAll('#workers tr:nth-child(2) .bar i')]"
        ".map((one) => [one.dataset.name, one.offsetWidth])"
    )
    assert [name for name, _ in widths] == ["request", "incoming", "cached", "free"]
    request, incoming, cached, free = (width for _, width in widths)
    assert free > 2 * cached > 2 * request > 4 * incoming > 0
    assert browser.texts("#lanes tr")[1].split() == ["prefill-0", "decode-0", "tcp", "1.25", "7", "3.0", "MiB", "0"]
    states = browser.texts("#handoffs td:nth-child(5)")
    assert states == ["open", "failed: <i>lost</i>", "committed"]
    assert len(browser.texts("#slowest tr")) == 2
    browser.screenshot(tmp_path / "cluster.png")
    assert browser.complaints() == []
    served.server.stop()
    browser.wait(lambda: "does not answer" in browser.texts("#state")[0])


def test_the_page_loads_nothing_from_elsewhere(served: Served) -> None:
    for path in ("/ui", "/ui/app.js", "/ui/style.css"):
        found = served.http.get(path)
        assert found.status_code == 200
        assert "default-src 'self'" in found.headers["Content-Security-Policy"]
        assert "http://" not in found.text.replace("http://www.w3.org", "")
        assert "https://" not in found.text
    assert "/ui" not in served.http.get("/openapi.json").json()["paths"]


@pytest.mark.skipif(find_spec("fastapi_offline") is None, reason="the environment is older than requirements.lock")
def test_the_api_is_described_without_a_network(browser: Browser, served: Served) -> None:
    """Swagger UI, from this gateway alone, shows what the endpoints take."""
    browser.open(f"{served.url}/docs")
    browser.wait(lambda: "/v1/chat/completions" in browser.texts(".opblock-summary-path"))
    assert {"/v1/responses", "/v1/batches", "/tokenize"} <= set(browser.texts(".opblock-summary-path"))
    browser.run(
        "document.querySelector(arguments[0]).closest('.opblock').querySelector('.opblock-summary-control').click()",
        '[data-path="/v1/completions"]',
    )
    browser.wait(lambda: any("prompt_logprobs" in text for text in browser.texts(".opblock-body")))
    loaded = browser.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert loaded
    assert all(name.startswith((served.url, "data:")) for name in loaded)
    assert browser.complaints() == []
