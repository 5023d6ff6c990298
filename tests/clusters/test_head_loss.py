"""The host of Ray's head is lost as a whole while requests run. What Ray knows is in a Redis elsewhere: nothing of
what is served is lost, and the head that comes back finds everybody (docs/CLUSTERS.md, "When the head is lost")."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import hosts
import pytest
import redis_rig
import yaml
from harness import Outcome, ask, ask_all, check, question
from up_cluster import CLUSTER, FILE, SETTINGS, UpCluster, batons, furnished_hosts, wait_for_workers

from baton.common.clock import MonotonicClock
from baton.deploy.client import Client

lacks = ", ".join(filter(None, (hosts.missing(), redis_rig.missing())))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(lacks), reason=f"a head that may be lost needs {lacks}"),
]

# The first one is for both: ~/baton-role becomes a part of --resources, and one host fewer has to start.
ROLES = {"front-host": 'gateway": 1, "baton_prefill', "decode-host": "decode", "other-host": "decode"}
AWAY_S = 75.0
"""Longer than the minute after which Ray's nodes would end by themselves."""

STARTS = 4


@pytest.fixture
def cluster() -> Iterator[UpCluster]:
    """With gateways on a host of their own: the head's would be lost with it."""
    with furnished_hosts(ROLES) as found:
        folder = found.file.parent
        with redis_rig.running_redis(folder, f"{hosts.SUBNET}.1") as address:
            settings = (FILE.parent / "redis.env").read_text()
            settings = re.sub(r"(RAY_REDIS_ADDRESS=)\S+", rf"\g<1>{address}", settings)
            (folder / "redis.env").write_text(settings.replace("=yours", f"={redis_rig.PASSWORD}"))
            config = found.config
            config["file_mounts"]["~/baton-redis"] = str(folder / "redis.env")
            config["head_start_ray_commands"][1] = config["head_start_ray_commands"][1].replace(
                ', "baton_gateway": 1', ""
            )
            found.file.write_text(yaml.safe_dump(config))
            yield found


class Load:
    """Asks without a pause until it is left; all that was asked must be answered, and rightly."""

    def __init__(self, client: Client, at_once: int) -> None:
        self._client = client
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(at_once)
        self._asking: list[Future[list[Outcome]]] = [
            self._pool.submit(self._ask, random.Random(number)) for number in range(at_once)
        ]

    def _ask(self, rng: random.Random) -> list[Outcome]:
        outcomes = []
        while not self._stop.wait(0.5):
            outcomes.append(ask(self._client, question(rng)))
        return outcomes

    def end(self) -> list[Outcome]:
        self._stop.set()
        return [outcome for one in self._asking for outcome in one.result()]


def restart_head(cluster: UpCluster) -> None:
    """Its host is there again. Without the autoscaler, which would set up anew the hosts whose workers live. Ray gives
    its own agents 15 s to come up, on a busy machine too few: who watches over a head starts it again."""
    head = cluster.hosts["head"]
    head.start()
    stop, start = cluster.config["head_start_ray_commands"]
    # First of all on this machine, which is all hosts: the others are not restarting.
    start = re.sub(r"--autoscaling-config=\S+", "", start).replace("ray start", "nice -n -10 ray start")
    for _ in range(STARTS):
        done = head.run(f"{stop}; {start}")
        if done.returncode == 0:
            return
    raise AssertionError(done.stdout + done.stderr)


def actors(host: hosts.Host) -> set[str]:
    """Pids and names of Baton's processes there."""
    lines = host.run("ps -eo pid,args").stdout.splitlines()
    return {f"{host.name} {line.strip()}" for line in lines if re.search(r"ray::\w*Actor", line)}


def lose_worker(host: hosts.Host) -> None:
    """Its process is killed, and nobody is there to replace it."""
    killed = host.run("pkill -KILL -f ray::DecodeActor")
    assert killed.returncode == 0, host.processes()


def test_a_head_is_lost_and_comes_back(cluster: UpCluster) -> None:
    clock, rng, there = MonotonicClock(), random.Random(7), cluster.hosts
    cluster.up()
    url = next(line for line in cluster.deploy().splitlines() if line.startswith("http://"))
    assert url == f"http://{there['front-host'].address}:8000"
    everybody = {"prefill-0", "decode-0", "decode-1"}
    with Client(url, timeout_s=120.0) as client:
        wait_for_workers(client, everybody)
        survivors = {one for name in ("front-host", "decode-host") for one in actors(there[name])}
        assert len(survivors) == 3
        load = Load(client, at_once=2)
        with ThreadPoolExecutor(4) as pool:
            long = [pool.submit(ask, client, question(rng, prompt_tokens=300, max_tokens=1200)) for _ in range(4)]
            there["head"].lose()
            lost_s = clock.now()
            under_way = sum(not one.done() for one in long)
            check([one.result() for one in long])
        assert under_way == 4
        lose_worker(there["other-host"])
        check(ask_all(client, [question(rng) for _ in range(10)], at_once=2))  # streams go on at the other
        while clock.now() - lost_s < AWAY_S:
            check([ask(client, question(rng))])

        begun_s = clock.now()
        restart_head(cluster)
        took = {"head away": begun_s - lost_s, "ray start": clock.now() - begun_s}
        # The controller was lost with the head. It is back, knows everybody, and fills the empty seat.
        wait_for_workers(client, everybody)
        took["until a new worker serves"] = clock.now() - begun_s
        outcomes = load.end()
        check(outcomes)
        assert survivors <= {one for host in there.values() for one in actors(host)}
        settings = " ".join(f"--set {one}" for one in SETTINGS)
        again = there["head"].run(f"baton deploy --config ~/baton.yaml {settings}")
        assert "runs already, as configured" in again.stdout + again.stderr
        check(ask_all(client, [question(rng) for _ in range(20)], at_once=4))

    down = there["head"].run(f"baton down --cluster {CLUSTER} --drain-s 5")
    assert down.returncode == 0, down.stderr
    for host in there.values():
        assert not batons(host), host.name
        assert not [*host.run("ls /tmp/baton-0").stdout.split()], host.name
    print(json.dumps({name: round(value, 1) for name, value in took.items()}), len(outcomes))
