"""All sessions of one side of one process: their states, their timers, and the memory of those that ended.

Owns the bounds: what ended is kept for `tombstone_ttl_s`, at most `max_tombstones`, oldest forgotten first; what frames
alone have created is kept apart under the same bound. Never decides what an event means (that is the machine).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from msgspec import Struct

from baton.common.deadlines import Deadlines
from baton.common.ids import HandoffKey, Stamp
from baton.transfer.session.step import PeerDead, PeerSilent, SessionRules, Step, Verdict

StateT = TypeVar("StateT")
InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")

HISTORY_LENGTH = 256


class Machine(Struct, Generic[StateT, InputT, OutputT], frozen=True):
    """A session machine as values: what a book needs to drive it."""

    side: str  # "sink" | "source"
    step: Callable[[StateT, InputT, float, SessionRules], Step[StateT, OutputT]]
    timer: Callable[[StateT], float | None]
    clockwork: Callable[[StateT, float], InputT]
    is_over: Callable[[StateT], bool]
    peer: Callable[[StateT], Stamp]


class Transition(Struct, frozen=True):
    """One line of recent history, for people."""

    now: float
    side: str
    key: HandoffKey
    event: str
    before: str
    verdict: Verdict
    after: str


class SessionBook(Generic[StateT, InputT, OutputT]):
    """`states[key]` by machine steps. All methods are O(log sessions) but `items` and `keys_of`."""

    def __init__(
        self,
        machine: Machine[StateT, InputT, OutputT],
        rules: SessionRules,
        tombstone_ttl_s: float,
        max_tombstones: int,
        counters: Counter[str],
        history: deque[Transition],
        observe: Callable[[HandoffKey, InputT | None, Step[StateT, OutputT], float], None],
    ) -> None:
        """`observe` is told of every step; of the first one of a session, without an event."""
        self._machine = machine
        self._rules = rules
        self._tombstone_ttl_s = tombstone_ttl_s
        self._max_tombstones = max_tombstones
        self._counters = counters
        self._history = history
        self._observe = observe
        self._states: dict[HandoffKey, StateT] = {}
        self._ended: dict[HandoffKey, float] = {}  # -> when to forget it; in order of ending
        self._unasked: dict[HandoffKey, float] = {}  # the same, for what a frame alone has created
        self._timers: Deadlines[HandoffKey] = Deadlines()
        self._forgotten = False  # something was, once

    @property
    def live(self) -> int:
        """Sessions whose engine has not been told the end."""
        return len(self._states) - len(self._ended) - len(self._unasked)

    def get(self, key: HandoffKey) -> StateT | None:
        return self._states.get(key)

    def items(self) -> Iterator[tuple[HandoffKey, StateT]]:
        return iter(self._states.items())

    def keys_of(self, chosen: Callable[[Stamp], bool], *, ended_too: bool) -> list[HandoffKey]:
        return [
            key
            for key, state in self._states.items()
            if chosen(self._machine.peer(state)) and (ended_too or not self._machine.is_over(state))
        ]

    def peers(self) -> list[Stamp]:
        """Of those that are not over, each once per session."""
        if not self.live:
            return []
        peer, is_over = self._machine.peer, self._machine.is_over
        return [peer(state) for state in self._states.values() if not is_over(state)]

    def open(self, key: HandoffKey, first: Step[StateT, OutputT], now: float) -> tuple[OutputT, ...]:
        """Enters a new session with its first step."""
        assert key not in self._states, f"{self._machine.side} {key} exists"
        self._observe(key, None, first, now)
        self._enter(key, first.state, now)
        return first.effects

    def bury_unasked(self, key: HandoffKey, state: StateT, now: float) -> None:
        """Remembers something terminal that a frame alone has created."""
        assert key not in self._states, f"{self._machine.side} {key} exists"
        assert self._machine.is_over(state), state
        self._states[key] = state
        self._unasked[key] = now + self._tombstone_ttl_s
        self._forget_beyond_bounds(self._unasked, now)

    def apply(self, key: HandoffKey, event: InputT, now: float) -> tuple[OutputT, ...]:
        """One transition of a known session. Raises for an unknown key: a bug of this process, or the caller looked."""
        assert key in self._states, f"{type(event).__name__} for a {self._machine.side} that never was: {key}"
        before = self._states[key]
        step = self._machine.step(before, event, now, self._rules)
        self._note(key, before, event, step, now)
        self._observe(key, event, step, now)
        self._enter(key, step.state, now)
        return step.effects

    def apply_to_peers(
        self, chosen: Callable[[Stamp], bool], event: InputT, now: float, *, ended_too: bool
    ) -> list[OutputT]:
        """News of peers, to all their sessions. The end of one may push the memory of another out of its bounds."""
        effects: list[OutputT] = []
        for key in self.keys_of(chosen, ended_too=ended_too):
            if key in self._states:
                effects += self.apply(key, event, now)
        return effects

    def command(self, key: HandoffKey, event: InputT, now: float) -> tuple[OutputT, ...]:
        """`apply`, for what the engine asks for. An engine that was away for long (a long step, a stopped process) may
        speak of a session that has not only ended but been forgotten since: that is no bug, and it has been told."""
        if key not in self._states and self._forgotten:
            self._counters[f"{self._machine.side}.forgotten.{type(event).__name__}"] += 1
            return ()
        return self.apply(key, event, now)

    def run_timers(self, now: float) -> list[OutputT]:
        self._forget_beyond_bounds(self._ended, now)
        self._forget_beyond_bounds(self._unasked, now)
        effects: list[OutputT] = []
        for key in self._timers.pop_due(now):
            if key in self._states:  # else the end of another one has pushed it out of memory
                effects += self.apply(key, self._machine.clockwork(self._states[key], now), now)
        return effects

    def next_deadline(self) -> float | None:
        """When a session wants `run_timers`. Forgetting is no reason to wake up: it happens on the way."""
        return self._timers.next_s()

    def _enter(self, key: HandoffKey, state: StateT, now: float) -> None:
        self._states[key] = state
        due_s = self._machine.timer(state)
        if due_s is None:
            self._timers.drop(key)
        elif due_s != self._timers.get(key):
            self._timers.set(key, due_s)
        if self._machine.is_over(state) and key not in self._ended and key not in self._unasked:
            self._ended[key] = now + self._tombstone_ttl_s
            self._forget_beyond_bounds(self._ended, now)

    def _forget_beyond_bounds(self, table: dict[HandoffKey, float], now: float) -> None:
        while table:
            key = next(iter(table))
            if table[key] > now and len(table) <= self._max_tombstones:
                return
            del table[key], self._states[key]
            self._timers.drop(key)
            self._forgotten = True

    def _note(self, key: HandoffKey, before: StateT, event: InputT, step: Step[StateT, OutputT], now: float) -> None:
        if step.verdict is not Verdict.MOVE and isinstance(event, PeerSilent | PeerDead):
            return  # news of a peer goes to all its sessions; that most have no use for it is no news
        side, name, verdict = self._machine.side, type(event).__name__, step.verdict
        before_name, after_name = type(before).__name__, type(step.state).__name__
        self._history.append(Transition(now, side, key, name, before_name, verdict, after_name))
        if verdict is not Verdict.MOVE:
            self._counters[f"{side}.{before_name}.{name}.{verdict}"] += 1
