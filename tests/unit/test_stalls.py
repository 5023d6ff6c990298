"""Lanes that move nothing are noticed, slow ones and pauses of this very process are not held against them."""

from __future__ import annotations

from baton.common.ids import Epoch, Stamp, WorkerId
from baton.transfer.stalls import LOOK_EVERY_S, SLOWEST_BYTES_PER_S, STALLED_S, SUSPICIOUS_S, Path, Stalls

PEER = Stamp(WorkerId("prefill-0"), 1, Epoch(5))
PATH: Path = ("tcp", PEER)
OTHER: Path = ("zmq", PEER)


def watch(stalls: Stalls, now: float, seconds: float) -> tuple[list[Path], float]:
    """Turn after turn. Who was found to have stalled, and the time after it."""
    found: list[Path] = []
    until_s = now + seconds
    while now < until_s:
        now += LOOK_EVERY_S
        found += stalls.look(now)
    return found, now


def test_a_path_on_which_nothing_ends_is_found_and_no_other() -> None:
    stalls = Stalls()
    stalls.began(PATH, 1000)
    stalls.began(OTHER, 1000)
    found, now = watch(stalls, 100.0, STALLED_S - LOOK_EVERY_S)
    assert not found
    stalls.ended(OTHER, 1000)
    stalls.began(OTHER, 1000)
    found, now = watch(stalls, now, 4 * LOOK_EVERY_S)
    assert found == [PATH]
    assert not watch(stalls, now, STALLED_S - 4 * LOOK_EVERY_S)[0].count(PATH), "its time begins anew"


def test_who_has_more_to_move_has_more_time() -> None:
    stalls, nbytes = Stalls(), int(10 * SLOWEST_BYTES_PER_S)
    stalls.began(PATH, nbytes // 2)
    stalls.began(PATH, nbytes // 2)
    found, now = watch(stalls, 0.0, STALLED_S + 9)
    assert not found
    assert watch(stalls, now, 3)[0] == [PATH]


def test_each_region_that_comes_shows_that_the_lane_moves() -> None:
    stalls, now = Stalls(), 0.0
    for _ in range(10):
        stalls.began(PATH, 1000)
        found, now = watch(stalls, now, STALLED_S - 2 * LOOK_EVERY_S)
        assert not found
        stalls.ended(PATH, 1000)
    assert stalls.wait_s() is None
    assert not stalls.look(now + 1000)


def test_while_this_process_did_not_look_nobody_stalled() -> None:
    stalls = Stalls()
    stalls.began(PATH, 1000)
    stalls.look(1.0)
    assert not stalls.look(1000.0)
    assert not stalls.is_suspicious(PATH)


def test_suspicion_comes_before_and_ends_with_the_operation() -> None:
    stalls = Stalls()
    stalls.began(PATH, 1 << 30)
    assert not stalls.is_suspicious(PATH)
    watch(stalls, 0.0, SUSPICIOUS_S + LOOK_EVERY_S)
    assert stalls.is_suspicious(PATH)
    stalls.ended(PATH, 1 << 30)
    assert not stalls.is_suspicious(PATH)
