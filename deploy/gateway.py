"""The gateway process: HTTP on one thread, the cluster's sockets on another, and the Ray actor around them.

Owns: the wiring of `GatewayServer`, `Gateway`, `GatewayCore` and `IoThread`, and what the controller asks of a process.
Never: decides anything, or holds a lock on the way of a token.

`GatewayProcess` is the whole of it without Ray; `GatewayActor` adds what Ray and the controller need.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import version

import ray
from ray.actor import ActorHandle

from baton.common.clock import MonotonicClock
from baton.common.config import ClusterConfig
from baton.common.errors import BatonError, ErrorCode, RequestError
from baton.common.ids import Stamp, WorkerId
from baton.common.log import EventLog, configure_logging
from baton.common.messages import Load
from baton.common.model.cache import Progress, silent
from baton.deploy.controller_core import COMPUTE_ROLES
from baton.deploy.gateway_core import GatewayCore
from baton.deploy.gateway_shell import Gateway, UnknownWorkers, Workers
from baton.deploy.http_server import GatewayServer
from baton.deploy.listener import open_listener
from baton.deploy.ray_side import find_process
from baton.deploy.status import GatewayStatus
from baton.deploy.tokenizer import ServedModel, load_served_model
from baton.transfer.actor import HEALTH, INQUIRY, WATCH, ProcessReport, in_group
from baton.transfer.io import IoThread, Rejected
from baton.transfer.mesh import ClusterKeys
from baton.transfer.process import ProcessSpec, actor_name, die_with_parent, register_process

STATUS_TIMEOUT_S = 3.0

_log = EventLog("baton.gateway")


class NotAdmitted(BatonError):
    """The controller does not let this process in."""


class GatewayProcess:
    """One gateway, from its listening socket to the cluster's mesh. Raises ConfigError when its port is taken or its
    model cannot be read."""

    def __init__(
        self,
        stamp: Stamp,
        config: ClusterConfig,
        keys: ClusterKeys | None,
        controller_address: str,
        *,
        on_progress: Progress = silent,
        workers: Callable[[IoThread], Workers] = lambda io: UnknownWorkers(),
    ) -> None:
        listener = open_listener(config.gateway.host, config.gateway.port)
        on_progress("loading the tokenizer")
        self._model = load_served_model(config)
        self._config = config
        self._workers = workers
        self._gateway: Gateway | None = None
        self.io = IoThread(
            stamp,
            "gateway",
            config,
            None,
            keys,
            self._on_event,
            controller_address=controller_address,
            load=self._load,
        )
        self._server = GatewayServer(listener, config.gateway, self._make_gateway)
        on_progress(f"listening at {self._server.url}")

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def model(self) -> ServedModel:
        return self._model

    def start(self) -> None:
        """Serves HTTP, and joins the cluster: raises NotAdmitted when the controller refuses or does not answer."""
        self._gateway = self._server.start()
        self.io.start()
        admitted = self.io.wait_admitted(self._config.liveness.start_deadline_s)
        if isinstance(admitted, Rejected):
            raise NotAdmitted(f"not admitted: {admitted.reason} {dict(admitted.differences) or ''}".rstrip())
        if not admitted:
            raise NotAdmitted("the controller did not answer")

    def status(self) -> GatewayStatus:
        assert self._gateway is not None, "not started"
        return self._server.begin(self._gateway.status()).result(2 * STATUS_TIMEOUT_S)

    def drain(self, timeout_s: float) -> bool:
        """Admits nothing new, waits for what runs."""
        assert self._gateway is not None, "not started"
        return self._server.begin(self._gateway.drain(timeout_s)).result(timeout_s + 1.0)

    def stop(self, timeout_s: float = 10.0) -> None:
        self._server.stop(timeout_s)
        self.io.stop(timeout_s)

    def _make_gateway(self) -> Gateway:
        config = self._config
        core = GatewayCore(config.gateway, config.transfer, config.liveness, self._model.max_model_len)
        return Gateway(
            core,
            self._model,
            self.io.post,
            MonotonicClock(),
            version=version("baton-pd"),
            stuck_after_s=config.liveness.engine_stuck_after_s,
            workers=self._workers(self.io),
        )

    def _on_event(self, event: object) -> None:
        """On the I/O thread."""
        if isinstance(event, Rejected):
            return  # `start` waits for it
        assert self._gateway is not None, "the I/O thread starts after the gateway"
        self._gateway.deliver(event)

    def _load(self) -> Load:
        return self._gateway.load() if self._gateway is not None else Load()


class GatewayActor:
    """`ProcessActor` of the role gateway."""

    def __init__(self, spec: ProcessSpec) -> None:
        configure_logging(spec.name, spec.config.log_level)
        die_with_parent()
        register_process(spec.run_dir, spec.name)
        self._spec = spec
        self._controller_address = spec.controller_address
        self._progress: list[str] = []
        self._process: GatewayProcess | None = None
        self._watch = threading.Condition()
        self._watcher = 0

    def start(self) -> None:
        spec = self._spec
        if self._process is not None:
            return  # a controller that was restarted asks again
        self._note("starting")
        self._process = GatewayProcess(
            spec.new_stamp(),
            spec.config,
            spec.keys,
            self._controller_address,
            on_progress=self._note,
            workers=lambda io: RayWorkers(spec.config.cluster, io),
        )
        self._process.io.set_controller(self._controller_address)  # which may have moved while this was loading
        self._note("registering")
        self._process.start()

    def _note(self, step: str) -> None:
        self._progress.append(step)
        _log.info("progress", step=step)

    @in_group(HEALTH)
    def progress(self) -> list[str]:
        return list(self._progress)

    @in_group(WATCH)
    def watch(self, watcher: int) -> None:
        with self._watch:
            self._watcher = watcher
            self._watch.notify_all()
            self._watch.wait_for(lambda: self._watcher != watcher)

    @in_group(HEALTH)
    def report(self) -> ProcessReport:
        process = self._process
        if process is None or not process.io.snapshot().listed:
            return ProcessReport(None, None)
        return ProcessReport(process.io.member, process.io.latest_membership)

    @in_group(HEALTH)
    def rejoin(self, controller_address: str) -> None:
        self._controller_address = controller_address  # before the look: loading may end in between
        if self._process is not None:
            self._process.io.set_controller(controller_address)

    @in_group(INQUIRY)
    def status(self) -> GatewayStatus | None:
        return self._process.status() if self._process is not None else None

    @in_group(WATCH)
    def drain(self, timeout_s: float) -> bool:
        """Admits nothing new, waits for what runs. False: some of it did not end in time."""
        return self._process is None or self._process.drain(timeout_s)


class RayWorkers:
    """`Workers` over their Ray actors, found by name. Ray's calls wait, so they run on threads of their own."""

    def __init__(self, cluster: str, io: IoThread) -> None:
        self._cluster = cluster
        self._io = io

    async def statuses(self) -> Mapping[str, object]:
        return await asyncio.to_thread(self._ask_all)

    async def page_owner(self, worker: str, page: int) -> str:
        return await asyncio.to_thread(self._ask_page, worker, page)

    def _ask_all(self) -> Mapping[str, object]:
        """Workers that do not answer in time are left out: status must not hang on the one process that is ill."""
        refs = {actor.status.remote(): worker for worker, actor in self._actors().items()}
        answered, _ = ray.wait(list(refs), num_returns=len(refs), timeout=STATUS_TIMEOUT_S) if refs else ([], [])
        statuses: dict[str, object] = {}
        for reference in answered:
            try:
                statuses[refs[reference]] = ray.get(reference)
            except ray.exceptions.RayError as error:
                _log.warning("worker_without_status", worker=refs[reference], error=str(error)[:200])
        return statuses

    def _ask_page(self, worker: str, page: int) -> str:
        actor = self._actors().get(WorkerId(worker))
        if actor is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"there is no worker {worker!r} with pages", "worker")
        try:
            owner: str = ray.get(actor.kv_census.remote(page), timeout=STATUS_TIMEOUT_S)
        except ray.exceptions.RayTaskError as error:
            raise RequestError(ErrorCode.INVALID_REQUEST, str(error.cause), "page") from error
        except ray.exceptions.RayError as error:
            raise RequestError(ErrorCode.NO_WORKER, f"{worker} does not answer", "worker") from error
        return owner

    def _actors(self) -> dict[WorkerId, ActorHandle]:
        """Of the members that hold KV."""
        found = {}
        for member in self._io.snapshot().members:
            if member.role in COMPUTE_ROLES:
                actor = find_process(self._cluster, actor_name(member.stamp.worker, member.stamp.incarnation))
                if actor is not None:
                    found[member.stamp.worker] = actor
        return found
