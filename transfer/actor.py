"""What every process actor of a cluster (prefill, decode, gateway) is to the controller: born, started, watched.

Owns: the pid record, the thread on which the process starts, what it has said of its start, the method names and the
threads that Ray runs them on. Never: what a role does (`ClusterProcess`), or who lives (the controller).

The start needs no call: the constructor begins it, and the mesh tells the controller how far it came (Hello). A call
could be lost or come late, and nobody would know which.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, cast

import ray

from baton.common.by_name import ByName
from baton.common.config import NODE_ADDRESS, ClusterConfig
from baton.common.log import EventLog, configure_logging
from baton.common.messages import Member, Membership
from baton.transfer.io import IoThread
from baton.transfer.keys import ControllerDoor, KeyPair
from baton.transfer.process import ProcessSpec, die_with_parent, on_sigterm, register_process

HEALTH = "health"
WATCH = "watch"
INQUIRY = "inquiry"
CONCURRENCY_GROUPS = {HEALTH: 4, WATCH: 4, INQUIRY: 2}
"""Threads per group. `health` answers at once, while the process starts and while its engine is stuck: who does not
answer there is killed. `watch` only waits. `inquiry` is what people ask: it may wait for the engine, so it has no
thread of the others, however many ask."""

SLOW_START_S = 120.0
"""A start that takes longer leaves in the log where each of its threads is: loading a large model, or stuck."""

STDERR = 2  # where Ray looks for what a process has to say, whatever stands in for `sys.stderr`

MethodT = TypeVar("MethodT", bound=Callable[..., object])

_log = EventLog("baton.process")


@contextmanager
def sparing_the_collector() -> Iterator[None]:
    """What is loaded stays: hundreds of thousands of objects, over which full collections would go again and again.
    They took a fifth of a start, and later every thread of the process stood still for a tenth of a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def in_group(group: str) -> Callable[[MethodT], MethodT]:
    """Ray's decorator for an actor method, with its type kept."""
    return cast(Callable[[MethodT], MethodT], ray.method(concurrency_group=group))


def at_this_node(config: ClusterConfig) -> ClusterConfig:
    """With the address of this node for `bind_host: node`. Call in a process of Ray's."""
    if config.bind_host != NODE_ADDRESS:
        return config
    return replace(config, bind_host=ray.util.get_node_ip_address())


@dataclass(frozen=True, slots=True)
class ProcessReport(ByName):
    """What a live process knows: its role, its public key, itself when it has been admitted, the last membership it was
    told, and whether it was told to take nothing new."""

    role: str
    key: str
    member: Member | None = None
    view: Membership | None = None
    draining: bool = False
    revision: int = 1


class ClusterProcess(Protocol):
    """What a role runs. Each method is called once, in this order, on the thread of the start."""

    def load(self, say: Callable[[str], None]) -> IoThread:
        """Whatever takes long, one `say` per step. Raises when it cannot work; a BatonError is told as it is."""

    def serve(self) -> None:
        """Starts what must run before the I/O thread delivers to it."""


class ProcessActor:
    """One process of the cluster. Constructed by the controller; says Hello to it by itself."""

    def __init__(self, spec: ProcessSpec) -> None:
        register_process(spec.run_dir, spec.name)
        die_with_parent()
        spec = replace(spec, config=at_this_node(spec.config))
        configure_logging(spec.process_name, spec.config.logging)
        self._role = spec.role
        self._revision = spec.revision
        self._draining = threading.Event()  # somebody has said so
        self._liveness = spec.config.liveness
        self._admission_timeout_s = spec.config.liveness.start_deadline_s
        self._controller = spec.controller
        self._keys = KeyPair.generate()
        self._io: IoThread | None = None
        self._steps: list[str] = []
        self._changed = threading.Condition()
        self._watcher = 0
        self._failure: BaseException | None = None
        process = self.make_process(spec, self._keys)
        threading.Thread(target=self._start, args=(process,), name="start", daemon=True).start()
        on_sigterm(self._leave)

    def make_process(self, spec: ProcessSpec, keys: KeyPair) -> ClusterProcess:
        """Returns quickly; what takes long is its `load`. `keys` are the process's own."""
        raise NotImplementedError

    def _start(self, process: ClusterProcess) -> None:
        faulthandler.dump_traceback_later(SLOW_START_S, file=STDERR)
        try:
            self._say("starting")
            with sparing_the_collector():
                io = self._io = process.load(self._say)
                io.set_controller(self._controller)  # which may have moved while this was loading
                process.serve()
            io.start()
            self._say("registering")
            io.wait_admitted(self._admission_timeout_s)
            self._say("admitted")
        except BaseException as error:  # noqa: BLE001 - the thread's top frame; the controller is told, and decides
            _log.error("start_failed", error=f"{type(error).__name__}: {error}")
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def drain(self, timeout_s: float) -> bool:
        """Takes nothing new; True when all that ran has ended, or goes on elsewhere."""
        raise NotImplementedError

    def _leave(self) -> None:
        """It was told to stop: the controller is to see to a successor, and what runs is finished or handed over. Its
        end is no failure, whoever comes first: this thread, or the controller that has heard that nothing is left."""
        _log.info("told_to_stop")
        if self._io is not None:
            self._io.leaving = True
        self._draining.wait(self._liveness.dead_after_s)  # or the controller would take its end for a failure
        self.drain(self._liveness.drain_deadline_s)
        os._exit(0)

    def _say(self, step: str) -> None:
        self._steps.append(step)
        _log.info("progress", step=step)

    @in_group(HEALTH)
    def progress(self) -> list[str]:
        """What the start has said so far, one line per step."""
        return list(self._steps)

    @in_group(WATCH)
    def watch(self, watcher: int) -> None:
        """Raises why the process could not start. Returns when another watcher comes."""
        with self._changed:
            self._watcher = watcher
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failure is not None or self._watcher != watcher)
            if self._failure is not None and self._watcher == watcher:
                raise self._failure

    @in_group(HEALTH)
    def report(self) -> ProcessReport:
        """For a controller that was restarted."""
        io = self._io
        if io is None or not io.snapshot().listed:
            return ProcessReport(self._role, self._keys.public, revision=self._revision)
        known = io.member, io.latest_membership, self._draining.is_set(), self._revision
        return ProcessReport(self._role, self._keys.public, *known)

    @in_group(HEALTH)
    def rejoin(self, controller: ControllerDoor) -> None:
        """The controller is there now."""
        self._controller = controller  # before the look: loading may end in between
        if self._io is not None:
            self._io.set_controller(controller)
