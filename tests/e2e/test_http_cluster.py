"""`baton serve` as a person starts it: real actors and sockets, the fake model, whose answers prove every page it read.

One cluster, on a Ray that is there already, serves all tests here, and is ended with Ctrl-C by the last one. The one
that brings its own Ray: test_http_demo.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from open_ports import documented_for, listeners_of
from otlp_receiver import Received, Receiver, receiving, tree
from vllm_events import Subscriber

from baton.client import Answer, AsyncClient, Client
from baton.common.engine.fake_runner import fake_answer
from baton.common.ids import WorkerId
from baton.common.messages import SamplingParams
from baton.common.routing_config import KvEventsConfig
from baton.decode.filling import LOCAL_SHARE
from baton.deploy.api_keys import ApiKey, entry_line
from baton.deploy.cli import FAILED, OK, run_command
from baton.deploy.show import all_idle
from baton.deploy.tokenizer import ByteTokenizer
from baton.transfer.kv_publisher import publishing_ports
from baton.transfer.process import recorded_pid, run_root

pytestmark = pytest.mark.ray

MAX_MODEL_LEN = 4096
START_S = 200.0
SETTLE_S = 20.0
END_TOKEN = 257
SECRET = "zyxwvut-never-to-be-logged"
SECRET_TRACE = "5ec4e75ec4e75ec4e75ec4e75ec4e700"
"""Nothing that is asked for with it may be told by a log; and it is the cluster's API key, the only one."""
KEYED = {"Authorization": f"Bearer {SECRET}"}
_PORT = 12_000 + os.getpid() % 16 * 1_200
KV_EVENTS = KvEventsConfig(publish=True, port=_PORT, replay_port=_PORT + 600)


@dataclass
class Cluster:
    process: subprocess.Popen[str]
    url: str
    shown: list[str]

    def baton(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "baton.deploy.cli", *arguments, "--url", self.url]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def settle(self, client: Client) -> bool:
        """True when, within a moment, no worker runs anything and none of their pages is held by anybody."""
        give_up_s = time.monotonic() + SETTLE_S
        while time.monotonic() < give_up_s:
            status = client.status()
            if all_idle(status) and not any(detail["load"]["running"] for detail in status.details.values()):
                return True
        return False


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def cluster(ray_session: str, collector: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    keys.write_text(entry_line(ApiKey(name="tests", sha256=digest, admin=True)))
    command = [sys.executable, "-m", "baton.deploy.cli", "serve", "--model", "fake", "--port", "0"]
    command += ["--ray-address", ray_session]
    command += ["--set", f"cluster=test-http-{os.getpid()}", "--set", f"model.max_model_len={MAX_MODEL_LEN}"]
    command += ["--set", f"tracing.endpoint={collector.url}", "--set", "tracing.sample_ratio=0"]
    command += ["--set", "kv_events.publish=true", "--set", f"kv_events.port={KV_EVENTS.port}"]
    command += ["--set", f"kv_events.replay_port={KV_EVENTS.replay_port}"]
    command += ["--set", f"gateway.api_keys_file={keys}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BATON_API_KEY", SECRET)  # of every client and command here
            yield wait_until_served(process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert process.stderr is not None
        process.stderr.close()


def wait_until_served(process: subprocess.Popen[str]) -> Cluster:
    assert process.stderr is not None
    shown: list[str] = []
    give_up_s = time.monotonic() + START_S
    for line in process.stderr:
        shown.append(line.rstrip())
        assert time.monotonic() < give_up_s, shown
        if line.lstrip().startswith("baton run"):
            return Cluster(process, line.split()[3], shown)
    raise AssertionError("\n".join(shown))


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.url) as client:
        yield client


def right_text(prompt: str, **sampling: float | int) -> tuple[str, int, str]:
    """(text, tokens, finish reason) that the fake model must give."""
    params = SamplingParams(**{"temperature": 0.0, "stop_token_ids": (END_TOKEN,), **sampling})  # type: ignore[arg-type]
    answer = fake_answer(list(prompt.encode()), params, MAX_MODEL_LEN)
    return ByteTokenizer().decode(answer.tokens), len(answer.tokens), answer.finish_reason


def test_it_says_what_was_decided_and_how_to_ask(cluster: Cluster) -> None:
    shown = "\n".join(cluster.shown)
    assert "fake in float32: 1 prefill, 2 decode" in shown
    assert f"model.max_model_len = {MAX_MODEL_LEN}" in shown
    for worker in ("prefill-0", "decode-0", "decode-1", "gateway-0"):
        assert f"{worker}: ready" in shown
    assert f"curl {cluster.url}/v1/chat/completions" in shown


def test_programs_outside_read_what_is_cached_as_vllm_tells_it(client: Client, cluster: Cluster) -> None:
    prompt = "What is cached is told to whoever indexes it, block by block. " * 8
    client.complete(prompt, max_tokens=4, temperature=0.0)
    assert cluster.settle(client)
    wanted = tuple(prompt.encode())
    subscribers = [
        Subscriber(KV_EVENTS.host, *publishing_ports(WorkerId(worker), KV_EVENTS))
        for worker in ("prefill-0", "decode-0", "decode-1")
    ]
    try:
        for subscriber in subscribers:
            subscriber.replay()
        longest = [max(map(len, one.tokens.values()), default=0) for one in subscribers]
        assert longest[0] >= len(wanted) // 16 * 16, "whoever computed it has it"
        assert max(longest[1:]) >= len(wanted) // 16 * 16, "and whoever it was handed to"
        told = {tokens[: len(wanted)] for one in subscribers for tokens in one.tokens.values()}
        assert wanted[: len(wanted) // 16 * 16] in {tokens[: len(wanted) // 16 * 16] for tokens in told}
    finally:
        for subscriber in subscribers:
            subscriber.close()


def test_every_open_port_is_in_the_operations_guide(cluster: Cluster) -> None:
    (run_dir,) = Path(run_root()).glob(f"test-http-{os.getpid()}-*")
    names = sorted(path.name for path in run_dir.glob("[!.]*"))
    assert names == ["controller", "decode-0@1", "decode-1@1", "gateway-0@1", "prefill-0@1"]
    for name in names:
        pid = recorded_pid(str(run_dir), name)
        assert pid is not None, name
        worker = WorkerId(name.partition("@")[0])
        wanted, found = documented_for(worker.partition("-")[0]), listeners_of(pid)
        assert len(found) == len(wanted), (name, found, wanted)
        # All but Ray's own are on the addresses that settings name: by default on this machine's own.
        everywhere = {one.port for one in found if not ipaddress.ip_address(one.host).is_loopback}
        assert len(everywhere) == sum(one.host == "all addresses" for one in wanted), (name, found)
        chosen = [one for one in wanted if one.port.startswith("`")]
        if worker.startswith("gateway"):
            known = {httpx.URL(cluster.url).port}
        else:
            known = set(publishing_ports(worker, KV_EVENTS)) if chosen else set()
        assert known <= {one.port for one in found} - everywhere, (name, found)
        assert len(known) == len(chosen), (name, chosen)


def test_answers_are_right_and_were_handed_over(client: Client, cluster: Cluster) -> None:
    for length in (1, 15, 16, 17, 100, 3000):
        prompt = "".join(chr(97 + (length + n * n) % 26) for n in range(length))
        answer = client.complete(prompt, max_tokens=50, temperature=0)
        text, tokens, reason = right_text(prompt, max_tokens=50)
        assert (answer.text, answer.completion_tokens, answer.finish_reason) == (text, tokens, reason)
        timeline = answer.timeline
        assert timeline.local_tokens + timeline.cached_tokens + timeline.transferred_tokens == length
        assert timeline.transferred_tokens
        assert timeline.lane
        assert answer.prompt_tokens == length >= answer.cached_tokens
    assert cluster.settle(client)


def test_a_stranger_is_let_nowhere(cluster: Cluster) -> None:
    for key in ("", "Bearer wrong", f"Bearer {SECRET} "[:-2]):
        refused = httpx.post(f"{cluster.url}/v1/completions", headers={"Authorization": key}, timeout=20)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.get(f"{cluster.url}/health", timeout=20).status_code == 200


def traced(cluster: Cluster, trace_id: str, **body: object) -> httpx.Response:
    headers = KEYED | {
        "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01",
        "tracestate": "vendor=1",
        "X-Request-Id": "mine",
    }
    return httpx.post(f"{cluster.url}/v1/completions", json={"model": "fake", **body}, headers=headers, timeout=60)


def test_a_traced_request_is_one_tree_over_all_processes(cluster: Cluster, collector: Receiver) -> None:
    trace_id, prompt = "4bf92f3577b34da6a3ce929d0e0e4736", "traced from end to end " * 40
    answer = traced(cluster, trace_id, prompt=prompt, max_tokens=8, temperature=0, ignore_eos=True)
    timeline = answer.json()["baton"]["timeline"]
    decode, prefill = timeline["decode_worker"], timeline["prefill_worker"]

    def complete(spans: list[Received]) -> bool:
        names = [(span.name, span.worker) for span in spans]
        return {("POST /v1/completions", "gateway-0"), ("transfer", prefill), ("scatter", decode)} <= {*names} and (
            "decode_worker",
            decode,
        ) in names

    spans = collector.wait(trace_id, complete, SETTLE_S)
    assert tree(spans) == {
        "POST /v1/completions @gateway-0": {
            "text_completion fake @gateway-0": {
                "queue @gateway-0": {},
                "first_token @gateway-0": {},
                "placement @gateway-0": {
                    f"decode_worker @{decode}": {
                        f"queue @{decode}": {},
                        f"handoff @{decode}": {
                            f"staging @{decode}": {},
                            f"prefill_worker @{prefill}": {
                                f"queue @{prefill}": {},
                                f"prefill @{prefill}": {},
                                f"transfer @{prefill}": {},
                            },
                            f"transfer @{decode}": {f"scatter @{decode}": {}},
                        },
                        f"decode_queue @{decode}": {},
                        f"decode @{decode}": {},
                    }
                },
            }
        }
    }
    by_name = {(span.name, span.worker): span for span in spans}
    root = by_name["POST /v1/completions", "gateway-0"]
    assert (root.parent, root.state) == ("00f067aa0ba902b7", "vendor=1")
    assert answer.headers["traceparent"] == f"00-{trace_id}-{root.span_id}-01"
    assert root.attributes["baton.client_request_id"] == answer.headers["X-Request-Id"] == "mine"
    asked = by_name["text_completion fake", "gateway-0"].attributes
    assert asked["gen_ai.usage.input_tokens"] == len(prompt)
    assert asked["gen_ai.usage.output_tokens"] == 8
    assert asked["gen_ai.response.finish_reasons"] == ("length",)
    moved = by_name["transfer", decode].attributes
    assert moved["baton.transfer.bytes"] == timeline["transfer_bytes"]
    assert moved["baton.lane"] == timeline["lane"]
    assert all(span.error == "" for span in spans)
    assert all(root.begin_ns - 5e6 <= span.begin_ns <= span.end_ns <= root.end_ns + 1e9 for span in spans)


def test_who_is_not_sampled_is_not_traced(cluster: Cluster) -> None:
    assert (
        "traceparent"
        not in httpx.post(
            f"{cluster.url}/v1/completions",
            json={"model": "fake", "prompt": "x", "max_tokens": 1},
            headers=KEYED,
            timeout=60,
        ).headers
    )


def test_a_seed_gives_the_same_answer_again(client: Client) -> None:
    texts = [client.complete("a seeded prompt", max_tokens=40, temperature=0.8, seed=seed).text for seed in (5, 5, 6)]
    assert texts[0] == texts[1] == right_text("a seeded prompt", max_tokens=40, temperature=0.8, seed=5)[0]
    assert texts[2] != texts[0]


def prompt_tokens_counted(cluster: Cluster) -> float:
    """Of all sources together."""
    page = httpx.get(f"{cluster.url}/metrics", timeout=20).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in page if line.startswith("baton_prompt_tokens_total{"))


def test_every_process_tells_what_it_has_refused(cluster: Cluster) -> None:
    page = httpx.get(f"{cluster.url}/metrics", timeout=20).text
    for worker in ("controller", "gateway-0", "prefill-0", "decode-0"):
        assert f'baton_refused_frames_total{{reason="malformed",worker="{worker}"}} 0.0' in page


def test_many_at_once_are_all_right(cluster: Cluster) -> None:
    prompts = [f"prompt number {n} " * (n % 7 + 1) for n in range(60)]
    before = prompt_tokens_counted(cluster)

    async def ask() -> list[str]:
        async with AsyncClient(cluster.url) as client:
            answers = await client.map(prompts, concurrency=30, max_tokens=30, temperature=0)
            return [answer.text for answer in answers]

    assert asyncio.run(ask()) == [right_text(prompt, max_tokens=30)[0] for prompt in prompts]
    assert prompt_tokens_counted(cluster) - before == sum(map(len, prompts)), "each token of a prompt is counted once"


def test_a_job_is_found_again_and_its_answers_are_right(cluster: Cluster) -> None:
    prompts = [f"a prompt of a job, number {n}" for n in range(20)]
    with Client(cluster.url) as client:
        job_id = client.submit(prompts, key="of the cluster", max_tokens=20, temperature=0).id
    with Client(cluster.url) as client:
        answers = [one for one in client.job(job_id).results(60) if isinstance(one, Answer)]
        assert [answer.text for answer in answers] == [right_text(prompt, max_tokens=20)[0] for prompt in prompts]
        assert all(answer.timeline.decode_worker for answer in answers)
        again = client.map(prompts, key="of the cluster", max_tokens=20, temperature=0)
        assert again == answers, "told again, not computed again"


def test_the_openai_package_sees_a_stream(cluster: Cluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=SECRET)
    chunks = list(
        client.completions.create(
            model="fake", prompt="streamed", max_tokens=60, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
    )
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == right_text("streamed", max_tokens=60, stop_token_ids=())[0]


def test_a_stop_string_ends_it_everywhere(cluster: Cluster, client: Client) -> None:
    whole, _, _ = right_text("stop me", max_tokens=200, stop_token_ids=())
    stop = whole[20:23]
    answer = client.complete("stop me", max_tokens=200, temperature=0, ignore_eos=True, stop=[stop])
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"
    assert cluster.settle(client)


def test_a_conversation_of_five_turns_sends_each_token_at_most_once(cluster: Cluster, client: Client) -> None:
    session = client.open_session()
    text, sent = "a conversation " * 5, 0
    for turn in range(5):
        expected, _, _ = right_text(text, max_tokens=20 + turn, stop_token_ids=())
        answer = client.complete(
            text, max_tokens=20 + turn, temperature=0, ignore_eos=True, session_id=session, timeout_s=60
        )
        assert answer.text == expected
        timeline = answer.timeline
        sent += timeline.transferred_tokens
        known = timeline.cached_tokens + timeline.local_tokens
        assert timeline.local_tokens < 16 + known // LOCAL_SHARE, "the rest of a page, and a short end"
        assert timeline.cached_tokens + timeline.local_tokens + timeline.transferred_tokens == len(text.encode())
        if turn:
            assert timeline.transferred_tokens <= 30, "the new words and no more"
        assert sent <= len(text.encode())
        text = f"{text}{''.join(c for c in answer.text if c.isascii())} and then {turn}"
    held = [detail["census"].get("session", 0) for detail in client.status().details.values()]
    assert max(held) > 0
    client.close_session(session)
    assert cluster.settle(client)


def test_hanging_up_frees_everything(cluster: Cluster, client: Client) -> None:
    streams = [client.stream(f"gone {n}", max_tokens=3000, temperature=0, ignore_eos=True) for n in range(8)]
    for stream in streams:
        next(iter(stream))
    for stream in streams:
        stream.close()
    assert cluster.settle(client)


def test_a_deadline_in_the_middle_of_an_answer(cluster: Cluster, client: Client) -> None:
    with pytest.raises(Exception, match="deadline_exceeded"):
        client.complete("too slow", max_tokens=4000, ignore_eos=True, timeout_s=0.05)
    assert cluster.settle(client)


def test_status_and_run_from_the_terminal(cluster: Cluster) -> None:
    shown = cluster.baton("status")
    assert shown.returncode == 0, shown.stderr
    for word in ("decode-0", "decode-1", "prefill-0", "gateway-0", "Lanes", "Pages", "Every page"):
        assert word in shown.stdout
    asked = cluster.baton("run", "hello", "--raw", "--max-tokens", "10", "--temperature", "0")
    assert asked.returncode == 0
    assert "over" in asked.stderr


def test_who_holds_the_pages(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    def baton(*arguments: str) -> tuple[int, str, str]:
        code = run_command([*arguments, "--url", cluster.url])
        said = capfd.readouterr()
        return code, said.out, said.err

    assert '"census"' in baton("status", "--json")[1]
    code, census, _ = baton("kv")
    assert (code, "idle" in census) == (OK, True)
    _, owner, said = baton("kv", "--worker", "decode-0", "--page", "1")
    assert owner.startswith("full page 1: "), said
    code, _, said = baton("kv", "--worker", "decode-9", "--page", "1")
    assert (code, "no worker 'decode-9'" in said) == (FAILED, True)
    code, _, said = baton("kv", "--worker", "decode-0", "--page", "99999")
    assert (code, "from 1 to 4096" in said) == (FAILED, True)
    assert "Traceback" not in said


def ask_with_secrets(cluster: Cluster) -> dict[str, httpx.Response]:
    """Every way that a request can go, by name. Each has the secret in it."""
    always = {**KEYED, "traceparent": f"00-{SECRET_TRACE}-00f067aa0ba902b7-01"}
    with httpx.Client(base_url=cluster.url, timeout=60, headers=always) as http:

        def ask(path: str, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
            return http.post(path, json={"model": "fake", "max_tokens": 4, "prompt": SECRET, **body}, headers=headers)

        chat = [{"role": "user", "content": SECRET}]
        tool = {"type": "function", "function": {"name": "f", "description": SECRET, "parameters": {"x": SECRET}}}
        answers = {
            "whole": ask("/v1/completions"),
            "many": ask("/v1/completions", n=3, stop=[SECRET]),
            "stream": ask("/v1/completions", stream=True),
            "chat": http.post("/v1/chat/completions", json={"model": "fake", "messages": chat, "max_tokens": 4}),
            "response": http.post("/v1/responses", json={"model": "fake", "input": SECRET, "max_output_tokens": 4}),
            "tools": http.post("/v1/chat/completions", json={"model": "fake", "messages": chat, "tools": [tool]}),
            "broken": http.post("/v1/completions", content=f'{{"prompt": "{SECRET}"'),
            "field": ask("/v1/completions", **{SECRET: SECRET}),
            "value": ask("/v1/completions", temperature=SECRET),
            "model": ask("/v1/completions", model=SECRET),
            "long": ask("/v1/completions", prompt=SECRET * 500),
            "grammar": ask("/v1/completions", guided_regex=f"({SECRET}"),
            "schema": ask("/v1/completions", response_format={"type": "json_schema", "json_schema": {"name": SECRET}}),
            "session": ask("/v1/completions", session_id=SECRET),
            "key": ask("/v1/completions", {"Idempotency-Key": SECRET}),
            "other body": ask("/v1/completions", {"Idempotency-Key": SECRET}, max_tokens=5),
            "name": ask("/v1/completions", {"X-Request-Id": f"{SECRET} <>", "traceparent": SECRET}),
            "deadline": ask("/v1/completions", max_tokens=4000, ignore_eos=True, timeout_s=0.05),
            "path": http.get(f"/{SECRET}?prompt={SECRET}"),
            "tokens": http.post("/tokenize", json={"model": "fake", "prompt": SECRET}),
            "file": http.post("/v1/files", data={"purpose": SECRET}, files={"file": (SECRET, SECRET.encode())}),
            "batch": http.post("/v1/batches", json={"input_file_id": SECRET, "endpoint": SECRET}),
        }
        with http.stream("POST", "/v1/completions", json={
            "model": "fake", "prompt": SECRET, "stream": True, "max_tokens": 3000, "ignore_eos": True,
        }, headers={"X-Request-Id": "hangs-up"}) as stream:  # fmt: skip
            next(stream.iter_lines())
    return answers


def lines_of(logs: Path) -> list[dict[str, Any]]:
    """Of the gateway: one JSON object each."""
    said = [line for path in logs.glob("worker-*.err") for line in path.read_text(errors="replace").splitlines()]
    lines = [json.loads(line) for line in said if line.startswith("{")]
    return [line for line in lines if line["worker"] == "gateway-0" and line["event"] == "request"]


def test_the_log_has_a_line_for_each_request_and_no_word_of_it(
    cluster: Cluster, client: Client, ray_logs: Path, collector: Receiver
) -> None:
    answers = ask_with_secrets(cluster)
    wanted = {answer.headers["X-Baton-Request-Id"]: name for name, answer in answers.items() if name != "path"}
    give_up_s = time.monotonic() + SETTLE_S
    while True:
        lines = lines_of(ray_logs)
        by_id = {line["request"]: line for line in lines}
        gone = [line for line in lines if line.get("client_request") == "hangs-up"]
        if gone and wanted.keys() <= by_id.keys():
            break
        assert time.monotonic() < give_up_s, [name for one, name in wanted.items() if one not in by_id]
    assert (gone[0]["status"], gone[0]["reason"], gone[0]["path"]) == (499, "cancelled", "/v1/completions")
    for request_id, name in wanted.items():
        assert by_id[request_id]["status"] == answers[name].status_code, name
        assert (by_id[request_id]["role"], by_id[request_id]["key"]) == ("gateway", "tests")
    whole = by_id[answers["whole"].headers["X-Baton-Request-Id"]]
    assert (whole["reason"], whole["prompt_tokens"], whole["completion_tokens"]) == ("length", len(SECRET), 4)
    assert whole["stages_ms"].keys() == {
        "gateway", "queue", "reserve", "restore", "handoff", "prefill", "transfer", "scatter", "decode_queue", "decode",
    }  # fmt: skip
    reasons = {name: by_id[one].get("reason") for one, name in wanted.items()}
    assert (reasons["deadline"], reasons["long"], reasons["model"]) == (
        "deadline_exceeded", "prompt_too_long", "model_not_found",
    )  # fmt: skip
    assert cluster.settle(client)
    for path in ray_logs.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    assert not any(SECRET in line for line in cluster.shown)
    assert whole["trace"] == SECRET_TRACE
    roots = {"POST /v1/completions", "POST /v1/chat/completions", "POST /v1/responses"}

    def told(spans: list[Received]) -> bool:
        """Each process sends its own, when it likes."""
        errors = {span.error for span in spans if span.name == "decode_worker"}
        return roots <= {span.name for span in spans} and errors >= {"", "cancelled"}

    assert told(collector.wait(SECRET_TRACE, told, SETTLE_S)), "somebody hung up, and no decode worker told"
    assert not any(SECRET.encode() in body for body in collector.raw)


def test_two_clusters_do_not_share_a_port(cluster: Cluster) -> None:
    port = cluster.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "baton.deploy.cli", "serve", "--model", "fake", "--port", port]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2
    assert "already in use" in second.stderr
    assert "Traceback" not in second.stderr


def test_ctrl_c_ends_it_cleanly(cluster: Cluster, client: Client) -> None:
    pids = [int(detail["pid"]) for detail in client.status().details.values()]
    assert len(pids) == 3
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.process.wait(60) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
