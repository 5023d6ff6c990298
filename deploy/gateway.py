"""The gateway process: HTTP on one thread, the cluster's sockets on another, and the Ray actor around them.

Owns: the wiring of `GatewayServer`, `Gateway`, `GatewayCore` and `IoThread`, and what the controller asks of a process.
Never: decides anything, or holds a lock on the way of a token.

`GatewayProcess` is the whole of it without Ray; `GatewayActor` adds what Ray and the controller need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from importlib.metadata import version

import ray
from ray.actor import ActorHandle

from baton.common.clock import MonotonicClock
from baton.common.errors import ErrorCode, RequestError
from baton.common.ids import WorkerId
from baton.common.kv.layout import Component
from baton.common.log import EventLog
from baton.common.messages import Load
from baton.common.model.cache import Progress
from baton.deploy.controller_core import COMPUTE_ROLES
from baton.deploy.gateway_core import GatewayCore
from baton.deploy.gateway_shell import Gateway, Workers
from baton.deploy.http_server import GatewayServer
from baton.deploy.listener import open_listener
from baton.deploy.ray_side import find_process
from baton.deploy.status import GatewayStatus
from baton.deploy.tokenizer import ServedModel, load_served_model
from baton.transfer.actor import INQUIRY, WATCH, ProcessActor, in_group
from baton.transfer.io import IoThread
from baton.transfer.process import ProcessSpec, actor_name

STATUS_TIMEOUT_S = 3.0

_log = EventLog("baton.gateway")


class GatewayProcess:
    """One gateway, from its listening socket to the cluster's mesh: `ClusterProcess`."""

    def __init__(self, spec: ProcessSpec, workers: Callable[[IoThread], Workers]) -> None:
        self._spec = spec
        self._workers = workers
        self._server: GatewayServer | None = None
        self._gateway: Gateway | None = None

    def load(self, say: Progress) -> IoThread:
        """Raises ConfigError when the port is taken or the model cannot be read."""
        config = self._spec.config
        listener = open_listener(config.gateway.host, config.gateway.port)
        say("loading the tokenizer")
        model = load_served_model(config)
        io = IoThread(
            self._spec.new_stamp(),
            "gateway",
            config,
            None,
            self._spec.keys,
            self._on_event,
            controller_address=self._spec.controller_address,
            load=self._load,
        )
        self._server = GatewayServer(listener, config.gateway, lambda: self._make_gateway(model, io))
        say(f"listening at {self._server.url}")
        return io

    def serve(self) -> None:
        assert self._server is not None, "not loaded"
        self._gateway = self._server.start()

    def status(self) -> GatewayStatus | None:
        """None: it is still starting."""
        if self._server is None or self._gateway is None:
            return None
        return self._server.begin(self._gateway.status()).result(2 * STATUS_TIMEOUT_S)

    def drain(self, timeout_s: float) -> bool:
        """Admits nothing new, waits for what runs. False: some of it did not end in time."""
        if self._server is None or self._gateway is None:
            return True
        return self._server.begin(self._gateway.drain(timeout_s)).result(timeout_s + 1.0)

    def _make_gateway(self, model: ServedModel, io: IoThread) -> Gateway:
        config = self._spec.config
        return Gateway(
            GatewayCore(config.gateway, config.transfer, config.liveness, model.max_model_len, model.thinking_token_id),
            model,
            io.post,
            MonotonicClock(),
            version=version("baton-pd"),
            stuck_after_s=config.liveness.engine_stuck_after_s,
            workers=self._workers(io),
        )

    def _on_event(self, event: object) -> None:
        """On the I/O thread."""
        assert self._gateway is not None, "the I/O thread starts after the gateway"
        self._gateway.deliver(event)

    def _load(self) -> Load:
        return self._gateway.load() if self._gateway is not None else Load()


class GatewayActor(ProcessActor):
    """The Ray shell of a gateway."""

    def make_process(self, spec: ProcessSpec) -> GatewayProcess:
        self._process = GatewayProcess(spec, lambda io: RayWorkers(spec.config.cluster, io))
        return self._process

    @in_group(INQUIRY)
    def status(self) -> GatewayStatus | None:
        return self._process.status()

    @in_group(WATCH)
    def drain(self, timeout_s: float) -> bool:
        return self._process.drain(timeout_s)


class RayWorkers:
    """`Workers` over their Ray actors, found by name. Ray's calls wait, so they run on threads of their own."""

    def __init__(self, cluster: str, io: IoThread) -> None:
        self._cluster = cluster
        self._io = io

    async def statuses(self) -> Mapping[str, object]:
        return await asyncio.to_thread(self._ask_all)

    async def page_owner(self, worker: str, page: int, component: Component | None) -> str:
        return await asyncio.to_thread(self._ask_page, worker, page, component)

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

    def _ask_page(self, worker: str, page: int, component: Component | None) -> str:
        actor = self._actors().get(WorkerId(worker))
        if actor is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"there is no worker {worker!r} with pages", "worker")
        try:
            owner: str = ray.get(actor.page_owner.remote(page, component), timeout=STATUS_TIMEOUT_S)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RequestError):
                raise error.cause from None
            raise RequestError(ErrorCode.NO_WORKER, f"{worker} cannot tell: {error.cause}", "worker") from error
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
