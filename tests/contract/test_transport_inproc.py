"""The contract of every lane, for `inproc`."""

from __future__ import annotations

from baton.transfer.testing import TransportContract


class TestInproc(TransportContract):
    lane = "inproc"
    remote = False
