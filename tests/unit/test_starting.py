"""A process that starts makes no collections, and all as soon as it serves; also where the start failed."""

from __future__ import annotations

import gc

import pytest

from baton.transfer.actor import sparing_the_collector


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_rests_while_a_process_loads(fails: bool) -> None:
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    try:
        with sparing_the_collector():
            assert not gc.isenabled()
            loaded = [[number] for number in range(1000)]
            if fails:
                raise RuntimeError("no such model")
    except RuntimeError:
        pass
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(loaded)
