"""The systems that are compared on the same cores: Baton with and without disaggregation, vLLM with and without.

Owns: vLLM's servers, which are stopped while it is not their turn. Its disaggregation is asked as its own proxy asks
it, by the client: without the proxy's hop, in its favour.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from baton.common.config import ClusterConfig, DecodeConfig, GatewayConfig, KvConfig, LivenessConfig, ModelConfig
from baton.common.model.loading import Dtype, load_tokenizer, weights_directory
from baton.deploy.launch import ClusterHandle, launch
from benchmarks.children import ROOT
from benchmarks.pd.load import ITL_SLO_S

MAX_LEN = 4096
START_S = 900.0
VLLM = ROOT / ".venv-vllm"


async def _events(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[str]:
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{url}: {answer.status_code} {(await answer.aread())[:300]!r}")
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class Baton:
    """A cluster of its own on the Ray of this process."""

    def __init__(self, name: str, model: str, dtype: Dtype, prefill: int, decode: int) -> None:
        self.name, self._model = name, model
        self._config = ClusterConfig(
            cluster=f"bench-{prefill}-{decode}-{os.getpid()}",
            prefill=prefill,
            decode=decode,
            model=ModelConfig(model=model, dtype=dtype, max_model_len=MAX_LEN),
            kv=KvConfig(pool_bytes=1 << 30),
            decode_worker=DecodeConfig(chunk_tokens=256, itl_s=ITL_SLO_S),
            liveness=LivenessConfig(dead_after_s=15.0),
            gateway=GatewayConfig(port=0),
        )
        self._cluster: ClusterHandle | None = None

    def start(self) -> None:
        self._cluster = launch(self._config, on_progress=print)

    def chunks(self, client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
        assert self._cluster is not None
        return _events(client, self._cluster.gateway_url, {"model": self._model, **body})

    def resume(self) -> None:
        """Its processes sleep while nobody asks."""

    def pause(self) -> None:
        pass

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.shutdown()


class Vllm:
    """One server per entry of `cores`: one that does everything, or a prefill and a decode server."""

    def __init__(self, name: str, model: str, dtype: Dtype, cores: Sequence[Sequence[int]]) -> None:
        self.name = name
        self._cores = cores
        self._dtype = dtype
        self._directory = str(weights_directory(model, dtype))
        self._tokenizer = tempfile.TemporaryDirectory(prefix="bench-pd-")
        load_tokenizer(model).save_pretrained(self._tokenizer.name)
        self._servers: list[subprocess.Popen[bytes]] = []
        self._urls: list[str] = []

    def start(self) -> None:
        for cores in self._cores:
            port, side_channel = _free_port(), _free_port()
            command = [
                "taskset", "-c", ",".join(map(str, cores)),
                str(VLLM / "bin/python"), "-m", "vllm.entrypoints.openai.api_server", "--model", self._directory,
                "--tokenizer", self._tokenizer.name, "--served-model-name", "m", "--host", "127.0.0.1",
                "--port", str(port), "--dtype", self._dtype, "--max-model-len", str(MAX_LEN),
            ]  # fmt: skip
            if len(self._cores) > 1:
                connector = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'
                command += ["--kv-transfer-config", connector]
            environment = {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_NO_USAGE_STATS": "1",
                "UCX_TLS": "tcp,self,sm",
                "HF_HUB_OFFLINE": "1",
            }
            with Path(self._tokenizer.name, f"server-{port}.log").open("wb") as log:
                process = subprocess.Popen(
                    command, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True
                )
            self._servers.append(process)
            self._urls.append(f"http://127.0.0.1:{port}")
        for server, url in zip(self._servers, self._urls, strict=True):
            self._wait(server, url)

    def _wait(self, server: subprocess.Popen[bytes], url: str) -> None:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and server.poll() is None:
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(1.0)
        log = Path(self._tokenizer.name, f"server-{url.rpartition(':')[2]}.log").read_text(errors="replace")
        raise RuntimeError(f"{self.name} did not start: {log.strip()[-500:]}")

    async def chunks(self, client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
        body = {"model": "m", **body}
        if len(self._urls) > 1:
            asked = {"do_remote_decode": True, "do_remote_prefill": False}
            alone = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": asked}
            answer = await client.post(f"{self._urls[0]}/v1/completions", json=alone)
            body["kv_transfer_params"] = answer.raise_for_status().json().get("kv_transfer_params")
            if not body["kv_transfer_params"]:
                raise RuntimeError(f"{self.name}'s prefill server offers nothing to its decode server")
        async for event in _events(client, self._urls[-1], body):
            yield event

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGKILL)
        for server in self._servers:
            server.wait()
        self._tokenizer.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        """To every process of each server."""
        for server in self._servers:
            if server.poll() is None:
                os.killpg(server.pid, number)
