"""What a token costs on its way from a decode worker to a client, and what an open stream weighs.

    python -m benchmarks.bench_gateway [--streams 1 64 125 250 500] [--tokens 128] [--write docs/benchmarks/gateway.md]

A real cluster of the fake model (1 prefill, 1 decode whose steps take `--step-ms`), and that many clients at once, each
with a connection of its own. Every answer is compared with what the fake model must say, to the last character; each
stream must end with one usage and one `[DONE]`. CPU time is that of the processes, as the kernel counts it; memory is
what the gateway's grew by while all streams were open. `--write` puts the table between two marks of the document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import numpy as np
import ray
from rich.console import Console

from baton.common.config import FAKE_MODEL, JobsConfig
from baton.common.engine.fake_answer import fake_generate
from baton.common.messages import SamplingParams
from baton.common.resolve import Layer
from baton.deploy.launch import CLASS_PATHS, launch
from baton.deploy.ray_join import LOCAL_NODE_ADDRESS
from baton.deploy.serve import decide
from baton.deploy.tokenizer import ByteTokenizer
from benchmarks.paced import PACE_S

BEGIN, END = "<!-- bench-gateway -->\n", "<!-- /bench-gateway -->\n"
PROMPT_TOKENS = 32
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Stream:
    """What one client saw."""

    ttft_s: float
    gaps_s: list[float]
    events: int


@dataclass(frozen=True, slots=True)
class Row:
    streams: int
    tokens_per_s: float
    events_per_token: float
    gateway_us: float  # CPU per token, as the rest
    decode_us: float
    client_us: float
    kib_per_stream: float
    ttft_s: tuple[float, float]  # median, 99th percentile, as the other
    gap_s: tuple[float, float]


# ------------------------------------------------------------------------------------------------------- processes


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def pid_of(actor: str) -> int:
    """Of the one process that Ray shows by this name."""
    found = [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and (folder / "cmdline").read_bytes().startswith(f"ray::{actor}".encode())
    ]
    assert len(found) == 1, f"{actor}: {found}; is another cluster running here?"
    return found[0]


# --------------------------------------------------------------------------------------------------------- clients


async def open_stream(url: str, prompt: Sequence[int], tokens: int, begin: asyncio.Event) -> Stream:
    """One request over a connection of its own. Raises AssertionError for an answer that is not right."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    body = json.dumps(
        {
            "model": FAKE_MODEL,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    await begin.wait()
    asked = time.perf_counter()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: baton\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    times, text, usages, ends = list[float](), list[str](), list[int](), 0
    async for line in reader:
        if not line.startswith(b"data: "):
            continue
        assert not ends, "something came behind [DONE]"
        if line.startswith(b"data: [DONE]"):
            ends += 1
            continue
        event = json.loads(line[6:])
        assert "error" not in event, event
        if event.get("usage"):
            usages.append(event["usage"]["completion_tokens"])
        for choice in event["choices"]:
            text.append(choice["text"])
            times.append(time.perf_counter())
    writer.close()
    said = fake_generate(list(prompt), SamplingParams(max_tokens=tokens, temperature=0.0), tokens)
    assert "".join(text) == ByteTokenizer().decode(said), "a token is missing, or came twice"
    assert (usages, ends) == ([tokens], 1), (usages, ends)
    return Stream(times[0] - asked, np.diff(times).tolist(), len(times))


async def measure(url: str, streams: int, tokens: int, gateway: int, decode: int) -> Row:
    rng = random.Random(time.time_ns())  # prompts that no cache has
    begin = asyncio.Event()
    before_bytes = resident_bytes(gateway)
    prompts = [[rng.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(streams)]
    tasks = [asyncio.create_task(open_stream(url, prompt, tokens, begin)) for prompt in prompts]
    most_bytes = before_bytes
    whose = (gateway, decode, os.getpid())
    before = [cpu_s(pid) for pid in whose]
    began = time.perf_counter()
    begin.set()
    while not all(task.done() for task in tasks):
        await asyncio.wait(tasks, timeout=0.1, return_when=asyncio.ALL_COMPLETED)
        most_bytes = max(most_bytes, resident_bytes(gateway))
    took_s = time.perf_counter() - began
    spent = [cpu_s(pid) - old for pid, old in zip(whose, before, strict=True)]
    seen = [task.result() for task in tasks]
    total = streams * tokens
    gaps = [gap for one in seen for gap in one.gaps_s]
    per_token = [1e6 * seconds / total for seconds in spent]
    return Row(
        streams,
        total / took_s,
        sum(one.events for one in seen) / total,
        *per_token,
        (most_bytes - before_bytes) / streams / 1024,
        quantiles([one.ttft_s for one in seen]),
        quantiles(gaps),
    )


def run(runs: int, streams: int, tokens: int, processes: tuple[str, int, int]) -> Row:
    url, gateway, decode = processes
    asyncio.run(measure(url, 8, 16, gateway, decode))  # what is only done once
    row = median_of([asyncio.run(measure(url, streams, tokens, gateway, decode)) for _ in range(runs)])
    print(row, flush=True)
    return row


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    return float(np.percentile(values, 50)), float(np.percentile(values, 99))


def median_of(rows: Sequence[Row]) -> Row:
    """By what a token costs the gateway. Memory: the most, as the allocator keeps what it once had."""
    row = sorted(rows, key=lambda one: one.gateway_us)[len(rows) // 2]
    return Row(
        row.streams,
        row.tokens_per_s,
        row.events_per_token,
        row.gateway_us,
        row.decode_us,
        row.client_us,
        max(one.kib_per_stream for one in rows),
        row.ttft_s,
        row.gap_s,
    )


# ----------------------------------------------------------------------------------------------------------- report


def table(rows: Sequence[Row], tokens: int, step_ms: float) -> str:
    lines = [
        f"{tokens} tokens each, a step every {step_ms:g} ms, median of several runs; {os.cpu_count()} cores for "
        "cluster and clients together.",
        "",
        "| streams | tokens/s | events per token | gateway, µs/token | decode, µs/token | clients, µs/token "
        "| gateway, KiB/stream | TTFT p50 / p99, s | gap p50 / p99, ms |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.streams} | {row.tokens_per_s:,.0f} | {row.events_per_token:.2f} | {row.gateway_us:.0f} "
            f"| {row.decode_us:.0f} | {row.client_us:.0f} | {row.kib_per_stream:.0f} "
            f"| {row.ttft_s[0]:.2f} / {row.ttft_s[1]:.2f} | {1e3 * row.gap_s[0]:.1f} / {1e3 * row.gap_s[1]:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 125, 250, 500])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--step-ms", type=float, default=100.0, help="of a decode worker's step")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--write", type=Path, help="a document with the two marks")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    wanted = {
        "model": {"model": FAKE_MODEL, "max_model_len": 2048},
        "prefill": 1,
        "decode": 1,
        "gateway": {"port": 0, "max_inflight_requests": max(arguments.streams)},
        "decode_worker": {"max_running_requests": max(arguments.streams)},
        "kv": {"num_pages": 1 << 15},
    }
    config = decide([Layer("this benchmark", wanted)], console)
    os.environ[PACE_S] = str(arguments.step_ms / 1000)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ray.init(
        address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, _node_ip_address=LOCAL_NODE_ADDRESS
    )
    classes = {**CLASS_PATHS, "decode": "benchmarks.paced:PacedDecodeActor"}
    with TemporaryDirectory() as folder:
        handle = launch(replace(config, jobs=JobsConfig(database=f"{folder}/jobs.sqlite")), class_paths=classes)
        try:
            processes = handle.gateway_url, pid_of("GatewayActor"), pid_of("PacedDecodeActor")
            rows = [run(arguments.runs, streams, arguments.tokens, processes) for streams in arguments.streams]
        finally:
            handle.shutdown()
            ray.shutdown()
    text = table(rows, arguments.tokens, arguments.step_ms)
    console.print(text, markup=False, soft_wrap=True)
    if arguments.write is not None:
        before, _, rest = arguments.write.read_text().partition(BEGIN)
        arguments.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
