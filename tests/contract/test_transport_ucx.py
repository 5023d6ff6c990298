"""The contract of every lane, for `ucx`, and who it does not talk to."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from baton.transfer.link import LaneStatus
from baton.transfer.testing import TransportContract
from baton.transfer.testing_ends import End, EndKeys, EndSpec, pump, small_config
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
