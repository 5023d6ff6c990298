"""A real `ray up` over ssh between hosts of their own: Baton is deployed on it, a host is lost and comes back, one is
left in good order, and all of it comes down clean."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import hosts
import httpx
import pytest
from harness import ask_all, check, question
from up_cluster import RECOVERS_S, UpCluster, batons, furnished_hosts, wait_for_workers

from baton.common.clock import MonotonicClock
from baton.deploy.client import Client

lacks = hosts.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(lacks), reason=f"hosts of one's own need {lacks}"),
]

ROLES = {"prefill-host": "prefill", "decode-host": "decode", "other-host": "decode"}


@pytest.fixture
def cluster() -> Iterator[UpCluster]:
    with furnished_hosts(ROLES) as found:
        yield found


def check_probes(there: dict[str, hosts.Host]) -> None:
    """Those of the chart are answered without Ray's token; the dashboard is closed to others."""
    for host in there.values():
        assert httpx.get(f"http://{host.address}:52365/api/local_raylet_healthz", timeout=10.0).is_success, host.name
    head = there["head"]
    asked = head.run("curl --silent --fail http://127.0.0.1:8265/api/gcs_healthz")
    assert asked.returncode == 0, asked.stderr
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{head.address}:8265", timeout=10.0)


def test_up_serve_lose_a_host_leave_one_and_down(cluster: UpCluster) -> None:
    clock, rng, there = MonotonicClock(), random.Random(7), cluster.hosts
    took: dict[str, float] = {}

    def timed(name: str, begun_s: float) -> None:
        took[name] = round(clock.now() - begun_s, 1)

    begun_s = clock.now()
    cluster.up()
    timed("up", begun_s)
    begun_s = clock.now()
    url = next(line for line in cluster.deploy().splitlines() if line.startswith("http://"))
    timed("deploy", begun_s)
    assert url == f"http://{there['head'].address}:8000"
    with Client(url, timeout_s=120.0) as client:
        everybody = {"prefill-0", "decode-0", "decode-1"}
        wait_for_workers(client, everybody)
        assert batons(there["prefill-host"])
        allowed = there["prefill-host"].run("grep Cpus_allowed_list /proc/$(pgrep -f ^ray::PrefillActor)/status")
        assert allowed.stdout.split()[1:] == ["0"], allowed
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
        cluster.start_worker(there["other-host"])
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
