"""However many ask a stuck process how it is, the controller still hears from it: it kills who does not answer."""

from __future__ import annotations

import pytest
import ray
from stuck_process import StuckGateway, StuckWorker

from baton.deploy.ray_side import create_actor

pytestmark = pytest.mark.ray

ANSWER_S = 20.0
"""For a busy machine, and for the start of the process. Without threads of their own they would never answer."""
ASKED = 12


def test_questions_to_a_stuck_worker_leave_its_health_alone(ray_session: None) -> None:
    worker = create_actor(StuckWorker, None, "inquiry", "worker", num_cpus=0, max_restarts=0)
    try:
        asked = [worker.status.remote() for _ in range(ASKED)] + [worker.kv_census.remote() for _ in range(ASKED)]
        assert ray.get(worker.report.remote(), timeout=ANSWER_S).member is None
        assert ray.get(worker.health.remote(), timeout=ANSWER_S).step_age_s == 9.0
        assert ray.get(worker.progress.remote(), timeout=ANSWER_S) == ["loaded"]
        ray.get(worker.rejoin.remote("tcp://127.0.0.2:1"), timeout=ANSWER_S)
        assert ray.wait(asked, timeout=0.0)[0] == []
        ray.get(worker.let_go.remote(), timeout=ANSWER_S)
        ray.get(asked, timeout=ANSWER_S)
    finally:
        ray.kill(worker, no_restart=True)


def test_questions_to_a_stuck_gateway_leave_its_health_alone(ray_session: None) -> None:
    gateway = create_actor(StuckGateway, None, "inquiry", "gateway", num_cpus=0, max_restarts=0)
    try:
        ray.get(gateway.start.remote(), timeout=ANSWER_S)
        asked = [gateway.status.remote() for _ in range(ASKED)]
        assert ray.get(gateway.report.remote(), timeout=ANSWER_S).member is None
        assert ray.get(gateway.progress.remote(), timeout=ANSWER_S) == ["loaded"]
        assert ray.wait(asked, timeout=0.0)[0] == []
        ray.get(gateway.let_go.remote(), timeout=ANSWER_S)
        ray.get(asked, timeout=ANSWER_S)
    finally:
        ray.kill(gateway, no_restart=True)
