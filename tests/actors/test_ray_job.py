"""The client inside `ray job submit`, as docs/CLIENT.md says it: a Ray with its Jobs API, and a real cluster on it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from baton.client import Client
from baton.common import env
from baton.common.engine.fake_runner import fake_answer
from baton.common.messages import SamplingParams
from baton.deploy.listener import draw_port
from baton.deploy.tokenizer import ByteTokenizer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

START_S = 120.0
PAGE = Path(__file__).parents[2] / "docs" / "CLIENT.md"
PROMPTS = [f"prompt {n}" for n in range(12)]
WORK = f"""
import json, os, signal
from pathlib import Path
from baton.client import Client

with Client() as client:
    if not Path("{{begun}}").exists():
        for event in client.submit({PROMPTS!r}, key="ray", max_tokens=20, temperature=0).events():
            Path("{{begun}}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    answers = client.map({PROMPTS!r}, key="ray", max_tokens=20, temperature=0)
    streamed = "".join(client.stream("streamed", max_tokens=20, temperature=0))
    print("FOUND", json.dumps([[answer.text, answer.request_id] for answer in answers] + [[streamed, ""]]))
"""


@pytest.fixture(scope="module")
def environment() -> Mapping[str, str]:
    """Of Ray and of everything on it: its `python` is ours."""
    env.prepare_ray(joins=False)
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def ray_ports(environment: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """(of its head, of its Jobs API)."""
    head, jobs = draw_port("127.0.0.1"), draw_port("127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="bt", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = ["ray", "start", "--head", "--block", f"--port={head}", f"--temp-dir={folder}", "--num-cpus=64"]
        command += ["--node-ip-address=127.0.0.1", "--include-dashboard=true", f"--dashboard-port={jobs}"]
        command += ["--object-store-memory=100000000", "--disable-usage-stats"]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for(f"http://127.0.0.1:{jobs}/api/version")
            yield head, jobs
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def wait_for(url: str) -> None:
    give_up_s = time.monotonic() + START_S
    with httpx.Client(timeout=5.0) as http:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if http.get(url).is_success:
                    return
            assert time.monotonic() < give_up_s, url


@pytest.fixture(scope="module")
def url(ray_ports: tuple[int, int], environment: Mapping[str, str]) -> Iterator[str]:
    port = draw_port("127.0.0.1")
    command = [sys.executable, "-m", "baton.deploy.cli", "serve", "--model", "fake", "--port", str(port)]
    command += ["--ray-address", f"127.0.0.1:{ray_ports[0]}", "--set", f"cluster=test-ray-job-{os.getpid()}"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{port}/ready")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def right_text(prompt: str) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(257,))
    return ByteTokenizer().decode(fake_answer(list(prompt.encode()), params, 4096).tokens)


def test_a_ray_job_uses_the_client(
    url: str, ray_ports: tuple[int, int], environment: Mapping[str, str], tmp_path: Path
) -> None:
    (tmp_path / "work.py").write_text(WORK.replace("{begun}", str(tmp_path / "begun")))
    said = re.search(r"^ray job submit .*$", PAGE.read_text(), re.MULTILINE)
    assert said is not None
    command = shlex.split(said[0].replace("http://127.0.0.1:8000", url))
    found = []
    for run in range(3):  # as Ray does itself when the script's node dies
        done = subprocess.run(
            command,
            env={**environment, "RAY_ADDRESS": f"http://127.0.0.1:{ray_ports[1]}"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        if run == 0:
            assert done.returncode != 0, "it was killed when the first answer was there"
            continue
        assert done.returncode == 0, done.stdout + done.stderr
        line = next(line for line in done.stdout.splitlines() if "FOUND" in line)
        found.append(json.loads(line.partition("FOUND ")[2]))
    assert [text for text, _ in found[0]] == [right_text(prompt) for prompt in (*PROMPTS, "streamed")]
    assert found[1] == found[0], "the same answers of the same requests"
    with Client(url) as client:  # from outside
        assert [status.request_counts.completed for status in client.jobs()] == [len(PROMPTS)]
