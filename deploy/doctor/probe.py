"""A probe process: a `Prober` on a thread, and whoever asks it.

Owns: the thread, the pid record by which it can be ended when it hangs, and its own end when its lifetime is over.
Never: outlives its parent, or does anything unasked.

It is asked in bytes (`shapes.py`), over Ray (`ray_probes.py`) or a socket to its parent (`local_probes.py`), one
request at a time; what it cannot do, it answers with `Failed`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TypeVar, assert_never

import msgspec

from baton.common.errors import BatonError
from baton.common.ids import Epoch, Stamp
from baton.deploy.doctor.host import facts_here, ucx_info
from baton.deploy.doctor.prober import Prober, try_port
from baton.deploy.doctor.shapes import (
    PORTS_AT_ONCE,
    Answer,
    Done,
    Facts,
    Failed,
    Heard,
    Measure,
    Measured,
    Meet,
    ProbeSpec,
    Request,
    Stop,
    TellFacts,
    TellHeard,
    TellTime,
    Tried,
    TryPorts,
    WallTime,
)
from baton.transfer.process import die_with_parent, register_process

TURN_S = 0.02
CALL_S = 5.0
SLACK_S = 4.0

T = TypeVar("T")


class ProbeProcess:
    """Raises ConfigError when it cannot listen, or has no lane."""

    def __init__(self, spec: ProbeSpec) -> None:
        self._spec = spec
        stamp = Stamp(spec.worker, 0, Epoch(secrets.randbits(62) + 1))
        self._prober = Prober(stamp, spec.config)
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopped = threading.Event()
        self._ends_at_s = time.monotonic() + spec.lifetime_s
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)
        self._thread.start()

    def ask(self, request: bytes) -> bytes:
        try:
            answer = self._answer(msgspec.json.decode(request, type=Request))
        except (BatonError, OSError, TimeoutError, msgspec.DecodeError) as error:
            answer = Failed(f"{type(error).__name__}: {error}")
        return msgspec.json.encode(answer)

    def _answer(self, request: Request) -> Answer:
        prober = self._prober
        match request:
            case TellFacts():
                config, host = self._spec.config, self._spec.config.bind_host
                return Facts(prober.member, facts_here(config, host, ucx_info() if prober.has_ucx else ""))
            case Meet():
                self._call(lambda: prober.meet(request.sources, request.everybody)).result(CALL_S)
                return Done()
            case TellTime():
                return WallTime(time.time())
            case Measure():
                begun = self._call(lambda: prober.measure(request.source, request.within_s)).result(CALL_S)
                return Measured(begun.result(request.within_s + SLACK_S))
            case TellHeard():
                return Heard(tuple(sorted(prober.heard)))
            case TryPorts():
                with ThreadPoolExecutor(PORTS_AT_ONCE) as pool:
                    tried = pool.map(lambda port: try_port(port[1], port[2], request.within_s), request.ports)
                    return Tried(tuple(tried))
            case Stop():
                self.stop()
                return Done()
            case _:
                assert_never(request)

    def stop(self) -> None:
        """Returns when its sockets and memory are gone."""
        self._stopped.set()
        self._prober.wake()
        self._thread.join(CALL_S)

    def _call(self, job: Callable[[], T]) -> Future[T]:
        """On the thread."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(job())
            except (BatonError, KeyError, AssertionError) as error:
                done.set_exception(BatonError(f"{type(error).__name__}: {error}"))

        self._jobs.put(run)
        self._prober.wake()
        return done

    def _run(self) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(Empty):
                while True:
                    self._jobs.get_nowait()()
            self._prober.step(TURN_S)
            if time.monotonic() >= self._ends_at_s:
                os._exit(1)  # nobody has ended it: whoever asked is gone
        self._prober.close()


def born(spec: bytes) -> ProbeProcess:
    """In a process of its own. Raises ConfigError."""
    decoded = msgspec.json.decode(spec, type=ProbeSpec)
    register_process(decoded.run_dir, decoded.worker.replace("/", "_"))
    die_with_parent()
    return ProbeProcess(decoded)


def main() -> None:
    """A child: its spec, and then requests, come as lines over the socket whose descriptor is its argument. Answers go
    back with the number of their question."""
    with socket.socket(fileno=int(sys.argv[1])) as parent, parent.makefile("rwb") as lines:
        probe: ProbeProcess | None = None
        for line in lines:
            number, _, request = line.rstrip(b"\n").partition(b" ")
            if probe is not None:
                answer = probe.ask(request)
            else:
                try:
                    probe, answer = born(request), msgspec.json.encode(Done())
                except (BatonError, msgspec.DecodeError) as error:
                    answer = msgspec.json.encode(Failed(str(error)))
            lines.write(number + b" " + answer + b"\n")
            lines.flush()
            if probe is None:
                return
        if probe is not None:
            probe.stop()


if __name__ == "__main__":
    main()
