"""One worker process: model runner, KV pool, engine thread and I/O thread, wired together; the Ray actor's methods.

Owns: the order of birth (record, pin, load, sockets, admission) and of end, and what is told from outside (status,
census, health). Never: decides anything about a request (the role's core does), or touches KV state off the engine
thread.

    peers <-> IoThread (sockets, hand-offs, heartbeats) --deliver--> EngineLoop (core, runner, pool)
                        ^------------------- post ---------------------'
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from msgspec import Struct

from baton.common.clock import MonotonicClock
from baton.common.config import FAKE_MODEL, ClusterConfig
from baton.common.engine.batch import ModelRunner
from baton.common.engine.core_api import Drain, EngineCore
from baton.common.engine.fake_runner import fake_runner
from baton.common.engine.loop import EngineLoop, end_process
from baton.common.errors import BatonError, ConfigError
from baton.common.ids import Stamp
from baton.common.kv.checker import InvariantChecker, who_holds
from baton.common.kv.pool import KvPool
from baton.common.kv.transitions import TransitionLog
from baton.common.log import EventLog, configure_logging
from baton.common.messages import Load, Member, Membership
from baton.transfer.actor import HEALTH, INQUIRY, WATCH, ProcessReport, in_group
from baton.transfer.io import IoThread, Rejected
from baton.transfer.process import ProcessSpec, die_with_parent, pin_process, register_process

STOP_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 5.0

_log = EventLog("baton.worker")


class AdmissionRefused(BatonError):
    """The controller does not admit this process. A restart of the same process would end the same way."""

    def __init__(self, rejected: Rejected) -> None:
        named = "; ".join(f"{name}: {values}" for name, values in sorted(rejected.differences.items()))
        super().__init__(f"{rejected.reason} ({named})" if named else rejected.reason)


class CoreFactory(Protocol):
    """Makes the role's core over a pool."""

    def __call__(self, stamp: Stamp, pool: KvPool, config: ClusterConfig, max_context_len: int) -> EngineCore: ...


RunnerFactory = Callable[[ProcessSpec, Callable[[str], None]], ModelRunner]


class LaneStatus(Struct, frozen=True, kw_only=True):
    """One data lane from one peer, as this worker sees it. Bytes and regions count both directions."""

    peer: str
    lane: str
    status: str
    reason: str
    regions_in: int = 0
    bytes_in: int = 0
    regions_out: int = 0
    bytes_out: int = 0
    damaged: int = 0
    failures: int = 0


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """One worker's account of itself. `census` holds pages per owner class; they add up to `census["total"]`."""

    worker: str
    role: str
    incarnation: int
    pid: int
    cores: tuple[int, ...]
    load: Load
    census: dict[str, int]
    lanes: tuple[LaneStatus, ...]
    hand_offs: int
    counters: dict[str, int]


class Health(Struct, frozen=True, kw_only=True):
    """`step_age_s`: how long the engine has been away from its inbox. `io_age_s`: how long the I/O thread has not
    spoken. Answered by neither of the two."""

    admitted: bool
    steps: int
    step_age_s: float
    io_age_s: float


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What exists from the end of loading until the process ends."""

    pool: KvPool
    core: EngineCore
    engine: EngineLoop
    io: IoThread


def make_runner(spec: ProcessSpec, progress: Callable[[str], None]) -> ModelRunner:
    """The runner of the configured model, over a buffer of `kv.num_pages` pages and the null page."""
    config = spec.config
    num_pages = config.kv.num_pages
    if num_pages is None:
        raise ConfigError("kv.num_pages", None, "is still undecided", "start workers with a resolved configuration")
    if config.model.model == FAKE_MODEL:
        return fake_runner(num_pages + 1, config.kv.page_size)
    from baton.common.engine.torch_runner import TorchRunner  # heavy, and not needed for the fake model

    return TorchRunner.load(
        config.model.model,
        dtype=config.model.dtype,
        num_pages=num_pages + 1,
        page_size=config.kv.page_size,
        attention=config.model.attention,
        threads=len(spec.cores) or max(1, (os.cpu_count() or 1) // (config.prefill + config.decode)),
        progress=progress,
    )


class WorkerProcess:
    """Everything in one worker but Ray. `start` once; the rest from any thread."""

    def __init__(self, spec: ProcessSpec, make_core: CoreFactory, max_rows: int, make_runner: RunnerFactory) -> None:
        self._spec = spec
        self._stamp = spec.new_stamp()
        self._make_core = make_core
        self._max_rows = max_rows
        self._make_runner = make_runner
        self._clock = MonotonicClock()
        self._controller_address = spec.controller_address
        self._loaded: _Loaded | None = None
        self._progress: list[str] = []
        self._watch = threading.Condition()
        self._watcher = 0
        self._ready = False
        self._stopped = False

    def start(self) -> None:
        """Loads, and returns when the cluster has admitted this process. Raises ConfigError, AdmissionRefused. Called
        again (by a controller that was restarted) it has nothing to do."""
        if self._loaded is not None:
            return
        pin_process(self._spec.cores)
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        if niceness > 0:
            _log.warning("low_priority", niceness=niceness, advice="start Ray with RAY_worker_niceness=0")
        loaded = self._load()
        self._loaded = loaded
        loaded.io.set_controller(self._controller_address)  # which may have moved while this was loading
        loaded.engine.start()
        loaded.io.start()
        self._say("registering")
        admitted = loaded.io.wait_admitted(self._spec.config.liveness.start_deadline_s)
        if isinstance(admitted, Rejected):
            raise AdmissionRefused(admitted)
        if not admitted:
            raise BatonError(f"the controller at {self._controller_address} did not answer")
        self._ready = True
        self._say("ready")

    def _load(self) -> _Loaded:
        spec, config = self._spec, self._spec.config
        runner = self._make_runner(spec, self._say)
        buffer = runner.buffer
        max_context_len = min(config.model.max_model_len or runner.max_positions, runner.max_positions)
        pool = KvPool(
            buffer.num_pages,
            buffer.page_size,
            self._max_rows,
            max_context_len,
            config.kv.prefix_cache,
            TransitionLog(self._clock),
        )
        core = self._make_core(self._stamp, pool, config, max_context_len)
        checker = InvariantChecker()

        def check() -> None:
            checker.check(pool, core.holdings())

        io = IoThread(
            self._stamp,
            spec.role,
            config,
            buffer,
            spec.keys,
            lambda event: self._deliver(engine, event),
            controller_address=self._controller_address,
            load=lambda: engine.load(),
            clock=self._clock,
        )
        engine = EngineLoop(core, runner, io.post, self._clock, check=check)
        return _Loaded(pool, core, engine, io)

    def _deliver(self, engine: EngineLoop, event: object) -> bool:
        """On the I/O thread. A process that was admitted once and is rejected now has been replaced: it must go."""
        if isinstance(event, Rejected):
            _log.error("rejected", reason=event.reason)
            if self._ready:
                end_process()
            return True
        return engine.deliver(event)

    def _say(self, line: str) -> None:
        self._progress.append(line)
        _log.info("progress", step=line)

    # --------------------------------------------------------------------------------- told from outside

    def progress(self) -> list[str]:
        return list(self._progress)

    def report(self) -> ProcessReport:
        loaded = self._loaded
        if loaded is None or not loaded.io.snapshot().listed:
            return ProcessReport(None, None)
        return ProcessReport(self.member, self.view)

    @property
    def member(self) -> Member:
        return self._running.io.member

    @property
    def view(self) -> Membership | None:
        return self._running.io.latest_membership

    def rejoin(self, controller_address: str) -> None:
        self._controller_address = controller_address  # before the look: loading may end in between
        if self._loaded is not None:
            self._loaded.io.set_controller(controller_address)

    def watch(self, watcher: int) -> None:
        """Returns when this process is told to stop, or when another watcher comes."""
        with self._watch:
            self._watcher = watcher
            self._watch.notify_all()
            self._watch.wait_for(lambda: self._stopped or self._watcher != watcher)

    def health(self) -> Health:
        loaded = self._loaded
        if loaded is None:
            return Health(admitted=False, steps=0, step_age_s=0.0, io_age_s=0.0)
        load, snapshot = loaded.engine.load(), loaded.io.snapshot()
        return Health(
            admitted=snapshot.listed,
            steps=load.steps,
            step_age_s=load.step_age_s,
            io_age_s=max(0.0, self._clock.now() - snapshot.at_s),
        )

    def status(self) -> WorkerStatus:
        """Raises TimeoutError when the engine does not come to the end of its step."""
        loaded, spec = self._running, self._spec
        snapshot = loaded.io.snapshot()
        census = self.census()
        counters = {f"endpoint.{name}": value for name, value in snapshot.endpoint.items()}
        counters |= {f"io.dropped.{name}": value for name, value in snapshot.dropped.items()}
        counters |= {f"mesh.{name}": value for name, value in asdict(snapshot.mesh).items()}
        counters["engine.refused_messages"] = loaded.engine.refused_messages
        return WorkerStatus(
            worker=spec.worker,
            role=spec.role,
            incarnation=spec.incarnation,
            pid=os.getpid(),
            cores=spec.cores,
            load=loaded.engine.load(),
            census=census,
            lanes=_lane_statuses(loaded.io),
            hand_offs=snapshot.hand_offs,
            counters=counters,
        )

    def census(self) -> dict[str, int]:
        """Pages per owner class, checked: the engine thread walks the invariants first."""
        loaded = self._running
        taken = loaded.engine.call(lambda: InvariantChecker().check(loaded.pool, loaded.core.holdings()))
        census = taken.result(CALL_TIMEOUT_S)
        return {
            "total": census.total,
            "free": census.free,
            "cached": census.cached_evictable,
            "cached_locked": census.cached_locked,
            "request": census.request,
            "incoming": census.incoming,
            "outgoing": census.outgoing,
            "quarantined": census.quarantined,
        }

    def page_owner(self, page: int) -> str:
        """Who holds this page and since when, for people. Raises ValueError for a page that the pool does not have."""
        loaded = self._running
        owner = loaded.engine.call(lambda: who_holds(loaded.pool, page, loaded.core.holdings())).result(CALL_TIMEOUT_S)
        since = "" if owner.since_s is None else f" for {self._clock.now() - owner.since_s:.1f} s"
        readers = f", read by {', '.join(owner.readers)}" if owner.readers else ""
        history = "".join(f"\n  {transition}" for transition in owner.history)
        return f"page {page}: {owner.owner} {owner.owner_id}{since}{readers}{history}"

    def drain(self, timeout_s: float) -> bool:
        """Admits nothing new; True when everything that ran has ended. Nothing runs while it loads."""
        if self._loaded is None:
            return True
        self._loaded.engine.deliver(Drain())
        return self._loaded.engine.wait_idle(timeout_s)

    def stop(self) -> None:
        """Ends both threads: engine first, so that nothing is posted to a closed socket. Drain before, or what runs is
        lost."""
        if self._loaded is not None:
            self._loaded.engine.stop(STOP_TIMEOUT_S)
            self._loaded.io.stop(STOP_TIMEOUT_S)
        with self._watch:
            self._stopped = True
            self._watch.notify_all()

    @property
    def _running(self) -> _Loaded:
        if self._loaded is None:
            raise BatonError(f"{self._spec.name} is still loading")
        return self._loaded


def _lane_statuses(io: IoThread) -> tuple[LaneStatus, ...]:
    data = io.snapshot().data
    if data is None:
        return ()
    views = {(peer, view.lane): view for peer, lanes in data.lanes.items() for view in lanes}
    statuses = []
    for pair in sorted(views.keys() | data.counters.keys()):
        view, counters = views.get(pair), data.counters.get(pair)
        statuses.append(
            LaneStatus(
                peer=pair[0],
                lane=pair[1],
                status=view.status if view is not None else "",
                reason=view.reason if view is not None else "",
                regions_in=counters.regions_in if counters is not None else 0,
                bytes_in=counters.bytes_in if counters is not None else 0,
                regions_out=counters.regions_out if counters is not None else 0,
                bytes_out=counters.bytes_out if counters is not None else 0,
                damaged=counters.damaged if counters is not None else 0,
                failures=counters.failures if counters is not None else 0,
            )
        )
    return tuple(statuses)


class WorkerActor:
    """The Ray shell of a worker: `ProcessActor`, and what operators ask. A role says which core it runs."""

    def __init__(self, spec: ProcessSpec) -> None:
        register_process(spec.run_dir, spec.name)
        die_with_parent()
        configure_logging(spec.name, spec.config.log_level)
        self._process = WorkerProcess(spec, self.make_core, self.max_rows(spec.config), self.make_runner)

    def make_core(self, stamp: Stamp, pool: KvPool, config: ClusterConfig, max_context_len: int) -> EngineCore:
        raise NotImplementedError

    def max_rows(self, config: ClusterConfig) -> int:
        """Most requests that hold KV at one time."""
        raise NotImplementedError

    def make_runner(self, spec: ProcessSpec, progress: Callable[[str], None]) -> ModelRunner:
        return make_runner(spec, progress)

    def start(self) -> None:
        self._process.start()

    @in_group(HEALTH)
    def progress(self) -> list[str]:
        return self._process.progress()

    @in_group(WATCH)
    def watch(self, watcher: int) -> None:
        self._process.watch(watcher)

    @in_group(HEALTH)
    def report(self) -> ProcessReport:
        return self._process.report()

    @in_group(HEALTH)
    def rejoin(self, controller_address: str) -> None:
        self._process.rejoin(controller_address)

    @in_group(HEALTH)
    def member(self) -> Member:
        return self._process.member

    @in_group(HEALTH)
    def health(self) -> Health:
        return self._process.health()

    @in_group(INQUIRY)
    def status(self) -> WorkerStatus:
        return self._process.status()

    @in_group(INQUIRY)
    def kv_census(self, page: int | None = None) -> dict[str, int] | str:
        """Pages per owner class; or, for one page, who holds it."""
        return self._process.census() if page is None else self._process.page_owner(page)

    @in_group(WATCH)
    def drain(self, timeout_s: float) -> bool:
        return self._process.drain(timeout_s)

    def stop(self) -> None:
        self._process.stop()
