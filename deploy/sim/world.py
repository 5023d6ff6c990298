"""One simulated cluster from start to rest: seats, clients, faults, and the verdict.

Owns the schedule, the network and every process. Never: decides anything that a core decides. A world is a function of
(settings, seed, hooks): same input, same trace. At the end, with faults stopped, everything must have drained: each
request has one right outcome, every page is free or cached, no hand-off is open, every table is within its bound.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random

from baton.common.config import GatewayConfig
from baton.common.engine.core_api import Drain
from baton.common.errors import ErrorCode
from baton.common.ids import CONTROLLER, Epoch, RequestId, SessionId, Stamp, WorkerId
from baton.common.messages import Failure
from baton.deploy.controller_seats import Keep, SeatSpec
from baton.deploy.gateway_states import RequestEnded
from baton.deploy.routing.index import PrefixIndex
from baton.deploy.sim.clients import ClientRequest, Clients
from baton.deploy.sim.faults import is_prompt, is_steady, plan_faults, without
from baton.deploy.sim.network import Network
from baton.deploy.sim.oracles import StoredPages, assert_content, assert_thoughts_are_not_cached
from baton.deploy.sim.process import ControllerProcess, GatewayProcess, MemberProcess, SimProcess
from baton.deploy.sim.schedule import Clock, Schedule
from baton.deploy.sim.settings import WorldSettings, random_settings
from baton.deploy.sim.tier import SharedStore, page_keys_of
from baton.deploy.sim.watch_caches import CacheWatch, assert_named, is_known
from baton.deploy.sim.watch_members import PublicationWatch
from baton.deploy.sim.watch_seats import LeaveWatch
from baton.deploy.sim.worker import WorkerProcess
from baton.deploy.sim.workload import OWNER, plan_workload
from baton.transfer.api import SinkFailed

KILL_S = 0.05
LOOK_S = 0.05
"""A process that was told to leave looks this often whether it is done."""
HAND_OVER_SHARE = 0.8
HALF_OPEN_S = 2.0
QUIET_STEP_S = 0.5
SHORT_S = 10.0
SHUT_DOWN_S = 5.0
REPORT_AGAIN_S = 2.0
RARE_LOSS = 0.03
"""Of so few heartbeats there are never so many lost, one after the other, that anybody is missed."""
INDEX_REST_S = 10.0
"""And from then until gateways know what is cached."""
REST_S = 55.0
"""Most time from the last arrival, the last fault and the last answer until everything must be at rest."""
FEW_TOMBSTONES = 16
"""Where so few are kept, a session may be forgotten before what it says last was heard."""


TRUE_CLOCK = Clock()


class NeverRests(AssertionError):
    """Something is still owed long after the last fault."""


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a world."""

    seed: int
    trace_hash: str
    events: int
    virtual_s: float
    outcomes: Counter[str]
    probes: Counter[str]
    trace: tuple[str, ...]


class World:
    """`hooks` maps a probe's name to what is called when it is hit: how scenarios steer."""

    def __init__(self, settings: WorldSettings, seed: int, keep_trace: bool = False) -> None:
        self.settings = settings
        self.seed = seed
        self.schedule = Schedule(seed, keep_trace)
        self.rng: Random = self.schedule.rng
        self.probes: Counter[str] = Counter()
        self.hooks: dict[str, list[Callable[[World, object], None]]] = {}
        self.seats: dict[WorkerId, SimProcess] = {}
        self.network = Network(self.schedule, settings.links, self.seats.get, self.probe)
        self.clients = Clients()
        self.tier_store = SharedStore(settings.tier_pages)  # survives every worker
        self.stored_pages = StoredPages(page_keys_of(settings))
        self.gateway_config = GatewayConfig(
            max_inflight_requests=settings.max_inflight_requests,
            dispatch_ahead_requests=settings.dispatch_ahead,
            session_ttl_s=settings.session_ttl_s,
        )
        self.faulty = settings.links.loss > 0
        self._prompt = is_prompt(settings)
        roles = ("prefill", settings.prefill), ("decode", settings.decode), ("gateway", settings.gateways)
        self.specs = [SeatSpec(WorkerId(f"{role}-{i}"), role) for role, count in roles for i in range(count)]
        self.wanted = self.specs  # of the controller
        self.revision = self.serves = 1  # the newest that was asked for; that of new workers
        self.bad_revisions: set[int] = set()  # processes of which do not get ready
        self.publications = PublicationWatch(self._is_alive)
        self.caches = CacheWatch()
        self.leaves = LeaveWatch()
        self.controller = ControllerProcess(self, self.specs)
        self.seats[CONTROLLER] = self.controller
        self.calm_s = 0.0
        self._killed: set[tuple[WorkerId, int]] = set()  # before they had begun
        self._given: dict[WorkerId, int] = {}  # the newest incarnation of each seat
        self._ordered: dict[WorkerId, int] = {}  # the highest ever

    @property
    def now(self) -> float:
        return self.schedule.now

    def new_clock(self) -> Clock:
        """For one more process."""
        settings = self.settings
        if not settings.clock_offset_s and not settings.clock_drift:
            return TRUE_CLOCK
        offset_s = self.rng.random() * settings.clock_offset_s
        return Clock(offset_s, 1 + self.rng.uniform(-settings.clock_drift, settings.clock_drift))

    def is_prompt(self) -> bool:
        """Nothing has gone wrong so far that could keep a frame from arriving soon."""
        return self._prompt and not self.faulty and not self.network.steered

    # ------------------------------------------------------------------------------------------ probes

    def probe(self, name: str, details: object) -> None:
        """Something noteworthy happens; hooks may meddle."""
        self.probes[name] += 1
        if name in self.hooks:
            for hook in self.hooks[name]:
                hook(self, details)

    def on(self, name: str, hook: Callable[[World, object], None]) -> None:
        self.hooks.setdefault(name, []).append(hook)

    # --------------------------------------------------------------------------------------- processes

    def start(self, spec: SeatSpec, incarnation: int) -> None:
        """A new process for a seat; it says Hello when it has loaded."""
        self._given[spec.worker] = incarnation
        before = self.seats.get(spec.worker)
        assert before is None or not before.alive, f"{before.stamp} is to have a successor, and it is alive"
        assert incarnation > self._ordered.get(spec.worker, 0), f"{spec.worker} is {incarnation} once more"
        self._ordered[spec.worker] = incarnation

        def begin() -> None:
            if self._given[spec.worker] != incarnation or (spec.worker, incarnation) in self._killed:
                return  # who ordered it has died and its successor has ordered another, or it is not wanted any more
            old = self.seats.get(spec.worker)
            assert old is None or not old.alive, f"two processes in seat {spec.worker}"
            stamp = Stamp(spec.worker, incarnation, Epoch(self.rng.getrandbits(62) + 2))
            if spec.revision in self.bad_revisions:
                self.probe("bad_start", spec)
                self.schedule.after(0.1, self.controller.start_failed, stamp)
                return
            if self._may_go_wrong(self.settings.bad_starts):
                self._start_badly(stamp)
                return
            make = GatewayProcess if spec.role == "gateway" else WorkerProcess
            self.seats[spec.worker] = make(self, stamp, spec.role, spec.revision)
            for other in [*self.seats] if self.settings.half_open and self.now < self.calm_s else ():
                if self.rng.random() < self.settings.half_open:
                    self.publications.suspect(spec.worker)  # which may not know whom to tell that it lives
                    self.network.cut(other, spec.worker, self.rng.random() * HALF_OPEN_S)

        self.schedule.after(self.rng.random() * self.settings.start_s, begin)

    def _may_go_wrong(self, share: float) -> bool:
        wrong = share > 0 and self.now < self.calm_s and self.rng.random() < share
        self.faulty = self.faulty or wrong
        return wrong

    def _start_badly(self, stamp: Stamp) -> None:
        """It says so, it dies without a word, or it hangs until its time is over."""
        how = self.rng.choice(("says so", "dies", "hangs"))
        self.schedule.note(stamp.worker, f"starts badly: {how}")
        if how != "hangs":
            self.schedule.after(0.1, self.controller.start_failed if how == "says so" else self.controller.died, stamp)

    def kill_for_sure(self, worker: WorkerId, incarnation: int) -> None:
        """The controller's SIGKILL, and the proof that it worked."""
        if self._may_go_wrong(self.settings.lost_kills):
            return
        process = self.seats.get(worker)
        if process is None or process.stamp.incarnation != incarnation:
            self._killed.add((worker, incarnation))
            self.schedule.after(KILL_S, self.controller.died, Stamp(worker, incarnation, Epoch(0)))
            return
        assert not self.is_sound(worker), f"{process.stamp} is killed, and nothing was wrong with it"

        def strike() -> None:
            process.kill()
            self._report_death(process.stamp)

        self.schedule.after(self.rng.random() * KILL_S, strike)

    def crash(self, worker: WorkerId, seen: bool = True) -> None:
        """The process dies. `seen`: its supervisor notices; else only its silence tells."""
        process = self.seats.get(worker)
        if process is None or not process.alive:
            return
        self.faulty = True
        self.publications.suspect(worker)
        self.schedule.note(worker, "crash")
        self.probe("crash", process)
        process.kill()
        if seen:
            self.schedule.after(self.rng.random() * 0.5, self._report_death, process.stamp)

    def _report_death(self, stamp: Stamp) -> None:
        """And once more, when a successor may live."""
        self.controller.died(stamp)
        self.schedule.after(REPORT_AGAIN_S, lambda: self.controller.died(stamp))

    def crash_controller(self, down_s: float) -> None:
        """It dies, and a successor rebuilds its view from those who are there."""
        if not self.controller.alive:
            return
        self.faulty = True
        self.schedule.note(CONTROLLER, "crash")
        self.probe("controller_crash", self.controller)
        self.controller.kill()
        self.schedule.after(down_s, self._restart_controller)

    def _restart_controller(self) -> None:
        """Who does not answer is killed before anything is published; who was ordered and has not begun never will."""
        processes = [process for process in self.seats.values() if process is not self.controller]
        for process in processes:
            if process.paused:
                process.kill()
        wanted = {spec.worker for spec in self.wanted}
        for process in processes:
            if process.alive and process.stamp.worker not in wanted:  # it was leaving
                self.publications.suspect(process.stamp.worker)
                process.kill()
        living = [process for process in processes if process.alive]
        views = [process.roster.latest for process in living if isinstance(process, MemberProcess)]
        version = max([int(self.now * 1000), *(view.version + 1 for view in views if view is not None)])
        self.controller = ControllerProcess(self, self.wanted, version)
        self.seats[CONTROLLER] = self.controller
        self.schedule.note(CONTROLLER, f"begins again with version {version}")
        # As a real one does, by the time that has passed: of seats that are gone nobody tells.
        self.controller.core.book.first_incarnation = max(self._ordered.values(), default=0) + 1
        self.controller.rebuild(self._ordered, living)
        for process in living:
            self._given[process.stamp.worker] = process.stamp.incarnation
        for worker in self._given.keys() - {process.stamp.worker for process in living}:
            self._given[worker] = 0

    def pause(self, worker: WorkerId, seconds: float) -> None:
        """The process is stopped, and continued unless somebody kills it meanwhile."""
        process = self.seats.get(worker)
        if process is None or not process.alive or process.paused:
            return
        self.faulty = True
        self.publications.suspect(worker)
        self.schedule.note(worker, f"pause {seconds:.2f}")
        process.pause()
        self.schedule.after(seconds, process.resume)

    def hang(self, worker: WorkerId) -> None:
        """A step of its engine never ends."""
        process = self.seats.get(worker)
        if isinstance(process, WorkerProcess) and process.alive:
            self.faulty = True
            self.publications.suspect(worker)
            self.schedule.note(worker, "engine hangs")
            process.hang()

    def drain(self, worker: WorkerId) -> None:
        """As before an upgrade: it finishes what it has, then it ends and is replaced."""
        process = self.seats.get(worker)
        if not isinstance(process, WorkerProcess) or not process.alive:
            return
        self.faulty = True
        process.run(lambda: process.deliver(Drain()), "drain")

        def end_when_idle() -> None:
            if process.alive and process.settled:
                self.crash(worker)
            elif process.alive:
                self.schedule.after(0.2, end_when_idle)

        self.schedule.after(0.2, end_when_idle)

    def flip(self, worker: WorkerId) -> None:
        """The controller is told that the worker there shall have the other role."""
        self.controller.flip(worker)

    def upgrade(self) -> None:
        """All seats shall have processes of the next revision, with `surge` more of either role meanwhile."""
        self.revision += 1
        roles = [spec.role for spec in self.specs]
        extra = [
            SeatSpec(name, role, extra=True)
            for role in ("prefill", "decode")
            if role in {self._role_of(spec) for spec in self.specs}  # one who has no like needs one
            for name in self._free_names(role, roles.count(role), self.settings.surge, self.specs)
        ]
        lasting = [spec for spec in self.wanted if not spec.extra]
        anew = [dataclasses.replace(spec, fallback=spec.fallback or spec.revision) for spec in lasting]
        self.wanted = [dataclasses.replace(spec, revision=self.revision) for spec in (*anew, *extra)]
        self.schedule.note("world", f"upgrade to revision {self.revision}")
        self.publications.suspect(*(spec.worker for spec in self.wanted))
        self.controller.change(self.wanted)

    def scale(self, role: str, count: int) -> None:
        """So many workers of this role, of the revision that new ones have. Of those that are too many who takes no
        requests leaves first, else the last ones."""
        lasting = [spec for spec in self.wanted if not spec.extra]
        alike = [spec for spec in lasting if self._role_of(spec) == role]
        live = {member.stamp.worker for member in self.controller.core.live_members()}
        leaving = sorted(alike, key=lambda spec: spec.worker in live, reverse=True)[count:]
        fallback = max(spec.fallback for spec in lasting)
        revision = self.revision if fallback else self.serves
        names = self._free_names(role, 0, count - len(alike), self.wanted)
        more = [SeatSpec(name, role, revision, fallback=fallback) for name in names]
        self.specs = [*(spec for spec in lasting if spec not in leaving), *more]
        self.wanted = [*self.specs, *(spec for spec in self.wanted if spec.extra)]
        self.faulty = True
        self.schedule.note("world", f"scale {role}={count}")
        self.publications.suspect(*(spec.worker for spec in (*more, *leaving)))
        self.controller.change(self.wanted)
        self.probe("scale", (role, count))

    def _role_of(self, spec: SeatSpec) -> str:
        """That its next process has: workers change it."""
        seat = self.controller.core.book.seats.get(spec.worker)
        return spec.role if seat is None else seat.spec.role

    @staticmethod
    def _free_names(role: str, first: int, count: int, specs: Iterable[SeatSpec]) -> list[WorkerId]:
        taken = {spec.worker for spec in specs}
        names = (WorkerId(f"{role}-{number}") for number in itertools.count(first))
        return list(itertools.islice((name for name in names if name not in taken), max(0, count)))

    def keep(self, kept: Keep) -> None:
        """What the next controller begins with."""
        self.wanted, self.serves = list(kept.specs), kept.serves
        self.schedule.note("world", f"revision {kept.serves} serves")
        self.probe("upgrade_over", kept)

    def ask_to_leave(self, worker: WorkerId, incarnation: int, timeout_s: float) -> None:
        """By order of the controller, which asked for the answer: when nothing is left to do there. What is there
        shortly before its time is over goes on elsewhere."""
        process, asked_by = self.seats.get(worker), self.controller
        if not isinstance(process, MemberProcess) or process.stamp.incarnation != incarnation:
            return
        self.publications.suspect(worker)
        if not process.load().draining:
            wanted = process.role != "prefill" or "prefill" in {self._role_of(spec) for spec in self.specs}
            self.leaves.leaves(process.stamp, process.role, wanted)
        self.faulty = self.faulty or timeout_s < SHORT_S
        process.run(process.drain, "drain")
        process.after(timeout_s * HAND_OVER_SHARE, process.hand_over, "hand over")

        def answer_when_drained() -> None:
            if process.drained:
                asked_by.drained(process.stamp)
            else:
                process.after(LOOK_S, answer_when_drained, "drained?")

        process.after(LOOK_S, answer_when_drained, "drained?")

    def partition(self, a: WorkerId, b: WorkerId, seconds: float, both: bool) -> None:
        self.faulty = True
        self.publications.suspect(a, b)
        self.schedule.note(a, f"cut off from {b} {seconds:.2f}")
        self.network.cut(a, b, seconds)
        if both:
            self.network.cut(b, a, seconds)

    def clog(self, a: WorkerId, b: WorkerId, seconds: float) -> None:
        self.faulty = True
        self.publications.suspect(a, b)
        self.schedule.note(a, f"clogged towards {b} {seconds:.2f}")
        self.network.clog(a, b, seconds)

    def is_sound(self, worker: WorkerId) -> bool:
        """It lives, is heard, and always was."""
        process = self.seats.get(worker)
        heard = not self.network.steered and self.settings.links.loss < RARE_LOSS
        return heard and process is not None and process.alive and self.publications.is_sound(worker)

    def _is_alive(self, stamp: Stamp) -> bool:
        process = self.seats.get(stamp.worker)
        return process is not None and process.alive and process.stamp == stamp

    def hang_lane(self, a: WorkerId, b: WorkerId, lane: str, seconds: float) -> None:
        """It moves nothing from `a` to `b`, and both live."""
        self.faulty = True
        self.schedule.note(a, f"{lane} hangs towards {b} {seconds:.2f}")
        self.network.hang(a, b, lane, seconds)

    def worker_at(self, stamp: Stamp) -> WorkerProcess | None:
        """The living process of this stamp."""
        process = self.seats.get(stamp.worker)
        alive = isinstance(process, WorkerProcess) and process.alive and process.stamp == stamp
        return process if alive and isinstance(process, WorkerProcess) else None

    def workers(self, role: str = "") -> list[WorkerProcess]:
        """Living ones, in seat order."""
        wanted = [spec.worker for spec in self.wanted]
        leaving = [worker for worker in self.seats if worker not in wanted]
        processes = [self.seats.get(worker) for worker in (*wanted, *leaving)]
        return [
            one for one in processes if isinstance(one, WorkerProcess) and one.alive and (not role or one.role == role)
        ]

    # ----------------------------------------------------------------------------------------- requests

    def submit(self, request: ClientRequest, gateway: int = 0) -> None:
        """Through the nth gateway, as soon as it is there."""
        process = self.seats.get(WorkerId(f"gateway-{gateway}"))
        if not isinstance(process, GatewayProcess) or not process.takes_requests:
            self.schedule.after(0.2, lambda: self.submit(request, gateway))
            return
        request.gateway = process
        self.clients.add(request)
        process.run(partial(self._submit_to, process, request), f"submit {request.request_id} {len(request.prompt)}t")

    def _submit_to(self, process: GatewayProcess, request: ClientRequest) -> None:
        core, now, session_id = process.core, process.now, request.session_id
        process.admission.asked(request)
        process.requests.asked(request.request_id, session_id, now + self.settings.request_timeout_s)
        if request.begins_session:
            process.requests.opened(session_id, now)
            refused = core.open_session(session_id, OWNER, now)
            assert refused is None, refused
        effects = core.submit(
            request.request_id,
            request.prompt,
            request.sampling,
            self.settings.request_timeout_s,
            now,
            session_id,
            OWNER if session_id else "",
            request.priority,
            request.tenant,
        )
        if session_id and not any(isinstance(one, RequestEnded) for one in effects):
            twice = RequestId(f"{request.request_id}, again")
            [busy] = core.submit(twice, request.prompt, request.sampling, 1.0, now, session_id, OWNER)
            assert isinstance(busy, RequestEnded), f"two turns of {session_id} at once"
        process.carry_out(effects)

    def close_session(self, session_id: SessionId, gateway: int) -> None:
        """Its client is done with it. A gateway that has begun anew does not know it."""
        process = self.seats.get(WorkerId(f"gateway-{gateway}"))
        if isinstance(process, GatewayProcess) and process.alive:
            closed = process.core.close_session(session_id, OWNER)
            if not isinstance(closed, Failure):
                process.carry_out(closed)

    def cancel(self, request: ClientRequest) -> None:
        """The client goes away."""
        if not request.outcome and request.gateway is not None and request.gateway.alive:
            request.cancelled = True
            self.probe("client_gone", request)
            request.gateway.cancel(request.request_id)

    # --------------------------------------------------------------------------------------------- runs

    def plan_random(self, left_out: Collection[str] = ()) -> tuple[list[str], list[str]]:
        """Requests and faults, all drawn now; those whose names are left out do not happen. Returns the names."""
        settings, first_s = self.settings, 1.0
        asked = plan_workload(self, first_s, left_out)
        self.calm_s = first_s + max(settings.arrival_s, settings.fault_s)
        faults = plan_faults(self, first_s, left_out)
        self.schedule.at(self.calm_s, self.calm_down)
        if is_steady(settings):
            self.on("engine_event", _assert_no_failure)
        return asked, faults

    def cancel_someone(self) -> None:
        waiting = [one for one in self.clients.requests.values() if not one.outcome]
        if waiting:
            self.cancel(self.rng.choice(waiting))

    def calm_down(self) -> None:
        """From here on nothing goes wrong any more."""
        self.schedule.note("world", "calm")
        self.network.calm_down()

    def run(self) -> Report:
        """Until everything is at rest. Raises AssertionError when something is wrong."""
        answered, since_s = 0, self.calm_s
        while not self._at_rest():
            if (ended := self.clients.outcomes.total()) > answered:
                answered, since_s = ended, max(self.now, self.calm_s)
            if self.now > since_s + REST_S:
                raise NeverRests(self._what_is_owed())
            self.schedule.run_until(self.now + QUIET_STEP_S)
            self._look_around()
        self._wait_for_indexes()
        self._judge()
        if self.settings.aftermath_s:
            self.schedule.run_until(self.now + self.settings.aftermath_s)
            assert self._at_rest(), f"not at rest any more: {self._what_is_owed()}"
        outcomes = self.clients.outcomes
        schedule = self.schedule
        return Report(
            self.seed,
            schedule.trace_hash,
            schedule.events,
            self.now,
            outcomes,
            self.probes,
            tuple(schedule.trace or ()),
        )

    def _look_around(self) -> None:
        """What is not judged after each event."""
        for worker in self.workers():
            worker.look_at_what_is_kept()
            assert_named(worker.pool)
        for index in self._indexes():
            self.caches.look([worker.stamp for worker in self.workers()], index)
        self._look_at_what_is_cached(self.clients.newly_over())

    def _look_at_what_is_cached(self, requests: Collection[ClientRequest]) -> None:
        assert_content(self.workers(), [one.known for one in requests], self.settings.layout)
        if (thinking := self.settings.thinking_token_id) >= 0:
            prompts = [one.prompt for one in self.clients.requests.values()]
            for request in requests:
                assert_thoughts_are_not_cached(self.workers("decode"), request, thinking, prompts)

    def shut_down(self) -> None:
        """Afterwards nobody is left, and nobody comes back."""
        self.publications.suspect(*self.seats)
        self.controller.shut_down()
        self.schedule.run_until(self.now + SHUT_DOWN_S)
        left = [process.stamp for process in self._living() if process is not self.controller]
        assert not left, f"{left} outlive the cluster"
        assert self.controller.core.finished, "the controller waits for somebody who is gone"

    def _living(self) -> list[SimProcess]:
        return [process for process in self.seats.values() if process.alive]

    def _at_rest(self) -> bool:
        if self.now < self.calm_s or not self.clients.all_ended:
            return False
        full = all((process := self.seats.get(spec.worker)) is not None and process.alive for spec in self.specs)
        return (
            full
            and self.controller.alive
            and not self.controller.core.book.changing
            and not any(process.paused or not process.settled for process in self._living())
        )

    def _what_is_owed(self) -> str:
        open_requests = [one.request_id for one in self.clients.requests.values() if not one.outcome]
        unsettled = [str(process.stamp) for process in self._living() if not process.settled or process.paused]
        detail = [
            f"{worker.stamp.worker}: {worker.endpoint.sessions()} {list(worker.core.holdings())}"
            for worker in self.workers()
            if not worker.settled
        ]
        seats = [spec.worker for spec in self.specs if (one := self.seats.get(spec.worker)) is None or not one.alive]
        asked = self.controller.core.book.changing if self.controller.alive else "nobody is there to say"
        return (
            f"still open at {self.now:.1f} s: requests {open_requests}, processes {unsettled}, seats {seats}, "
            f"controller's changes {asked}; {detail}"
        )

    def _indexes(self) -> list[PrefixIndex]:
        gateways = [one for one in self._living() if isinstance(one, GatewayProcess)]
        return [index for one in gateways if (index := one.core.router.index) is not None]

    def _wait_for_indexes(self) -> None:
        """What was lost of what gateways are told of caches is asked for."""
        indexes = self._indexes()
        until_s = self.now + INDEX_REST_S
        while not all(is_known(index, {one.stamp: one.pool for one in self.workers()}) for index in indexes):
            assert self.now < until_s, "a gateway does not come to know what is cached"
            self.schedule.run_until(self.now + QUIET_STEP_S)

    def _judge(self) -> None:
        self.clients.judge(self.settings, faulty=self.faulty)
        there = {process.stamp.worker for process in self._living()} - {CONTROLLER}
        again = {seat.worker for seat in self.controller.core.status() if seat.state != "live"}  # it was killed late
        asked_for = {spec.worker for spec in self.specs}
        assert there <= asked_for <= there | again, f"{sorted(there)} are there, and not who was asked for"
        self._look_at_what_is_cached(self.clients.requests.values())
        for request in self.clients.requests.values():
            self.stored_pages.assert_right(request.known)
        for worker in self.workers():
            worker.check()
            assert not list(worker.core.holdings()), f"{worker.stamp.worker} holds pages at rest"
            most = 2 * self.settings.transfer.max_tombstones  # per side: asked for and not
            assert len(worker.endpoint.sessions()) <= 2 * most, f"{worker.stamp.worker} remembers too much"
            census = worker.pool.census(())
            assert census.idle, f"{worker.stamp.worker} at rest: {census}"


def _prompts_take_long(world: World) -> bool:
    """All on one worker, as fast as the slowest says that it is: longer than a hand-off has."""
    tokens = sum(len(request.prompt) for request in world.clients.requests.values())
    speeds = [speed for worker in world.workers() if (speed := worker.core.load().tokens_per_s)]
    return bool(speeds) and tokens / min(speeds) > world.settings.transfer.handoff_ttl_s


def _has_heard_of(peer: SimProcess, stamp: Stamp) -> bool:
    """However often it was told, all of that may have been lost."""
    view = peer.roster.latest if isinstance(peer, MemberProcess) else None
    return view is not None and any(member.stamp == stamp for member in view.members)


def _assert_no_failure(world: World, details: object) -> None:
    """Where everybody is there, no hand-off fails for want of time or peers: what is lost is sent again. A return may
    take too long: it is given up then."""
    process, event = details if isinstance(details, tuple) else (None, None)
    if isinstance(event, SinkFailed) and event.key.attempt >= 0:
        code = event.failure.code
        transfer = world.settings.transfer
        hurried = transfer.handoff_ttl_s <= SHORT_S or world.settings.request_timeout_s <= SHORT_S
        forgetful = world.settings.links.loss > 0 and transfer.max_tombstones < FEW_TOMBSTONES
        late = code is ErrorCode.DEADLINE_EXCEEDED and not (hurried or forgetful or _prompts_take_long(world))
        broken = code is ErrorCode.INTERNAL and not world.settings.links.region_lost
        gone = code is ErrorCode.NO_WORKER and _has_heard_of(world.seats[event.peer], process.stamp)
        trouble = late or broken or gone
        assert not trouble, f"{event} where everybody was there"


def run_seed(seed: int, keep_trace: bool = False, left_out: Collection[str] = ()) -> Report:
    """One random world, without these of its requests, conversations and faults."""
    world = World(without(random_settings(seed), left_out), seed, keep_trace)
    world.plan_random(left_out)
    report = world.run()
    world.shut_down()
    return report
