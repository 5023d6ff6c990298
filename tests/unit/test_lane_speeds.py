"""The average of what a lane reached."""

from __future__ import annotations

import pytest

from baton.common.ids import WorkerId
from baton.transfer.speed import LaneSpeeds

P0 = WorkerId("prefill-0")
MIB = 1 << 20


def test_what_has_not_moved_is_unknown() -> None:
    assert LaneSpeeds().gbps(P0, "zmq") == 0.0


def test_regions_that_overlap_share_the_wire() -> None:
    speeds = LaneSpeeds()
    for index in range(4):  # all asked for at 0, one lands each millisecond
        speeds.note(P0, "zmq", 4 * MIB, 0.0, 1e-3 * (index + 1))
    assert speeds.gbps(P0, "zmq") == pytest.approx(4 * MIB / 1e-3 / 1e9)
    assert speeds.gbps(P0, "local") == 0.0


def test_rests_between_regions_do_not_count() -> None:
    speeds = LaneSpeeds()
    speeds.note(P0, "zmq", 4 * MIB, 0.0, 1e-3)
    speeds.note(P0, "zmq", 4 * MIB, 9.0, 9.001)
    assert speeds.gbps(P0, "zmq") == pytest.approx(4 * MIB / 1e-3 / 1e9)


def test_small_regions_say_nothing() -> None:
    speeds = LaneSpeeds()
    speeds.note(P0, "zmq", 16 << 10, 0.0, 1e-3)
    assert speeds.gbps(P0, "zmq") == 0.0


def test_the_present_outweighs_the_past() -> None:
    speeds, at = LaneSpeeds(), 0.0
    for took_s, regions in ((1e-3, 1000), (1e-2, 64)):
        for _ in range(regions):
            speeds.note(P0, "zmq", 4 * MIB, at, at + took_s)
            at += took_s
    assert speeds.gbps(P0, "zmq") == pytest.approx(4 * MIB / 1e-2 / 1e9, rel=0.15)
