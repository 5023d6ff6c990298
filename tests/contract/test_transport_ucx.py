"""The contract of every lane, for `ucx`, and who it does not talk to."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from baton.transfer.link import LaneStatus
from baton.transfer.testing import REOPENED_S, TransportContract
from baton.transfer.testing_ends import End, EndKeys, EndSpec, HandOff, pump, small_config
from baton.transfer.transports import ucx_worker
from baton.transfer.transports.ucx import why_unavailable

pytestmark = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())


class TestUcx(TransportContract):
    lane = "ucx"


def test_a_sink_without_the_secret_gets_no_link() -> None:
    spec = EndSpec("source", 8, "ucx", EndKeys.generate(), small_config("ucx"), fill=1)
    source, stranger = End(spec), End(replace(spec, worker="sink", keys=EndKeys.generate()))
    try:
        stranger.set_peers([source.member])
        pump([source, stranger], lambda: False, wait_s=0.5)
        lanes = stranger.data.snapshot(time.monotonic()).lanes
        assert [view.status for views in lanes.values() for view in views] == [LaneStatus.CONNECTING]
    finally:
        source.close()
        stranger.close()


def test_a_link_that_comes_up_after_others_in_vain_carries_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX pairs endpoints by number: the source must make up for those to which it did not answer. It learns of them
    by messages that need an answer, which all are for some fabrics."""
    monkeypatch.setenv("UCX_RNDV_THRESH", "1024")
    monkeypatch.setattr(ucx_worker, "MOST_AT_ONCE", 2)  # each time it says hello
    keys, config = EndKeys.generate(), small_config("ucx")
    source, sink = End(EndSpec("source", 8, "ucx", keys, config, fill=1)), End(EndSpec("sink", 7, "ucx", keys, config))
    try:
        source.let_in()  # nobody
        for turned_away in range(5):
            sink.set_peers([source.member])
            assert pump([source, sink], lambda: source.data.snapshot(time.monotonic()).stray > turned_away)  # noqa: B023
            sink.set_peers([])
        source.let_in(*keys.members())
        sink.set_peers([source.member])
        assert pump([source, sink], lambda: sink.is_up(source))
        ids = np.arange(1, 5, dtype=np.int32)
        hand_off = HandOff(sink, source, ids, ids)
        hand_off.prepare()
        hand_off.move(0, slice(0, 4))
        assert pump([source, sink], lambda: hand_off.landed() == {0}, REOPENED_S)
    finally:
        source.close()
        sink.close()
