"""The contract of every lane, for `zmq`, and who it does not talk to."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import zmq

from baton.transfer.link import LaneStatus
from baton.transfer.mesh import secure_client
from baton.transfer.testing import TransportContract
from baton.transfer.testing_ends import FULL_ONLY, End, EndKeys, EndSpec, HandOff, KvSpec, pump, small_config


class TestZmq(TransportContract):
    lane = "zmq"


class TestZmqPlain(TransportContract):
    """Without keys, as a cluster on a trusted network may run it."""

    lane = "zmq"
    remote = False

    def make_pair(self, kv: KvSpec = FULL_ONLY) -> tuple[End, End]:
        config = small_config(self.lane)
        sink = End(EndSpec("sink", 7, self.lane, None, config, kv))
        source = End(EndSpec("source", 8, self.lane, None, config, kv, fill=1))
        sink.set_peers([source.member])
        return sink, source


def lane_status(end: End, peer: str) -> LaneStatus:
    lanes = end.data.snapshot(time.monotonic()).lanes
    return next(view.status for worker, views in lanes.items() if worker == peer for view in views)


def test_a_sink_of_another_cluster_gets_no_link() -> None:
    config = small_config("zmq")
    spec = EndSpec("source", 8, "zmq", EndKeys.generate(), config, fill=1)
    source, stranger = End(spec), End(replace(spec, worker="sink", keys=EndKeys.generate()))
    try:
        stranger.set_peers([source.member])
        pump([source, stranger], lambda: False, wait_s=0.3)
        assert lane_status(stranger, "source") is not LaneStatus.UP
    finally:
        source.close()
        stranger.close()


def test_a_link_to_an_earlier_process_at_the_address_does_not_come_up() -> None:
    keys, config = EndKeys.generate(), small_config("zmq")
    source, sink = End(EndSpec("source", 8, "zmq", keys, config)), End(EndSpec("sink", 7, "zmq", keys, config))
    try:
        member = source.member
        old = type(member)(
            stamp=type(member.stamp)(member.stamp.worker, 0, member.stamp.epoch - 1),
            role=member.role,
            address=member.address,
            lanes=member.lanes,
        )
        sink.set_peers([old])
        pump([source, sink], lambda: False, wait_s=0.3)
        assert lane_status(sink, "source") is not LaneStatus.UP
    finally:
        source.close()
        sink.close()


def test_messages_that_make_no_sense_are_dropped_and_the_lane_lives() -> None:
    keys, config = EndKeys.generate(), small_config("zmq")
    source, sink = End(EndSpec("source", 8, "zmq", keys, config, fill=1)), End(EndSpec("sink", 7, "zmq", keys, config))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    odd = context.socket(zmq.DEALER)
    try:
        secure_client(odd, keys.of("sink"), keys.of("source").public)
        odd.connect(str(source.member.lanes[0].address["tcp"]))
        for parts in ([b""], [b"H", b"\xc1"], [b"A", b"12345678"], [b"A", b"1"], [b"D", b"x", b"y"], [b"H"] * 9):
            odd.send_multipart(parts)
        sink.set_peers([source.member])
        ids = np.arange(1, 5, dtype=np.int32)
        hand_off = HandOff(sink, source, ids, ids)
        hand_off.prepare()
        hand_off.move(0, slice(0, 4))
        assert pump([sink, source], lambda: hand_off.landed() == {0})
        assert not odd.poll(0)
    finally:
        context.destroy(linger=0)
        source.close()
        sink.close()
