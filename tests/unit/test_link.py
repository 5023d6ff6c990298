"""Which lane is chosen, and when a lane is tried again."""

from __future__ import annotations

from baton.common.ids import Epoch, Stamp, WorkerId
from baton.common.messages import LaneAddress
from baton.transfer.link import (
    AVOID_S,
    CONNECT_TIMEOUT_S,
    PATIENCE_S,
    RETRY_S,
    Chosen,
    CloseLink,
    LaneStatus,
    LaneView,
    Links,
    NoLane,
    OpenLink,
    Wait,
    choose_lane,
)

PEER = Stamp(WorkerId("prefill-0"), 1, Epoch(9))
SUCCESSOR = Stamp(WorkerId("prefill-0"), 2, Epoch(10))
UP, CONNECTING, DOWN = LaneStatus.UP, LaneStatus.CONNECTING, LaneStatus.DOWN


def addresses(*lanes: str) -> list[LaneAddress]:
    return [LaneAddress(lane=lane, address={}) for lane in lanes]


def test_the_first_lane_that_is_up_wins_and_says_what_it_passed_over() -> None:
    choice = choose_lane([LaneView("local", DOWN, "another host"), LaneView("ucx", UP), LaneView("zmq", UP)])
    assert isinstance(choice, Chosen)
    assert choice.lane == "ucx"
    assert "local (another host)" in choice.reason


def test_a_lane_that_is_not_here_says_why_and_is_never_opened() -> None:
    links = Links(("cuda_ipc", "zmq"), missing={"cuda_ipc": "no driver"})
    effects = links.set_peers([(PEER, addresses("cuda_ipc", "zmq"))], 0.0)
    assert [effect.lane for effect in effects if isinstance(effect, OpenLink)] == ["zmq"]
    links.on_up(PEER, "zmq", 0.0)
    absent, up = links.views(PEER, 0.0)
    assert (absent.status, absent.reason, up.status) == (LaneStatus.ABSENT, "no driver", UP)
    assert links.choose(PEER, 0.0) == Chosen("zmq", "preferred over the rest; passed over: cuda_ipc (no driver)")
    assert [effect.lane for effect in links.set_peers([], 1.0) if isinstance(effect, CloseLink)] == ["zmq"]


def test_a_better_lane_is_waited_for_but_not_for_long() -> None:
    fresh = [LaneView("ucx", CONNECTING, age_s=PATIENCE_S / 2), LaneView("zmq", UP)]
    stale = [LaneView("ucx", CONNECTING, age_s=PATIENCE_S * 2), LaneView("zmq", UP)]
    assert isinstance(choose_lane(fresh), Wait)
    assert choose_lane(stale) == Chosen("zmq", "preferred over the rest; passed over: ucx (connecting)")


def test_a_lane_that_just_failed_is_the_last_choice_but_a_choice() -> None:
    failed, fine = LaneView("local", UP, avoided=True), LaneView("zmq", UP)
    first = choose_lane([failed, fine])
    assert isinstance(first, Chosen)
    assert first.lane == "zmq"
    only = choose_lane([failed])
    assert isinstance(only, Chosen)
    assert only.lane == "local"


def test_no_lane_names_every_reason() -> None:
    choice = choose_lane([LaneView("local", DOWN, "another host"), LaneView("ucx", LaneStatus.ABSENT, "not there")])
    assert choice == NoLane("local (another host); ucx (not there)")
    assert isinstance(choose_lane([]), NoLane)


def test_a_link_lives_through_down_retry_and_up() -> None:
    links = Links(["local", "zmq"])
    assert links.set_peers([(PEER, addresses("zmq", "local"))], 0.0) == [
        OpenLink(PEER, "local", addresses("local")[0]),
        OpenLink(PEER, "zmq", addresses("zmq")[0]),
    ]
    links.on_down(PEER, "local", "another host", 0.1)
    links.on_up(PEER, "zmq", 0.1)
    assert isinstance(links.choose(PEER, 0.2), Chosen)
    assert links.next_deadline() == 0.1 + RETRY_S
    assert links.on_timer(1.0) == []
    assert links.on_timer(0.1 + RETRY_S) == [OpenLink(PEER, "local", addresses("local")[0])]
    links.on_up(PEER, "local", 3.0)
    choice = links.choose(PEER, 3.0)
    assert isinstance(choice, Chosen)
    assert choice.lane == "local"
    assert links.on_timer(links.next_deadline() or 0.0) == [], "called once for nothing, perhaps"
    assert links.next_deadline() is None


def test_a_link_that_is_never_answered_is_given_up_and_tried_again() -> None:
    links = Links(["ucx"])
    links.set_peers([(PEER, addresses("ucx"))], 0.0)
    assert isinstance(links.choose(PEER, PATIENCE_S * 2), Wait)
    assert links.on_timer(CONNECT_TIMEOUT_S) == [CloseLink(PEER, "ucx")]
    assert links.choose(PEER, CONNECT_TIMEOUT_S) == NoLane("ucx (no answer)")
    assert links.on_timer(CONNECT_TIMEOUT_S + RETRY_S) == [OpenLink(PEER, "ucx", addresses("ucx")[0])]


def test_a_failure_is_held_against_the_lane_for_a_while() -> None:
    links = Links(["local", "zmq"])
    links.set_peers([(PEER, addresses("local", "zmq"))], 0.0)
    links.on_up(PEER, "local", 0.0)
    links.on_up(PEER, "zmq", 0.0)
    links.on_failure(PEER, "local", 1.0)
    choices = [links.choose(PEER, now) for now in (1.0, 1.0 + AVOID_S)]
    assert [choice.lane for choice in choices if isinstance(choice, Chosen)] == ["zmq", "local"]


def test_a_peer_that_restarted_is_another_peer() -> None:
    links = Links(["zmq"])
    links.set_peers([(PEER, addresses("zmq"))], 0.0)
    links.on_up(PEER, "zmq", 0.0)
    assert links.set_peers([(SUCCESSOR, addresses("zmq"))], 1.0) == [
        CloseLink(PEER, "zmq"),
        OpenLink(SUCCESSOR, "zmq", addresses("zmq")[0]),
    ]
    assert isinstance(links.choose(PEER, 1.0), NoLane)
    assert isinstance(links.choose(SUCCESSOR, 1.0), Wait)
    links.on_up(PEER, "zmq", 1.1)  # a late report
    assert isinstance(links.choose(PEER, 1.1), NoLane)


def test_a_lane_that_the_peer_lacks_is_never_opened() -> None:
    links = Links(["ucx", "zmq"])
    assert links.set_peers([(PEER, addresses("zmq"))], 0.0) == [OpenLink(PEER, "zmq", addresses("zmq")[0])]
    assert [view.status for view in links.views(PEER, 0.0)] == [LaneStatus.ABSENT, CONNECTING]
    assert links.on_timer(CONNECT_TIMEOUT_S - 1) == []
