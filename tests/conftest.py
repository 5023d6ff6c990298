"""What all tests share: one Ray for those that need processes, and a garbage collector that does not look at everything
that was imported again and again."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ACTORS = Path(__file__).parent / "actors"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-sessions", action="store_true", help="write tests/data/openai_sessions anew")


def pytest_collection_finish() -> None:
    """Modules and tests live as long as the run. To walk them took a quarter of the time of tests that only compute."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="session", autouse=True)
def state_of_tests() -> Iterator[None]:
    """What clusters keep for the time after them is not kept after tests."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as environment:
        environment.setenv("BATON_STATE_DIR", folder)
        yield


@pytest.fixture(scope="session")
def ray_context() -> Iterator[dict[str, str]]:
    """Where it is: `gcs_address`, `session_dir`. Starting it costs five seconds, a cluster on it about one."""
    import ray  # heavy, and most tests need no processes

    from baton.common import env
    from baton.deploy.ray_join import LOCAL_NODE_ADDRESS

    env.prepare_ray(joins=False)
    # Actors import the stub from here.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ACTORS), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="bt", dir="/tmp") as folder:  # short: Ray puts socket names under it
        context = ray.init(
            address="local",
            num_cpus=64,  # seats, not cores: many clusters share this Ray
            num_gpus=0,
            object_store_memory=100_000_000,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address=LOCAL_NODE_ADDRESS,
            _temp_dir=folder,
        )
        assert Path(folder).exists()
        yield dict(context.address_info)
        ray.shutdown()


@pytest.fixture(scope="session")
def ray_session(ray_context: dict[str, str]) -> str:
    """Its address."""
    return ray_context["gcs_address"]


@pytest.fixture(scope="session")
def ray_logs(ray_context: dict[str, str]) -> Path:
    """Where its processes, and all of ours on it, leave what they have to say."""
    return Path(ray_context["session_dir"]) / "logs"
