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
GATEWAY = Stamp(WorkerId("gateway-0"), 1, Epoch(5))
GATEWAY_AFTER = Stamp(WorkerId("gateway-0"), 2, Epoch(6))
EVERYBODY = (ME, Stamp(WorkerId("decode-1"), 1, Epoch(7)), PREFILL, GATEWAY, Stamp(WorkerId("gateway-1"), 1, Epoch(8)))


def member(stamp: Stamp) -> Member:
    return Member(stamp=stamp, role=stamp.worker.split("-")[0], address=f"tcp://127.0.0.1:{stamp.epoch}")


def view(version: int, *stamps: Stamp) -> Membership:
    return Membership(version=version, members=tuple(member(stamp) for stamp in stamps))


def roster_with(*stamps: Stamp, now: float = 0.0) -> Roster:
    """This process is a decode worker."""
    roster = Roster(ME, "decode", LIVENESS, now)
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
    roster = Roster(ME, "decode", LIVENESS, 0.0)
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
    roster = roster_with(ME, GATEWAY)
    assert tick(roster, 0.0, 2.9) == []
    assert tick(roster, 2.9, 5.0) == [GATEWAY.worker]
    assert roster.view.silent == {GATEWAY.worker}
    back = roster.on_heard(GATEWAY, 5.1)
    assert back.came_back == (GATEWAY.worker,)
    assert back.view is not None
    assert not back.view.silent
    assert tick(roster, 5.0, 7.9) == []


def test_an_earlier_process_does_not_count_as_a_sign_of_life() -> None:
    roster = roster_with(ME, GATEWAY_AFTER)
    for step in range(40):
        assert roster.on_heard(GATEWAY, step * 0.1) is None
        roster.on_timer(step * 0.1)
    assert roster.silent == {GATEWAY_AFTER.worker}


def test_a_process_that_slept_blames_nobody() -> None:
    roster = roster_with(ME, GATEWAY)
    tick(roster, 0.0, 1.0)
    assert roster.on_timer(60.0) is NO_CHANGE  # stopped for a minute
    assert tick(roster, 60.0, 61.9) == []  # what was left of its patience
    assert tick(roster, 61.9, 63.5) == [GATEWAY.worker]


def test_many_short_stalls_do_not_hide_a_death_for_ever() -> None:
    roster = roster_with(ME, GATEWAY)
    now, silent = 0.0, ()
    while not silent and now < 60.0:
        for step_s in (0.1, 0.1, 0.1, 0.1, 0.1, 0.5):  # every sixth turn is slow
            now += step_s
            silent = silent or roster.on_timer(now).fell_silent
    assert now < 10.0


def test_heartbeats_are_due_once_per_interval() -> None:
    roster = Roster(ME, "decode", LIVENESS, 0.0)
    spoken = sum(roster.speak(step * 0.01) for step in range(401))
    assert 19 <= spoken <= 21
    assert roster.next_deadline <= 4.25


def test_each_tells_those_who_listen_to_its_role() -> None:
    told = {}
    for stamp in EVERYBODY:
        role = stamp.worker.split("-")[0]
        roster = Roster(stamp, role, LIVENESS, 0.0)
        roster.on_membership(CONTROLLER, view(1, *EVERYBODY), 0.0)
        audience = roster.audience((), 0.0)
        assert not audience.asked
        told[stamp.worker] = {*audience.told}
    assert told["decode-0"] == told["decode-1"] == told["prefill-0"] == {"gateway-0", "gateway-1"}
    assert told["gateway-0"] == told["gateway-1"] == {"decode-0", "decode-1"}


def test_silence_counts_of_those_on_whom_one_depends() -> None:
    gateways, workers = {"gateway-0", "gateway-1"}, {"decode-0", "decode-1", "prefill-0"}
    for stamp, listened_to in ((ME, gateways), (PREFILL, set()), (GATEWAY, workers)):
        roster = Roster(stamp, stamp.worker.split("-")[0], LIVENESS, 0.0)
        roster.on_membership(CONTROLLER, view(1, *EVERYBODY), 0.0)
        assert {*tick(roster, 0.0, 60.0)} == listened_to


def test_the_peer_of_a_hand_off_is_asked_and_its_silence_counts_from_then_on() -> None:
    roster = roster_with(ME, PREFILL)
    assert tick(roster, 0.0, 60.0) == []
    assert [*roster.audience((PREFILL,), 60.0).asked] == [PREFILL.worker]
    assert tick(roster, 60.0, 62.9) == []
    assert tick(roster, 62.9, 63.2) == [PREFILL.worker]


def test_a_hand_off_that_is_over_is_no_reason_to_listen() -> None:
    roster = roster_with(ME, PREFILL)
    roster.audience((PREFILL,), 0.0)
    assert not any(roster.audience((), 1.0))
    assert tick(roster, 1.0, 60.0) == []


def test_a_silent_peer_is_asked_until_it_is_heard_also_without_a_hand_off() -> None:
    roster = roster_with(ME, PREFILL)
    roster.audience((PREFILL,), 0.0)
    assert tick(roster, 0.0, 4.0) == [PREFILL.worker]
    for at_s in (4.0, 5.0, 6.0):
        assert [*roster.audience((), at_s).asked] == [PREFILL.worker]
    assert roster.silent
    assert roster.on_heard(PREFILL, 6.5).came_back == (PREFILL.worker,)
    assert not any(roster.audience((), 7.0))
    assert not roster.silent


def test_who_asks_is_answered_once_and_is_not_listened_to() -> None:
    roster = roster_with(ME, PREFILL)
    roster.on_asked(PREFILL)
    assert [*roster.audience((), 0.2).told] == [PREFILL.worker]
    assert not any(roster.audience((), 0.4))
    assert tick(roster, 0.4, 60.0) == []


def test_two_with_a_hand_off_between_them_ask_each_other_and_need_no_further_answer() -> None:
    roster = roster_with(ME, PREFILL)
    roster.on_asked(PREFILL)
    told, asked = roster.audience((PREFILL,), 0.2)
    assert (told, [*asked]) == ({}, [PREFILL.worker])


def test_who_leaves_is_neither_asked_nor_answered() -> None:
    roster = roster_with(ME, PREFILL)
    roster.audience((PREFILL,), 0.0)
    roster.on_asked(PREFILL)
    roster.on_membership(CONTROLLER, view(2, ME, SUCCESSOR), 1.0)
    assert not any(roster.audience((PREFILL,), 1.0)), "a hand-off with the predecessor is none with the successor"
    assert tick(roster, 1.0, 60.0) == []


def test_ways_are_opened_to_those_to_whom_there_is_something_to_say() -> None:
    ways = {
        stamp.worker: {other.worker for other in EVERYBODY if roster.speaks_to(member(other))}
        for stamp in EVERYBODY
        for roster in [Roster(stamp, stamp.worker.split("-")[0], LIVENESS, 0.0)]
    }
    assert ways["decode-0"] == {"prefill-0", "gateway-0", "gateway-1"}
    assert ways["prefill-0"] == {"decode-0", "decode-1", "gateway-0", "gateway-1"}
    assert ways["gateway-0"] == {"prefill-0", "decode-0", "decode-1"}
