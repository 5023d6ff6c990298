"""A real `ray up` over ssh between hosts of their own: Baton is deployed on it, a host is lost and comes back, one is
left in good order, and all of it comes down clean."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hosts
import httpx
import pytest
import yaml
from harness import ask_all, check, question

from baton.common.clock import MonotonicClock
from baton.deploy.client import Client

lacks = hosts.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(lacks), reason=f"hosts of one's own need {lacks}"),
]

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "ray" / "on-premise.yaml"
NAMES = ("head", "prefill-host", "decode-host", "other-host")
ROLES = {"prefill-host": "prefill", "decode-host": "decode", "other-host": "decode"}
SETTINGS = (
    "cluster=ups", "model.model=fake", "model.max_model_len=1536", "kv.num_pages=400", "placement.cpus=1",
    "liveness.drain_deadline_s=20", "gateway.request_timeout_s=120", "gateway.host=0.0.0.0",
    "gateway.open_to_network=true",
)  # fmt: skip
RECOVERS_S = 240.0


@dataclass(frozen=True)
class UpCluster:
    """A cluster that `ray up` made, and its hosts."""

    hosts: dict[str, hosts.Host]
    file: Path
    environment: dict[str, str]

    def ray(self, *words: str) -> str:
        """What Ray's launcher says, which must end well."""
        done = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", *words], capture_output=True, text=True, check=False,
            cwd=self.file.parent, env=self.environment, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, f"ray {words[0]}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def execute(self, command: str) -> str:
        """On the head."""
        return self.ray("exec", "--no-config-cache", str(self.file), command)

    def deploy(self, options: str = "") -> str:
        settings = " ".join(f"--set {one}" for one in SETTINGS)
        return self.execute(f"baton deploy {options} --config ~/baton.yaml {settings}")


def write_config(folder: Path, there: dict[str, hosts.Host]) -> Path:
    """on-premise.yaml with these hosts; everything is installed on them already."""
    config: dict[str, Any] = yaml.safe_load(FILE.read_text())
    workers = [host.address for name, host in there.items() if name != "head"]
    config["cluster_name"] = folder.name
    config["provider"] |= {"head_ip": there["head"].address, "worker_ips": workers}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(folder / "key")}
    config["min_workers"] = config["max_workers"] = len(workers)
    config["setup_commands"] = [line for line in config["setup_commands"] if "pip install" not in line]
    config["file_mounts"] = {
        "~/baton.yaml": str(FILE.parent / "baton.yaml"),
        "~/.ray/auth_token": str(folder / "token"),
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def furnish(host: hosts.Host) -> None:
    """What its owner does before `ray up`."""
    (host.home / "baton-venv" / "bin").parent.mkdir()
    (host.home / "baton-venv" / "bin").symlink_to(Path(sys.executable).parent)
    source = os.environ.get("PYTHONPATH", str(ROOT / ".src"))
    # A machine that runs four hosts at once is slow to answer.
    (host.home / ".bashrc").write_text(f"export PYTHONPATH={source} RAY_health_check_period_ms=2000\n")
    (host.home / "baton-role").write_text(ROLES.get(host.name, ""))


@pytest.fixture
def cluster() -> Iterator[UpCluster]:
    with tempfile.TemporaryDirectory(prefix="bu", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "token").write_text("0123456789abcdef" * 4)
        environment = {**os.environ, "RAY_UP_enable_autoscaler_v2": "0", "RAY_AUTH_MODE": "token", "HOME": name,
                       "RAY_AUTH_TOKEN_PATH": str(folder / "token"), "RAY_USAGE_STATS_ENABLED": "0"}  # fmt: skip
        with hosts.hosts(folder, *NAMES) as there:
            for host in there.values():
                furnish(host)
            yield UpCluster(there, write_config(folder, there), environment)
        for left in Path("/tmp/ray").glob(f"cluster-{folder.name}.*"):  # what Ray's launcher keeps of it
            left.unlink()


def wait_for_workers(client: Client, wanted: set[str]) -> float:
    """Until exactly these are there and are heard. Returns how long it took."""
    clock = MonotonicClock()
    begun_s = clock.now()
    while True:
        seen = {str(one.worker) for one in client.status().workers if one.role != "gateway" and not one.silent}
        if seen == wanted:
            return clock.now() - begun_s
        assert clock.now() < begun_s + RECOVERS_S, seen


def check_probes(there: dict[str, hosts.Host]) -> None:
    """Those of the chart are answered without Ray's token; the dashboard is closed to others."""
    for host in there.values():
        assert httpx.get(f"http://{host.address}:52365/api/local_raylet_healthz", timeout=10.0).is_success, host.name
    head = there["head"]
    asked = head.run("curl --silent --fail http://127.0.0.1:8265/api/gcs_healthz")
    assert asked.returncode == 0, asked.stderr
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{head.address}:8265", timeout=10.0)


def batons(host: hosts.Host) -> list[str]:
    """Baton's processes there; Ray's own are Ray's."""
    return [line for line in host.processes() if re.match(r"ray::\w*Actor|\S*python\S* \S*/baton ", line)]


def test_up_serve_lose_a_host_leave_one_and_down(cluster: UpCluster) -> None:
    clock, rng, there = MonotonicClock(), random.Random(7), cluster.hosts
    took: dict[str, float] = {}

    def timed(name: str, begun_s: float) -> None:
        took[name] = round(clock.now() - begun_s, 1)

    begun_s = clock.now()
    cluster.ray("up", "-y", "--no-config-cache", str(cluster.file))
    timed("up", begun_s)
    begun_s = clock.now()
    url = next(line for line in cluster.deploy().splitlines() if line.startswith("http://"))
    timed("deploy", begun_s)
    assert url == f"http://{there['head'].address}:8000"
    with Client(url, timeout_s=120.0) as client:
        everybody = {"prefill-0", "decode-0", "decode-1"}
        wait_for_workers(client, everybody)
        assert batons(there["prefill-host"])
        check(ask_all(client, [question(rng) for _ in range(20)], at_once=4))
        lanes = {use.lane for use in client.status().lanes}
        assert lanes <= {"tcp", "zmq", "ucx"}, lanes  # between hosts there is no other
        # Again, as a job: nothing happens. The address where the chart's deployer asks, with Ray's token.
        assert url in cluster.deploy("--address http://127.0.0.1:8265").splitlines()
        check_probes(there)

        begun_s = clock.now()
        there["other-host"].lose()
        check(ask_all(client, [question(rng) for _ in range(20)], at_once=4))  # streams go on at the other
        wait_for_workers(client, everybody - {lost_of(client, everybody)})
        timed("loss noticed", begun_s)
        begun_s = clock.now()
        there["other-host"].start()
        start = yaml.safe_load(cluster.file.read_text())["worker_start_ray_commands"][1]
        done = there["other-host"].run(f"export RAY_HEAD_IP={there['head'].address}; {start}")
        assert done.returncode == 0, done.stdout + done.stderr
        wait_for_workers(client, everybody)
        timed("host back", begun_s)
        check(ask_all(client, [question(rng) for _ in range(10)], at_once=4))

        begun_s = clock.now()
        left = there["decode-host"].run("baton leave --cluster ups --within-s 60")
        timed("leave", begun_s)
        assert left.returncode == 0, left.stderr
        assert not batons(there["decode-host"])
        check(ask_all(client, [question(rng) for _ in range(10)], at_once=4))

    begun_s = clock.now()
    cluster.execute("baton down --cluster ups --drain-s 5")
    timed("down", begun_s)
    for host in there.values():
        assert not batons(host), host.name
        assert not [*host.run("ls /tmp/baton-0").stdout.split()], host.name
    print(json.dumps(took))
    cluster.ray("down", "-y", str(cluster.file))
    assert not [line for line in there["head"].processes() if "/raylet " in line]


def lost_of(client: Client, everybody: set[str]) -> str:
    """The decode worker that is not heard any more."""
    clock = MonotonicClock()
    deadline_s = clock.now() + RECOVERS_S
    while True:
        heard = {str(one.worker) for one in client.status().workers if not one.silent}
        if len(everybody - heard) == 1:
            return next(iter(everybody - heard))
        assert clock.now() < deadline_s, heard
