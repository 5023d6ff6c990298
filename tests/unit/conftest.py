"""What several unit tests need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from prefix_rig import IMPLEMENTATIONS, Trees

if TYPE_CHECKING:
    from baton.common.engine.kernels import Kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The compiled kernels, where there is a compiler."""
    from baton.common.engine.kernels import load_kernels  # heavy, and most tests need no model
    from baton.common.native import BuildError

    try:
        return load_kernels()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(params=IMPLEMENTATIONS)
def trees(request: pytest.FixtureRequest) -> Trees:
    """Of each implementation; what is compiled where there is a compiler."""
    return Trees(IMPLEMENTATIONS[request.param])
