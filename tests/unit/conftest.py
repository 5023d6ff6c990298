"""What several unit tests need."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import pytest
from prefix_rig import IMPLEMENTATIONS, Trees

from baton.common import env

if TYPE_CHECKING:
    from baton.common.engine.kernels import Kernels


@pytest.fixture(autouse=True)
def _same_random_numbers_every_time() -> None:
    """A failure is to come again, alone or after other tests."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The compiled kernels, where there is a compiler."""
    from baton.common.engine.kernels import load_kernels  # heavy, and most tests need no model

    if shutil.which(env.compiler()) is None:
        pytest.skip("there is no compiler")
    return load_kernels()


@pytest.fixture(params=IMPLEMENTATIONS)
def trees(request: pytest.FixtureRequest) -> Trees:
    """Of each implementation; what is compiled where there is a compiler."""
    return Trees(IMPLEMENTATIONS[request.param])
