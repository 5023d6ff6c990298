"""When a session's clockwork runs, whatever its timer did before."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from baton.common.ids import Epoch, HandoffId, HandoffKey, Stamp, WorkerId
from baton.transfer.session.book import Machine, SessionBook
from baton.transfer.session.step import SessionRules, Step, Verdict


class Timed(NamedTuple):
    """A session that wants its clockwork at `due_s`; an event is its next `due_s`."""

    due_s: float | None


RANG = "rang"
"""What the clockwork does."""


def step(state: Timed, event: Timed, now: float, rules: SessionRules) -> Step[Timed, str]:
    return Step(event, Verdict.MOVE, () if event.due_s is not None else (RANG,))


MACHINE: Machine[Timed, Timed, str] = Machine(
    side="sink",
    step=step,
    timer=lambda state: state.due_s,
    clockwork=lambda state, now: Timed(None),
    is_over=lambda state: False,
    peer=lambda state: Stamp(WorkerId("prefill-0"), 1, Epoch(1)),
)


def book() -> SessionBook[Timed, Timed, str]:
    rules = SessionRules(page_size=4, resend_after_s=0.5)
    return SessionBook(MACHINE, rules, 60.0, 100, Counter(), deque(maxlen=4), lambda *told: None)


def key(number: int) -> HandoffKey:
    return HandoffKey(HandoffId(number), 1)


def opened(made: SessionBook[Timed, Timed, str], number: int, due_s: float | None) -> None:
    made.open(key(number), Step(Timed(due_s), Verdict.MOVE), 0.0)


def test_a_timer_that_was_taken_back_may_be_set_to_the_same_time_again() -> None:
    made = book()
    opened(made, 1, 5.0)
    made.apply(key(1), Timed(None), 1.0)
    assert made.next_deadline() is None
    made.apply(key(1), Timed(5.0), 2.0)
    assert made.next_deadline() == 5.0
    assert made.run_timers(5.0) == [RANG]
    assert made.next_deadline() is None


def test_a_timer_rings_once_and_only_when_it_was_last_set_to() -> None:
    made = book()
    opened(made, 1, 5.0)
    made.apply(key(1), Timed(9.0), 1.0)
    assert made.run_timers(5.0) == []
    made.apply(key(1), Timed(7.0), 6.0)
    assert made.next_deadline() == 7.0
    assert made.run_timers(9.0) == [RANG]
    assert made.run_timers(99.0) == []


def test_timers_that_moved_do_not_pile_up_behind_a_session_that_waits() -> None:
    made = book()
    opened(made, 0, 1.0)  # first in line
    opened(made, 1, 2.0)
    for turn in range(5_000):
        made.apply(key(1), Timed(2.0 + turn), 0.5)
        made.next_deadline()
    timers = made._timers
    assert len(timers._heap) < 200, "two sessions"
