"""The contract of every lane, for `local`."""

from __future__ import annotations

from baton.transfer.testing import TransportContract


class TestLocal(TransportContract):
    lane = "local"
