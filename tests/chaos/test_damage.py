"""Bits turn over on the wire of a lane that does not encrypt: the digest finds it and one more try mends it, or the
hand-off ends with a code. No wrong byte is ever committed."""

from __future__ import annotations

import time

import pytest
from chaos_peer import Pace
from chaos_proxy import ByteFaults
from chaos_rig import ChaosCluster, chaos_config
from chaos_soak import EXPECTED

from baton.common.errors import ErrorCode

ENOUGH_NACKS = 5


def damage(lane: str, committed: int, flip: float, from_bytes: int = 1) -> None:
    cluster = ChaosCluster(seed=3, encrypted=False)
    tally, until_s = cluster.tally, time.monotonic() + 100.0
    assert cluster.proxy is not None
    try:
        for worker in ("prefill-0", "decode-0"):
            cluster.start(worker, chaos_config(lane))
        cluster.wait_up()
        cluster.proxy.set_faults(f"/{lane}", ByteFaults(flip=flip, flip_from_bytes=from_bytes))
        cluster.peers["decode-0"].send(Pace(6))
        while tally.committed.total() < committed or cluster.account("decode-0").frames["nacks"] < ENOUGH_NACKS:
            assert time.monotonic() < until_s, tally
            cluster.listen()
            time.sleep(0.02)
        cluster.proxy.set_faults(f"/{lane}", ByteFaults())
        cluster.peers["decode-0"].send(Pace(0))
        accounts = cluster.accounts()
        cluster.listen()
        print(
            f"\ndamage on {lane}: {cluster.proxy.counts()}, {accounts['decode-0'].frames['nacks']} regions sent again; "
            f"committed {tally.committed.total()}, failed {dict(tally.failed)}, wrong bytes {tally.wrong_bytes}"
        )
        assert tally.wrong_bytes == 0
        assert all(account.clean and not account.written_after_return for account in accounts.values()), accounts
        assert set(tally.failed) <= EXPECTED
        assert not tally.late
        assert tally.failed[ErrorCode.TRANSFER_CORRUPT] < ENOUGH_NACKS, "one more try mends nearly everything"
    finally:
        cluster.close()


def test_damaged_bits_on_the_tcp_lane_are_found_and_mended() -> None:
    damage("tcp", committed=30, flip=0.05, from_bytes=4096)


@pytest.mark.slow
@pytest.mark.parametrize("lane", ["tcp", "zmq"])
def test_damaged_bits_are_found_and_mended_for_long(lane: str) -> None:
    damage(lane, committed=400, flip=0.01)
