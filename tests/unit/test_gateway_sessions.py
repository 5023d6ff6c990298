"""Sessions at the gateway: whose they are, where their turns go, and what becomes of the slot on the worker."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.config import GatewayConfig, LivenessConfig, TransferConfig
from baton.common.engine.core_api import FromPeer, MembershipView, SendTo
from baton.common.errors import ErrorCode
from baton.common.ids import Epoch, RequestId, SessionId, Stamp, WorkerId
from baton.common.messages import (
    Body,
    CancelRequest,
    CloseSession,
    Failure,
    Member,
    Output,
    SamplingParams,
    Submit,
    Submitted,
    pack_tokens,
)
from baton.deploy.gateway_core import GatewayCore
from baton.deploy.gateway_states import GatewayEffect, RequestEnded

ALICE, BOB = "alice", "bob"
S = SessionId("s")
A, B = (Stamp(WorkerId(f"decode-{name}"), 1, Epoch(number)) for number, name in enumerate("ab", start=1))


class Driver:
    """Two decode workers and whatever is asked of them."""

    def __init__(self, max_sessions: int = 8, ttl_s: float = 100.0) -> None:
        gateway = GatewayConfig(max_sessions=max_sessions, session_ttl_s=ttl_s)
        self.core = GatewayCore(gateway, TransferConfig(resend_after_s=1.0), LivenessConfig(), 64)
        self.now = 0.0
        self.version = 0
        self.sent: list[SendTo] = []
        self.ended: dict[str, RequestEnded] = {}
        self.view(A, B)

    def take(self, effects: list[GatewayEffect]) -> list[SendTo]:
        sent = [effect for effect in effects if isinstance(effect, SendTo)]
        self.ended |= {effect.request_id: effect for effect in effects if isinstance(effect, RequestEnded)}
        self.sent += sent
        return sent

    def view(self, *stamps: Stamp) -> list[SendTo]:
        self.version += 1
        members = tuple(Member(stamp=one, role="decode", address="") for one in stamps)
        return self.take(self.core.handle(MembershipView(self.version, members, frozenset()), self.now))

    def ask(self, name: str, session: SessionId = S, owner: str = ALICE) -> Submit | None:
        """What a worker is sent; None when the turn is refused."""
        effects = self.core.submit(
            RequestId(name), np.arange(5, dtype=np.int32), SamplingParams(), 50.0, self.now, session, owner
        )
        sent = self.take(effects)
        if not sent:
            return None
        assert isinstance(sent[0].body, Submit)
        return sent[0].body

    def tell(self, sender: Stamp, body: Body) -> list[SendTo]:
        return self.take(self.core.handle(FromPeer(sender, body), self.now))

    def answer(self, name: str, worker: Stamp, placement: int = 0, **more: object) -> list[SendTo]:
        more = more or {"finish_reason": "stop"}
        key = {"request_id": RequestId(name), "placement": placement}
        self.tell(worker, Submitted(**key))  # type: ignore[arg-type]
        return self.tell(worker, Output(**key, first_index=0, tokens=pack_tokens([1]), **more))  # type: ignore[arg-type]

    def worker_of_last_submit(self) -> Stamp:
        last = next(effect for effect in reversed(self.sent) if isinstance(effect.body, Submit))
        return next(one for one in (A, B) if one.worker == last.worker)

    def refusal(self, name: str) -> ErrorCode:
        failure = self.ended[name].failure
        assert failure is not None
        return failure.code

    def turn(self, name: str) -> Stamp:
        assert self.ask(name) is not None
        worker = self.worker_of_last_submit()
        self.answer(name, worker)
        assert self.ended[name].failure is None
        return worker


@pytest.fixture
def driver() -> Driver:
    made = Driver()
    assert made.core.open_session(S, ALICE, 0.0) is None
    return made


def closes(sent: list[SendTo]) -> list[WorkerId]:
    return [effect.worker for effect in sent if isinstance(effect.body, CloseSession)]


def test_turns_stay_with_the_worker_and_are_counted(driver: Driver) -> None:
    first = driver.ask("t0")
    assert first is not None
    assert (first.session_id, first.session_turn) == (S, 0)
    home = driver.worker_of_last_submit()
    driver.answer("t0", home)
    for number in range(1, 4):
        driver.ask(f"busy{number}", SessionId(""))  # load on whoever is free
        asked = driver.ask(f"t{number}")
        assert asked is not None
        assert (asked.session_id, asked.session_turn) == (S, number)
        assert driver.worker_of_last_submit() == home
        driver.answer(f"t{number}", home)


def test_nobody_uses_the_session_of_another_nor_learns_that_it_exists(driver: Driver) -> None:
    driver.turn("t0")
    assert driver.ask("theirs", owner=BOB) is None
    assert driver.ask("none", SessionId("no such")) is None
    assert driver.refusal("theirs") == driver.refusal("none") == ErrorCode.SESSION_NOT_FOUND
    assert driver.ended["theirs"].failure == driver.ended["none"].failure
    failure = driver.core.close_session(S, BOB)
    assert isinstance(failure, Failure)
    assert failure.code is ErrorCode.SESSION_NOT_FOUND
    driver.turn("t1")


def test_one_turn_at_a_time(driver: Driver) -> None:
    driver.ask("t0")
    assert driver.ask("again") is None
    assert driver.refusal("again") is ErrorCode.SESSION_BUSY
    driver.answer("t0", driver.worker_of_last_submit())
    driver.turn("t1")


def test_a_turn_that_fails_is_not_counted_and_the_next_one_may_come(driver: Driver) -> None:
    home = driver.turn("t0")
    driver.ask("bad")
    driver.answer("bad", home, failure=Failure(code=ErrorCode.OUT_OF_PAGES))
    assert driver.refusal("bad") is ErrorCode.OUT_OF_PAGES
    driver.ask("gone")
    driver.take(driver.core.cancel(RequestId("gone"), driver.now))
    asked = driver.ask("t1")
    assert asked is not None
    assert asked.session_turn == 1


def test_a_worker_that_is_gone_loses_the_slot_not_the_conversation(driver: Driver) -> None:
    home = driver.turn("t0")
    other = B if home == A else A
    driver.view(other)
    asked = driver.ask("t1")
    assert asked is not None
    assert asked.session_turn == 1
    assert driver.worker_of_last_submit() == other
    assert closes(driver.answer("t1", other)) == []  # nobody is there to be told
    driver.view(home, other)
    driver.ask("t2")
    assert driver.worker_of_last_submit() == other


def test_a_successor_in_the_same_seat_is_somebody_else(driver: Driver) -> None:
    home = driver.turn("t0")
    driver.view(A, B)
    successor = Stamp(home.worker, 2, Epoch(99))
    other = B if home == A else A
    driver.view(other, successor)
    assert closes(driver.take(driver.core.close_session(S, ALICE))) == []  # type: ignore[arg-type]


def test_a_turn_that_moved_closes_the_slot_that_it_left(driver: Driver) -> None:
    home = driver.turn("t0")
    other = B if home == A else A
    driver.ask("t1")
    driver.tell(home, Output(request_id=RequestId("t1"), placement=0, first_index=0,
                             failure=Failure(code=ErrorCode.OVERLOADED)))  # fmt: skip
    assert driver.worker_of_last_submit() == other
    assert closes(driver.answer("t1", other, placement=1)) == [home.worker]


def test_closing_frees_the_slot_now_or_when_the_turn_ends(driver: Driver) -> None:
    home = driver.turn("t0")
    assert closes(driver.take(driver.core.close_session(S, ALICE))) == [home.worker]  # type: ignore[arg-type]
    assert driver.ask("late") is None
    assert driver.core.open_session(S, ALICE, 0.0) is None
    driver.ask("t1")
    running = driver.worker_of_last_submit()
    assert closes(driver.take(driver.core.close_session(S, ALICE))) == []  # type: ignore[arg-type]
    assert closes(driver.answer("t1", running)) == [running.worker]
    assert driver.ended["t1"].failure is None


def test_unused_sessions_expire_and_used_ones_do_not(driver: Driver) -> None:
    home = driver.turn("t0")
    driver.ask("slow")
    driver.now = 120.0
    assert closes(driver.take(driver.core.on_timer(driver.now))) == []
    driver.now = 200.0
    driver.ask("fresh", SessionId(""))
    assert driver.refusal("slow") is ErrorCode.DEADLINE_EXCEEDED
    driver.turn("t1")
    driver.now = 299.0
    driver.take(driver.core.on_timer(driver.now))
    due_s = driver.core.next_deadline()
    assert due_s is not None
    driver.now = 300.0
    assert closes(driver.take(driver.core.on_timer(driver.now))) == [home.worker]
    assert driver.ask("late") is None


def test_sessions_are_bounded() -> None:
    driver = Driver(max_sessions=1)
    assert driver.core.open_session(S, ALICE, 0.0) is None
    failure = driver.core.open_session(SessionId("two"), ALICE, 0.0)
    assert failure is not None
    assert failure.code is ErrorCode.OVERLOADED


def test_a_found_stop_string_ends_the_turn_with_its_answer(driver: Driver) -> None:
    driver.ask("t0")
    home = driver.worker_of_last_submit()
    driver.tell(home, Submitted(request_id=RequestId("t0"), placement=0))
    sent = driver.take(driver.core.finish(RequestId("t0"), driver.now))
    assert [effect.body for effect in sent] == [CancelRequest(request_id=RequestId("t0"), placement=0, answered=True)]
    late = driver.tell(home, Output(request_id=RequestId("t0"), placement=0, first_index=0, tokens=pack_tokens([1])))
    assert late[0].body == CancelRequest(request_id=RequestId("t0"), placement=0, answered=True)
    asked = driver.ask("t1")
    assert asked is not None
    assert asked.session_turn == 1
    assert driver.worker_of_last_submit() == home
