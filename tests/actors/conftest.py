"""One Ray for all tests that need processes: starting it costs five seconds, a cluster on it about one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from baton.common import env
from baton.deploy.launch import LOCAL_NODE_ADDRESS


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    env.prepare_ray()
    # Actors import the stub from here.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="bt", dir="/tmp") as folder:  # short: Ray puts socket names under it
        ray.init(
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
        yield
        ray.shutdown()
