"""A cluster that `ray up` makes of hosts of their own, by deploy/ray/on-premise.yaml."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hosts
import yaml

from baton.common.clock import MonotonicClock
from baton.deploy.client import Client

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "ray" / "on-premise.yaml"
CLUSTER = "ups"
SETTINGS = (
    f"cluster={CLUSTER}", "model.model=fake", "model.max_model_len=1536", "kv.num_pages=400", "placement.cpus=1",
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

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load(self.file.read_text())
        return found

    def ray(self, *words: str) -> str:
        """What Ray's launcher says, which must end well."""
        done = subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", *words], capture_output=True, text=True, check=False,
            cwd=self.file.parent, env=self.environment, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, f"ray {words[0]}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def up(self) -> None:
        self.ray("up", "-y", "--no-config-cache", str(self.file))

    def execute(self, command: str) -> str:
        """On the head."""
        return self.ray("exec", "--no-config-cache", str(self.file), command)

    def deploy(self, options: str = "") -> str:
        settings = " ".join(f"--set {one}" for one in SETTINGS)
        return self.execute(f"baton deploy {options} --config ~/baton.yaml {settings}")

    def start_worker(self, host: hosts.Host) -> None:
        """One that was lost: as the file says."""
        start = self.config["worker_start_ray_commands"][1]
        done = host.run(f"export RAY_HEAD_IP={self.hosts['head'].address}; {start}")
        assert done.returncode == 0, done.stdout + done.stderr


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


def furnish(host: hosts.Host, role: str) -> None:
    """What its owner does before `ray up`. Prefill shall be near what the first core is near to."""
    if role == "prefill":
        (host.home / "baton-near").write_text("taskset --cpu-list 0")
    (host.home / "baton-venv" / "bin").parent.mkdir()
    (host.home / "baton-venv" / "bin").symlink_to(Path(sys.executable).parent)
    source = os.environ.get("PYTHONPATH", str(ROOT / ".src"))
    # A machine that runs all hosts at once is slow to answer.
    (host.home / ".bashrc").write_text(
        f"export PYTHONPATH={source} RAY_health_check_period_ms=2000 RAY_agent_register_timeout_ms=60000\n"
    )
    (host.home / "baton-role").write_text(role)


@contextlib.contextmanager
def furnished_hosts(roles: Mapping[str, str]) -> Iterator[UpCluster]:
    """A head, and hosts with these roles, before `ray up`."""
    with tempfile.TemporaryDirectory(prefix="bu", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "token").write_text("0123456789abcdef" * 4)
        environment = {**os.environ, "RAY_UP_enable_autoscaler_v2": "0", "RAY_AUTH_MODE": "token", "HOME": name,
                       "RAY_AUTH_TOKEN_PATH": str(folder / "token"), "RAY_USAGE_STATS_ENABLED": "0"}  # fmt: skip
        with hosts.hosts(folder, "head", *roles) as there:
            for host in there.values():
                furnish(host, roles.get(host.name, ""))
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


def batons(host: hosts.Host) -> list[str]:
    """Baton's processes there; Ray's own are Ray's."""
    return [line for line in host.processes() if re.match(r"ray::\w*Actor|\S*python\S* \S*/baton ", line)]
