"""The gateway process: HTTP on one thread, the cluster's sockets on another, and the Ray actor around them.

Owns: the wiring of `GatewayServer`, `Gateway`, `GatewayCore` and `IoThread`, and what the controller asks of a process.
Never: decides anything, or holds a lock on the way of a token.

`GatewayProcess` is the whole of it without Ray; `GatewayActor` adds what Ray and the controller need.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version

from baton.common.clock import MonotonicClock
from baton.common.messages import Load
from baton.common.model.cache import Progress
from baton.common.tracing import FLUSH_S, NOBODY, SpanSink, open_sink
from baton.deploy.api_keys import Keys, keys_of
from baton.deploy.gateway_core import GatewayCore
from baton.deploy.gateway_shell import Gateway, Workers
from baton.deploy.http_server import GatewayServer
from baton.deploy.jobs.store_thread import open_store
from baton.deploy.listener import open_listener
from baton.deploy.ray_workers import STATUS_TIMEOUT_S, RayWorkers
from baton.deploy.routing.own_policy import policy_of
from baton.deploy.status import GatewayStatus
from baton.deploy.tokenizer import ServedModel, load_served_model
from baton.transfer.actor import INQUIRY, WATCH, ProcessActor, in_group
from baton.transfer.io import IoThread, refusals_of
from baton.transfer.keys import KeyPair
from baton.transfer.process import ProcessSpec, pin_process


class GatewayProcess:
    """One gateway, from its listening socket to the cluster's mesh: `ClusterProcess`."""

    def __init__(self, spec: ProcessSpec, keys: KeyPair, workers: Callable[[IoThread], Workers]) -> None:
        self._spec = spec
        self._keys = keys
        self._workers = workers
        self._server: GatewayServer | None = None
        self._gateway: Gateway | None = None
        self._clock = MonotonicClock()
        self._spans: SpanSink = NOBODY

    def load(self, say: Progress) -> IoThread:
        """Raises ConfigError when the port is taken, or the model or a routing policy cannot be had."""
        config = self._spec.config
        pin_process(os.sched_getaffinity(0).intersection(self._spec.cores))  # another node may have none of them
        number = int(self._spec.worker.rpartition("-")[2])
        listener = open_listener(config.gateway.host, config.gateway_port(number))
        keys = keys_of(config.gateway.api_keys_file, MonotonicClock())
        policy_of(config.routing.policy)  # one of the user's own may not be there
        store = open_store(config)
        say("loading the tokenizer")
        model = load_served_model(config)
        io = IoThread(
            self._spec.new_stamp(),
            "gateway",
            config,
            None,
            self._keys,
            self._on_event,
            controller=self._spec.controller,
            load=self._load,
        )
        self._server = GatewayServer(listener, config, store, lambda: self._make_gateway(model, io, keys))
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
        """Admits nothing new, waits for what runs, leaves jobs to others. False: some of it did not end in time."""
        if self._server is None or self._gateway is None:
            return True
        self._server.begin(self._server.stop_jobs())
        drained = self._server.begin(self._gateway.drain(timeout_s)).result(timeout_s + 1.0)
        self._spans.flush(FLUSH_S)
        return drained

    def _make_gateway(self, model: ServedModel, io: IoThread, keys: Keys) -> Gateway:
        config = self._spec.config
        self._spans = open_sink(config, self._spec.process_name, self._clock)
        return Gateway(
            GatewayCore(
                config.gateway,
                config.transfer,
                config.liveness,
                model.max_model_len,
                model.thinking_token_id,
                config.routing,
                config.kv.page_size,
                config.decode_worker,
            ),
            model,
            io.post,
            self._clock,
            version=version("baton-pd"),
            stuck_after_s=config.liveness.engine_stuck_after_s,
            workers=self._workers(io),
            spans=self._spans,
            name=self._spec.worker,
            keys=keys,
            refused=lambda: refusals_of(io.snapshot()),
        )

    def _on_event(self, event: object) -> None:
        """On the I/O thread."""
        assert self._gateway is not None, "the I/O thread starts after the gateway"
        self._gateway.deliver(event)

    def _load(self) -> Load:
        return self._gateway.load() if self._gateway is not None else Load()


class GatewayActor(ProcessActor):
    """The Ray shell of a gateway."""

    def make_process(self, spec: ProcessSpec, keys: KeyPair) -> GatewayProcess:
        self._process = GatewayProcess(spec, keys, lambda io: RayWorkers(spec.config.cluster, io))
        return self._process

    @in_group(INQUIRY)
    def status(self) -> GatewayStatus | None:
        return self._process.status()

    @in_group(WATCH)
    def drain(self, timeout_s: float) -> bool:
        self._draining.set()
        return self._process.drain(timeout_s)
