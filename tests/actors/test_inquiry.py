"""However many ask a stuck process how it is, the controller still hears from it: it kills who does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from ray.exceptions import RayTaskError
from stuck_process import NoSuchModel, StuckGateway, StuckWorker

from baton.common.config import ClusterConfig
from baton.common.errors import RequestError
from baton.common.ids import WorkerId
from baton.common.kv.layout import Component
from baton.deploy.cluster_plan import Place
from baton.deploy.ray_side import create_actor
from baton.transfer.keys import NOWHERE, ControllerDoor
from baton.transfer.process import ProcessSpec, recorded_pid

pytestmark = pytest.mark.ray

ANSWER_S = 20.0
"""For a busy machine, and for the start of the process. Without threads of their own they would never answer."""
ASKED = 12


@pytest.fixture
def spec(tmp_path: Path) -> ProcessSpec:
    tmp_path.chmod(0o700)
    return ProcessSpec(
        worker=WorkerId("decode-0"),
        role="decode",
        incarnation=1,
        controller=NOWHERE,
        config=ClusterConfig(cluster="inquiry"),
        cores=(),
        run_dir=str(tmp_path / "run"),
    )


@pytest.mark.parametrize("shell", [StuckWorker, StuckGateway])
def test_questions_to_a_stuck_process_leave_its_health_alone(
    ray_session: str, spec: ProcessSpec, shell: type[StuckWorker] | type[StuckGateway]
) -> None:
    actor = create_actor(shell, spec, "inquiry", shell.__name__, Place(), max_restarts=0)
    try:
        asked = [actor.status.remote() for _ in range(ASKED)]
        if shell is StuckWorker:
            asked += [actor.kv_census.remote() for _ in range(ASKED)]
            asked += [actor.page_owner.remote(1, Component.SWA) for _ in range(ASKED)]
        assert ray.get(actor.report.remote(), timeout=ANSWER_S).member is None
        assert "starting" in ray.get(actor.progress.remote(), timeout=ANSWER_S)
        ray.get(actor.rejoin.remote(ControllerDoor("tcp://127.0.0.2:1")), timeout=ANSWER_S)
        assert ray.wait(asked, timeout=0.0)[0] == []
        ray.get(actor.let_go.remote(), timeout=ANSWER_S)
        ray.get(asked, timeout=ANSWER_S)
    finally:
        ray.kill(actor, no_restart=True)


def test_a_page_that_is_not_there_is_told_as_what_it_is(ray_session: str, spec: ProcessSpec) -> None:
    actor = create_actor(StuckWorker, spec, "inquiry", "pages", Place(), max_restarts=0)
    try:
        ray.get(actor.let_go.remote(), timeout=ANSWER_S)
        assert ray.get(actor.page_owner.remote(7, Component.STATE), timeout=ANSWER_S) == "state page 7"
        with pytest.raises(RayTaskError) as told:
            ray.get(actor.page_owner.remote(7, None), timeout=ANSWER_S)
        assert isinstance(told.value.cause, RequestError)
        assert (told.value.cause.message, told.value.cause.field) == ("no page 7", "page")
    finally:
        ray.kill(actor, no_restart=True)


def test_a_start_that_fails_is_told_to_whoever_watches_however_late(ray_session: str, spec: ProcessSpec) -> None:
    actor = create_actor(StuckWorker, spec, "inquiry", "watched", Place(), max_restarts=0)
    try:
        for watcher in (1, 2):
            with pytest.raises(RayTaskError) as told:
                ray.get(actor.watch.remote(watcher), timeout=ANSWER_S)
            assert isinstance(told.value.cause, NoSuchModel)
        assert ray.get(actor.progress.remote(), timeout=ANSWER_S) == ["starting", "looking for the model"]
        assert recorded_pid(spec.run_dir, spec.name) is not None  # its end is the controller's to decide
    finally:
        ray.kill(actor, no_restart=True)
