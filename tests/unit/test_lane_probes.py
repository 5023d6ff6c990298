"""Probes that come to nothing: what was started for them ends later, and belongs to nobody else."""

from __future__ import annotations

import time

import pytest

from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.messages import Probe
from baton.transfer.lane_probes import MOST_SERVED, PROBE_BYTES, PROBE_TIMEOUT_S
from baton.transfer.testing_ends import End, EndKeys, EndSpec, pump, small_config


@pytest.mark.parametrize(("lane", "nbytes"), [("tcp", PROBE_BYTES), ("zmq", small_config("zmq").region_bytes)])
def test_a_probe_that_its_peer_forgets_is_given_up(lane: str, nbytes: int) -> None:
    source = End(EndSpec("source", 8, lane, EndKeys.generate(), small_config(lane), fill=1))
    try:
        now = time.monotonic()
        for number in range(MOST_SERVED):
            peer = Stamp(WorkerId(f"sink-{number}"), 0, Epoch(7))
            source.data.on_frame(Probe(lane=lane, tag=1 << 39, nbytes=nbytes), peer, now)
        open_slots = source.slots()[1]
        for _ in range(2):  # gives them up, and hears of their end
            source.data.poll(now + PROBE_TIMEOUT_S)
        assert pump([source], lambda: source.slots()[1][2] == 0)
        assert source.slots()[1][0] == sum(open_slots)
    finally:
        source.close()
