"""The contract of every lane, for `zmq`."""

from __future__ import annotations

from baton.transfer.testing import TransportContract


class TestZmq(TransportContract):
    lane = "zmq"
