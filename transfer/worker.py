"""One worker process: model runner, KV pool, engine thread and I/O thread, wired together; the Ray actor's methods.

Owns: the order of birth (pin, load, tiers, sockets, engine) and what is told from outside (status, census). Never:
decides anything about a request (the role's core does), or touches KV state off the engine thread.

    peers <-> IoThread (sockets, hand-offs, heartbeats) --deliver--> EngineLoop (core, runner, pool)
                        ^------------------- post ---------------------|  ^
                                  TierThread (levels below) <----------'--' deliver
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from msgspec import structs

from baton.common.clock import MonotonicClock, wall_offset_s
from baton.common.compat import KV_VERSION
from baton.common.config import ClusterConfig
from baton.common.engine.batch import KvMemory, ModelRunner
from baton.common.engine.chunk_predictor import ChunkPredictor
from baton.common.engine.core_api import Drain, EngineCore, HandOver
from baton.common.engine.kv_feed import PublishPages
from baton.common.engine.loop import EngineLoop, end_process
from baton.common.engine.trace import EngineTrace
from baton.common.errors import BatonError, ConfigError, ErrorCode, RequestError
from baton.common.ids import Stamp
from baton.common.kv.census import Census
from baton.common.kv.checker import InvariantChecker, who_holds
from baton.common.kv.layout import Component
from baton.common.kv.pool import KvPool
from baton.common.kv.tiers.api import TierCommand
from baton.common.kv.tiers.keys import PageKeys
from baton.common.kv.tiers.thread import TierThread
from baton.common.kv.tiers.tiers import Tiers, open_tiers
from baton.common.kv.transitions import TransitionLog
from baton.common.log import EventLog
from baton.common.spans import TracedSpan
from baton.common.trace import ProcessTrace, Recorder
from baton.common.tracing import FLUSH_S, SpanSink, open_sink
from baton.transfer.actor import INQUIRY, WATCH, ProcessActor, in_group
from baton.transfer.copying import load_copies
from baton.transfer.io import IoThread, refusals_of
from baton.transfer.keys import KeyPair
from baton.transfer.kv_publisher import KvPublisher, publisher_of
from baton.transfer.model_runner import RunnerFactory, find_predictor, make_runner, model_identity, weights_identity
from baton.transfer.process import ProcessSpec, pin_process
from baton.transfer.reports import HandoffTimes, LaneReport, WorkerMetrics, WorkerStatus
from baton.transfer.session.ledger import flow_of

CALL_TIMEOUT_S = 5.0
HAND_OVER_S = 3.0
"""Before its time is over, a worker that drains gives back what it has not finished."""
SLOT_STATES = ("free", "reserved", "leased")

_log = EventLog("baton.worker")


class CoreFactory(Protocol):
    """Makes the role's core over the pool of a runner's memory; with `page_keys`, over tiers below it."""

    def __call__(
        self,
        stamp: Stamp,
        pool: KvPool,
        runner: ModelRunner,
        config: ClusterConfig,
        max_context_len: int,
        page_keys: PageKeys | None,
        predictor: ChunkPredictor | None,
    ) -> EngineCore: ...


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What exists from the end of loading until the process ends."""

    pool: KvPool
    core: EngineCore
    engine: EngineLoop
    io: IoThread
    tiers: TierThread | None
    spans: SpanSink
    publisher: KvPublisher | None
    chunk_predictor: str  # for people
    forward_path: str  # for people
    page_layout: str  # for people


class WorkerProcess:
    """Everything in one worker but Ray: `ClusterProcess`. What is told from outside, from any thread."""

    def __init__(
        self,
        spec: ProcessSpec,
        keys: KeyPair,
        make_core: CoreFactory,
        max_rows: int,
        step_tokens: int,
        chunk_target_s: float,
        make_runner: RunnerFactory,
        has_tiers: bool,
    ) -> None:
        self._spec = spec
        self._keys = keys
        self._stamp = spec.new_stamp()
        self._make_core = make_core
        self._max_rows = max_rows
        self._step_tokens = step_tokens
        self._chunk_target_s = chunk_target_s
        self._make_runner = make_runner
        self._has_tiers = has_tiers
        self._clock = MonotonicClock()
        self._loaded: _Loaded | None = None
        self._recording = threading.Lock()

    def load(self, say: Callable[[str], None]) -> IoThread:
        spec, config = self._spec, self._spec.config
        pin_process(spec.cores)
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        if niceness > 0:
            _log.warning("low_priority", niceness=niceness, advice="start Ray with RAY_worker_niceness=0")
        load_copies(say)
        runner = self._make_runner(spec, say)
        memory = runner.memory
        max_context_len = min(config.model.max_model_len or runner.max_positions, runner.max_positions)
        pool = KvPool(
            memory.layout,
            {component: buffer.num_pages for component, buffer in memory.buffers.items()},
            self._max_rows,
            max_context_len,
            config.kv.prefix_cache,
            TransitionLog(self._clock),
            self._step_tokens,
            events=config.routing.indexed or config.kv_events.publish,
        )
        page_keys, levels = self._open_tiers(memory, say) if self._has_tiers else (None, None)
        predictor, chunk_predictor = find_predictor(pool, runner, self._step_tokens, self._chunk_target_s, say)
        core = self._make_core(self._stamp, pool, runner, config, max_context_len, page_keys, predictor)
        checker = InvariantChecker()
        spans = open_sink(config, spec.process_name, self._clock)

        io = IoThread(
            self._stamp,
            spec.role,
            config,
            memory,
            self._keys,
            lambda event: engine.deliver(event),
            controller=spec.controller,
            load=lambda: engine.load(),
            clock=self._clock,
            guides=runner.guides,
            spans=spans,
            model_identity=model_identity(config.model.model),
        )
        tiers = None
        if levels is not None:
            tiers = TierThread(
                levels,
                memory.main.as_bytes(),
                lambda event: engine.deliver(event),
                self._clock,
                max_queued_jobs=config.kv.tiers.max_queued_jobs,
                on_fatal=end_process,
            )

        publisher = publisher_of(pool, spec.worker, config, self._clock)

        def post(effect: object) -> None:
            if isinstance(effect, TracedSpan):
                spans.tell(effect)
            elif isinstance(effect, PublishPages):
                assert publisher is not None, effect
                publisher.publish(effect.events)
            elif isinstance(effect, TierCommand):
                assert tiers is not None, effect
                tiers.post(effect)
            else:
                io.post(effect)

        engine = EngineLoop(core, runner, post, self._clock, check=lambda: checker.check(pool, core.holdings()))
        layout = runner.memory.main.page_layout
        self._loaded = _Loaded(
            pool, core, engine, io, tiers, spans, publisher, chunk_predictor, runner.forward_path, layout
        )
        return io

    def _open_tiers(self, memory: KvMemory, say: Callable[[str], None]) -> tuple[PageKeys, Tiers] | tuple[None, None]:
        """How pages are named below the pool, and the levels there; None when none can be opened. Raises ConfigError
        when they would be of no use."""
        config = self._spec.config
        if not memory.layout.only_full:
            reason = f"this model keeps {'+'.join(memory.layout.components)}; a page of a sliding or recurrent layer"
            reason += " is of use at the end of its tokens only"
            raise ConfigError("kv.tiers", config.model.model, reason, "leave kv.tiers out")
        for name, most in config.kv.tiers.bounds.items():
            if most < memory.main.page_bytes:
                raise ConfigError(f"kv.tiers.{name}", most, f"holds no page, of {memory.main.page_bytes} bytes each")
        say("naming the weights for the tiers below the pool")
        weights = weights_identity(config.model.model, config.model.weights)
        names = memory.fingerprint() | {"weights": weights, "kv_version": str(KV_VERSION)}
        keys = PageKeys.of_model(names, memory.layout.page_size)
        levels = open_tiers(config.kv.tiers, self._spec.worker, keys.root, memory.main.page_bytes)
        return (None, None) if levels is None else (keys, levels)

    def serve(self) -> None:
        if self._running.tiers is not None:
            self._running.tiers.start()
        if self._running.publisher is not None:
            self._running.publisher.start()
        self._running.engine.start()

    # --------------------------------------------------------------------------------- told from outside

    def status(self) -> WorkerStatus:
        """Raises TimeoutError when the engine does not come to the end of its step."""
        loaded, spec = self._running, self._spec
        snapshot = loaded.io.snapshot()
        census = self._checked_census()
        counters = {f"endpoint.{name}": value for name, value in snapshot.endpoint.items()}
        counters |= {f"io.dropped.{name}": value for name, value in snapshot.dropped.items()}
        counters |= {f"mesh.{name}": value for name, value in asdict(snapshot.mesh).items()}
        counters["engine.refused_messages"] = loaded.engine.refused_messages
        if loaded.publisher is not None:
            counters["kv_events.dropped"] = loaded.publisher.dropped
        if loaded.tiers is not None:
            counters |= {f"tiers.{name}": value for name, value in loaded.tiers.counters().items()}
        return WorkerStatus(
            worker=spec.worker,
            role=spec.role,
            incarnation=spec.incarnation,
            pid=os.getpid(),
            cores=spec.cores,
            load=loaded.engine.load(),
            component=census.component.value,
            census=census.by_class(),
            components={one.component.value: one.by_class() for one in census.others},
            lanes=_lane_statuses(loaded.io),
            flows=loaded.io.flows().result(CALL_TIMEOUT_S),
            hand_offs=snapshot.hand_offs,
            counters=counters,
            chunk_predictor=loaded.chunk_predictor,
            forward_path=loaded.forward_path,
            page_layout=loaded.page_layout,
        )

    def census(self) -> dict[str, int]:
        """Pages per owner class, of the model's first component."""
        return self._checked_census().by_class()

    def _checked_census(self) -> Census:
        """The engine thread walks the invariants first."""
        loaded = self._running
        taken = loaded.engine.call(lambda: InvariantChecker().check(loaded.pool, loaded.core.holdings()))
        return taken.result(CALL_TIMEOUT_S)

    def page_owner(self, page: int, component: Component | None) -> str:
        """Who holds this page or slot (of the model's first component unless one is named) and since when, for people.
        Raises RequestError for one that the pool does not have."""
        loaded = self._running
        asked = loaded.engine.call(lambda: who_holds(loaded.pool, page, loaded.core.holdings(), component))
        return asked.result(CALL_TIMEOUT_S).told(self._clock.now())

    def metrics(self) -> WorkerMetrics:
        """Without the engine: also while it computes a long step."""
        loaded = self._running
        data = loaded.io.snapshot().data
        rings = {} if data is None else {"receive": data.receive_slots, "send": data.send_slots}
        return WorkerMetrics(
            flows=loaded.io.flows().result(CALL_TIMEOUT_S),
            slots={ring: dict(zip(SLOT_STATES, counts, strict=True)) for ring, counts in rings.items()},
            tiers=loaded.tiers.counters() if loaded.tiers is not None else {},
            trace_spans=loaded.spans.counts(),
            refused=self._refused(loaded),
        )

    def _refused(self, loaded: _Loaded) -> dict[str, int]:
        """`role`: what is not for a worker of this role; `kv_replay`: what came to that socket and was no request."""
        replay = 0 if loaded.publisher is None else loaded.publisher.refused
        own = {"role": loaded.core.stray_messages, "kv_replay": replay}
        return refusals_of(loaded.io.snapshot()) | own

    def handoffs(self) -> list[HandoffTimes]:
        """The last ones, oldest first, and the open ones. They begin by the wall clock."""
        offset_s = wall_offset_s(self._clock)
        times = self._running.io.handoff_times().result(CALL_TIMEOUT_S)
        return [structs.replace(one, begun_at_s=one.begun_at_s + offset_s) for one in times]

    def record(self, seconds: float) -> ProcessTrace:
        """What both threads do from now on for so long. Raises RequestError while somebody else records."""
        loaded = self._running
        if not self._recording.acquire(blocking=False):
            raise RequestError(ErrorCode.OVERLOADED, f"{self._spec.worker} is being recorded already")
        try:
            engine, io = Recorder(), Recorder()
            started = [loaded.engine.trace(EngineTrace(engine, self._clock, flow_of)), loaded.io.trace(io)]
            threading.Event().wait(seconds)
            stopped = [loaded.engine.trace(None), loaded.io.trace(None)]
            for switched in (*started, *stopped):
                switched.result(CALL_TIMEOUT_S)
        finally:
            self._recording.release()
        return ProcessTrace(
            process=self._spec.worker,
            pid=os.getpid(),
            wall_offset_s=wall_offset_s(self._clock),
            threads={"engine": engine.take(), "io": io.take()},
        )

    def drain(self, timeout_s: float) -> bool:
        """Admits nothing new; True when everything that ran has ended, or was handed over when time grew short. Nothing
        runs while it loads."""
        if self._loaded is None:
            return True
        engine, hand_over_s = self._loaded.engine, min(HAND_OVER_S, timeout_s / 4)
        engine.deliver(Drain())
        idle = engine.wait_idle(timeout_s - hand_over_s)
        if not idle:
            engine.deliver(HandOver())
            idle = engine.wait_idle(hand_over_s)
        self._loaded.spans.flush(FLUSH_S)
        return idle

    @property
    def _running(self) -> _Loaded:
        if self._loaded is None:
            raise BatonError(f"{self._spec.name} is still loading")
        return self._loaded


def _lane_statuses(io: IoThread) -> tuple[LaneReport, ...]:
    data = io.snapshot().data
    if data is None:
        return ()
    return tuple(
        LaneReport(peer=peer, lane=view.lane, status=view.status, reason=view.reason, gbps=view.gbps)
        for peer, views in sorted(data.lanes.items())
        for view in views
    )


class WorkerActor(ProcessActor):
    """The Ray shell of a worker: what operators ask. A role says which core it runs."""

    def make_process(self, spec: ProcessSpec, keys: KeyPair) -> WorkerProcess:
        rows, step_tokens = self.max_rows(spec.config), self.step_tokens(spec.config)
        target_s, tiers = self.chunk_target_s(spec.config), self.has_tiers(spec.config)
        self._process = WorkerProcess(spec, keys, self.make_core, rows, step_tokens, target_s, self.make_runner, tiers)
        return self._process

    def make_core(
        self,
        stamp: Stamp,
        pool: KvPool,
        runner: ModelRunner,
        config: ClusterConfig,
        max_context_len: int,
        page_keys: PageKeys | None,
        predictor: ChunkPredictor | None,
    ) -> EngineCore:
        raise NotImplementedError

    def has_tiers(self, config: ClusterConfig) -> bool:
        """Whether pages move between this role's pool and tiers below it."""
        return False

    def max_rows(self, config: ClusterConfig) -> int:
        """Most requests that hold KV at one time."""
        raise NotImplementedError

    def step_tokens(self, config: ClusterConfig) -> int:
        """Most tokens that one step computes of one request."""
        raise NotImplementedError

    def chunk_target_s(self, config: ClusterConfig) -> float:
        """How long a step with chunks should take at most; 0: as long as `step_tokens` take."""
        raise NotImplementedError

    def make_runner(self, spec: ProcessSpec, progress: Callable[[str], None]) -> ModelRunner:
        return make_runner(spec, progress)

    @in_group(INQUIRY)
    def status(self) -> WorkerStatus:
        return self._process.status()

    @in_group(INQUIRY)
    def kv_census(self) -> dict[str, int]:
        return self._process.census()

    @in_group(INQUIRY)
    def page_owner(self, page: int, component: Component | None) -> str:
        return self._process.page_owner(page, component)

    @in_group(INQUIRY)
    def metrics(self) -> WorkerMetrics:
        return self._process.metrics()

    @in_group(INQUIRY)
    def handoffs(self) -> list[HandoffTimes]:
        return self._process.handoffs()

    @in_group(WATCH)
    def record(self, seconds: float) -> ProcessTrace:
        return self._process.record(seconds)

    @in_group(WATCH)
    def drain(self, timeout_s: float) -> bool:
        self._draining.set()
        return self._process.drain(timeout_s)
