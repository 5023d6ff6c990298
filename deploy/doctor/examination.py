"""Examines hosts through the probes on them: asks, measures pair by pair, and gives back what was found.

Owns: the order, and the bounds. Never: a verdict (`judge.py`), or a wait without an end: a host that hangs costs one
deadline, is a finding, and takes part in nothing after that.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.common.config import ClusterConfig
from baton.common.ids import WorkerId
from baton.common.messages import Member
from baton.deploy.doctor.clocks import Exchange, offset_of
from baton.deploy.doctor.pairs import Pair, choose_pairs, rounds_of
from baton.deploy.doctor.probes import Probes, Silent
from baton.deploy.doctor.shapes import (
    PORTS_AT_ONCE,
    Answer,
    ClockReport,
    Facts,
    Failed,
    Found,
    Heard,
    Host,
    Measure,
    Measured,
    Meet,
    PairReport,
    Reach,
    Request,
    Running,
    TellFacts,
    TellHeard,
    TellTime,
    Tried,
    TryPorts,
    WallTime,
)

CLOCK_ROUNDS = 8
CLOCK_S = 3.0
PORT_S = 1.0
SLACK_S = 5.0
"""A probe that is late by more than this hangs."""
MEET_S = 10.0
SEED = 1
"""Which pairs of many are measured is the same in every run: what changed is not the choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """`start_s`: until a probe has told what it sees, its start included. `pair_s`: for one pair in one direction."""

    start_s: float = 60.0
    pair_s: float = 10.0
    all_pairs: bool = False
    measure: bool = True


@dataclass(slots=True)
class Examination:
    """One. `hosts` have their probes' names and no facts yet. `ports` are tried from every host, (name, host, port)."""

    config: ClusterConfig
    hosts: Sequence[Host]
    probes: Probes
    bounds: Bounds
    say: Callable[[str], None]
    ports: Sequence[tuple[str, str, int]] = ()
    members: Sequence[Running] = ()
    _known: dict[WorkerId, Facts] = field(default_factory=dict)
    _trouble: dict[WorkerId, str] = field(default_factory=dict)

    def run(self) -> Found:
        """Leaves the probes to whoever made them."""
        began_s = time.monotonic()
        probes = [probe for host in self.hosts for probe in host.probes]
        self.say(f"looking at hosts: {len(self.hosts)}, probes: {len(probes)}")
        self._known = self._facts(probes)
        clocks = self._clocks()
        pairs = self._pairs() if self.bounds.measure else []
        self._meet(pairs)
        reports = self._measure(pairs)
        return Found(
            config=self.config,
            hosts=tuple(self._host(host) for host in self.hosts),
            pairs=tuple(reports),
            deaf=tuple(self._deaf(pairs)),
            clocks=tuple(clocks),
            ports=tuple(self._try_ports()),
            members=tuple(self.members),
            pairs_possible=len(self._known) * (len(self._known) - 1),
            moved_bytes=sum(lane.nbytes for report in reports for lane in report.lanes),
            took_s=time.monotonic() - began_s,
        )

    # ---------------------------------------------------------------------------------------- the steps

    def _facts(self, probes: Sequence[WorkerId]) -> dict[WorkerId, Facts]:
        answers = self._ask({probe: TellFacts() for probe in probes}, self.bounds.start_s)
        return {probe: facts for probe in probes if isinstance(facts := answers.get(probe), Facts)}

    def _pairs(self) -> list[Pair]:
        return choose_pairs(list(self._known), random.Random(SEED).choice, all_pairs=self.bounds.all_pairs)

    def _clocks(self) -> list[ClockReport]:
        """One probe of each host, one after the other: a busy answer is a late one."""
        reports = []
        for host in self.hosts:
            probe = next((probe for probe in host.probes if self._lives(probe)), None)
            exchanges: list[Exchange] = []
            while probe is not None and len(exchanges) < CLOCK_ROUNDS:
                asked_s = time.time()
                answer = self._ask({probe: TellTime()}, CLOCK_S).get(probe)
                if not isinstance(answer, WallTime):
                    break
                exchanges.append(Exchange(asked_s, answer.wall_s, time.time()))
            if exchanges:
                ahead = offset_of(exchanges)
                reports.append(ClockReport(host.name, ahead.ahead_s, ahead.error_s))
        return reports

    def _meet(self, pairs: Sequence[Pair]) -> None:
        wanted: dict[WorkerId, Request] = {}
        for probe in self._known:
            sources = [self._member(pair.source) for pair in pairs if pair.receiver == probe]
            others = [self._member(pair.receiver) for pair in pairs if pair.source == probe]
            everybody = {member.stamp.worker: member for member in (*sources, *others)}
            wanted[probe] = Meet(tuple(sources), tuple(everybody.values()))
        self._ask(wanted, MEET_S)

    def _measure(self, pairs: Sequence[Pair]) -> list[PairReport]:
        reports: list[PairReport] = []
        rounds = rounds_of(pairs)
        for number, together in enumerate(rounds, start=1):
            self.say(f"measuring {len(pairs)} pairs: round {number} of {len(rounds)}")
            able = [pair for pair in together if all(self._lives(probe) for probe in pair)]
            asked: dict[WorkerId, Request] = {pair.receiver: Measure(pair.source, self.bounds.pair_s) for pair in able}
            answers = self._ask(asked, self.bounds.pair_s + SLACK_S)
            for pair in together:
                answer = answers.get(pair.receiver)
                if isinstance(answer, Measured):
                    reports.append(answer.report)
                    continue
                reason = next((self._trouble[probe] for probe in pair if probe in self._trouble), "no answer")
                reason = answer.reason if isinstance(answer, Failed) else reason
                reports.append(PairReport(pair.source, pair.receiver, 0.0, (), "", "", trouble=reason))
        return reports

    def _deaf(self, pairs: Sequence[Pair]) -> list[tuple[str, str]]:
        """Between probes that live. Asking takes frames in both directions: who was asked has heard the receiver."""
        answers = self._ask({probe: TellHeard() for probe in self._known if self._lives(probe)}, MEET_S)
        heard = {probe: answer.workers for probe, answer in answers.items() if isinstance(answer, Heard)}
        ways = dict.fromkeys(pairs)
        return [
            (way.source, way.receiver)
            for way in ways
            if self._lives(way.source) and way.receiver in heard and way.source not in heard[way.receiver]
        ]

    def _try_ports(self) -> list[Reach]:
        first = [next((probe for probe in host.probes if self._lives(probe)), None) for host in self.hosts]
        ports = tuple(self.ports)
        if not ports:
            return []
        answers = self._ask(
            {probe: TryPorts(ports, PORT_S) for probe in first if probe},
            SLACK_S + PORT_S * (1 + len(ports) // PORTS_AT_ONCE),
        )
        names = {probe: host.name for host, probe in zip(self.hosts, first, strict=True) if probe}
        return [
            Reach(names[probe], name, f"{host}:{port}", outcome)
            for probe, answer in answers.items()
            if isinstance(answer, Tried)
            for (name, host, port), outcome in zip(ports, answer.outcomes, strict=True)
        ]

    # ------------------------------------------------------------------------------------------ helpers

    def _ask(self, requests: Mapping[WorkerId, Request], within_s: float) -> dict[WorkerId, Answer]:
        """Who is silent is not asked again."""
        answers: dict[WorkerId, Answer] = {}
        for probe, answer in self.probes.ask(requests, within_s).items():
            if isinstance(answer, Silent):
                self._trouble[probe] = answer.reason
            else:
                answers[probe] = answer
                if isinstance(answer, Failed) and probe not in self._known:
                    self._trouble[probe] = answer.reason
        return answers

    def _lives(self, probe: WorkerId) -> bool:
        return probe in self._known and probe not in self._trouble

    def _member(self, probe: WorkerId) -> Member:
        return self._known[probe].member

    def _host(self, host: Host) -> Host:
        known = [self._known[probe].facts for probe in host.probes if probe in self._known]
        trouble = "; ".join(f"{probe}: {self._trouble[probe]}" for probe in host.probes if probe in self._trouble)
        return Host(host.name, host.probes, known[0] if known else None, trouble, host.workers, host.object_store_bytes)
