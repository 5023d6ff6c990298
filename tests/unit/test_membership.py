"""Who is there, who is silent, and who only seems to be because we slept."""

from __future__ import annotations

from baton.common.config import LivenessConfig
from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.messages import Member, Membership
from baton.transfer.membership import NO_CHANGE, Roster

LIVENESS = LivenessConfig(heartbeat_interval_s=0.2, republish_interval_s=1.0, dead_after_s=3.0)
CONTROLLER = Stamp(WorkerId("controller"), 100, Epoch(1))
ME = Stamp(WorkerId("decode-0"), 1, Epoch(2))
PREFILL = Stamp(WorkerId("prefill-0"), 1, Epoch(3))
SUCCESSOR = Stamp(WorkerId("prefill-0"), 2, Epoch(4))


def member(stamp: Stamp) -> Member:
    return Member(stamp=stamp, role="prefill", address=f"tcp://127.0.0.1:{stamp.epoch}")


def view(version: int, *stamps: Stamp) -> Membership:
    return Membership(version=version, members=tuple(member(stamp) for stamp in stamps))


def roster_with(*stamps: Stamp, now: float = 0.0) -> Roster:
    roster = Roster(ME, LIVENESS, now)
    roster.on_membership(CONTROLLER, view(1, *stamps), now)
    return roster


def tick(roster: Roster, start: float, end: float) -> list[WorkerId]:
    """Timers on time from `start` to `end`; returns who fell silent."""
    silent: list[WorkerId] = []
    steps = round((end - start) / 0.1)
    for step in range(1, steps + 1):
        silent += roster.on_timer(start + step * 0.1).fell_silent
    return silent


def test_joining_and_leaving_are_told_apart_by_stamp() -> None:
    roster = Roster(ME, LIVENESS, 0.0)
    first = roster.on_membership(CONTROLLER, view(1, ME, PREFILL), 0.0)
    assert [m.stamp for m in first.joined] == [PREFILL]
    assert first.view is not None
    assert [m.stamp for m in first.view.members] == [ME, PREFILL]
    assert roster.listed
    second = roster.on_membership(CONTROLLER, view(2, ME, SUCCESSOR), 1.0)
    assert ([m.stamp for m in second.left], [m.stamp for m in second.joined]) == ([PREFILL], [SUCCESSOR])


def test_old_views_and_views_of_an_old_controller_change_nothing() -> None:
    roster = roster_with(ME, PREFILL)
    newer = Stamp(CONTROLLER.worker, 101, Epoch(7))
    assert roster.on_membership(CONTROLLER, view(1), 1.0) is NO_CHANGE
    assert roster.on_membership(newer, view(1, ME), 1.0).left
    assert roster.on_membership(CONTROLLER, view(9, ME, PREFILL), 2.0) is NO_CHANGE
    assert not roster.members


def test_a_process_that_was_replaced_at_our_seat_does_not_make_us_listed() -> None:
    roster = roster_with(Stamp(ME.worker, 2, Epoch(99)))
    assert not roster.listed


def test_silence_is_noticed_once_and_ends_with_the_first_sound() -> None:
    roster = roster_with(ME, PREFILL)
    assert tick(roster, 0.0, 2.9) == []
    assert tick(roster, 2.9, 5.0) == [PREFILL.worker]
    assert roster.view.silent == {PREFILL.worker}
    back = roster.on_heard(PREFILL, 5.1)
    assert back.came_back == (PREFILL.worker,)
    assert back.view is not None
    assert not back.view.silent
    assert tick(roster, 5.0, 7.9) == []


def test_an_earlier_process_does_not_count_as_a_sign_of_life() -> None:
    roster = roster_with(ME, SUCCESSOR)
    for step in range(40):
        assert roster.on_heard(PREFILL, step * 0.1) is None
        roster.on_timer(step * 0.1)
    assert roster.silent == {SUCCESSOR.worker}


def test_a_process_that_slept_blames_nobody() -> None:
    roster = roster_with(ME, PREFILL)
    tick(roster, 0.0, 1.0)
    assert roster.on_timer(60.0) is NO_CHANGE  # stopped for a minute
    assert tick(roster, 60.0, 61.9) == []  # what was left of its patience
    assert tick(roster, 61.9, 63.5) == [PREFILL.worker]


def test_many_short_stalls_do_not_hide_a_death_for_ever() -> None:
    roster = roster_with(ME, PREFILL)
    now, silent = 0.0, ()
    while not silent and now < 60.0:
        for step_s in (0.1, 0.1, 0.1, 0.1, 0.1, 0.5):  # every sixth turn is slow
            now += step_s
            silent = silent or roster.on_timer(now).fell_silent
    assert now < 10.0


def test_heartbeats_are_due_once_per_interval() -> None:
    roster = Roster(ME, LIVENESS, 0.0)
    spoken = sum(roster.speak(step * 0.01) for step in range(401))
    assert 19 <= spoken <= 21
    assert roster.next_deadline <= 4.25
