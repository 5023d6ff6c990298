"""A real headless Chromium, driven through ChromeDriver's own HTTP protocol (W3C WebDriver)."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from baton.deploy.listener import draw_port

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1000,800",
]  # fmt: skip
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
ENTER, SHIFT = "\ue007", "\ue008"
PATIENCE_S = 30.0


class Browser:
    """One window."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http = http
        self._base = f"/session/{session}"

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """What the body of this function returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        self._call("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._call("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def texts(self, selector: str) -> list[str]:
        """As a person sees them."""
        found: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)", selector
        )
        return found

    def wait(self, what: Callable[[], Any]) -> Any:
        """Until it is something. Asks again and again: a page has no other way to say so."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not (found := what()):
            assert time.monotonic() < give_up_s, self.run("return document.body.innerText")
        return found

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def complaints(self) -> list[str]:
        """What the browser found wrong with the page: exceptions, refused loads, forbidden scripts."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def _find(self, selector: str) -> str:
        found: dict[str, str] = self._call("POST", "/element", {"using": "css selector", "value": selector})
        return found[ELEMENT]

    def _call(self, method: str, path: str, body: dict[str, object] | None = None) -> Any:
        response = self._http.request(method, self._base + path, json=body)
        assert response.is_success, response.text
        return response.json()["value"]


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    assert DRIVER is not None
    port = draw_port("127.0.0.1")
    with subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            assert any("started successfully" in line for line in driver.stdout)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                options = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": CHROMIUM}
                wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
                made = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
                assert made.is_success, made.text
                session = made.json()["value"]["sessionId"]
                yield Browser(http, session)
                http.delete(f"/session/{session}")
        finally:
            driver.terminate()
