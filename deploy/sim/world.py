"""One simulated cluster from start to rest: seats, clients, faults, and the verdict.

Owns the schedule, the network and every process. Never: decides anything that a core decides. A world is a function of
(settings, seed, hooks): same input, same trace. At the end, with faults stopped, everything must have drained: each
request has one right outcome, every page is free or cached, no hand-off is open, every table is within its bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from baton.common.config import GatewayConfig
from baton.common.engine.core_api import Drain
from baton.common.ids import CONTROLLER, Epoch, Stamp, WorkerId
from baton.deploy.controller_core import SeatSpec
from baton.deploy.sim.clients import ClientRequest, Clients, random_request
from baton.deploy.sim.network import Network
from baton.deploy.sim.process import ControllerProcess, GatewayProcess, SimProcess
from baton.deploy.sim.schedule import Clock, Schedule
from baton.deploy.sim.settings import WorldSettings, random_settings
from baton.deploy.sim.tier import SharedStore
from baton.deploy.sim.worker import WorkerProcess

AIMS = ("command", "hand_off_frame", "land_region", "landing_ended", "engine_event", "fence_sink", "frame_lost")
KILL_S = 0.05
QUIET_STEP_S = 0.5
REST_S = 150.0
"""Most time from the last arrival and the last fault until everything must be at rest."""


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
        self.gateway_config = GatewayConfig(max_inflight_requests=256)
        self.faulty = settings.links.loss > 0
        roles = ("prefill", settings.prefill), ("decode", settings.decode), ("gateway", settings.gateways)
        self.specs = [SeatSpec(WorkerId(f"{role}-{i}"), role) for role, count in roles for i in range(count)]
        self.controller = ControllerProcess(self, self.specs)
        self.seats[CONTROLLER] = self.controller
        self.calm_s = 0.0

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

        def begin() -> None:
            old = self.seats.get(spec.worker)
            assert old is None or not old.alive, f"two processes in seat {spec.worker}"
            stamp = Stamp(spec.worker, incarnation, Epoch(self.rng.getrandbits(62) + 2))
            make = GatewayProcess if spec.role == "gateway" else WorkerProcess
            self.seats[spec.worker] = make(self, stamp, spec.role)

        self.schedule.after(self.rng.random() * self.settings.start_s, begin)

    def kill_for_sure(self, worker: WorkerId, incarnation: int) -> None:
        """The controller's SIGKILL, and the proof that it worked."""
        process = self.seats.get(worker)
        if process is None or process.stamp.incarnation != incarnation:
            return

        def strike() -> None:
            process.kill()
            self.controller.died(process.stamp)

        self.schedule.after(self.rng.random() * KILL_S, strike)

    def crash(self, worker: WorkerId, seen: bool = True) -> None:
        """The process dies. `seen`: its supervisor notices; else only its silence tells."""
        process = self.seats.get(worker)
        if process is None or not process.alive:
            return
        self.faulty = True
        self.schedule.note(worker, "crash")
        self.probe("crash", process)
        process.kill()
        if seen:
            self.schedule.after(self.rng.random() * 0.5, lambda: self.controller.died(process.stamp))

    def pause(self, worker: WorkerId, seconds: float) -> None:
        """The process is stopped, and continued unless somebody kills it meanwhile."""
        process = self.seats.get(worker)
        if process is None or not process.alive or process.paused:
            return
        self.faulty = True
        self.schedule.note(worker, f"pause {seconds:.2f}")
        process.pause()
        self.schedule.after(seconds, process.resume)

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

    def partition(self, a: WorkerId, b: WorkerId, seconds: float, both: bool) -> None:
        self.faulty = True
        self.schedule.note(a, f"cut off from {b} {seconds:.2f}")
        self.network.cut(a, b, seconds)
        if both:
            self.network.cut(b, a, seconds)

    def worker_at(self, stamp: Stamp) -> WorkerProcess | None:
        """The living process of this stamp."""
        process = self.seats.get(stamp.worker)
        alive = isinstance(process, WorkerProcess) and process.alive and process.stamp == stamp
        return process if alive and isinstance(process, WorkerProcess) else None

    def workers(self, role: str = "") -> list[WorkerProcess]:
        """Living ones, in seat order."""
        processes = [self.seats.get(spec.worker) for spec in self.specs]
        return [
            one for one in processes if isinstance(one, WorkerProcess) and one.alive and (not role or one.role == role)
        ]

    # ----------------------------------------------------------------------------------------- requests

    def submit(self, request: ClientRequest, gateway: int = 0) -> None:
        """Through the nth gateway, as soon as it is there."""
        process = self.seats.get(WorkerId(f"gateway-{gateway}"))
        if not isinstance(process, GatewayProcess) or not process.alive or process.paused or not process.roster.listed:
            self.schedule.after(0.2, lambda: self.submit(request, gateway))
            return
        request.gateway = process
        self.clients.add(request)
        timeout_s = self.settings.request_timeout_s
        process.run(
            lambda: process.carry_out(
                process.core.submit(request.request_id, request.prompt, request.sampling, timeout_s, process.now)
            ),
            f"submit {request.request_id} {len(request.prompt)}t",
        )

    def cancel(self, request: ClientRequest) -> None:
        """The client goes away."""
        if not request.outcome and request.gateway is not None and request.gateway.alive:
            request.cancelled = True
            self.probe("client_gone", request)
            request.gateway.cancel(request.request_id)

    # --------------------------------------------------------------------------------------------- runs

    def plan_random(self) -> None:
        """Requests and faults, all drawn now."""
        settings, rng = self.settings, self.rng
        families = [[rng.randrange(258) for _ in range(settings.max_prompt)] for _ in range(2)]
        first_s = 1.0
        self.clients.planned = settings.requests
        for number in range(settings.requests):
            request = random_request(number, rng, settings, families)
            gateway = rng.randrange(settings.gateways)
            at_s = first_s + rng.random() * settings.arrival_s
            self.schedule.at(at_s, partial(self.submit, request, gateway))
        self.calm_s = first_s + max(settings.arrival_s, settings.fault_s)
        self.plan_faults(first_s)
        self.schedule.at(self.calm_s, self.calm_down)

    def plan_faults(self, first_s: float) -> None:
        """Half of them at any time, half of them aimed: a moment after the nth event of some kind in a hand-off."""
        settings, rng = self.settings, self.rng
        workers = [spec.worker for spec in self.specs]
        victims = [spec.worker for spec in self.specs if spec.role != "gateway" or settings.gateways > 1]
        faults: list[Callable[[WorkerId | None], None]] = []
        for _ in range(settings.crashes):
            worker, seen = rng.choice(victims), rng.random() < 0.7
            faults.append(partial(self._crash_fault, worker, seen))
        for _ in range(settings.pauses):
            worker, seconds = rng.choice([*victims, CONTROLLER]), rng.choice((0.3, 1.5, 5.0))
            faults.append(partial(self._pause_fault, worker, seconds))
        for _ in range(settings.partitions):
            a, b = rng.sample([*workers, CONTROLLER], 2)
            seconds, both = rng.choice((0.3, 1.5, 5.0)), rng.random() < 0.5
            faults.append(partial(self._partition_fault, a, b, seconds, both))
        for _ in range(settings.drains):
            faults.append(partial(self._drain_fault, rng.choice([one.worker for one in self.specs])))
        for _ in range(settings.cancels):
            faults.append(lambda _: self.cancel_someone())
        for fault in faults:
            if rng.random() < 0.5:
                at_s = first_s + rng.random() * (settings.arrival_s + 0.5)
                self.schedule.at(at_s, partial(fault, None))
            else:
                self._aim(rng.choice(AIMS), rng.randint(1, 30), fault)

    def _crash_fault(self, worker: WorkerId, seen: bool, hit: WorkerId | None) -> None:
        self.crash(hit or worker, seen)

    def _pause_fault(self, worker: WorkerId, seconds: float, hit: WorkerId | None) -> None:
        self.pause(hit or worker, seconds)

    def _partition_fault(self, a: WorkerId, b: WorkerId, seconds: float, both: bool, hit: WorkerId | None) -> None:
        self.partition(a, b, seconds, both)

    def _drain_fault(self, worker: WorkerId, hit: WorkerId | None) -> None:
        self.drain(hit or worker)

    def _aim(self, name: str, nth: int, fault: Callable[[WorkerId | None], None]) -> None:
        """`fault` strikes once, just after the nth probe `name`: whoever was there, or somebody else."""
        delay_s, whoever = self.rng.random() * 0.005, self.rng.random() < 0.5
        left = nth

        def hook(_: World, details: object) -> None:
            nonlocal left
            left -= 1
            if left == 0 and self.now < self.calm_s:
                process = details[0] if isinstance(details, tuple) else None
                hit = process.stamp.worker if whoever and isinstance(process, WorkerProcess) else None
                self.schedule.after(delay_s, lambda: fault(hit))

        self.on(name, hook)

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
        while not self._at_rest():
            if self.now > self.calm_s + REST_S:
                raise NeverRests(self._what_is_owed())
            self.schedule.run_until(self.now + QUIET_STEP_S)
        self._judge()
        outcomes = Counter(one.outcome for one in self.clients.requests.values())
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

    def _living(self) -> list[SimProcess]:
        return [process for process in self.seats.values() if process.alive]

    def _at_rest(self) -> bool:
        if self.now < self.calm_s or not self.clients.all_ended:
            return False
        full = all((process := self.seats.get(spec.worker)) is not None and process.alive for spec in self.specs)
        return full and not any(process.paused or not process.settled for process in self._living())

    def _what_is_owed(self) -> str:
        open_requests = [one.request_id for one in self.clients.requests.values() if not one.outcome]
        unsettled = [str(process.stamp) for process in self._living() if not process.settled or process.paused]
        detail = [
            f"{worker.stamp.worker}: {worker.endpoint.sessions()} {list(worker.core.holdings())}"
            for worker in self.workers()
            if not worker.settled
        ]
        return f"still open at {self.now:.1f} s: requests {open_requests}, processes {unsettled}; {detail}"

    def _judge(self) -> None:
        self.clients.judge(self.settings, faulty=self.faulty)
        for worker in self.workers():
            worker.check()
            assert not list(worker.core.holdings()), f"{worker.stamp.worker} holds pages at rest"
            most = 2 * self.settings.transfer.max_tombstones  # per side: asked for and not
            assert len(worker.endpoint.sessions()) <= 2 * most, f"{worker.stamp.worker} remembers too much"
            census = worker.pool.census(())
            assert census.idle, f"{worker.stamp.worker} at rest: {census}"


def run_seed(seed: int, keep_trace: bool = False) -> Report:
    """One random world."""
    world = World(random_settings(seed), seed, keep_trace)
    world.plan_random()
    return world.run()
